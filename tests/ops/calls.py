"""Calls of the attention functions over a batch.

A call is kept as dictionaries from argument name to value, in the order of `docs/ops.md`, so that a
test can spoil one argument by its name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import oracle
import tvm
from batches import Batch, Spec, indptr_of
from device_tensors import DeviceTensor, numpy_dtype, poisoned, synchronize, to_device

LAYOUTS = {"NHD": 0, "HND": 1}

Args = dict[str, Any]


def passed(args: Args, changes: Args) -> list[Any]:
    """The values to call with: `args` with `changes`, and tensors taken out of their holders."""
    unknown = set(changes) - set(args)
    assert not unknown, f"no such argument: {sorted(unknown)}"
    merged = {**args, **changes}
    return [x.tensor if isinstance(x, DeviceTensor) else x for x in merged.values()]


@dataclass
class Call:
    """A plan function and a run function with their arguments."""

    ops: Any
    device: Any
    batch: Batch
    plan_name: str
    run_name: str
    plan_args: Args
    run_args: Args
    plan_value: Any = None

    def plan(self, **changes: Any) -> Any:
        """Call the plan function, with some arguments replaced, and keep what it returns."""
        plan = getattr(self.ops, self.plan_name)(*passed(self.plan_args, changes))
        self.plan_value = plan
        return plan

    def run(self, **changes: Any) -> None:
        """Call the run function with the last plan, with some arguments replaced."""
        args = {**self.run_args, "plan": self.plan_value}
        getattr(self.ops, self.run_name)(*passed(args, changes))

    def fresh_outputs(self) -> None:
        """New poisoned outputs."""
        spec = self.batch.spec
        rows = (sum(spec.rows), spec.heads[0])
        self.run_args["o"] = poisoned((*rows, spec.vo), spec.dtype, self.device)
        if self.run_args["lse"] is not None:
            self.run_args["lse"] = poisoned(rows, "float32", self.device)

    def outputs(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Output and LSE on the host; the bytes around them must be intact."""
        synchronize(self.device)
        lse = self.run_args["lse"]
        self.run_args["o"].assert_guards_intact("o")
        if lse is not None:
            lse.assert_guards_intact("lse")
        return self.run_args["o"].numpy(), None if lse is None else lse.numpy()

    def check(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Compare the outputs with the oracle, and return them."""
        spec = self.batch.spec
        o, lse = self.outputs()
        oracle.assert_attention(
            o,
            lse,
            self.batch.q,
            self.batch.requests,
            causal=spec.causal,
            window_left=spec.window_left,
            sm_scale=spec.scale,
        )
        return o, lse

    def plan_run_check(self) -> tuple[np.ndarray, np.ndarray | None]:
        """Plan, run and check."""
        self.plan()
        self.run()
        return self.check()

    def assert_untouched(self, action: Callable[[], Any]) -> None:
        """Run `action`; neither output may change by a byte."""
        held = [x for x in (self.run_args["o"], self.run_args["lse"]) if x is not None]
        before = [x.raw() for x in held]
        action()
        for x, old in zip(held, before, strict=True):
            np.testing.assert_array_equal(x.raw(), old)


def _host(array: np.ndarray) -> DeviceTensor:
    return to_device(array, tvm.cpu(0))


def _place_q(batch: Batch, device: Any, views: bool) -> DeviceTensor:
    """Queries: contiguous, or the first heads of a fused QKV tensor whose other heads are NaN."""
    if not views:
        return to_device(batch.q, device)
    n, heads, d = batch.q.shape
    fused = np.full((n, heads + 2 * batch.spec.heads[1], d), np.nan, batch.q.dtype)
    fused[:, :heads] = batch.q
    return to_device(fused, device, byte_offset=32).view(lambda a: a[:, :heads])


def _index(array: np.ndarray, device: Any, views: bool) -> DeviceTensor:
    return to_device(array.astype(np.int32), device, byte_offset=4 if views else None)


def _workspace_args(workspaces: Any) -> Args:
    return {
        "float_workspace": workspaces.float_workspace,
        "int_workspace": workspaces.int_workspace,
        "pinned_int_workspace": workspaces.pinned_int_workspace,
    }


def _prefill_plan_args(workspaces: Any, batch: Batch, kv_indptr: np.ndarray, size: int) -> Args:
    spec = batch.spec
    return {
        **_workspace_args(workspaces),
        "qo_indptr": _host(indptr_of(spec.rows)),
        "kv_indptr": _host(kv_indptr),
        "kv_len": _host(np.array(spec.kv_lens, np.int32)),
        "total_num_rows": sum(spec.rows),
        "batch_size": len(spec.kv_lens),
        "num_qo_heads": spec.heads[0],
        "num_kv_heads": spec.heads[1],
        "page_size": size,
        "enable_cuda_graph": False,
        "head_dim_qk": spec.head_dim,
        "head_dim_vo": spec.vo,
        "causal": spec.causal,
        "window_left": spec.window_left,
        "fixed_split_size": -1,
        "disable_split_kv": False,
        "num_colocated_ctas": 0,
    }


def _run_tail(spec: Spec) -> Args:
    return {
        "layout": LAYOUTS[spec.layout],
        "window_left": spec.window_left,
        "enable_pdl": False,
        "sm_scale": spec.scale,
        # Not read, by contract; values that would ruin the result if they were.
        "rope_rcp_scale": math.nan,
        "rope_rcp_theta": math.nan,
    }


def _run_head(workspaces: Any) -> Args:
    args = _workspace_args(workspaces)
    return {**{k: args[k] for k in ("float_workspace", "int_workspace")}, "plan": None}


def _outputs(batch: Batch, device: Any, with_lse: bool) -> Args:
    spec = batch.spec
    rows = (sum(spec.rows), spec.heads[0])
    lse = poisoned(rows, "float32", device) if with_lse else None
    return {"o": poisoned((*rows, spec.vo), spec.dtype, device), "lse": lse}


def _pages(batch: Batch, device: Any, views: bool) -> Args:
    pool = batch.pool
    if views:
        whole = to_device(pool, device)
        return {f"{n}_pages": whole.view(lambda a, i=i: a[:, i]) for i, n in enumerate("kv")}
    return {f"{n}_pages": to_device(pool[:, i], device) for i, n in enumerate("kv")}


def _tables(batch: Batch, device: Any, views: bool) -> Args:
    return {
        "page_indptr": _index(batch.page_indptr, device, views),
        "page_indices": _index(batch.page_indices, device, views),
        "last_page_len": _index(batch.last_page_len, device, views),
    }


def paged_prefill(
    ops: Any,
    device: Any,
    workspaces: Any,
    batch: Batch,
    *,
    views: bool = False,
    with_lse: bool = True,
) -> Call:
    """`batch_prefill_plan` and `batch_prefill_paged_run` over `batch`.

    With `views` the queries are a slice of a fused tensor, K and V pages strided views of one pool
    and every index tensor has a byte offset; without, all is contiguous.
    """
    spec = batch.spec
    run = {
        **_run_head(workspaces),
        "q": _place_q(batch, device, views),
        **_pages(batch, device, views),
        "qo_indptr": _index(indptr_of(spec.rows), device, views),
        **_tables(batch, device, views),
        **_outputs(batch, device, with_lse),
        "mask_mode": int(spec.causal),
        **_run_tail(spec),
    }
    plan = _prefill_plan_args(workspaces, batch, batch.page_indptr, spec.page_size)
    return Call(ops, device, batch, "batch_prefill_plan", "batch_prefill_paged_run", plan, run)


def decode(
    ops: Any,
    device: Any,
    workspaces: Any,
    batch: Batch,
    *,
    views: bool = False,
    with_lse: bool = True,
) -> Call:
    """`batch_decode_plan` and `batch_decode_run` over `batch`, one row per request."""
    spec = batch.spec
    empty = to_device(np.zeros((0, spec.head_dim), numpy_dtype(spec.dtype)), device)
    plan = {
        **_workspace_args(workspaces),
        "page_indptr": _host(batch.page_indptr),
        "batch_size": len(spec.kv_lens),
        "num_qo_heads": spec.heads[0],
        "num_kv_heads": spec.heads[1],
        "page_size": spec.page_size,
        "enable_cuda_graph": False,
        "window_left": spec.window_left,
        "logits_soft_cap": 0.0,
        "head_dim_qk": spec.head_dim,
        "head_dim_vo": spec.vo,
        "empty_q": empty,
        "empty_kv": empty,
    }
    run = {
        **_run_head(workspaces),
        "q": _place_q(batch, device, views),
        **_pages(batch, device, views),
        **_tables(batch, device, views),
        **_outputs(batch, device, with_lse),
        **_run_tail(spec),
    }
    return Call(ops, device, batch, "batch_decode_plan", "batch_decode_run", plan, run)


def ragged_prefill(
    ops: Any,
    device: Any,
    workspaces: Any,
    batch: Batch,
    *,
    views: bool = False,
    with_lse: bool = True,
) -> Call:
    """`batch_prefill_plan` with page size 1 and `batch_prefill_ragged_run` over `batch`.

    With `views` keys and values are slices of one fused tensor (NHD, equal head dimensions) or lie
    with a gap between heads (HND).
    """
    spec = batch.spec
    dtype = numpy_dtype(spec.dtype)
    empty = np.zeros((0, spec.heads[1], spec.head_dim), dtype)
    k = np.concatenate([empty, *batch.keys])
    v = np.concatenate([np.zeros((0, spec.heads[1], spec.vo), dtype), *batch.values])
    kv_heads = spec.heads[1]
    if spec.layout == "HND":
        k, v = np.ascontiguousarray(k.swapaxes(0, 1)), np.ascontiguousarray(v.swapaxes(0, 1))
    if not views:
        placed = (to_device(k, device), to_device(v, device))
    elif spec.layout == "HND":
        placed = tuple(
            to_device(x, device, byte_offset=16, strides=(x[0].size + 64, x.shape[2], 1))
            for x in (k, v)
        )
    else:
        fused = to_device(np.concatenate([k, v], axis=1), device)
        placed = (fused.view(lambda a: a[:, :kv_heads]), fused.view(lambda a: a[:, kv_heads:]))
    kv_indptr = indptr_of(spec.kv_lens)
    run = {
        **_run_head(workspaces),
        "q": _place_q(batch, device, views),
        "k": placed[0],
        "v": placed[1],
        "qo_indptr": _index(indptr_of(spec.rows), device, views),
        "kv_indptr": _index(kv_indptr, device, views),
        **_outputs(batch, device, with_lse),
        "mask_mode": int(spec.causal),
        **_run_tail(spec),
    }
    plan = _prefill_plan_args(workspaces, batch, kv_indptr, 1)
    return Call(ops, device, batch, "batch_prefill_plan", "batch_prefill_ragged_run", plan, run)


@dataclass
class BoundCall(Call):
    """A function that `bind_attention` returns, over the same batch; its plan does nothing."""

    def plan(self, **changes: Any) -> Any:
        """There is none."""
        assert not changes, "a function without a plan takes no settings of one"

    def run(self, **changes: Any) -> None:
        """Bind without options and call."""
        bound = self.ops.bind_attention(self.run_name, "{}", None, None)
        bound(*passed(self.run_args, changes))


def _bound(ops: Any, device: Any, batch: Batch, slot: str, args: Args, with_lse: bool) -> Call:
    assert with_lse, "functions without a plan always write the LSE"
    spec = batch.spec
    assert spec.window_left < 0, "functions without a plan have windows of another kind"
    tail: Args = _outputs(batch, device, with_lse)
    if slot != "decode_paged":
        tail["causal"] = int(spec.causal)
    # Positions are not read in this mode, nor are theta and scale.
    tail.update(rotary_mode=0, rope_scale=math.nan, rope_theta=math.nan, sm_scale=spec.scale)
    return BoundCall(ops, device, batch, "", slot, {}, {**args, **tail})


def _positions(batch: Batch, device: Any, views: bool) -> tuple[DeviceTensor, DeviceTensor]:
    rows, size = sum(batch.spec.rows), len(batch.spec.kv_lens)
    return _index(np.full(rows, -1), device, views), _index(np.full(size, -1), device, views)


def bound_paged(
    ops: Any,
    device: Any,
    workspaces: Any,
    batch: Batch,
    *,
    decoding: bool = False,
    views: bool = False,
    with_lse: bool = True,
) -> Call:
    """The functions without a plan over pages, prefill or decode.

    With `views` there are gaps between the pages, besides what `paged_prefill` does.
    """
    spec = batch.spec
    assert spec.layout == "HND", "TVM's cache has its pages so"
    _, two, heads, size, d = batch.pool.shape
    steps = (two * heads * size * d + 64, heads * size * d, size * d, d, 1) if views else None
    of_rows, of_keys = _positions(batch, device, views)
    tables = _tables(batch, device, views)
    args: Args = {"q": _place_q(batch, device, views)}
    if not decoding:
        args["qo_indptr"] = _index(indptr_of(spec.rows), device, views)
    args.update(
        pages=to_device(batch.pool, device, strides=steps),
        page_indptr=tables["page_indptr"],
        page_indices=tables["page_indices"],
        length_info=tables["last_page_len"],
        k_rope_pos_offset=of_keys,
        q_rope_position=of_rows,
    )
    slot = "decode_paged" if decoding else "prefill_paged"
    return _bound(ops, device, batch, slot, args, with_lse)


def bound_ragged(
    ops: Any,
    device: Any,
    workspaces: Any,
    batch: Batch,
    *,
    views: bool = False,
    with_lse: bool = True,
) -> Call:
    """The function without a plan over ragged keys."""
    planned = ragged_prefill(ops, device, workspaces, batch, views=views).run_args
    assert batch.spec.layout == "NHD", "TVM's cache gives tokens first"
    of_rows, of_keys = _positions(batch, device, views)
    args = {name: planned[name] for name in ("q", "qo_indptr", "k", "v", "kv_indptr")}
    args.update(q_rope_position=of_rows, k_rope_pos_offset=of_keys)
    return _bound(ops, device, batch, "prefill_ragged", args, with_lse)

"""One good call of every packed function, by the names of its arguments.

A function that a `bind_...` returns is listed under that name with `()` behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
from batches import Batch, Spec, indptr_of, make_batch
from cache_calls import SLOTS, CacheSpec, make_cache_batch
from cache_oracle import pack_bits, random_tree
from calls import Args, Call, decode, paged_prefill, passed, ragged_prefill
from device_tensors import DeviceTensor, to_device
from functions import Workspaces
from good_row_calls import ROPE, ROW_MAKERS, RowMaker
from mla_calls import MLASpec, mla_call
from tuning_texts import entry, text_of_here

QO_LENS, KV_LENS = (5, 17, 2), (40, 17, 5)


@dataclass
class Example:
    """A function and arguments that it takes."""

    function: Callable[..., Any]
    args: Args

    def call(self) -> list[np.ndarray]:
        """Call on tensors as they were at first; the bytes of all of them afterwards."""
        for tensor in self.tensors.values():
            tensor.reset()
        self.function(*passed(self.args, {}))
        return [tensor.raw() for tensor in self.tensors.values()]

    @property
    def tensors(self) -> dict[str, DeviceTensor]:
        """The tensors among the arguments but workspaces, whose contents mean nothing."""
        return {
            name: x
            for name, x in self.args.items()
            if isinstance(x, DeviceTensor) and "workspace" not in name
        }


class Maker(RowMaker):
    """Makes examples on one device: `maker(name)`."""

    def __init__(self, ops: Any, device: Any) -> None:
        super().__init__(device)
        self.ops = ops
        dirty = np.full(8 << 20, 0xFF, np.uint8)
        self.workspaces = Workspaces(*(to_device(dirty, x) for x in (device, device, tvm.cpu(0))))

    def __call__(self, name: str) -> Example:
        """Make the example of this name."""
        args = MAKERS[name](self)
        if isinstance(args, Example):
            return args
        return Example(getattr(self.ops, name), args)

    def planned(self, make: Callable[..., Call], run: bool) -> Args:
        """Arguments of a plan, or of a run with one."""
        spec = Spec(KV_LENS, None if make is decode else QO_LENS, causal=make is not decode)
        paged = make is not ragged_prefill
        if not paged:
            spec = Spec(KV_LENS, QO_LENS, causal=True, layout="NHD")
        batch: Batch = make_batch(self.rng, spec, paged=paged)
        call = make(self.ops, self.device, self.workspaces, batch, views=True)
        return call.run_args | {"plan": list(call.plan())} if run else call.plan_args

    def mla(self, run: bool) -> Args:
        """The same for MLA."""
        spec = MLASpec(KV_LENS, QO_LENS, heads=2, causal=True)
        call = mla_call(self.ops, self.device, self.workspaces, self.rng, spec)
        if run:
            call.run_args["plan"] = list(call.plan())
        return call.run_args if run else call.plan_args

    def bound(self, slot: str, **settings: Any) -> Example:
        """A call of a slot."""
        rows = None if slot == "decode_paged" else QO_LENS
        spec = CacheSpec(slot, KV_LENS, rows, **settings)
        if slot == "prefill_paged":
            spec.sliding = [(9, 4), (3, 0), (0, 0)]
        if slot.startswith("tree"):
            spec.qo_lens = rows if slot == "tree_paged" else KV_LENS
            nodes = QO_LENS if slot == "tree_paged" else KV_LENS
            spec.trees = [random_tree(self.rng, n) for n in nodes]
        if slot.startswith("mask"):
            sizes = zip(QO_LENS, KV_LENS, strict=True)
            spec.masks = [self.rng.random(size) < 0.5 for size in sizes]
        batch = make_cache_batch(self.rng, self.device, spec)
        return Example(getattr(self.ops, f"bind_attention_{slot}")("{}"), batch.args)

    def bound_mla(self) -> Example:
        """The slot of MLA without a plan, with dimensions that CUDA serves too."""
        args = {
            "q": self.given(4, 2, 64),
            "qo_indptr": self.ints([0, 3, 4]),
            "pages": self.given(4, 8, 64),
            "page_indptr": self.ints([0, 2, 3]),
            "page_indices": self.ints([3, 0, 1]),
            "length_info": self.ints([5, 8]),
            "o": self.out(4, 2, 64),
            "lse": self.out(4, 2, dtype="float32"),
            "causal": 1,
            "sm_scale": 0.1,
        }
        return Example(self.ops.bind_attention_mla("{}"), args)

    def dense(self, *, o_last: bool) -> Args:
        """Requests of equal length; the calls of graphs pass the output last."""
        args: Args = {
            "q": self.given(2, 3, 4, 64),
            "k": self.given(2, 9, 2, 64),
            "v": self.given(2, 9, 2, 64),
        }
        o = self.out(2, 3, 4, 64)
        if not o_last:
            lse = self.out(2, 3, 4, dtype="float32")
            return args | {"o": o, "lse": lse, "causal": 1, "sm_scale": 0.1}
        return args | {**GRAPH, "o": o}

    def dense_masked(self) -> Args:
        """The same with a packed mask."""
        args = self.dense(o_last=True)
        indptr, packed = pack_bits(self.rng.random((2, 3, 9)) < 0.7)
        mask = {"mask_indptr": self.ints(indptr), "packed_mask": to_device(packed, self.device)}
        inputs = {name: args[name] for name in "qkv"}
        return inputs | mask | {name: x for name, x in args.items() if name not in inputs}

    def dense_biased(self) -> Args:
        """The same with a bias."""
        args = self.dense(o_last=True)
        bias = {"bias": self.given(1, 4, 3, 9, dtype="float32"), "heads_as_requests": 1}
        inputs = {name: args[name] for name in "qkv"}
        return inputs | bias | {name: x for name, x in args.items() if name not in inputs}

    def ragged(self) -> Args:
        """Rows of all requests in one tensor."""
        return {
            "q": self.given(sum(QO_LENS), 4, 64),
            "k": self.given(sum(KV_LENS), 2, 64),
            "v": self.given(sum(KV_LENS), 2, 64),
            "qo_indptr": self.ints(indptr_of(QO_LENS)),
            "kv_indptr": self.ints(indptr_of(KV_LENS)),
            **GRAPH,
            "o": self.out(sum(QO_LENS), 4, 64),
        }

    def paged(self, *, rows: bool) -> Args:
        """Pages of three requests; decode has one row of each."""
        slot = "prefill_paged" if rows else "decode_paged"
        batch = make_cache_batch(
            self.rng, self.device, CacheSpec(slot, KV_LENS, QO_LENS if rows else None)
        )
        names = ["q", "pages", *(["qo_indptr"] if rows else []), "page_indptr", "page_indices"]
        tensors = {name: batch.args[name] for name in (*names, "length_info")}
        numbers = {name: x for name, x in GRAPH.items() if rows or name != "causal"}
        return tensors | numbers | {"o": batch.args["o"]}

    def single(self, rows: int) -> Args:
        """One request."""
        causal = {"causal": 1} if rows > 1 else {}
        fp16 = {"allow_fp16_qk": False} if rows > 1 else {}
        return {
            "q": self.given(rows, 4, 64),
            "k": self.given(9, 2, 64),
            "v": self.given(9, 2, 64),
            "scratch": self.given(8, dtype="float32"),
            **causal,
            "layout": 0,
            "rotary_mode": 0,
            **fp16,
            "rope_scale": 1.0,
            "rope_theta": 1e4,
            "o": self.out(rows, 4, 64),
        }

    def states(self, names: str) -> Args:
        """Pairs of values and sums."""
        held = zip(names.split()[::2], names.split()[1::2], strict=True)
        return {
            name: x
            for v, s in held
            for name, x in ((v, self.given(9, 4, 64)), (s, self.given(9, 4, dtype="float32")))
        }

    def sinks(self) -> Args:
        """A finished state."""
        return self.states("o lse") | {"sinks": self.given(4, dtype="float32")}

    def rotary(self) -> Args:
        """Of a fused tensor."""
        return {
            "qkv": self.given(7, 8, 64),
            "position_map": self.ints(np.arange(7) * 9),
            "q": self.out(7, 4, 64),
            "k": self.out(7, 2, 64),
            "v": self.out(7, 2, 64),
            "apply_rope": 1,
            **ROPE,
        }

    def bound_rotary(self) -> Example:
        """What TVM's cache calls."""
        bound = self.ops.bind_split_qkv_rotary(*ROPE.values())
        return Example(bound, {k: x for k, x in self.rotary().items() if k not in ROPE})

    def append(self) -> Args:
        """Three rows into four pages."""
        return {
            "pages": self.given(4, 2, 2, 16, 64),
            "k": self.given(3, 2, 64),
            "v": self.given(3, 2, 64),
            "position_map": self.ints([5, 63, -1]),
        }

    def append_mla(self) -> Args:
        """The same for MLA."""
        return {
            "pages": self.given(4, 16, 64),
            "kv": self.given(3, 64),
            "position_map": self.ints([5, 63, -1]),
        }


GRAPH: Args = {"causal": 1, "window_left": -1, "logits_soft_cap": 0.0, "sm_scale": 0.1}
OPTIONS: Args = {"options": "{}"}
_MERGED = "v_a s_a v_b s_b v_merged s_merged"
_COPY: Args = {"src_page": 2, "tgt_page": 0, "copy_length": 9}

MAKERS: dict[str, Callable[[Maker], Args | Example]] = {
    "batch_prefill_plan": lambda m: m.planned(paged_prefill, False),
    "batch_prefill_paged_run": lambda m: m.planned(paged_prefill, True),
    "batch_prefill_ragged_run": lambda m: m.planned(ragged_prefill, True),
    "batch_decode_plan": lambda m: m.planned(decode, False),
    "batch_decode_run": lambda m: m.planned(decode, True),
    "batch_mla_plan": lambda m: m.mla(False),
    "batch_mla_run": lambda m: m.mla(True),
    "attention_dense": lambda m: m.dense(o_last=True),
    "attention_dense_masked": Maker.dense_masked,
    "attention_dense_biased": Maker.dense_biased,
    "attention_ragged": Maker.ragged,
    "attention_paged": lambda m: m.paged(rows=True),
    "attention_paged_decode": lambda m: m.paged(rows=False),
    "bind_attention": lambda m: {
        "slot": "prefill_paged",
        "options": "{}",
        "sinks": m.given(4, dtype="float32"),
        "alibi_slopes": m.given(4, dtype="float32"),
    },
    **{f"bind_attention_{slot}": lambda _: dict(OPTIONS) for slot in (*SLOTS, "dense", "mla")},
    **{f"bind_attention_{slot}()": lambda m, slot=slot: m.bound(slot) for slot in SLOTS},
    "bind_attention_dense()": lambda m: Example(
        m.ops.bind_attention_dense("{}"), m.dense(o_last=False)
    ),
    "bind_attention_mla()": Maker.bound_mla,
    "single_prefill": lambda m: m.single(5),
    "single_decode": lambda m: m.single(1),
    "cache_slot": lambda _: {
        "slot": "decode_paged",
        "options": "{}",
        "planned": True,
        "support_sliding_window": 0,
    },
    "cache_slot_with_slopes": lambda m: {
        "slot": "decode_paged",
        "options": "{}",
        "support_sliding_window": 0,
        "alibi_slopes": m.given(4, dtype="float32"),
    },
    "cache_slot_with_tuning": lambda _: {
        "slot": "decode_paged",
        "options": "{}",
        "planned": True,
        "support_sliding_window": 0,
        "tuning": text_of_here(entry()),
    },
    "kernel_choice": lambda _: {
        "slot": "prefill_paged",
        "gpu_name": "NVIDIA H200",
        "arch": 90,
        "num_sm": 132,
        "num_qo_heads": 32,
        "num_kv_heads": 8,
        "head_dim_qk": 128,
        "head_dim_vo": 128,
        "causal": True,
        "window_left": -1,
        "qo_lens": [5, 17],
        "kv_lens": [40, 17],
    },
    **{
        name: lambda _: {"text": text_of_here(entry()), "source": "a test"}
        for name in ("load_tuning", "check_tuning")
    },
    **{name: lambda _: {} for name in ("measured_archs", "clear_tuning", "tuning_files")},
    "merge_state": lambda m: m.states(_MERGED),
    "merge_state_in_place": lambda m: m.states("v s v_other s_other"),
    "apply_attention_sinks": Maker.sinks,
    "split_qkv_rotary": Maker.rotary,
    "bind_split_qkv_rotary": lambda _: dict(ROPE),
    "bind_split_qkv_rotary()": Maker.bound_rotary,
    "append_paged_kv_cache": Maker.append,
    "bind_append_paged_kv_cache": lambda _: dict(OPTIONS),
    "bind_append_paged_kv_cache()": lambda m: Example(
        m.ops.bind_append_paged_kv_cache("{}"), m.append()
    ),
    "copy_single_page": lambda m: {"pages": m.given(4, 2, 2, 16, 64), **_COPY},
    "compact_kv_copy": lambda m: {
        "pages": m.given(4, 2, 2, 16, 64),
        "copy_length_indptr": m.ints([0, 2, 4]),
        "src_dst_pos": m.ints([[1, 2, 40, 41], [30, 31, 50, 51]]),
        "batch_size": 2,
    },
    "debug_get_kv": lambda m: {
        "pages": m.given(4, 2, 2, 16, 64),
        "position_map": m.ints([5, 63, 0]),
        "k": m.out(2, 3, 2, 64),
        "v": m.out(2, 3, 2, 64),
        "layer_id": 1,
    },
    "append_paged_mla_kv_cache": Maker.append_mla,
    "bind_append_paged_mla_kv_cache": lambda _: dict(OPTIONS),
    "bind_append_paged_mla_kv_cache()": lambda m: Example(
        m.ops.bind_append_paged_mla_kv_cache("{}"), m.append_mla()
    ),
    "copy_single_page_mla": lambda m: {"pages": m.given(4, 16, 64), **_COPY},
    "debug_get_kv_mla": lambda m: {
        "pages": m.given(4, 16, 64),
        "position_map": m.ints([5, 63, 0]),
        "kv": m.out(2, 3, 64),
        "layer_id": 1,
    },
    **ROW_MAKERS,
    "call_counts": lambda _: {},
    "reset_call_counts": lambda _: {},
}

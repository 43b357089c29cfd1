"""Calls of latent attention (MLA) over a batch: the plan, the run, and what they must give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tvm
from batches import indptr_of, is_cuda, normal
from cache_oracle import Extras, assert_request
from calls import Args, passed
from device_tensors import DeviceTensor, poisoned, to_device

CUDA_DIMS = (512, 64)


def needs_mla_kernel(device: Any, dtype: str, dims: tuple[int, int]) -> None:
    """Skip what CUDA refuses by contract; test_batch_mla_errors checks that it does."""
    if is_cuda(device) and dtype == "float32":
        pytest.skip("CUDA attention has no float32 kernels")
    if is_cuda(device) and dims != CUDA_DIMS:
        pytest.skip(f"CUDA has no kernels for head dimensions {dims}")


@dataclass(frozen=True)
class MLASpec:
    """Shape of a batch; `dims` are the columns of the latent and of the rotated part."""

    kv_lens: Sequence[int]
    rows: Sequence[int] | None = None
    heads: int = 16
    dims: tuple[int, int] = CUDA_DIMS
    page_size: int = 16
    dtype: str = "float16"
    causal: bool = False

    @property
    def qo_lens(self) -> list[int]:
        """Query rows of each request; one without `rows`."""
        return [1] * len(self.kv_lens) if self.rows is None else list(self.rows)

    @property
    def sm_scale(self) -> float:
        """As DeepSeek scales: by the head dimension before compression."""
        return 192**-0.5 if self.dims == CUDA_DIMS else sum(self.dims) ** -0.5


@dataclass
class MLACall:
    """A batch on the host, and the arguments of its plan and run."""

    ops: Any
    device: Any
    spec: MLASpec
    q: np.ndarray
    keys: list[np.ndarray]
    pool: np.ndarray
    page_indptr: np.ndarray
    page_indices: np.ndarray
    plan_args: Args = field(default_factory=dict)
    run_args: Args = field(default_factory=dict)

    def plan(self, **changes: Any) -> Any:
        """Call the plan function and keep what it returns for the run."""
        self.run_args["plan"] = self.ops.batch_mla_plan(*passed(self.plan_args, changes))
        return self.run_args["plan"]

    def run(self, **changes: Any) -> None:
        """Call the run function."""
        self.ops.batch_mla_run(*passed(self.run_args, changes))

    def outputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and LSE on the host; the bytes around them must be intact."""
        for name in ("o", "lse"):
            self.run_args[name].assert_guards_intact(name)
        return self.run_args["o"].numpy(), self.run_args["lse"].numpy()

    def check(self) -> tuple[np.ndarray, np.ndarray]:
        """Compare with the oracle, and return the outputs."""
        o, lse = self.outputs()
        ptr = indptr_of(self.spec.qo_lens)
        for b, k in enumerate(self.keys):
            part = slice(ptr[b], ptr[b + 1])
            assert_request(
                o[part], lse[part], self.q[part], k[:, None], k[:, None, : self.spec.dims[0]],
                Extras(causal=self.spec.causal), self.spec.sm_scale,
                f"request {b} ({self.spec.qo_lens[b]} rows, {len(k)} keys)",
            )  # fmt: skip
        return o, lse

    def plan_run_check(self) -> tuple[np.ndarray, np.ndarray]:
        """Plan, run and check."""
        self.plan()
        self.run()
        return self.check()


def paged(
    rng: np.random.Generator, keys: Sequence[np.ndarray], page_size: int, fill: float = np.nan
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Keys in shuffled pages of a larger pool: the pool, page_indptr and page_indices."""
    counts = [-(-len(k) // page_size) for k in keys]
    indices = rng.permutation(sum(counts) + 2)[: sum(counts)].astype(np.int32)
    pool = np.full((sum(counts) + 2, page_size, keys[0].shape[1]), fill, keys[0].dtype)
    at = indptr_of(counts)
    for b, tokens in enumerate(keys):
        j = np.arange(len(tokens))
        pool[indices[at[b] : at[b + 1]][j // page_size], j % page_size] = tokens
    return pool, at, indices


def mla_call(
    ops: Any,
    device: Any,
    workspaces: Any,
    rng: np.random.Generator,
    spec: MLASpec,
    *,
    views: bool = True,
    fill: float = np.nan,
) -> MLACall:
    """A random batch and its arguments.

    With `views` queries and pages are slices of one tensor each, as TVM's cache passes them, with
    byte offsets; without, every part is a tensor of its own.
    """
    n, heads, width = sum(spec.qo_lens), spec.heads, sum(spec.dims)
    q = normal(rng, (n, heads, width), spec.dtype)
    keys = [normal(rng, (m, width), spec.dtype) for m in spec.kv_lens]
    pool, indptr, indices = paged(rng, keys, spec.page_size, fill)
    call = MLACall(ops, device, spec, q, keys, pool, indptr, indices)
    host = lambda array: to_device(np.asarray(array, np.int32), tvm.cpu(0))  # noqa: E731
    call.plan_args = {
        "float_workspace": workspaces.float_workspace,
        "int_workspace": workspaces.int_workspace,
        "pinned_int_workspace": workspaces.pinned_int_workspace,
        "qo_indptr": host(indptr_of(spec.qo_lens)),
        "kv_indptr": host(indptr),
        "kv_len": host(spec.kv_lens),
        "num_heads": heads,
        "head_dim_ckv": spec.dims[0],
        "causal": spec.causal,
    }
    call.run_args = {
        "float_workspace": workspaces.float_workspace,
        "int_workspace": workspaces.int_workspace,
        "plan": None,
        **_parts(("q_nope", "q_pe"), q, spec.dims[0], device, views),
        **_parts(("ckv", "kpe"), pool, spec.dims[0], device, views),
        "page_indices": to_device(indices, device, byte_offset=4 if views else None),
        "o": poisoned((n, heads, spec.dims[0]), spec.dtype, device),
        "lse": poisoned((n, heads), "float32", device),
        "mask_mode": int(spec.causal),
        "num_heads": heads,
        "page_size": spec.page_size,
        "sm_scale": spec.sm_scale,
        "return_lse_base_on_e": False,
    }
    return call


def _parts(
    names: tuple[str, str], whole: np.ndarray, cut: int, device: Any, views: bool
) -> dict[str, DeviceTensor]:
    if not views:
        parts = (whole[..., :cut], whole[..., cut:])
        return {
            name: to_device(np.ascontiguousarray(part), device)
            for name, part in zip(names, parts, strict=True)
        }
    tensor = to_device(whole, device, byte_offset=64)
    return {
        names[0]: tensor.view(lambda a: a[..., :cut]),
        names[1]: tensor.view(lambda a: a[..., cut:]),
    }

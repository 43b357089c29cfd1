"""The attention functions by name, so that one input can be given to all that take it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import tvm
from batches import CUDA_HEAD_DIMS, Batch, Spec, is_cuda, make_batch
from calls import Call, bound_paged, bound_ragged, decode, paged_prefill, ragged_prefill
from device_tensors import to_device

MAKERS: dict[str, Callable[..., Call]] = {
    "planned-paged": paged_prefill,
    "planned-ragged": ragged_prefill,
    "planned-decode": decode,
    "bound-paged": bound_paged,
    "bound-ragged": bound_ragged,
    "bound-decode": functools.partial(bound_paged, decoding=True),
}
DECODE = ("planned-decode", "bound-decode")
RAGGED = ("planned-ragged", "bound-ragged")
PREFILL = ("planned-paged", "bound-paged", *RAGGED)
PAGED = ("planned-paged", "bound-paged", *DECODE)
PLANNED = ("planned-paged", "planned-ragged", "planned-decode")


def each(*names: str) -> Any:
    """Run the test once with each function; all of them without names."""
    return pytest.mark.parametrize("function", names or tuple(MAKERS))


def batch_for(function: str, rng: Any, spec: Spec, **values: Any) -> Batch:
    """The batch of a spec as this function takes it: decode has one row per request."""
    ragged = function in RAGGED
    if function in DECODE:
        spec = replace(spec, qo_lens=None, causal=False)
    spec = replace(spec, layout="NHD" if ragged else "HND")
    return make_batch(rng, spec, paged=not ragged, **values)


def served(device: Any, function: str, spec: Spec) -> bool:
    """Whether the device has a kernel: by docs/ops.md, not by what the function says."""
    if not is_cuda(device):
        return True
    dims = {spec.head_dim, spec.vo}
    if function.startswith("planned"):
        return spec.dtype != "float32" and len(dims) == 1 and spec.head_dim in CUDA_HEAD_DIMS
    return spec.dtype != "float32" and all(d % 16 == 0 and d <= 256 for d in dims)


class Workspaces(NamedTuple):
    """Workspaces of a test of its own, as the fixture of this name has them."""

    float_workspace: Any
    int_workspace: Any
    pinned_int_workspace: Any


def new_workspaces(device: Any, num_bytes: int = 8 << 20) -> Workspaces:
    """Workspaces full of 0xFF, for tests whose device is not that of the fixture."""
    dirty = np.full(num_bytes, 0xFF, np.uint8)
    return Workspaces(*(to_device(dirty, where).tensor for where in (device, device, tvm.cpu(0))))


class Attend:
    """Makes calls of any function on one device."""

    def __init__(self, ops: Any, device: Any, workspaces: Any) -> None:
        self.ops, self.device, self.workspaces = ops, device, workspaces

    def call(self, function: str, batch: Batch, **kwargs: Any) -> Call:
        """The call of a function over a batch that `batch_for` made."""
        return MAKERS[function](self.ops, self.device, self.workspaces, batch, **kwargs)

    def check(self, function: str, rng: Any, spec: Spec, **kwargs: Any) -> Call:
        """Make a random batch, call and compare with float64."""
        call = self.call(function, batch_for(function, rng, spec), **kwargs)
        call.plan_run_check()
        return call

"""New tensors of the kind and on the device of given ones."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm_ffi

#: Whatever speaks DLPack: a NumPy array, a tensor of TVM, one of another framework.
Tensor = Any


@functools.cache
def function(name: str) -> Callable[..., Any]:
    """Return the packed function ``flashinfer.<name>``."""
    import tvm_flashinfer  # noqa: F401  registers them

    return tvm_ffi.get_global_func(f"flashinfer.{name}")


@functools.lru_cache(maxsize=256)
def bound(slot: str, options: str) -> Callable[..., Any]:
    """Return a function without a plan, for a slot and options that are JSON text."""
    return function("bind_attention")(slot, options, None, None)


def empty(like: Tensor, shape: Sequence[int], dtype: str | None = None) -> Tensor:
    """Return a tensor without contents, of the kind and on the device of another one.

    Parameters
    ----------
    like : tensor
    shape : sequence of int
    dtype : str, optional
        That of `like` when it is left out.

    Raises
    ------
    TypeError
        `like` is neither a NumPy array nor a tensor of TVM.
    """
    if isinstance(like, np.ndarray):
        return np.empty(tuple(shape), dtype or like.dtype)
    if isinstance(like, tvm_ffi.Tensor):
        import tvm

        return tvm.runtime.empty(tuple(shape), dtype or str(like.dtype), like.device)
    raise TypeError(
        f"got a tensor of type {type(like).__name__}; results are allocated for NumPy arrays and "
        "tensors of TVM. Allocate them and give them as `out`"
    )


def state(
    q: Tensor, out: Tensor | None, lse: Tensor | None, head_dim: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return an output and its LSE: as given, or allocated.

    Parameters
    ----------
    q : tensor
        (n, num_qo_heads, head_dim).
    out, lse : tensor or None
    head_dim : int, optional
        That of the output, where it is not that of q.
    """
    if out is None:
        out = empty(q, (*q.shape[:2], head_dim or q.shape[-1]))
    return out, empty(q, q.shape[:2], "float32") if lse is None else lse


def layout_code(layout: str) -> int:
    """Return the number that packed functions take for a layout of keys, or of pages."""
    codes = {"NHD": 0, "HND": 1}
    if layout not in codes:
        raise ValueError(f"`layout` is {layout!r}, expected 'NHD' or 'HND'")
    return codes[layout]


def scale_or_default(sm_scale: float | None, head_dim: int) -> float:
    """Return a softmax scale: as given, or one over the root of the head dimension."""
    return float(head_dim) ** -0.5 if sm_scale is None else float(sm_scale)


def window_left(window: int | None) -> int:
    """Return how many keys before the diagonal a row sees: one less than the window; -1 for all."""
    if window is None:
        return -1
    if window < 1:
        raise ValueError(f"`window` is {window}; expected a positive number of keys, or None")
    return window - 1

"""Shapes and orders that kernels want of tensors of heads."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx


def padded_head_dim(x: te.Tensor, head_dim: int) -> te.Tensor:
    """Put zeros behind the last element of every head; products do not change.

    Parameters
    ----------
    x : te.Tensor
        (..., d) with a constant d.
    head_dim : int
        d at least.

    Returns
    -------
    padded : te.Tensor
        (..., head_dim).
    """
    d = _last(x)
    if head_dim < d:
        raise ValueError(f"`head_dim` is {head_dim}, x has shape {list(x.shape)}; expected {d} up")
    zero = tirx.const(0, x.dtype)

    def element(*at: Any) -> Any:
        return tirx.if_then_else(at[-1] < d, x(*at), zero)

    return te.compute([*x.shape[:-1], head_dim], element, name="padded_head_dim")


def cut_head_dim(x: te.Tensor, head_dim: int) -> te.Tensor:
    """Return the first elements of every head: what `padded_head_dim` was given.

    Parameters
    ----------
    x : te.Tensor
        (..., d) with a constant d.
    head_dim : int
        d at most.
    """
    d = _last(x)
    if head_dim > d:
        raise ValueError(f"`head_dim` is {head_dim}, x has shape {list(x.shape)}; {d} at most")
    return te.compute([*x.shape[:-1], head_dim], lambda *at: x(*at), name="cut_head_dim")


def heads_swapped(x: te.Tensor) -> te.Tensor:
    """Exchange the two dimensions in the middle: (B, S, N, H) to (B, N, S, H), and back."""
    if len(x.shape) != 4:
        raise ValueError(f"x has shape {list(x.shape)}; expected (B, S, N, H) or (B, N, S, H)")
    b, s, n, h = x.shape
    return te.compute((b, n, s, h), lambda i, j, k, at: x(i, k, j, at), name="heads_swapped")


def _last(x: te.Tensor) -> int:
    d = x.shape[-1]
    if not isinstance(d, int | tirx.IntImm):
        raise ValueError(f"x has shape {list(x.shape)}; expected a constant last dimension")
    return int(d)

"""Integer tensors that are affine in their indices, such as positions made with ``arange``."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from tvm import relax as rx

from tvm_flashinfer.relax.attention_site import provably_at_most, provably_equal, static
from tvm_flashinfer.relax.graph import Graph, axes, has_shape, number, op_name, shape_of


class Affine(NamedTuple):
    """The element at an index is the sum of `slopes` times the index, plus `start`."""

    slopes: tuple[int, ...]
    start: Any

    def plus(self, other: Affine, factor: int = 1) -> Affine:
        """Return the sum with a multiple of another one, broadcast as tensors are."""
        rank = max(len(self.slopes), len(other.slopes))
        mine, others = (_padded(x.slopes, rank) for x in (self, other))
        slopes = tuple(a + factor * b for a, b in zip(mine, others, strict=True))
        return Affine(slopes, self.start + factor * other.start)

    def times(self, factor: int) -> Affine:
        """Return a multiple."""
        return Affine(tuple(factor * slope for slope in self.slopes), factor * self.start)


def read_affine(graph: Graph, expr: rx.Expr) -> Affine | None:
    """Return an integer tensor as a function of its indices; None when it is not known to be one.

    A dimension of size 1 has slope 0.
    """
    array = graph.array(expr)
    if array is not None:
        return _fitted(array)
    value = graph.value(expr)
    if op_name(value) is None or not has_shape(value):
        return None
    found = _read_call(graph, value)
    return found and Affine(with_flat_units(found.slopes, shape_of(value)), found.start)


def _read_call(graph: Graph, value: rx.Call) -> Affine | None:
    name = op_name(value)
    if name == "relax.arange":
        start, step = value.args[0], number(value.args[2])
        return Affine((step,), start) if isinstance(step, int) else None
    if name in ("relax.add", "relax.subtract"):
        left, right = (read_affine(graph, arg) for arg in value.args)
        if left is None or right is None:
            return None
        return left.plus(right, 1 if name == "relax.add" else -1)
    if name in ("relax.multiply", "relax.negative"):
        return _multiplied(graph, value)
    if name == "relax.astype":
        is_integer = str(value.ty.dtype).startswith("int")
        return read_affine(graph, value.args[0]) if is_integer else None
    inner = read_affine(graph, value.args[0]) if value.args else None
    return None if inner is None else viewed(inner, value)


def viewed(inner: Affine, call: rx.Call) -> Affine | None:
    """Return the result of a view whose argument is affine; None when it is not affine."""
    name = op_name(call)
    old, new = shape_of(call.args[0]), shape_of(call)
    slopes = list(inner.slopes)
    if name == "relax.permute_dims":
        given = call.attrs.axes
        order = range(len(old))[::-1] if given is None else axes(given, len(old))
        return Affine(tuple(slopes[axis] for axis in order), inner.start)
    if name in ("relax.expand_dims", "relax.squeeze", "relax.reshape"):
        return _without_units(inner, old, new)
    if name == "relax.broadcast_to":
        return Affine(_padded(inner.slopes, len(new)), inner.start)
    if name == "relax.strided_slice":
        cut, begins, _, *strides = (list(arg.fields) for arg in call.args[1:])
        if strides and any(number(stride) != 1 for stride in strides[0]):
            return None
        start = inner.start
        for axis, begin in zip(cut, begins, strict=True):
            at = number(axis) % len(old)
            if not provably_at_most(0, begin):
                return None
            start = start + slopes[at] * begin
        return Affine(with_flat_units(slopes, new), start)
    return None


def with_flat_units(slopes: Any, shape: tuple[Any, ...]) -> tuple[int, ...]:
    """Return slopes with 0 for dimensions of size 1."""
    return tuple(0 if static(n) == 1 else s for s, n in zip(slopes, shape, strict=True))


def _padded(slopes: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (0,) * (rank - len(slopes)) + slopes


def _multiplied(graph: Graph, call: rx.Call) -> Affine | None:
    if op_name(call) == "relax.negative":
        inner = read_affine(graph, call.args[0])
        return None if inner is None else inner.times(-1)
    for factor, other in (call.args, call.args[::-1]):
        value = graph.uniform(factor)
        if value is not None and value == int(value):
            inner = read_affine(graph, other)
            return None if inner is None else inner.times(int(value))
    return None


def _without_units(inner: Affine, old: tuple[Any, ...], new: tuple[Any, ...]) -> Affine | None:
    """Return the slopes after a reshape that adds and removes dimensions of size 1 alone."""
    kept = [(n, s) for n, s in zip(old, inner.slopes, strict=True) if static(n) != 1]
    targets = [at for at, n in enumerate(new) if static(n) != 1]
    same = len(kept) == len(targets) and all(
        provably_equal(n, new[at]) for (n, _), at in zip(kept, targets, strict=True)
    )
    if not same:
        return None
    slopes = [0] * len(new)
    for (_, slope), at in zip(kept, targets, strict=True):
        slopes[at] = slope
    return Affine(tuple(slopes), inner.start)


def _fitted(array: np.ndarray) -> Affine | None:
    if array.size == 0 or array.dtype.kind not in "iu":
        return None
    corner = (0,) * array.ndim
    start = int(array[corner])
    slopes = []
    for axis, size in enumerate(array.shape):
        next_one = tuple(int(at == axis) for at in range(array.ndim))
        slopes.append(int(array[next_one]) - start if size > 1 else 0)
    grid = np.indices(array.shape, sparse=True)
    made = start + sum(slope * index for slope, index in zip(slopes, grid, strict=True))
    return (
        Affine(tuple(slopes), start)
        if np.array_equal(np.broadcast_to(made, array.shape), array)
        else None
    )

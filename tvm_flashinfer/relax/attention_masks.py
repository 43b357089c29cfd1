"""Which keys a row sees, read from what a model adds to scores or selects them by.

A mask is a list of conditions that all hold for a key that is seen. A condition on positions, such
as "at or before the row", is kept as a line; every other one is a tensor of booleans.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax as rx

from tvm_flashinfer.relax.affine import Affine, read_affine, viewed, with_flat_units
from tvm_flashinfer.relax.attention_site import provably_equal
from tvm_flashinfer.relax.graph import VIEWS, Graph, op_name, shape_of

#: Emits an expression, and gives what stands for an old one: see `emit_attention`.
Make = Callable[[Callable[[rx.Expr], rx.Expr], Callable[[rx.Expr], rx.Expr]], rx.Expr]

#: What is added to a score hides its key when it is at most this.
HIDDEN = -1e3

_VIEWS = (*VIEWS, "relax.strided_slice")

_COMPARISONS = {
    # Whether the left side is the smaller one, and whether the sides may be equal.
    "relax.less": (True, False),
    "relax.less_equal": (True, True),
    "relax.greater": (False, False),
    "relax.greater_equal": (False, True),
}


class UnprovenMaskError(ValueError):
    """A tensor is not known to hide keys or to leave scores as they are."""


@dataclass(frozen=True, eq=False)
class Seen:
    """A condition.

    Parameters
    ----------
    shape : tuple
        Of the booleans; it can be broadcast to that of the scores.
    make : callable
        Emits the booleans.
    line : Affine or None
        If known, the condition holds where this is at most 0.
    """

    shape: tuple[Any, ...]
    make: Make
    line: Affine | None = None


class MaskReader:
    """Reads masks of a function.

    Parameters
    ----------
    graph : Graph
    binary : bool
        Whether tensors of numbers that masks are made from hold 0 and 1 alone, which nothing in a
        model tells.

    Attributes
    ----------
    finite : bool
        Whether something that was read hides keys with a number other than minus infinity.
    """

    def __init__(self, graph: Graph, binary: bool = False) -> None:
        self.graph = graph
        self.binary = binary
        self.finite = False

    def added(self, expr: rx.Expr, factor: float = 1.0) -> list[Seen]:
        """Return the conditions of a tensor that is added to scores, and then multiplied.

        Raises
        ------
        UnprovenMaskError
            When it may be other than 0 and what hides keys.
        """
        uniform = self.graph.uniform(expr)
        if uniform == 0:
            return []
        array = self.graph.array(expr)
        if array is not None:
            return self._added_array(array.astype(np.float64) * factor, expr)
        value = self.graph.value(expr)
        name = op_name(value)
        if name == "relax.where":
            condition, kept, other = value.args
            if self.hides(other, factor):
                return [*self.seen(condition), *self.added(kept, factor)]
            if self.hides(kept, factor):
                return [*self.seen(condition, negated=True), *self.added(other, factor)]
        if name in ("relax.add", "relax.minimum"):
            return [seen for arg in value.args for seen in self.added(arg, factor)]
        if name == "relax.multiply":
            return self._added_product(value, factor)
        if name == "relax.maximum":
            for bound, other in (value.args, value.args[::-1]):
                if self.hides(bound, factor):
                    return self.added(other, factor)
        if name in ("relax.triu", "relax.tril") and self.hides(value.args[0], factor):
            return [_negated(self._triangle(value))]
        if name == "relax.astype" and str(value.args[0].ty.dtype).startswith(("float", "bfloat")):
            return self.added(value.args[0], factor)
        if name in _VIEWS:
            return [_viewed(seen, value) for seen in self.added(value.args[0], factor)]
        raise UnprovenMaskError(_of_other_numbers(value))

    def seen(self, expr: rx.Expr, negated: bool = False) -> list[Seen]:
        """Return the conditions under which booleans are true, or false."""
        value = self.graph.value(expr)
        name = op_name(value)
        uniform = self.graph.uniform(expr)
        if uniform is not None and bool(uniform) != negated:
            return []
        if name in ("relax.logical_not", "relax.bitwise_not"):
            return self.seen(value.args[0], not negated)
        both = (
            ("relax.logical_or", "relax.bitwise_or")
            if negated
            else (
                "relax.logical_and",
                "relax.bitwise_and",
            )
        )
        if name in both:
            return [seen for arg in value.args for seen in self.seen(arg, negated)]
        if name in _COMPARISONS and (line := self._compared(value)) is not None:
            return [_maybe_negated(_tensor(expr, line), negated)]
        if name in ("relax.triu", "relax.tril") and self.graph.uniform(value.args[0]) == 1:
            return [_maybe_negated(self._triangle(value), negated)]
        if name == "relax.where" and (chosen := self._chosen(value, negated)) is not None:
            return chosen
        if name == "relax.astype" and self._is_binary(value.args[0]):
            return self.ones(value.args[0], negated)
        if name in _VIEWS:
            return [_viewed(seen, value) for seen in self.seen(value.args[0], negated)]
        array = self.graph.array(expr)
        line = None if array is None else _band(array.astype(bool))
        return [_maybe_negated(_tensor(expr, line), negated)]

    def ones(self, expr: rx.Expr, negated: bool = False) -> list[Seen]:
        """Return the conditions under which a tensor of 0 and 1 is 1, or 0.

        Raises
        ------
        UnprovenMaskError
            When it is not known to have no other numbers.
        """
        value = self.graph.value(expr)
        name = op_name(value)
        if str(expr.ty.dtype) == "bool":
            return self.seen(expr, negated)
        if self.graph.uniform(expr) in (0.0, 1.0):
            if bool(self.graph.uniform(expr)) != negated:
                return []
        elif name == "relax.where" and (chosen := self._chosen(value, negated)) is not None:
            return chosen
        elif name == "relax.astype":
            return self.ones(value.args[0], negated)
        elif name == "relax.subtract" and self.graph.uniform(value.args[0]) == 1:
            return self.ones(value.args[1], not negated)
        elif name == "relax.multiply" and not negated:
            return [seen for arg in value.args for seen in self.ones(arg)]
        elif name in ("relax.triu", "relax.tril") and self.graph.uniform(value.args[0]) == 1:
            return [_maybe_negated(self._triangle(value), negated)]
        elif name in _VIEWS:
            return [_viewed(seen, value) for seen in self.ones(value.args[0], negated)]
        array = self.graph.array(expr)
        if self.binary or (array is not None and np.isin(array, (0, 1)).all()):
            line = None if array is None else _band(array.astype(bool))
            return [_maybe_negated(_tensor(expr, line, as_bool=True), negated)]
        raise UnprovenMaskError(
            f"the mask is made from {_text(value)}, which is not known to hold 0 and 1 alone, and "
            "is added as numbers; if it does, tell with DispatchAttention(binary_masks=True), or "
            "make it boolean in the model"
        )

    def _chosen(self, where: rx.Call, negated: bool) -> list[Seen] | None:
        """Return the conditions of a choice between 0 and a tensor of 0 and 1."""
        condition, first, second = where.args
        for other, kept, inverted in ((second, first, False), (first, second, True)):
            if self.graph.uniform(other) != 0:
                continue
            if self.graph.uniform(kept) == 1:
                return self.seen(condition, negated != inverted)
            if not negated and self._is_binary(kept):
                return [*self.seen(condition, inverted), *self.ones(kept)]
        return None

    def _is_binary(self, expr: rx.Expr) -> bool:
        try:
            self.ones(expr)
        except UnprovenMaskError:
            return False
        return True

    def _added_array(self, values: np.ndarray, expr: rx.Expr) -> list[Seen]:
        hidden = values <= HIDDEN
        if not (hidden | (values == 0)).all():
            raise UnprovenMaskError(
                "a constant is added to scores that has other numbers than 0 and those that hide a "
                f"key, such as {values[~hidden & (values != 0)].flat[0]:g}"
            )
        self.finite |= bool(np.isfinite(values[hidden]).any())
        seen = rx.const(~hidden)
        return [Seen(values.shape, lambda emit, renewed: seen, _band(~hidden))]

    def _added_product(self, call: rx.Call, factor: float) -> list[Seen]:
        for number_, other in (call.args, call.args[::-1]):
            value = self.graph.uniform(number_)
            if value is None:
                continue
            if value > 0:
                return self.added(other, factor * value)
            if value * factor <= HIDDEN:
                self.finite |= math.isfinite(value)
                return self.ones(other, negated=True)
        raise UnprovenMaskError(_of_other_numbers(call))

    def hides(self, expr: rx.Expr, factor: float) -> bool:
        """Return whether a uniform tensor hides every key whose score it takes the place of."""
        value = self.graph.uniform(expr)
        hides = value is not None and value * factor <= HIDDEN
        self.finite |= hides and math.isfinite(value)
        return hides

    def _triangle(self, call: rx.Call) -> Seen:
        """Return where a triangle of a uniform tensor keeps its elements."""
        upper = op_name(call) == "relax.triu"
        shape = shape_of(call)
        offset = call.args[1] if len(call.args) > 1 else 0
        # Kept where column - row >= offset above, and where column - row <= offset below.
        rank = len(shape)
        slopes = (*(0,) * (rank - 2), *((1, -1) if upper else (-1, 1)))
        line = Affine(with_flat_units(slopes, shape), offset if upper else 0 - offset)
        constructor = rx.op.triu if upper else rx.op.tril
        sizes = rx.ShapeExpr(shape)

        def make(emit: Any, renewed: Any) -> rx.Expr:
            ones = emit(rx.op.ones(renewed(sizes), "int32"))
            return rx.op.astype(emit(constructor(ones, offset)), "bool")

        return Seen(shape, make, line)

    def _compared(self, call: rx.Call) -> Affine | None:
        left, right = (read_affine(self.graph, arg) for arg in call.args)
        if left is None or right is None:
            return None
        smaller, equal = _COMPARISONS[op_name(call)]
        difference = left.plus(right, -1) if smaller else right.plus(left, -1)
        slopes = with_flat_units(difference.slopes, shape_of(call))
        return Affine(slopes, difference.start + (0 if equal else 1))


def _tensor(expr: rx.Expr, line: Affine | None = None, as_bool: bool = False) -> Seen:
    """Return the condition that a tensor is true."""

    def make(emit: Any, renewed: Any) -> rx.Expr:
        tensor = renewed(expr)
        return rx.op.astype(tensor, "bool") if as_bool else tensor

    return Seen(shape_of(expr), make, line)


def _negated(seen: Seen) -> Seen:
    line = seen.line
    if line is not None:  # not (x <= 0), of integers
        line = Affine(tuple(-slope for slope in line.slopes), 1 - line.start)
    return Seen(
        seen.shape,
        lambda emit, renewed: rx.op.logical_not(emit(seen.make(emit, renewed))),
        line,
    )


def _maybe_negated(seen: Seen, negated: bool) -> Seen:
    return _negated(seen) if negated else seen


def _viewed(seen: Seen, call: rx.Call) -> Seen:
    """Return a condition under a view of a tensor that it is broadcast to."""
    whole = _broadcast(seen, call.args[0])

    def make(emit: Any, renewed: Any) -> rx.Expr:
        rest = [renewed(arg) for arg in call.args[1:]]
        return rx.Call(call.op, [emit(whole.make(emit, renewed)), *rest], call.attrs)

    line = None if whole.line is None else viewed(whole.line, call)
    return Seen(shape_of(call), make, line)


def _broadcast(seen: Seen, tensor: rx.Expr) -> Seen:
    """Return a condition of one part of a tensor with the shape of all of it."""
    shape = shape_of(tensor)
    if len(shape) == len(seen.shape) and all(map(provably_equal, shape, seen.shape)):
        return seen
    sizes = rx.ShapeExpr(shape)

    def make(emit: Any, renewed: Any) -> rx.Expr:
        return rx.op.broadcast_to(emit(seen.make(emit, renewed)), renewed(sizes))

    line = seen.line
    if line is not None:
        line = Affine((*(0,) * (len(shape) - len(line.slopes)), *line.slopes), line.start)
    return Seen(shape, make, line)


def _band(seen: np.ndarray) -> Affine | None:
    """Return the line of booleans that are a triangle."""
    if seen.ndim < 2 or seen.size == 0:
        return None
    rows, columns = seen.shape[-2:]
    place = np.arange(columns)[None, :] - np.arange(rows)[:, None]
    for sign in (1, -1):
        inside = sign * place[seen.reshape(-1, rows, columns)[0]]
        if inside.size == 0:
            return None
        last = int(inside.max())
        if np.array_equal(seen, np.broadcast_to(sign * place <= last, seen.shape)):
            slopes = (*(0,) * (seen.ndim - 2), -sign, sign)
            return Affine(with_flat_units(slopes, seen.shape), -last)
    return None


def _of_other_numbers(value: rx.Expr) -> str:
    return (
        f"{_text(value)} is added to scores, which is not known to be either 0 or {HIDDEN:g} and "
        "less"
    )


def _text(value: rx.Expr) -> str:
    name = op_name(value)
    if name is None:
        return f"the tensor {value.name}" if isinstance(value, rx.Var) else "a tensor"
    return f"the result of {name}"

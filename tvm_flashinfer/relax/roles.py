"""What the dimensions of a tensor of an attention are, followed through views.

A role is ``b`` (requests), ``h`` (heads), ``n`` (rows or keys) or ``d`` (of a head), or ``bh`` for
requests and heads in one dimension, ``k`` and ``g`` for heads as KV heads and the query heads of
each, and ``1`` for a dimension of size 1, which may stand for any that is not there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from tvm import relax as rx

from tvm_flashinfer.relax.attention_site import BNSH, BSNH, Operand, provably_equal, static
from tvm_flashinfer.relax.graph import VIEWS, axes, op_name, shape_of

Roles = tuple[str, ...]

_MERGED: dict[Roles, str] = {("b", "h"): "bh", ("k", "g"): "h", ("b", "k", "g"): "bh"}

#: The letter of a layout for each role; groups are merged with their heads before.
_LETTERS = {"b": "B", "bh": "B", "h": "N", "k": "N", "n": "S", "d": "H"}

#: Roles of operands of a product, by their rank, the last two being those of a matrix.
LEADING = {2: (), 3: ("bh",), 4: ("b", "h"), 5: ("b", "k", "g")}


def with_units(roles: Sequence[str], shape: Sequence[Any]) -> Roles:
    """Return roles with ``1`` for every dimension of size 1."""
    return tuple(
        "1" if static(size) == 1 else role for role, size in zip(roles, shape, strict=True)
    )


def before(call: rx.Call, roles: Roles) -> Roles | None:
    """Return the roles of the argument of a view from those of its result; None if it has none."""
    name = op_name(call)
    old, new = shape_of(call.args[0]), shape_of(call)
    if name == "relax.permute_dims":
        order = _order(call, len(new))
        return tuple(roles[order.index(axis)] for axis in range(len(order)))
    if name == "relax.broadcast_to":
        return _before_broadcast(old, new, roles)
    if name == "relax.repeat":
        axis = call.attrs.axis
        has_heads = axis is not None and roles[int(axis) % len(new)] == "h"
        return with_units(roles, old) if has_heads else None
    return _regrouped(new, old, roles) if name in VIEWS else None


def after(call: rx.Call, roles: Roles) -> Roles | None:
    """Return the roles of the result of a view from those of its argument; None if it has none."""
    name = op_name(call)
    old, new = shape_of(call.args[0]), shape_of(call)
    if name == "relax.permute_dims":
        return tuple(roles[axis] for axis in _order(call, len(new)))
    if name == "relax.broadcast_to":
        same = len(old) == len(new) and all(map(provably_equal, old, new))
        return roles if same else None
    return _regrouped(old, new, roles) if name in VIEWS else None


def arranged(expr: rx.Expr, roles: Roles) -> Operand | None:
    """Return a tensor as one of four dimensions, if its elements lie in the order of a layout."""
    present = [
        (role, size) for role, size in zip(roles, shape_of(expr), strict=True) if role != "1"
    ]
    names = [role for role, _ in present]
    if "g" in names:
        at = names.index("g")
        if at == 0 or names[at - 1] != "k":
            return None
        present[at - 1 : at + 1] = [("h", present[at - 1][1] * present[at][1])]
    letters = [_LETTERS[role] for role, _ in present]
    sizes = dict(zip(letters, (size for _, size in present), strict=True))
    for layout in (BSNH, BNSH):
        if letters == [letter for letter in layout if letter in sizes]:
            return Operand(expr, layout, tuple(sizes.get(letter, 1) for letter in layout))
    return None


def _order(call: rx.Call, rank: int) -> list[int]:
    given = call.attrs.axes
    return list(range(rank))[::-1] if given is None else axes(given, rank)


def _before_broadcast(old: Sequence[Any], new: Sequence[Any], roles: Roles) -> Roles | None:
    if len(old) != len(new):
        return None
    found = []
    for was, now, role in zip(old, new, roles, strict=True):
        if provably_equal(was, now):
            found.append(role)
        elif static(was) == 1 and role in ("g", "h"):
            found.append("1")
        else:
            return None
    return tuple(found)


def _regrouped(old: Sequence[Any], new: Sequence[Any], roles: Roles) -> Roles | None:
    """Return the roles of a reshaped tensor: dimensions stay, are merged, or are parted."""
    sizes = [(role, size) for role, size in zip(roles, old, strict=True) if static(size) != 1]
    targets = [at for at, size in enumerate(new) if static(size) != 1]
    found = ["1"] * len(new)
    while sizes and targets:
        step = _step(sizes, [new[at] for at in targets])
        if step is None:
            return None
        taken, given = step
        for at, role in zip(targets, given, strict=False):
            found[at] = role
        sizes, targets = sizes[taken:], targets[len(given) :]
    return None if sizes or targets else tuple(found)


def _step(sizes: list[tuple[str, Any]], targets: list[Any]) -> tuple[int, Roles] | None:
    """Return how many dimensions are taken next, and the roles of those that stand for them."""
    first = sizes[0][0]
    if provably_equal(sizes[0][1], targets[0]):
        return 1, (first,)
    for parts, whole in _MERGED.items():
        count = len(parts)
        if first == whole and provably_equal(
            sizes[0][1], math.prod(targets[1:count], start=targets[0])
        ):
            return 1, parts
        merged = tuple(role for role, _ in sizes[:count])
        product = math.prod((size for _, size in sizes[1:count]), start=sizes[0][1])
        if merged == parts and provably_equal(product, targets[0]):
            return count, (whole,)
    return None

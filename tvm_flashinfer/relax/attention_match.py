"""Attention that a model spells with products and a softmax, as most frontends leave it.

Read from the product of weights and values backwards: the softmax, what is done to scores, the
product of queries and keys, and on each side the views down to tensors that a kernel takes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from tvm import relax as rx

from tvm_flashinfer.relax.attention_masks import MaskReader, Seen, UnprovenMaskError
from tvm_flashinfer.relax.attention_operands import same_shape, traced
from tvm_flashinfer.relax.attention_site import (
    BNSH,
    BSNH,
    AttentionSite,
    Bias,
    Operand,
)
from tvm_flashinfer.relax.graph import VIEWS, Graph, axes, has_shape, op_name, shape_of
from tvm_flashinfer.relax.roles import LEADING, Roles, after, arranged, before, with_units

MATMUL = "relax.matmul"
SOFTMAX = "relax.nn.softmax"
_DROPOUT = "relax.nn.dropout"


@dataclass
class _Found:
    """What has been read of one attention."""

    graph: Graph
    reader: MaskReader
    inner: list[rx.Var] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    conditions: list[Seen] = field(default_factory=list)
    biases: list[Bias] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    soft_cap: float = 0.0

    def step(self, expr: rx.Expr) -> rx.Expr:
        """Return what an expression is bound to, which the kernel will compute too."""
        self.inner += self.graph.names(expr)
        return self.graph.value(expr)


@dataclass(frozen=True)
class _Step:
    """Something done to scores, from the softmax inwards: its kind, and what it is done with."""

    kind: str
    names: list[rx.Var]
    value: Any = None


def read_products(
    graph: Graph, var: rx.Var, value: rx.Expr, binary_masks: bool = False
) -> AttentionSite | None:
    """Return the attention whose product of weights and values is bound to a variable.

    Parameters
    ----------
    graph : Graph
    var : relax.Var
    value : relax.Expr
        What it is bound to.
    binary_masks : bool
        See `MaskReader`.

    Returns
    -------
    site : AttentionSite or None
        None where there is no softmax of a product of two tensors before the product.
    """
    if op_name(value) != MATMUL or not has_shape(value):
        return None
    found = _Found(graph, MaskReader(graph, binary_masks))
    softmax = _weights(found, value)
    if softmax is None:
        return None
    steps = _steps(graph, softmax.args[0])
    if steps is None or not _in_order(steps):
        return None
    product = steps[-1].value
    scale = _read_steps(found, steps)
    operands = _operands(found, product, value)
    if operands is None:
        return None
    (q, q_scale), (k, k_scale), (v, _) = operands
    root_var, root, layout = _result(found, var, value, v.dtype)
    site = AttentionSite(root_var.name, root, "matmul, softmax, matmul", q, k, v, layout)
    site.scale = scale * q_scale * k_scale
    site.soft_cap = found.soft_cap
    if found.soft_cap:
        site.scale *= found.soft_cap
    site.problems += [*found.problems, *_leaks(found, root_var)]
    site.add_conditions(found.conditions)
    site.biases, site.notes = found.biases, found.notes
    if found.reader.finite and site.masks:
        site.notes.append("a row whose keys are all masked gives 0, not a mean of the values")
    return site


def _weights(found: _Found, values: rx.Call) -> rx.Call | None:
    """Return the softmax that the weights of a product with values come from."""
    expr, rank = values.args[0], len(shape_of(values))
    if rank not in LEADING or not has_shape(expr):
        return None
    roles: Roles | None = (*LEADING[rank], "n", "m")[-len(shape_of(expr)) :]
    roles = with_units(roles, shape_of(expr))
    while roles is not None:
        value = found.step(expr)
        name = op_name(value)
        if name == SOFTMAX:
            rank = len(shape_of(value))
            over_keys = int(value.attrs.axis) % rank == rank - 1
            return value if over_keys and _are_scores(roles, shape_of(value)) else None
        if isinstance(value, rx.TupleGetItem):
            value = found.step(value.tuple_value)
            if op_name(value) != _DROPOUT:
                return None
            found.problems.append(
                "there is a dropout between softmax and values; export the model for inference, "
                "which has none"
            )
        elif name in VIEWS:
            roles = before(value, roles)
        elif name == "relax.where":
            if not _is_guard(found, value, value.args[2]):
                return None
        elif name != "relax.astype":
            return None
        expr = value.args[2 if name == "relax.where" else 0]
    return None


def _in_order(steps: list[_Step]) -> bool:
    """Return whether scores keep their rows and keys from the product to the softmax."""
    product = steps[-1].value
    rank = len(shape_of(product))
    if rank not in LEADING:
        return False
    roles: Roles | None = with_units((*LEADING[rank], "n", "m"), shape_of(product))
    for step in steps[-2::-1]:
        if step.kind == "view":
            roles = after(step.value, roles)
            if roles is None or not _are_scores(roles, shape_of(step.value)):
                return False
    return True


def _are_scores(roles: Roles, shape: tuple[Any, ...]) -> bool:
    """Return whether dimensions are requests, heads, rows and keys, in this order."""
    if len(roles) not in LEADING:
        return False
    parts = {"bh": ("b", "h"), "h": ("h", "k", "g")}
    expected = with_units((*LEADING[len(roles)], "n", "m"), shape)
    got = iter(part for role in roles for part in parts.get(role, (role,)) if part != "1")
    return all(
        part in got for role in expected for part in parts.get(role, (role,))[:1] if part != "1"
    )


def _is_guard(found: _Found, where: rx.Call, weights: rx.Expr) -> bool:
    """Return whether weights are made 0 in rows whose scores are all minus infinity.

    PyTorch's exports do, and kernels do without being told.
    """
    value = found.graph.value(weights)
    if found.graph.uniform(where.args[1]) != 0 or op_name(value) != SOFTMAX:
        return False
    scores, names = value.args[0], []
    expr = where.args[0]
    while True:
        found.inner += found.graph.names(expr)
        call = found.graph.value(expr)
        name = op_name(call)
        if name == "relax.equal":
            same = found.graph.value(call.args[0]).same_as(found.graph.value(scores))
            hidden = found.graph.uniform(call.args[1]) == -math.inf
            return same and hidden and names == ["logical_not", "max", "logical_not"]
        if name == "relax.max":
            rank = len(shape_of(call.args[0]))
            if axes(call.attrs.axis or (), rank) != [rank - 1]:
                return False
            names.append("max")
        elif name == "relax.logical_not":
            names.append("logical_not")
        elif name != "relax.astype":
            return False
        found.inner += found.graph.names(where.args[1])
        expr = call.args[0]


def _steps(graph: Graph, expr: rx.Expr) -> list[_Step] | None:
    """Return what is done to scores, the last being their product; None when there is none."""
    names, value = graph.names(expr), graph.value(expr)
    name = op_name(value)
    if name is None or not has_shape(value):
        return None
    if name == MATMUL:
        return [_Step("product", names, value)]
    if name in ("relax.astype", "relax.tanh") or name in VIEWS:
        rest = _steps(graph, value.args[0])
        kind = {"relax.astype": "same", "relax.tanh": "tanh"}.get(name, "view")
        return None if rest is None else [_Step(kind, names, value), *rest]
    if name == "relax.where":
        for at in (1, 2):
            rest = _steps(graph, value.args[at])
            if rest is not None and same_shape(value, value.args[at]):
                return [_Step("selected", names, (value, at)), *rest]
        return None
    if name not in _BINARY:
        return None
    for scores, other in (value.args, value.args[::-1]):
        rest = _steps(graph, scores)
        if rest is not None and same_shape(value, scores):
            return [_Step(name, names, (other, scores.same_as(value.args[0]))), *rest]
    return None


_BINARY = (
    "relax.add",
    "relax.subtract",
    "relax.multiply",
    "relax.divide",
    "relax.maximum",
)


def _read_steps(found: _Found, steps: list[_Step]) -> float:
    """Read scale, cap and masks; return what the product is multiplied by, apart from a cap."""
    factor = 1.0
    for step in steps:
        found.inner += step.names
        try:
            factor = _read_step(found, step, factor)
        except UnprovenMaskError as error:
            found.problems.append(str(error))
    return factor


def _read_step(found: _Found, step: _Step, factor: float) -> float:
    """Read what is done to scores that are multiplied by a factor after it; return the next one."""
    reader = found.reader
    if step.kind in ("relax.multiply", "relax.divide"):
        return factor * _constant(found, step)
    if step.kind in ("product", "same", "view"):
        return factor
    if found.soft_cap:
        raise UnprovenMaskError("scores are masked or capped before they are capped")
    if not factor > 0:
        raise UnprovenMaskError("scores are multiplied by a negative number after a mask or a cap")
    if step.kind == "tanh":
        found.soft_cap = factor
        return 1.0
    if step.kind == "selected":
        found.conditions += _selected(found, *step.value, factor)
    elif step.kind == "relax.add":
        _read_added(found, step.value[0], factor)
    elif step.kind == "relax.subtract":
        raise UnprovenMaskError("a tensor is subtracted from scores, which no kernel does")
    elif not reader.hides(step.value[0], factor):  # of relax.maximum
        raise UnprovenMaskError("scores are clamped from below, which no kernel does")
    return factor


def _read_added(found: _Found, tensor: rx.Expr, factor: float) -> None:
    """Read a tensor that is added to scores: what is not known to hide keys is a bias."""
    try:
        found.conditions += found.reader.added(tensor, factor)
    except UnprovenMaskError as error:
        found.biases.append(Bias(tensor, factor))
        found.notes.append(str(error))


def _constant(found: _Found, step: _Step) -> float:
    other, scores_first = step.value
    value = found.graph.uniform(other)
    if value is None or (step.kind == "relax.divide" and (not scores_first or value == 0)):
        raise UnprovenMaskError("the scale of scores is not a constant of the model")
    return value if step.kind == "relax.multiply" else 1 / value


def _selected(found: _Found, where: rx.Call, at: int, factor: float) -> list[Seen]:
    """Return the conditions of scores that are replaced where their keys are hidden."""
    other = where.args[3 - at]
    if not found.reader.hides(other, factor):
        raise UnprovenMaskError("scores are replaced by numbers that do not hide their keys")
    return found.reader.seen(where.args[0], negated=at == 2)


def _operands(
    found: _Found, product: rx.Call, values: rx.Call
) -> list[tuple[Operand, float]] | None:
    """Return queries, keys and values, and what each is multiplied by before the products."""
    operands = []
    for call, at, matrix in (
        (product, 0, ("n", "d")),
        (product, 1, ("d", "n")),
        (values, 1, ("n", "d")),
    ):
        rank = len(shape_of(call))
        expr = call.args[at]
        if rank not in LEADING or not has_shape(expr):
            return None
        roles = (*LEADING[rank], *matrix)[-len(shape_of(expr)) :]
        operand = traced(found.graph, expr, with_units(roles, shape_of(expr)), call is product)
        if operand is None:
            return None
        operands.append(operand)
    return operands


def _result(found: _Found, var: rx.Var, value: rx.Call, dtype: str) -> tuple[rx.Var, rx.Call, str]:
    """Follow views of the result to the one whose elements lie best for a kernel."""
    rank = len(shape_of(value))
    roles: Roles | None = with_units((*LEADING[rank], "n", "d"), shape_of(value))
    best, passed = None, [var]
    while roles is not None:
        layout = _layout(value, roles)
        is_alias = isinstance(found.graph.bound(var), rx.Var)
        if layout is not None and str(value.ty.dtype) == dtype and not is_alias:
            if best is None or layout == BSNH or best[2] != BSNH:
                best = var, value, layout, len(passed) - 1
        users = found.graph.users(var)
        if len(users) != 1 or users[0] is None:
            break
        var = users[0]
        passed.append(var)
        bound = found.graph.bound(var)
        if isinstance(bound, rx.Var):
            continue
        value = bound
        if op_name(value) != "relax.astype":
            roles = after(value, roles) if op_name(value) in VIEWS else None
    if best is None:
        found.problems.append(
            f"queries, keys and values are {dtype} and the result is not; kernels keep the dtype"
        )
        return passed[0], found.graph.value(passed[0]), BNSH
    found.inner += passed[: best[3]]
    return best[:3]


def _layout(value: rx.Call, roles: Roles) -> str | None:
    """Return the layout of a result; heads lie before rows where they are one with requests."""
    operand = arranged(value, roles)
    if operand is None:
        return None
    return BNSH if "bh" in roles else operand.layout


def _leaks(found: _Found, root: rx.Var) -> list[str]:
    """Return what else uses tensors between the operands and the result."""
    inner = {var for var in found.inner if not var.same_as(root)}
    allowed = {*inner, root}
    return [
        f"{var.name}, which is between the operands and the result, is used elsewhere too"
        for var in dict.fromkeys(found.inner)
        if var in inner and not set(found.graph.users(var)) <= allowed
    ]

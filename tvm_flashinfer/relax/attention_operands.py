"""Followed through views: the operands of an attention to where kernels read them best."""

from __future__ import annotations

from tvm import relax as rx

from tvm_flashinfer.relax.attention_site import BSNH, Operand, provably_equal
from tvm_flashinfer.relax.graph import VIEWS, Graph, has_shape, op_name, shape_of
from tvm_flashinfer.relax.roles import Roles, arranged, before


def traced(graph: Graph, expr: rx.Expr, roles: Roles, scaled: bool) -> tuple[Operand, float] | None:
    """Follow views back to the tensor whose elements lie best for a kernel.

    Parameters
    ----------
    graph : Graph
    expr : relax.Expr
        One side of a product.
    roles : tuple of str
        Of its dimensions.
    scaled : bool
        Whether products with numbers may be followed too.

    Returns
    -------
    operand, factor : Operand and float
        The tensor, and what it is multiplied by on the way; None when there is none.
    """
    best, factor = None, 1.0
    while True:
        operand = arranged(expr, roles)
        if operand is not None and (best is None or _is_no_worse(operand, best[0])):
            best = operand, factor
        value = graph.value(expr)
        name = op_name(value)
        if name in ("relax.multiply", "relax.divide") and scaled:
            scalar = _scalar(graph, value)
            if scalar is None:
                return best
            expr, factor = scalar[0], factor * scalar[1]
        elif name == "relax.astype" and _widens(value):
            expr = value.args[0]
        elif name == "relax.repeat" or name in VIEWS:
            if not has_shape(value.args[0]):
                return best
            inner = before(value, roles)
            if inner is None:
                return best
            expr, roles = value.args[0], inner
        else:
            return best


def _is_no_worse(operand: Operand, best: Operand) -> bool:
    """Return whether a tensor nearer to the parameters is a better operand.

    It is where heads are parted from requests, or not repeated yet; else it should be in `BSNH`.
    """
    same_heads = provably_equal(operand.size("N"), best.size("N"))
    return not same_heads or operand.layout == BSNH or best.layout != BSNH


def _scalar(graph: Graph, call: rx.Call) -> tuple[rx.Expr, float] | None:
    """Return the tensor that is multiplied or divided by a number, and the factor."""
    left, right = call.args
    pairs = [(left, right)] if op_name(call) == "relax.divide" else [(left, right), (right, left)]
    for tensor, other in pairs:
        value = graph.uniform(other)
        if value and has_shape(tensor) and same_shape(tensor, call):
            return tensor, (1 / value if op_name(call) == "relax.divide" else value)
    return None


def _widens(call: rx.Call) -> bool:
    bits = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}
    old, new = (str(x.ty.dtype) for x in (call.args[0], call))
    return old in bits and new in bits and bits[old] < bits[new]


def same_shape(a: rx.Expr, b: rx.Expr) -> bool:
    """Return whether two tensors provably have the same shape."""
    sizes = shape_of(a), shape_of(b)
    return len(sizes[0]) == len(sizes[1]) and all(map(provably_equal, *sizes))

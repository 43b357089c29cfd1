"""Attention that a model spells as one operator of Relax."""

from __future__ import annotations

from typing import Any

from tvm import relax as rx

from tvm_flashinfer.relax.attention_masks import MaskReader, UnprovenMaskError
from tvm_flashinfer.relax.attention_site import (
    BOTTOM_RIGHT,
    BSNH,
    TOP_LEFT,
    AttentionSite,
    Bias,
    Operand,
    provably_at_most,
    static,
)
from tvm_flashinfer.relax.graph import Graph, has_shape, op_name, shape_of

ATTENTION = "relax.nn.attention"
ATTENTION_BIAS = "relax.nn.attention_bias"
ATTENTION_VAR_LEN = "relax.nn.attention_var_len"

_OPS = (ATTENTION, ATTENTION_BIAS, ATTENTION_VAR_LEN)


def read_operator(
    graph: Graph, var: rx.Var, value: rx.Expr, binary_masks: bool = False
) -> AttentionSite | None:
    """Return what an operator of attention computes, or None for another expression.

    Parameters
    ----------
    graph : Graph
        Of the function that has it.
    var : relax.Var
        What the expression is bound to.
    value : relax.Expr
    binary_masks : bool
        See `MaskReader`.
    """
    name = op_name(value)
    if name not in _OPS:
        return None
    if not all(has_shape(arg) for arg in value.args[:3]):
        problem = "the shape of queries, keys or values is not known at compile time"
        return AttentionSite(var.name, value, name, problems=[problem])
    q, k, v = (Operand(arg, BSNH, shape_of(arg)) for arg in value.args[:3])
    attrs = value.attrs
    site = AttentionSite(var.name, value, name, q, k, v)
    site.scale = _scale(attrs.scale, q)
    site.causal = None if attrs.causal_mask is None else str(attrs.causal_mask)
    site.window = _integer(attrs.window_size)
    site.problems += [*_causal_problems(site), *_window_problems(site)]
    if name == ATTENTION_BIAS:
        _read_bias(site, graph, value.args[3], binary_masks)
    if name == ATTENTION_VAR_LEN:
        _read_lengths(site, value)
    return site


def _scale(given: Any, q: Operand) -> float:
    if given is not None:
        return float(given.value)
    head_dim = static(q.size("H"))
    return head_dim**-0.5 if head_dim else 0.0


def _integer(given: Any) -> int | None:
    return None if given is None else int(getattr(given, "value", given))


def _causal_problems(site: AttentionSite) -> list[str]:
    if site.causal in (None, TOP_LEFT):
        return []
    if site.causal != BOTTOM_RIGHT:
        return [f"the causal mask is {site.causal!r}; there are {TOP_LEFT!r} and {BOTTOM_RIGHT!r}"]
    is_var_len = op_name(site.root) == ATTENTION_VAR_LEN
    if is_var_len or provably_at_most(site.rows, site.keys) or static(site.rows) == 1:
        return []
    return [
        f"the causal mask is {BOTTOM_RIGHT} with {site.rows} rows and {site.keys} keys; TVM lets "
        "every row see more keys when there are more rows than keys, which kernels do not"
    ]


def _read_bias(site: AttentionSite, graph: Graph, bias: rx.Expr, binary_masks: bool) -> None:
    """Read a bias: what is known to hide keys and nothing else becomes a mask."""
    reader = MaskReader(graph, binary_masks)
    try:
        conditions = reader.added(bias)
    except UnprovenMaskError as error:
        site.biases.append(Bias(bias))
        site.notes.append(str(error))
        return
    site.add_conditions(conditions)
    if reader.finite and site.masks:
        site.notes.append("a row whose keys are all masked gives 0, not a mean of the values")


def _window_problems(site: AttentionSite) -> list[str]:
    if site.window is None or site.causal is not None:
        return []
    return [
        f"window_size is {site.window} and causal_mask None; TVM does not say which keys after the "
        "diagonal a row sees then. Give a causal_mask"
    ]


def _read_lengths(site: AttentionSite, call: rx.Call) -> None:
    """Read where requests start. The longest lengths, which follow, are not needed."""
    site.qo_indptr, site.kv_indptr = call.args[3], call.args[4]
    for letter, operand in zip("qkv", (site.q, site.k, site.v), strict=True):
        if static(operand.size("B")) != 1:
            site.problems.append(
                f"{letter} has shape {operand.expr.ty.shape}; requests of different lengths follow "
                "each other in a first dimension of 1"
            )
    for name, indptr in (("seqstart_q", site.qo_indptr), ("seqstart_k", site.kv_indptr)):
        if str(indptr.ty.dtype) != "int32":
            site.problems.append(f"{name} is {indptr.ty.dtype}; kernels take int32")
    if site.causal is None or site.qo_indptr.same_as(site.kv_indptr):
        return
    if site.causal == TOP_LEFT:
        site.problems.append(
            f"the causal mask is {TOP_LEFT} and queries and keys have lengths of their own; "
            f"{BOTTOM_RIGHT} is served"
        )
    else:
        site.notes.append("rows of a request that has fewer keys than rows may see no key")

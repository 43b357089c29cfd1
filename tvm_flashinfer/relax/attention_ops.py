"""Attention that a model spells as one operator of Relax."""

from __future__ import annotations

from typing import Any

import tvm
from tvm import relax as rx

from tvm_flashinfer.relax.attention_site import (
    BOTTOM_RIGHT,
    BSNH,
    TOP_LEFT,
    AttentionSite,
    Operand,
    static,
)

ATTENTION = "relax.nn.attention"
ATTENTION_BIAS = "relax.nn.attention_bias"
ATTENTION_VAR_LEN = "relax.nn.attention_var_len"

_OPS = (ATTENTION, ATTENTION_BIAS, ATTENTION_VAR_LEN)


def read_operator(var: rx.Var, value: rx.Expr) -> AttentionSite | None:
    """Return what an operator of attention computes, or None for another expression.

    Parameters
    ----------
    var : relax.Var
        What the expression is bound to.
    value : relax.Expr
    """
    name = op_name(value)
    if name not in _OPS:
        return None
    q, k, v = (Operand(arg, BSNH) for arg in value.args[:3])
    attrs = value.attrs
    site = AttentionSite(var.name, value, name, q, k, v, BSNH, scale=0.0)
    for letter, operand in zip("qkv", (q, k, v), strict=True):
        if not has_shape(operand.expr):
            site.problems.append(f"the shape of {letter} is not known at compile time")
    if site.problems:
        return site
    site.scale = _scale(attrs.scale, q)
    site.causal = None if attrs.causal_mask is None else str(attrs.causal_mask)
    site.window = _integer(attrs.window_size)
    site.problems += [*_causal_problems(site.causal), *_window_problems(site)]
    if name == ATTENTION_BIAS:
        site.problems.append("there is an additive bias, which no kernel takes")
    if name == ATTENTION_VAR_LEN:
        _read_lengths(site, value)
    return site


def op_name(value: Any) -> str | None:
    """Return the name of the operator that an expression calls, such as ``"relax.add"``."""
    if isinstance(value, rx.Call) and isinstance(value.op, tvm.ir.Op):
        return str(value.op.name)
    return None


def has_shape(expr: rx.Expr) -> bool:
    """Return whether an expression is a tensor whose sizes are known, symbolic ones too."""
    return isinstance(expr.ty, rx.TensorType) and isinstance(expr.ty.shape, rx.ShapeExpr)


def _scale(given: Any, q: Operand) -> float:
    if given is not None:
        return float(given.value)
    head_dim = static(q.size("H"))
    return head_dim**-0.5 if head_dim else 0.0


def _integer(given: Any) -> int | None:
    return None if given is None else int(getattr(given, "value", given))


def _causal_problems(causal: str | None) -> list[str]:
    if causal in (None, TOP_LEFT, BOTTOM_RIGHT):
        return []
    return [f"the causal mask is {causal!r}; there are {TOP_LEFT!r} and {BOTTOM_RIGHT!r}"]


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

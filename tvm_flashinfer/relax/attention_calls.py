"""The calls that take the place of an attention: operands brought into order, then one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax as rx

from tvm_flashinfer.relax.attention_site import BNSH, BSNH, AttentionSite, Operand


def emit_attention(
    builder: rx.BlockBuilder, site: AttentionSite, renewed: Callable[[rx.Expr], rx.Expr]
) -> rx.Expr:
    """Emit what a site computes, and return the last expression, which has the type of the site.

    Parameters
    ----------
    builder : relax.BlockBuilder
        It is in a block of the function that is rewritten.
    site : AttentionSite
        One without reasons against it.
    renewed : callable
        Gives what stands for an expression of the old function in the new one.
    """
    q, k, v = (Operand(renewed(x.expr), x.layout) for x in (site.q, site.k, site.v))
    if site.qo_indptr is not None:
        return _ragged(site, [q, k, v], renewed)
    if site.equal_heads and all(x.layout == BNSH for x in (q, k, v)):
        # A head of a request is a request with one head, whose rows follow each other.
        result = _dense(builder, site, [_per_head(builder, x) for x in (q, k, v)])
        return _arranged(builder, _whole(builder, result, site), site.layout)
    tensors = [_arranged(builder, x, BSNH) for x in (q, k, v)]
    return _arranged(builder, Operand(_dense(builder, site, tensors)), site.layout)


def _arranged(builder: rx.BlockBuilder, x: Operand, layout: str) -> rx.Expr:
    if x.layout == layout:
        return x.expr
    return rx.op.permute_dims(_bound(builder, x.expr), [0, 2, 1, 3])


def _bound(builder: rx.BlockBuilder, expr: rx.Expr) -> rx.Expr:
    return expr if isinstance(expr, rx.Var) else builder.emit(expr)


def _per_head(builder: rx.BlockBuilder, x: Operand) -> rx.Expr:
    batch, heads, length, dim = (x.size(letter) for letter in BNSH)
    return rx.op.reshape(x.expr, [batch * heads, length, 1, dim])


def _whole(builder: rx.BlockBuilder, result: rx.Expr, site: AttentionSite) -> Operand:
    shape = [site.q.size("B"), site.q.size("N"), site.rows, site.v.size("H")]
    return Operand(rx.op.reshape(_bound(builder, result), shape), BNSH)


def _dense(builder: rx.BlockBuilder, site: AttentionSite, tensors: list[rx.Expr]) -> rx.Expr:
    """Return the call over requests of equal length, all in `BSNH`."""
    q, k, v = (_bound(builder, x) for x in tensors)
    if site.sliced:
        k, v = (
            builder.emit(rx.op.strided_slice(x, [1], [0], [site.rows], assume_inbound=True))
            for x in (k, v)
        )
    shape = [*list(q.ty.shape)[:3], v.ty.shape[3]]
    return _call("attention_dense", [q, k, v], site, shape)


def _ragged(
    site: AttentionSite, operands: list[Operand], renewed: Callable[[rx.Expr], rx.Expr]
) -> rx.Expr:
    tensors = [*(x.expr for x in operands), renewed(site.qo_indptr), renewed(site.kv_indptr)]
    return _call("attention_ragged", tensors, site, list(site.root.ty.shape))


def _call(function: str, tensors: list[rx.Expr], site: AttentionSite, shape: list[Any]) -> rx.Call:
    scalars = [
        int(site.causal is not None),
        -1 if site.window is None else site.window - 1,
        float(site.soft_cap),
        float(site.scale),
    ]
    # The integers are 64 bits wide, as the functions take them.
    values = [
        rx.prim_value(tvm.tirx.const(x, "int64" if isinstance(x, int) else "float64"))
        for x in scalars
    ]
    ty = rx.TensorType(rx.ShapeExpr(shape), site.q.dtype, site.root.ty.vdevice)
    return rx.call_dps_packed(f"flashinfer.{function}", rx.Tuple([*tensors, *values]), ty)

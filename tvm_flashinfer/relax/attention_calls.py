"""The calls that take the place of an attention: operands brought into order, then one kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm
from tvm import relax as rx

from tvm_flashinfer.relax.attention_site import (
    BNSH,
    BSNH,
    AttentionSite,
    Operand,
    provably_equal,
    static,
)
from tvm_flashinfer.tir import mask_indptr, packed_mask, packed_mask_bytes


def emit_attention(
    builder: rx.BlockBuilder,
    site: AttentionSite,
    head_dims: tuple[int, int],
    renewed: Callable[[rx.Expr], rx.Expr],
) -> rx.Expr:
    """Emit what a site computes, and return the last expression, which has the type of the site.

    Parameters
    ----------
    builder : relax.BlockBuilder
        It is in a block of the function that is rewritten.
    site : AttentionSite
        One without reasons against it.
    head_dims : tuple of int
        Of the kernel, of keys and of values; operands with fewer are padded.
    renewed : callable
        Gives what stands for an expression of the old function in the new one.
    """
    rebuild = _Rebuild(builder, renewed)
    qk, vo = head_dims
    q, k, v = (
        rebuild.padded(Operand(rebuild.tensor(x), x.layout, x.shape), dim)
        for x, dim in ((site.q, qk), (site.k, qk), (site.v, vo))
    )
    if site.qo_indptr is not None:
        return _ragged(rebuild, site, [q, k, v])
    # A head of a request is a request with one head, whose rows follow each other.
    heads_first = site.equal_heads and all(x.layout == BNSH for x in (q, k, v))
    per_head = heads_first or (site.masked_per_head and not site.biased)
    if site.biased:
        requests = static(site.q.size("N")) if per_head else 1
        mask = [_bias(rebuild, site), rx.prim_value(tvm.tirx.const(requests, "int64"))]
    else:
        mask = _mask(rebuild, site, per_head) if site.masks else []
    move = _per_head if per_head else _lengths_first
    result = _dense(rebuild, site, [move(rebuild, x) for x in (q, k, v)], mask)
    result = rebuild.cut(result, site, vo)
    return _as_the_root(rebuild, site, result, BNSH if per_head else BSNH)


def _as_the_root(rebuild: _Rebuild, site: AttentionSite, result: rx.Expr, layout: str) -> rx.Expr:
    """Return the result of the kernel with the shape and the order that the site has."""
    sizes = {"B": site.q.size("B"), "N": site.q.size("N"), "S": site.rows, "H": site.v.size("H")}
    shape = [sizes[letter] for letter in layout]
    if layout == BNSH:  # so far a request for each head
        shape = [sizes["B"] * sizes["N"], sizes["S"], 1, sizes["H"]]
    # Of one head both orders are the same elements.
    if layout != site.layout and static(sizes["N"]) != 1:
        if layout == BNSH:
            result = rx.op.reshape(rebuild.emit(result), [sizes[letter] for letter in BNSH])
        result = rx.op.permute_dims(rebuild.emit(result), [0, 2, 1, 3])
        shape = [sizes[letter] for letter in site.layout]
    wanted = list(site.root.ty.shape)
    if len(wanted) == 4 and all(map(provably_equal, shape, wanted)):
        return result
    return rx.op.reshape(rebuild.emit(result), wanted)


class _Rebuild:
    """Emits expressions of the new function."""

    def __init__(self, builder: rx.BlockBuilder, renewed: Callable[[rx.Expr], rx.Expr]) -> None:
        self.builder = builder
        self.renewed = renewed

    def emit(self, expr: rx.Expr) -> rx.Expr:
        """Bind an expression to a variable, unless it is one."""
        return expr if isinstance(expr, rx.Var) else self.builder.emit(expr)

    def call_te(self, function: Callable[..., Any], *args: Any) -> rx.Var:
        """Bind what a function of tensor expressions computes."""
        return self.emit(self.builder.call_te(function, *args))

    def tensor(self, x: Operand) -> rx.Expr:
        """Return an operand with its four dimensions."""
        return self.reshaped(self.renewed(x.expr), x.shape)

    def padded(self, x: Operand, head_dim: int) -> Operand:
        """Return an operand with zeros after the last element of every head."""
        missing = head_dim - static(x.size("H"))
        if missing == 0:
            return x
        tensor = self.emit(rx.op.nn.pad(self.emit(x.expr), [0, 0, 0, 0, 0, 0, 0, missing]))
        return Operand(tensor, x.layout, (*x.shape[:3], head_dim))

    def cut(self, result: rx.Expr, site: AttentionSite, head_dim: int) -> rx.Expr:
        """Return a result of the kernel without the columns that belong to padded values."""
        wanted = static(site.v.size("H"))
        if head_dim == wanted:
            return result
        return rx.op.strided_slice(self.emit(result), [3], [0], [wanted], assume_inbound=True)

    def reshaped(self, expr: rx.Expr, shape: tuple[Any, ...]) -> rx.Expr:
        """Return a tensor under another shape."""
        expr = self.emit(expr)
        old = tuple(expr.ty.shape)
        if len(old) == len(shape) and all(map(provably_equal, old, shape)):
            return expr
        return rx.op.reshape(expr, list(shape))

    def arranged(self, x: Operand, layout: str) -> rx.Expr:
        """Return an operand in another layout."""
        if x.layout == layout:
            return x.expr
        return rx.op.permute_dims(self.emit(x.expr), [0, 2, 1, 3])


def _per_head(rebuild: _Rebuild, x: Operand) -> rx.Expr:
    batch, heads, length, dim = (x.size(letter) for letter in BNSH)
    return rebuild.reshaped(rebuild.arranged(x, BNSH), (batch * heads, length, 1, dim))


def _lengths_first(rebuild: _Rebuild, x: Operand) -> rx.Expr:
    return rebuild.arranged(x, BSNH)


def _seen(rebuild: _Rebuild, site: AttentionSite) -> rx.Expr:
    """Emit booleans of four dimensions, which are true where all conditions hold."""
    seen = None
    for mask in site.masks:
        made = rebuild.emit(mask.make(rebuild.emit, rebuild.renewed))
        made = rebuild.emit(rebuild.reshaped(made, site.mask_shape(mask)))
        seen = made if seen is None else rebuild.emit(rx.op.logical_and(seen, made))
    return seen


def _first_keys(rebuild: _Rebuild, site: AttentionSite, tensor: rx.Expr) -> rx.Expr:
    """Return what belongs to the keys that are left; keys are the last dimension."""
    if not site.sliced or static(tensor.ty.shape[3]) == 1:
        return tensor
    return rebuild.emit(rx.op.strided_slice(tensor, [3], [0], [site.rows], assume_inbound=True))


def _bias(rebuild: _Rebuild, site: AttentionSite) -> rx.Expr:
    """Emit all that is added to scores as one tensor; minus infinity where a condition fails."""
    total = None
    for bias in site.biases:
        made = rebuild.emit(rebuild.reshaped(rebuild.renewed(bias.expr), site.mask_shape(bias)))
        dtype = str(made.ty.dtype)
        if dtype != "float32" and (dtype != site.q.dtype or total is not None):
            made, dtype = rebuild.emit(rx.op.astype(made, "float32")), "float32"
        if bias.factor != 1:
            made = rebuild.emit(rx.op.multiply(made, rx.const(bias.factor, dtype)))
        if total is not None:
            if str(total.ty.dtype) != "float32":
                total = rebuild.emit(rx.op.astype(total, "float32"))
            made = rebuild.emit(rx.op.add(total, made))
        total = made
    if site.masks:
        if total is None:
            total = rx.const(0, site.q.dtype)
        hidden = rx.const(float("-inf"), str(total.ty.dtype))
        total = rebuild.emit(rx.op.where(_seen(rebuild, site), total, hidden))
    return _first_keys(rebuild, site, total)


def _mask(rebuild: _Rebuild, site: AttentionSite, per_head: bool) -> list[rx.Expr]:
    """Emit the packed mask of all conditions, and return its offsets and its bytes."""
    seen = _first_keys(rebuild, site, _seen(rebuild, site))
    keys = site.rows if site.sliced else site.keys
    requests, heads = site.q.size("B"), site.q.size("N") if per_head else 1
    each = packed_mask_bytes(site.rows, keys)
    packed = rebuild.call_te(packed_mask, seen, requests, heads, site.rows, keys)
    flat = rebuild.emit(rx.op.reshape(packed, [requests * heads * each]))
    return [rebuild.call_te(mask_indptr, requests * heads, each), flat]


def _dense(
    rebuild: _Rebuild, site: AttentionSite, tensors: list[rx.Expr], mask: list[rx.Expr]
) -> rx.Expr:
    """Return the call over requests of equal length, all in `BSNH`."""
    q, k, v = (rebuild.emit(x) for x in tensors)
    if site.sliced:
        k, v = (
            rebuild.emit(rx.op.strided_slice(x, [1], [0], [site.rows], assume_inbound=True))
            for x in (k, v)
        )
    shape = [*list(q.ty.shape)[:3], v.ty.shape[3]]
    return _call(site.kernel.removeprefix("flashinfer."), [q, k, v, *mask], site, shape)


def _ragged(rebuild: _Rebuild, site: AttentionSite, operands: list[Operand]) -> rx.Expr:
    tensors = [rebuild.emit(x.expr) for x in operands]
    indptrs = [rebuild.renewed(x) for x in (site.qo_indptr, site.kv_indptr)]
    shape = [*list(site.root.ty.shape)[:3], operands[2].size("H")]
    result = _call("attention_ragged", [*tensors, *indptrs], site, shape)
    return rebuild.cut(result, site, operands[2].size("H"))


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

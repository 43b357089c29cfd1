"""Rotary embedding that is compiled with a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import te, tirx
from tvm.relax.frontend.nn.llm.position_embedding import switch_rope_freq_func


def split_rotary(
    qkv: te.Tensor,
    positions: te.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    *,
    rope_theta: float = 10000.0,
    rope_scale: float = 1.0,
    rotary_dim: int | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
) -> tuple[te.Tensor, te.Tensor, te.Tensor]:
    """Split fused projections, and rotate queries and keys by TVM's frequencies.

    What ``flashinfer.split_qkv_rotary`` computes, as tensor expressions that TVM fuses with others.

    Parameters
    ----------
    qkv : te.Tensor
        (n, num_qo_heads + 2 * num_kv_heads, head_dim).
    positions : te.Tensor
        (n,), int32.
    num_qo_heads, num_kv_heads : int
    rope_theta, rope_scale : float
        Angles are ``position * rope_scale * rope_theta ** (-2 * i / rotary_dim)``.
    rotary_dim : int, optional
        Rotated dimensions; all when it is left out.
    rope_scaling : mapping, optional
        What TVM's ``switch_rope_freq_func`` takes and needs no further tensor for.

    Returns
    -------
    q, k, v : te.Tensor
        (n, num_qo_heads, head_dim), and twice (n, num_kv_heads, head_dim).
    """
    rows, _, dim = qkv.shape
    rotated = int(dim) if rotary_dim is None else rotary_dim
    scaling = dict(rope_scaling or {})
    frequencies = switch_rope_freq_func(scaling)
    neighbours = scaling.get("rope_type") == "gptj"

    def turned(row: Any, head: Any, d: Any) -> Any:
        position = positions(row).astype("float32") * tirx.const(rope_scale, "float32")
        cosine, sine, named = frequencies(position, d, rotated, rope_theta, "float32")
        step, is_first = (1, d % 2 == 0) if neighbours else (rotated // 2, d < rotated // 2)
        other = tirx.if_then_else(
            is_first, -qkv(row, head, d + step), qkv(row, head, d - step)
        ).astype("float32")
        value = (cosine * qkv(row, head, d).astype("float32") + sine * other).astype(qkv.dtype)
        for var, bound in named.items():
            value = tirx.Let(var, bound, value)
        return value

    def part(first: int, heads: int, rotates: bool, name: str) -> te.Tensor:
        def element(row: Any, head: Any, d: Any) -> Any:
            copied = qkv(row, head + first, d)
            if not rotates or rotated == 0:
                return copied
            return tirx.if_then_else(d < rotated, turned(row, head + first, d), copied)

        return te.compute((rows, heads, dim), element, name=name)

    return (
        part(0, num_qo_heads, True, "q"),
        part(num_qo_heads, num_kv_heads, True, "k"),
        part(num_qo_heads + num_kv_heads, num_kv_heads, False, "v"),
    )

"""States of attention, rotary embedding, and pages of a KV cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tvm_flashinfer.ops._tensors import Tensor, empty, function


def merge_state(
    v_a: Tensor,
    s_a: Tensor,
    v_b: Tensor,
    s_b: Tensor,
    *,
    v_merged: Tensor | None = None,
    s_merged: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint keys; ``flashinfer.merge_state``.

    ``s = log2(2 ** s_a + 2 ** s_b)`` and ``v = (2 ** s_a * v_a + 2 ** s_b * v_b) / 2 ** s``, as in
    Ye et al., "Cascade Inference", and FlashInfer's ``merge_state``.

    Parameters
    ----------
    v_a, v_b : tensor
        (n, num_heads, head_dim), outputs.
    s_a, s_b : tensor
        (n, num_heads), float32, their LSE in base 2.
    v_merged, s_merged : tensor, optional
        Allocated when left out; they may be one of the two states.

    Returns
    -------
    v_merged, s_merged : tensor
        Two empty states give 0 and minus infinity.

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected.
    """
    v_merged = empty(v_a, v_a.shape) if v_merged is None else v_merged
    s_merged = empty(v_a, s_a.shape, "float32") if s_merged is None else s_merged
    function("merge_state")(v_a, s_a, v_b, s_b, v_merged, s_merged)
    return v_merged, s_merged


def merge_state_in_place(v: Tensor, s: Tensor, v_other: Tensor, s_other: Tensor) -> None:
    """Merge another state into one; ``flashinfer.merge_state_in_place``. See `merge_state`."""
    function("merge_state_in_place")(v, s, v_other, s_other)


def apply_attention_sinks(o: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """Let sinks take part in a finished state, in place; ``flashinfer.apply_attention_sinks``.

    Parameters
    ----------
    o : tensor
        (n, num_heads, head_dim).
    lse : tensor
        (n, num_heads), float32, base 2.
    sinks : tensor
        (num_heads,), float32: ``exp(sink)`` is added to the denominator of its head.
    """
    function("apply_attention_sinks")(o, lse, sinks)


def split_qkv_rotary(
    qkv: Tensor,
    position_map: Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    *,
    rope_theta: float = 10000.0,
    rope_scale: float = 1.0,
    rotary_dim: int | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    apply_rope: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Split fused projections, and rotate queries and keys; ``flashinfer.split_qkv_rotary``.

    Parameters
    ----------
    qkv : tensor
        (n, num_qo_heads + 2 * num_kv_heads, head_dim).
    position_map : tensor
        (n,), int32, the position of each row.
    num_qo_heads, num_kv_heads : int
    rope_theta, rope_scale : float
        Angles are ``position * rope_scale * rope_theta ** (-2 * i / rotary_dim)``.
    rotary_dim : int, optional
        Rotated dimensions; all when it is left out.
    rope_scaling : mapping, optional
        ``{"rope_type": "llama3", ...}`` and others, see docs/ops.md.
    apply_rope : bool
        Whether to rotate at all.

    Returns
    -------
    q, k, v : tensor
        (n, num_qo_heads, head_dim), and twice (n, num_kv_heads, head_dim).
    """
    rows, _, head_dim = qkv.shape
    q, k, v = (
        empty(qkv, (rows, heads, head_dim)) for heads in (num_qo_heads, num_kv_heads, num_kv_heads)
    )
    scaling = json.dumps(dict(rope_scaling or {}), sort_keys=True)
    function("split_qkv_rotary")(
        qkv, position_map, q, k, v, int(apply_rope), float(rope_theta), float(rope_scale),
        head_dim if rotary_dim is None else rotary_dim, scaling,
    )  # fmt: skip
    return q, k, v


def append_paged_kv_cache(
    pages: Tensor,
    k: Tensor,
    v: Tensor,
    position_map: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write keys and values into pages; ``flashinfer.append_paged_kv_cache``.

    Parameters
    ----------
    pages : tensor
        (num_pages, 2, num_kv_heads, page_size, head_dim); may have 8 bits.
    k, v : tensor
        (n, num_kv_heads, head_dim).
    position_map : tensor
        (n,), int32: ``page * page_size + slot``; a row with -1 is not written.
    k_scale, v_scale : float
        Of 8-bit pages: rows are divided by them.
    """
    if (k_scale, v_scale) == (1.0, 1.0):
        function("append_paged_kv_cache")(pages, k, v, position_map)
        return
    options = json.dumps({"k_scale": k_scale, "v_scale": v_scale})
    function("bind_append_paged_kv_cache")(options)(pages, k, v, position_map)


def copy_single_page(pages: Tensor, src_page: int, tgt_page: int, copy_length: int) -> None:
    """Copy the first tokens of a page; ``flashinfer.copy_single_page``.

    Parameters
    ----------
    pages : tensor
        (num_pages, 2, num_kv_heads, page_size, head_dim).
    src_page, tgt_page, copy_length : int
        Which page to which, and how many tokens.
    """
    function("copy_single_page")(pages, src_page, tgt_page, copy_length)

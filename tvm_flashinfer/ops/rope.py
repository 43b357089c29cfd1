"""Rotary embedding outside of attention, and on the way into pages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from tvm_flashinfer.ops._tensors import Tensor, empty, function


def apply_rope(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    *,
    rope_theta: float = 10000.0,
    rope_scale: float = 1.0,
    rotary_dim: int | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by their positions; ``flashinfer.apply_rope``.

    Su et al., "RoFormer", 2021.

    Parameters
    ----------
    q, k : tensor
        (n, num_qo_heads, head_dim) and (n, num_kv_heads, head_dim), float16, bfloat16 or float32.
        Rows and heads may have gaps between them, as slices of fused projections do.
    positions : tensor
        (n,), int32.
    rope_theta, rope_scale : float
        Angles are ``position * rope_scale * rope_theta ** (-2 * i / rotary_dim)``.
    rotary_dim : int, optional
        Rotated dimensions; all when it is left out.
    rope_scaling : mapping, optional
        ``{"rope_type": "llama3", ...}``, ``{"rope_type": "gptj"}`` for pairs of neighbours, and
        others, see docs/ops.md. Pairs are half of `rotary_dim` apart without one.
    q_out, k_out : tensor, optional
        Of the shapes of q and k, with gaps too; q and k themselves for a rotation in place.
        Allocated when left out.

    Returns
    -------
    q_out, k_out : tensor

    Raises
    ------
    ValueError, TypeError
        For shapes, devices, dtypes and settings that do not fit, with what is expected.
    """
    q_out, k_out = _outputs(q, k, q_out, k_out)
    function("apply_rope")(
        q, k, positions, *_settings(q, rope_theta, rope_scale, rotary_dim, rope_scaling),
        q_out, k_out,
    )  # fmt: skip
    return q_out, k_out


def apply_rope_cos_sin_cache(
    q: Tensor,
    k: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    *,
    interleaved: bool = False,
    q_out: Tensor | None = None,
    k_out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate queries and keys by a table; ``flashinfer.apply_rope_cos_sin_cache``.

    Parameters
    ----------
    q, k, positions, q_out, k_out
        See `apply_rope`.
    cos_sin_cache : tensor
        (max_position, rotary_dim), float32: the cosines of the pairs of a position, then the sines.
    interleaved : bool
        Pairs are neighbours, and not half of `rotary_dim` apart.

    Returns
    -------
    q_out, k_out : tensor
    """
    q_out, k_out = _outputs(q, k, q_out, k_out)
    function("apply_rope_cos_sin_cache")(
        q, k, positions, cos_sin_cache, int(interleaved), q_out, k_out
    )
    return q_out, k_out


def split_qkv_rotary_append(
    qkv: Tensor,
    positions: Tensor,
    slots: Tensor,
    pages: Tensor,
    num_qo_heads: int,
    *,
    rope_theta: float = 10000.0,
    rope_scale: float = 1.0,
    rotary_dim: int | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    q: Tensor | None = None,
) -> Tensor:
    """Split projections, rotate, and write keys and values; ``flashinfer.split_qkv_rotary_append``.

    One kernel for what `split_qkv_rotary` and `append_paged_kv_cache` do.

    Parameters
    ----------
    qkv : tensor
        (n, num_qo_heads + 2 * num_kv_heads, head_dim), or (n, -1) with the same elements; float16,
        bfloat16 or float32. Rows may have gaps between them.
    positions : tensor
        (n,), int32, of the rows in their sequences.
    slots : tensor
        (n,), int32: ``page * page_size + slot``; keys and values of a row with -1 are not written.
        See `token_slots`.
    pages : tensor
        (num_pages, 2, num_kv_heads, page_size, head_dim), of the dtype of qkv; written.
    num_qo_heads : int
    rope_theta, rope_scale, rotary_dim, rope_scaling
        See `apply_rope`; ``rotary_dim=0`` rotates nothing.
    q : tensor, optional
        (n, num_qo_heads, head_dim); allocated when left out.

    Returns
    -------
    q : tensor
        The rotated queries.

    Raises
    ------
    ValueError, TypeError
        For shapes, devices, dtypes and settings that do not fit, with what is expected.
    """
    q = empty(qkv, (qkv.shape[0], num_qo_heads, pages.shape[-1])) if q is None else q
    function("split_qkv_rotary_append")(
        qkv, positions, slots, *_settings(q, rope_theta, rope_scale, rotary_dim, rope_scaling),
        pages, q,
    )  # fmt: skip
    return q


def token_slots(
    qo_indptr: Tensor,
    page_indptr: Tensor,
    page_indices: Tensor,
    last_page_len: Tensor,
    page_size: int,
    num_rows: int,
    *,
    positions: Tensor | None = None,
    slots: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Find where the new tokens of a step go; ``flashinfer.token_slots``.

    The new tokens of a request are the last ones that its pages hold: token i of ``qo_len``
    has position ``kv_len - qo_len + i``. One call serves all layers of a step.

    Parameters
    ----------
    qo_indptr : tensor
        (batch_size + 1,), int32: where the rows of a request start.
    page_indptr, page_indices, last_page_len : tensor
        (batch_size + 1,), (num_indices,) and (batch_size,), int32: the pages of a request, those of
        the new tokens included, and how many tokens its last one holds.
    page_size, num_rows : int
    positions, slots : tensor, optional
        (num_rows,), int32; allocated when left out.

    Returns
    -------
    positions, slots : tensor
        What `split_qkv_rotary_append` takes.
    """
    positions = empty(qo_indptr, (num_rows,)) if positions is None else positions
    slots = empty(qo_indptr, (num_rows,)) if slots is None else slots
    function("token_slots")(
        qo_indptr, page_indptr, page_indices, last_page_len, page_size, positions, slots
    )
    return positions, slots


def _outputs(
    q: Tensor, k: Tensor, q_out: Tensor | None, k_out: Tensor | None
) -> tuple[Tensor, Tensor]:
    return (
        empty(q, q.shape) if q_out is None else q_out,
        empty(k, k.shape) if k_out is None else k_out,
    )


def _settings(
    q: Tensor,
    theta: float,
    scale: float,
    rotary_dim: int | None,
    scaling: Mapping[str, Any] | None,
) -> tuple[float, float, int, str]:
    dim = q.shape[-1] if rotary_dim is None else rotary_dim
    return float(theta), float(scale), dim, json.dumps(dict(scaling or {}), sort_keys=True)

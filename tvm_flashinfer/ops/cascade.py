"""Attention over keys in several levels, the first of which many requests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tvm_flashinfer.ops._tensors import Tensor, empty, function
from tvm_flashinfer.ops.attention import attention_paged
from tvm_flashinfer.ops.cache import merge_state_in_place


class Level(NamedTuple):
    """The pages of one level: groups of rows, and the keys that each group sees.

    Attributes
    ----------
    qo_indptr : tensor
        (num_groups + 1,), int32: where the rows of a group start. A prefix that all requests share
        has one group, the last level one for each request.
    page_indptr, page_indices, last_page_len : tensor
        (num_groups + 1,), (num_indices,) and (num_groups,), int32: its pages, and how many tokens
        the last of them holds.
    """

    qo_indptr: Tensor
    page_indptr: Tensor
    page_indices: Tensor
    last_page_len: Tensor


def merge_states(
    v: Tensor, s: Tensor, *, v_merged: Tensor | None = None, s_merged: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Merge attention over many disjoint sets of keys; ``flashinfer.merge_states``.

    Parameters
    ----------
    v : tensor
        (n, num_states, num_heads, head_dim), outputs; float16, bfloat16 or float32.
    s : tensor
        (n, num_states, num_heads), float32, their LSE in base 2.
    v_merged, s_merged : tensor, optional
        (n, num_heads, head_dim) and (n, num_heads); allocated when left out.

    Returns
    -------
    v_merged, s_merged : tensor
        See `merge_state`; without a state that has keys they are 0 and minus infinity.

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected.
    """
    rows, _, heads, dim = v.shape
    v_merged = empty(v, (rows, heads, dim)) if v_merged is None else v_merged
    s_merged = empty(v, (rows, heads), "float32") if s_merged is None else s_merged
    function("merge_states")(v, s, v_merged, s_merged)
    return v_merged, s_merged


def cascade_attention(
    q: Tensor,
    pages: Tensor,
    levels: Sequence[Level],
    *,
    causal: bool = True,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over levels of keys; ``flashinfer.attention_prefill_paged`` and merges of its states.

    A prefix that many requests share is read once for all of their rows: Ye et al., "Cascade
    Inference", 2024. The result is that of attention over the keys of all levels, one level after
    the other.

    Parameters
    ----------
    q : tensor
        (n, num_qo_heads, head_dim), the rows of all requests, float16 or bfloat16, on CPU also
        float32.
    pages : tensor
        (num_pages, 2, num_kv_heads, page_size, head_dim), those of every level.
    levels : sequence of Level
        From the most shared one to that of single requests.
    causal : bool
        In the last level row i of a request sees keys up to ``i + m - n``. Rows see all keys of the
        levels before it.
    logits_soft_cap, sm_scale
        See `attention`.
    out, lse : tensor, optional
        (n, num_qo_heads, head_dim), and (n, num_qo_heads) of float32; allocated when left out.

    Returns
    -------
    out, lse : tensor
        The LSE is in base 2. A row that sees no key gives 0 and minus infinity.

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected; without a level.
    """
    if not levels:
        raise ValueError("`levels` is empty, expected one level of keys at least")
    last = len(levels) - 1
    for i, level in enumerate(levels):
        part, sums = attention_paged(
            q, pages, *level, causal=causal and i == last, logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale, out=out if i == 0 else None, lse=lse if i == 0 else None,
        )  # fmt: skip
        if i == 0:
            out, lse = part, sums
        else:
            merge_state_in_place(out, lse, part, sums)
    return out, lse

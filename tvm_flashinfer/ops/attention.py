"""Attention over keys and values that lie in tensors, and over pages, without a plan."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from tvm_flashinfer.ops._tensors import (
    Tensor,
    bound,
    empty,
    function,
    layout_code,
    scale_or_default,
    state,
    window_left,
)


def single_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    layout: str = "NHD",
    out: Tensor | None = None,
) -> Tensor:
    """Attend with the rows of one request; ``flashinfer.single_prefill``.

    Parameters
    ----------
    q : tensor
        (n, num_qo_heads, head_dim), float16 or bfloat16, on CPU also float32.
    k, v : tensor
        (m, num_kv_heads, head_dim) with layout NHD, (num_kv_heads, m, head_dim) with HND.
    causal : bool
        Row i sees keys up to ``i + m - n``.
    layout : str
        ``"NHD"`` or ``"HND"``, of k and v.
    out : tensor, optional
        (n, num_qo_heads, head_dim); allocated when it is left out.

    Returns
    -------
    out : tensor
        The softmax scale is ``head_dim ** -0.5``.

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected.
    """
    out = empty(q, q.shape) if out is None else out
    function("single_prefill")(
        q, k, v, _scratch(q), int(causal), layout_code(layout), 0, True, 1.0, 1e4, out
    )
    return out


def single_decode(
    q: Tensor, k: Tensor, v: Tensor, *, layout: str = "NHD", out: Tensor | None = None
) -> Tensor:
    """Attend with one row; ``flashinfer.single_decode``.

    Parameters
    ----------
    q : tensor
        (1, num_qo_heads, head_dim).
    k, v, layout, out
        See `single_prefill`.
    """
    out = empty(q, q.shape) if out is None else out
    function("single_decode")(q, k, v, _scratch(q), layout_code(layout), 0, 1.0, 1e4, out)
    return out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with requests of equal length; ``flashinfer.attention_dense`` and its siblings.

    Parameters
    ----------
    q : tensor
        (batch_size, n, num_qo_heads, head_dim), float16 or bfloat16, on CPU also float32.
    k : tensor
        (batch_size, m, num_kv_heads, head_dim).
    v : tensor
        (batch_size, m, num_kv_heads, head_dim_vo).
    mask : pair of tensors, optional
        What `pack_mask` returns, on the device of q.
    bias : tensor, optional
        (batch_size, num_qo_heads, n, m), each of which may be 1 for one number for all; float32, or
        of the dtype of q. It is added to scores, after their cap. Not beside a mask: where a number
        is minus infinity the key is hidden.
    causal : bool
        Row i sees keys up to ``i + m - n``.
    window : int, optional
        How many keys up to the diagonal a row sees.
    logits_soft_cap : float
        c > 0: scores become ``c * tanh(score / c)``.
    sm_scale : float, optional
        ``head_dim ** -0.5`` when it is left out; on CUDA it must be positive.
    out : tensor, optional
        (batch_size, n, num_qo_heads, head_dim_vo); allocated when it is left out.

    Returns
    -------
    out : tensor
        A row that sees no key gives 0.

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected.
    """
    out = empty(q, (*q.shape[:3], v.shape[-1])) if out is None else out
    numbers = _numbers(q, causal, window, logits_soft_cap, sm_scale)
    if mask is not None and bias is not None:
        raise ValueError(
            "both `mask` and `bias` are given; hide keys by a bias of minus infinity instead"
        )
    if bias is not None:
        function("attention_dense_biased")(q, k, v, bias, 1, *numbers, out)
    elif mask is None:
        function("attention_dense")(q, k, v, *numbers, out)
    else:
        indptr, packed = mask
        function("attention_dense_masked")(q, k, v, indptr, packed, *numbers, out)
    return out


def attention_ragged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Attend with requests of any length; ``flashinfer.attention_ragged``.

    Parameters
    ----------
    q : tensor
        (n, num_qo_heads, head_dim), the rows of all requests.
    k, v : tensor
        (m, num_kv_heads, head_dim) and (m, num_kv_heads, head_dim_vo).
    qo_indptr, kv_indptr : tensor
        (batch_size + 1,), int32: where the rows and the keys of a request start.
    causal, window, logits_soft_cap, sm_scale
        See `attention`; the diagonal is that of each request.
    out : tensor, optional
        (n, num_qo_heads, head_dim_vo); allocated when it is left out.
    """
    out = empty(q, (*q.shape[:-1], v.shape[-1])) if out is None else out
    numbers = _numbers(q, causal, window, logits_soft_cap, sm_scale)
    function("attention_ragged")(q, k, v, qo_indptr, kv_indptr, *numbers, out)
    return out


def attention_paged(
    q: Tensor,
    pages: Tensor,
    qo_indptr: Tensor,
    page_indptr: Tensor,
    page_indices: Tensor,
    last_page_len: Tensor,
    *,
    causal: bool = False,
    window: int | None = None,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend over pages without a plan; ``flashinfer.bind_attention_prefill_paged``.

    Parameters
    ----------
    q : tensor
        (n, num_qo_heads, head_dim), the rows of all requests.
    pages : tensor
        (num_pages, 2, num_kv_heads, page_size, head_dim), keys and values; in the dtype of q, or
        float8_e4m3fn or float8_e5m2.
    qo_indptr : tensor
        (batch_size + 1,), int32: where the rows of a request start.
    page_indptr, page_indices, last_page_len : tensor
        (batch_size + 1,), (num_indices,) and (batch_size,), int32: the pages of a request, and how
        many tokens its last one holds.
    causal, window, logits_soft_cap, sm_scale
        See `attention`; the diagonal is that of each request.
    k_scale, v_scale : float
        Of 8-bit pages: a stored element stands for its value times the scale.
    out, lse : tensor, optional
        (n, num_qo_heads, head_dim), and (n, num_qo_heads) of float32; allocated when left out.

    Returns
    -------
    out, lse : tensor
        The LSE is in base 2. A row that sees no key gives 0 and minus infinity.
    """
    out, lse = state(q, out, lse)
    options: dict[str, Any] = {"logits_soft_cap": logits_soft_cap} if logits_soft_cap else {}
    if window is not None:
        options["window_left"] = window_left(window)
    if (k_scale, v_scale) != (1.0, 1.0):
        options |= {"k_scale": k_scale, "v_scale": v_scale}
    # Positions belong to RoPE inside attention, which is off: they are not read.
    positions = empty(q, last_page_len.shape, "int32"), empty(q, q.shape[:1], "int32")
    bound("prefill_paged", json.dumps(options, sort_keys=True))(
        q, qo_indptr, pages, page_indptr, page_indices, last_page_len, *positions, out, lse,
        int(causal), 0, 1.0, 1e4, scale_or_default(sm_scale, q.shape[-1]),
    )  # fmt: skip
    return out, lse


def decode_paged(
    q: Tensor,
    pages: Tensor,
    page_indptr: Tensor,
    page_indices: Tensor,
    last_page_len: Tensor,
    *,
    logits_soft_cap: float = 0.0,
    sm_scale: float | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend with one row of each request over pages; ``flashinfer.bind_attention_decode_paged``.

    Parameters
    ----------
    q : tensor
        (batch_size, num_qo_heads, head_dim).
    pages, page_indptr, page_indices, last_page_len, logits_soft_cap, sm_scale, out, lse
        See `attention_paged`.
    """
    out, lse = state(q, out, lse)
    options = json.dumps({"logits_soft_cap": logits_soft_cap} if logits_soft_cap else {})
    positions = (empty(q, q.shape[:1], "int32") for _ in range(2))
    bound("decode_paged", options)(
        q, pages, page_indptr, page_indices, last_page_len, *positions, out, lse,
        0, 1.0, 1e4, scale_or_default(sm_scale, q.shape[-1]),
    )  # fmt: skip
    return out, lse


def pack_mask(mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Pack the masks of requests of equal length as FlashInfer does, on the host.

    Parameters
    ----------
    mask : numpy.ndarray
        (batch_size, n, m) booleans, true where a row sees a key.

    Returns
    -------
    mask_indptr, packed_mask : numpy.ndarray
        (batch_size + 1,) of int32, and bytes: bit ``i * m + j`` of a request, counted from the
        lowest of its first byte, is row i and key j.
    """
    if mask.ndim != 3 or mask.dtype != np.bool_:
        raise ValueError(
            f"`mask` is {mask.dtype} of shape {mask.shape}, expected bool of (batch_size, n, m)"
        )
    packed = np.packbits(mask.reshape(len(mask), -1), axis=-1, bitorder="little")
    indptr = np.arange(len(mask) + 1, dtype=np.int32) * packed.shape[1]
    return indptr.astype(np.int32), packed.reshape(-1)


def _numbers(
    q: Tensor, causal: bool, window: int | None, cap: float, sm_scale: float | None
) -> tuple[int, int, float, float]:
    scale = scale_or_default(sm_scale, q.shape[-1])
    return int(causal), window_left(window), float(cap), scale


def _scratch(q: Tensor) -> Tensor:
    # Part of MLC LLM's calling convention; it is not read.
    return empty(q, (1,), "float32")

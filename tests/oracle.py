"""What the packed functions must compute, in NumPy.

The reference is attention in float64 over gathered keys and values. How far a result may lie off
is given by a plain implementation in the same dtype (inputs, probabilities, and output rounded,
float32 arithmetic): twice the plain one's own error, plus half a rounding. Errors are taken
relative to the largest element of the row: one that averages many keys is held to its own scale.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from device_tensors import numpy_dtype

LOG2E = math.log2(math.e)

# Half of one rounding; float32 kernels sum in another order than NumPy does.
FLOOR = {"float16": 2.0**-12, "bfloat16": 2.0**-9, "float32": 1e-5}
LSE_FLOOR = 1e-5


class Attention(NamedTuple):
    """Output (n, Hq, dvo) and base-2 LSE (n, Hq)."""

    o: np.ndarray
    lse: np.ndarray


class Request(NamedTuple):
    """The rows of one request in the batch, and its keys (m, Hkv, dqk) and values (m, Hkv, dvo)."""

    rows: slice
    k: np.ndarray
    v: np.ndarray


def visible(qo_len: int, kv_len: int, causal: bool, window_left: int) -> np.ndarray:
    """(qo_len, kv_len) booleans: which keys each row sees; aligned bottom-right."""
    diagonal = np.arange(qo_len)[:, None] + kv_len - qo_len
    keys = np.arange(kv_len)[None, :]
    seen = np.ones((qo_len, kv_len), bool)
    if causal:
        seen &= keys <= diagonal
    if window_left >= 0:
        seen &= keys >= diagonal - window_left
    return seen


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray,
    sm_scale: float,
    compute: type,
    p_dtype: np.dtype | None,
) -> Attention:
    n, num_qo_heads, d = q.shape
    m, num_kv_heads, d_vo = v.shape
    if m == 0 or n == 0:
        shape = (n, num_qo_heads)
        return Attention(np.zeros((*shape, d_vo), compute), np.full(shape, -np.inf, compute))
    group = num_qo_heads // num_kv_heads
    rows = q.astype(compute).reshape(n, num_kv_heads, group, d).transpose(1, 2, 0, 3)
    rows = np.ascontiguousarray(rows).reshape(num_kv_heads, group * n, d)
    keys = np.ascontiguousarray(k.astype(compute).transpose(1, 2, 0))
    values = np.ascontiguousarray(v.astype(compute).transpose(1, 0, 2))
    s = rows @ keys
    s *= compute(sm_scale)
    if not seen.all():
        s.reshape(num_kv_heads, group, n, m)[:, :, ~seen] = -np.inf
    top = s.max(-1, keepdims=True)
    top[np.isneginf(top)] = 0
    np.exp(s - top, out=s)
    if p_dtype is not None:
        # Numerator and denominator from the same rounded weights, as the tensor-core kernels do.
        s = s.astype(p_dtype).astype(compute)
    total = s.sum(-1)
    with np.errstate(divide="ignore"):
        lse = top[..., 0] * compute(LOG2E) + np.log2(total)
    o = (s @ values) / np.where(total > 0, total, 1)[..., None]
    o = o.reshape(num_kv_heads, group, n, d_vo).transpose(2, 0, 1, 3)
    lse = lse.reshape(num_kv_heads, group, n).transpose(2, 0, 1)
    return Attention(o.reshape(n, num_qo_heads, d_vo), lse.reshape(n, num_qo_heads))


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window_left: int = -1,
    sm_scale: float,
) -> Attention:
    """Attention of one request in float64. A row that sees no key gets 0 and -inf."""
    seen = visible(q.shape[0], k.shape[0], causal, window_left)
    return _attend(q, k, v, seen, sm_scale, np.float64, None)


def attention_plain(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: bool = False,
    window_left: int = -1,
    sm_scale: float,
) -> Attention:
    """The same in float32, with probabilities and output rounded to the dtype of `q`."""
    seen = visible(q.shape[0], k.shape[0], causal, window_left)
    p_dtype = None if q.dtype == np.float32 else q.dtype
    plain = _attend(q, k, v, seen, sm_scale, np.float32, p_dtype)
    return Attention(plain.o.astype(q.dtype).astype(np.float64), plain.lse.astype(np.float64))


def _worst(error: np.ndarray) -> tuple[int, ...]:
    return tuple(int(i) for i in np.unravel_index(np.argmax(error), error.shape))


def assert_rows_close(
    actual: np.ndarray, exact: np.ndarray, plain: np.ndarray, floor: float, what: str
) -> None:
    """`actual` errs at most twice as much as `plain`, plus `floor`, relative to each row's maximum.

    Rows lie along the last axis, and hold a few elements at least: a single one may cancel to
    nearly nothing. NaN and inf count as infinite errors.
    """
    assert actual.shape == exact.shape, f"{what}: shape {actual.shape}, expected {exact.shape}"
    if actual.size == 0:
        return
    scale = np.maximum(np.abs(exact).max(-1, keepdims=True), 1e-30)
    error = np.abs(actual.astype(np.float64) - exact) / scale
    error = np.where(np.isfinite(error), error, np.inf)
    bound = 2 * float((np.abs(plain.astype(np.float64) - exact) / scale).max()) + floor
    at = _worst(error)
    assert error[at] <= bound, (
        f"{what}: worst at {at}: got {actual[at]}, expected {exact[at]:.8g}, relative error "
        f"{error[at]:.3g}, bound {bound:.3g}; {int((error > bound).sum())} of {error.size} off"
    )


def assert_lse_close(
    actual: np.ndarray, exact: np.ndarray, plain: np.ndarray, what: str, slack: float = 0.0
) -> None:
    """LSE is -inf exactly where it must be, and elsewhere within the float32 bound and `slack`."""
    assert actual.dtype == np.float32, f"{what}: LSE is {actual.dtype}"
    empty = np.isneginf(exact)
    wrong = np.isneginf(actual) != empty
    assert not wrong.any(), (
        f"{what}: {_worst(wrong)}: LSE {actual[_worst(wrong)]}, expected {exact[_worst(wrong)]}"
    )
    if empty.all():
        return
    seen = ~empty
    error = np.zeros(exact.shape)
    error[seen] = np.abs(actual[seen].astype(np.float64) - exact[seen]) / (1 + np.abs(exact[seen]))
    error = np.where(np.isfinite(error), error, np.inf)
    plain_error = np.abs(plain[seen] - exact[seen]) / (1 + np.abs(exact[seen]))
    bound = 2 * float(plain_error.max()) + LSE_FLOOR + slack
    at = _worst(error)
    assert error[at] <= bound, (
        f"{what}: LSE worst at {at}: got {actual[at]}, expected {exact[at]:.8g}, relative error "
        f"{error[at]:.3g}, bound {bound:.3g}"
    )


def assert_attention(
    o: np.ndarray,
    lse: np.ndarray | None,
    q: np.ndarray,
    requests: Sequence[Request],
    *,
    causal: bool = False,
    window_left: int = -1,
    sm_scale: float,
) -> None:
    """Rows that see no key are exactly 0 and -inf, all others within the bound."""
    floor = FLOOR[q.dtype.name]
    mask: dict[str, Any] = dict(causal=causal, window_left=window_left, sm_scale=sm_scale)
    for index, request in enumerate(requests):
        rows, keys, values = q[request.rows], request.k, request.v
        if rows.shape[0] == 0:
            continue
        what = f"request {index} ({rows.shape[0]} rows, {keys.shape[0]} keys, {q.dtype.name})"
        exact = attention(rows, keys, values, **mask)
        plain = attention_plain(rows, keys, values, **mask)
        empty = np.isneginf(exact.lse)
        got = o[request.rows]
        blank = got[empty].astype(np.float32)
        assert not (blank != 0).any(), f"{what}: a row that sees no key is {blank[blank != 0][:4]}"
        assert_rows_close(got, exact.o, plain.o, floor, what)
        if lse is not None:
            assert_lse_close(lse[request.rows], exact.lse, plain.lse, what)


def merge(
    v_a: np.ndarray, s_a: np.ndarray, v_b: np.ndarray, s_b: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Merged (v, s) of two attention states in float64; two empty states give (0, -inf)."""
    s_a, s_b = s_a.astype(np.float64), s_b.astype(np.float64)
    top = np.maximum(s_a, s_b)
    top = np.where(np.isneginf(top), 0, top)
    w_a, w_b = np.exp2(s_a - top), np.exp2(s_b - top)
    total = w_a + w_b
    with np.errstate(divide="ignore"):
        s = top + np.log2(total)
    safe = np.where(total > 0, total, 1)[..., None]
    # A weight of zero hides whatever its state holds.
    part_a = np.where(w_a[..., None] > 0, w_a[..., None] * v_a.astype(np.float64), 0)
    part_b = np.where(w_b[..., None] > 0, w_b[..., None] * v_b.astype(np.float64), 0)
    return (part_a + part_b) / safe, s


def rotary_inv_freq(
    rotary_dim: int, theta: float, rope_scaling: dict[str, Any] | None = None
) -> np.ndarray:
    """The rotary_dim / 2 inverse frequencies in float64.

    `llama3` is the rule of TVM's `rope_freq_llama3`; `linear` divides all by `factor`.
    """
    inv_freq = theta ** (-2.0 * np.arange(rotary_dim // 2) / rotary_dim)
    scaling = rope_scaling or {}
    kind = scaling.get("rope_type")
    if kind == "linear":
        return inv_freq / scaling["factor"]
    if kind == "llama3":
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        rotations = scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
        smooth = np.clip((rotations - low) / (high - low), 0, 1)
        return (1 - smooth) * inv_freq / scaling["factor"] + smooth * inv_freq
    return inv_freq


def rotary(
    x: np.ndarray,
    positions: np.ndarray,
    *,
    theta: float,
    scale: float,
    rotary_dim: int,
    rope_scaling: dict[str, Any] | None = None,
    plain: bool = False,
) -> np.ndarray:
    """Rotary embedding of x (n, H, d) in float64.

    With `plain` the angles are float32, and the result is rounded to the dtype of `x`.
    """
    real = np.float32 if plain else np.float64
    inv_freq = rotary_inv_freq(rotary_dim, theta, rope_scaling).astype(real)
    angle = positions.astype(real)[:, None] * real(scale) * inv_freq
    cos, sin = np.cos(angle)[:, None, :], np.sin(angle)[:, None, :]
    out = x.astype(real)
    if (rope_scaling or {}).get("rope_type") == "gptj":
        first, second = slice(0, rotary_dim, 2), slice(1, rotary_dim, 2)
    else:
        half = rotary_dim // 2
        first, second = slice(0, half), slice(half, rotary_dim)
    a, b = x.astype(real)[..., first], x.astype(real)[..., second]
    out[..., first] = a * cos - b * sin
    out[..., second] = b * cos + a * sin
    return out.astype(x.dtype).astype(np.float64) if plain else out


def gathered(pages: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values (n, Hkv, d) at `page * S + slot` of a pool (P, 2, Hkv, S, d)."""
    page, slot = np.divmod(positions, pages.shape[3])
    return pages[page, 0, :, slot], pages[page, 1, :, slot]


def appended(pages: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The pool after writing the rows whose position is not -1."""
    out = pages.copy()
    rows = np.flatnonzero(positions >= 0)
    page, slot = np.divmod(positions[rows], pages.shape[3])
    out[page, 0, :, slot] = k[rows]
    out[page, 1, :, slot] = v[rows]
    return out


def compacted(pages: np.ndarray, indptr: np.ndarray, src_dst_pos: np.ndarray) -> np.ndarray:
    """The pool after moving slot src_dst_pos[0, i] to src_dst_pos[1, i] for i in order."""
    out = pages.copy()
    size = pages.shape[3]
    for i in range(int(indptr[0]), int(indptr[-1])):
        src, dst = int(src_dst_pos[0, i]), int(src_dst_pos[1, i])
        out[dst // size, :, :, dst % size] = out[src // size, :, :, src % size]
    return out


__all__ = [
    "FLOOR",
    "Attention",
    "Request",
    "appended",
    "assert_attention",
    "assert_lse_close",
    "assert_rows_close",
    "attention",
    "attention_plain",
    "compacted",
    "gathered",
    "merge",
    "numpy_dtype",
    "rotary",
    "rotary_inv_freq",
    "visible",
]

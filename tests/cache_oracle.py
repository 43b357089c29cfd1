"""Attention as TVM's cache asks for it, in NumPy: sliding pages, trees, positions, caps, sinks.

`attend` computes one request in float64, and once more plainly (float32 arithmetic, inputs and
outputs rounded), from which the bound on errors comes; `oracle.py` has the comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import oracle


@dataclass
class Extras:
    """What one request may have besides causal attention.

    Attributes
    ----------
    causal : bool
        Bottom-right aligned.
    layer_window : int
        W > 0: the keys lie before the rows, and row r sees the last max(W - r - 1, 0) of them.
    tree : numpy.ndarray, optional
        (nodes, 2): the interval of orders of each node's subtree; the nodes are the last keys.
    mask : numpy.ndarray, optional
        (rows, keys) booleans: what is hidden besides.
    window_left : int
        -1, or how many keys before the diagonal a row sees.
    soft_cap : float
        0 for none.
    alibi_slopes, sinks : numpy.ndarray, optional
        One value per query head.
    bias : numpy.ndarray, optional
        Added to scores: what can be broadcast to (query heads, rows, keys).
    alibi_by_position : bool
        Slopes multiply positions of keys less those of rows, not the distance from the diagonal.
    rope : dict, optional
        Keywords of `rotate`; queries and keys are rotated with it.
    q_positions, k_positions : numpy.ndarray, optional
        The position of each row and of each key.
    """

    causal: bool = False
    layer_window: int = 0
    tree: np.ndarray | None = None
    mask: np.ndarray | None = None
    window_left: int = -1
    soft_cap: float = 0.0
    alibi_slopes: np.ndarray | None = None
    bias: np.ndarray | None = None
    sinks: np.ndarray | None = None
    alibi_by_position: bool = False
    rope: dict[str, Any] | None = None
    q_positions: np.ndarray | None = field(default=None, repr=False)
    k_positions: np.ndarray | None = field(default=None, repr=False)


def seen_by(extras: Extras, qo_len: int, kv_len: int) -> np.ndarray:
    """(qo_len, kv_len) booleans."""
    rows, keys = np.arange(qo_len)[:, None], np.arange(kv_len)[None, :]
    seen = oracle.visible(qo_len, kv_len, extras.causal, extras.window_left)
    if extras.mask is not None:
        seen &= extras.mask
    if extras.layer_window:
        seen &= keys >= kv_len - np.maximum(extras.layer_window - rows - 1, 0)
    if extras.tree is not None and len(extras.tree):
        nodes = len(extras.tree)
        own = extras.tree[nodes - qo_len :, 0]
        inside = (own[:, None] >= extras.tree[None, :, 0]) & (
            own[:, None] < extras.tree[None, :, 1]
        )
        seen[:, kv_len - nodes :] &= inside
    return seen


def inv_freqs(
    rotary_dim: int,
    theta: float,
    scaling: dict[str, Any] | None = None,
    ext_factors: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Frequencies of the first and the second elements of pairs, and the factor of sines.

    In float64, after TVM's `position_embedding.py`. TVM's yarn ramps over dimensions with bounds
    that are meant for pairs, so the second elements have frequencies of their own.
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type")
    half = rotary_dim // 2
    first = oracle.rotary_inv_freq(rotary_dim, theta, scaling)
    if kind == "longrope":
        original = scaling["original_max_position_embeddings"]
        ratio = scaling["max_position_embeddings"] / original
        magnitude = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
        assert ext_factors is not None
        first = first / ext_factors.astype(np.float64)
        return first, first, magnitude
    if kind != "yarn":
        return first, first, 1.0
    log_scale = scaling.get("inv_theta_log_scale", 1 / (2 * math.log(theta)))
    context = scaling["original_max_position_embeddings"]

    def bound(rotations: float) -> float:
        return rotary_dim * math.log(context / (rotations * 2 * math.pi)) * log_scale

    low = max(bound(scaling["beta_fast"]), 0)
    high = min(bound(scaling["beta_slow"]), rotary_dim - 1)
    high += 0.001 if low == high else 0
    ramp = np.clip((np.arange(rotary_dim) - low) / (high - low), 0, 1)
    both = np.tile(first, 2)
    both = both / scaling["factor"] * ramp + both * (1 - ramp)
    return both[:half], both[half:], 1.0


def rotate(
    x: np.ndarray,
    positions: np.ndarray,
    *,
    theta: float = 10000.0,
    scale: float = 1.0,
    rotary_dim: int | None = None,
    scaling: dict[str, Any] | None = None,
    ext_factors: np.ndarray | None = None,
    plain: bool = False,
) -> np.ndarray:
    """Rotary embedding of x (n, H, d); `plain` has float32 angles and rounds to the dtype of x."""
    real = np.float32 if plain else np.float64
    dim = x.shape[-1] if rotary_dim is None else rotary_dim
    first, second, magnitude = inv_freqs(dim, theta, scaling, ext_factors)
    places = positions.astype(real)[:, None, None] * real(scale)
    one, two = places * first.astype(real), places * second.astype(real)
    if (scaling or {}).get("rope_type") == "gptj":
        a_at, b_at = slice(0, dim, 2), slice(1, dim, 2)
    else:
        a_at, b_at = slice(0, dim // 2), slice(dim // 2, dim)
    out = x.astype(real)
    a, b = x.astype(real)[..., a_at], x.astype(real)[..., b_at]
    out[..., a_at] = real(magnitude) * (a * np.cos(one) - b * np.sin(one))
    out[..., b_at] = real(magnitude) * (b * np.cos(two) + a * np.sin(two))
    return out.astype(x.dtype).astype(np.float64) if plain else out


def _attend(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    seen: np.ndarray,
    sm_scale: float,
    extras: Extras,
    plain: bool,
) -> oracle.Attention:
    real = np.float32 if plain else np.float64
    n, num_qo_heads, _ = q.shape
    q_dtype = q.dtype
    group = num_qo_heads // k.shape[1]
    if extras.rope is not None:
        q = rotate(q, extras.q_positions, plain=plain, **extras.rope)
        k = rotate(k, extras.k_positions, plain=plain, **extras.rope)
        k = k.astype(q_dtype) if plain else k
    keys = np.repeat(k.astype(real), group, axis=1).transpose(1, 2, 0)
    values = np.repeat(v.astype(real), group, axis=1).transpose(1, 0, 2)
    s = (q.astype(real).transpose(1, 0, 2) @ keys) * real(sm_scale)
    if extras.soft_cap:
        s = real(extras.soft_cap) * np.tanh(s / real(extras.soft_cap))
    if extras.alibi_slopes is not None:
        distance = np.arange(len(k))[None, :] - np.arange(n)[:, None] - len(k) + n
        if extras.alibi_by_position:
            distance = extras.k_positions[None, :] - extras.q_positions[:, None]
        s = s + extras.alibi_slopes.astype(real)[:, None, None] * distance.astype(real)
    if extras.bias is not None:
        s = s + extras.bias.astype(real)
    s = np.where(seen[None], s, -np.inf)
    if extras.sinks is not None:
        column = np.broadcast_to(extras.sinks.astype(real)[:, None, None], (num_qo_heads, n, 1))
        s = np.concatenate([s, column], -1)
        values = np.concatenate([values, np.zeros((num_qo_heads, 1, v.shape[-1]), real)], 1)
    if s.shape[-1] == 0:
        return oracle.Attention(
            np.zeros((n, num_qo_heads, v.shape[-1])), np.full((n, num_qo_heads), -np.inf)
        )
    top = s.max(-1, keepdims=True)
    top[np.isneginf(top)] = 0
    p = np.exp(s - top)
    if plain and q_dtype != np.float32:
        # Numerator and denominator from the same rounded weights, as the tensor-core kernels do.
        p = p.astype(q_dtype).astype(real)
    total = p.sum(-1)
    with np.errstate(divide="ignore"):
        lse = top[..., 0] * real(oracle.LOG2E) + np.log2(total)
    o = (p @ values) / np.where(total > 0, total, 1)[..., None]
    return oracle.Attention(o.transpose(1, 0, 2), lse.transpose(1, 0))


def assert_request(
    o: np.ndarray,
    lse: np.ndarray | None,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    extras: Extras,
    sm_scale: float,
    what: str,
) -> None:
    """Rows (n, Hq, d) over keys and values (m, Hkv, d): within the bound, or exactly 0 and -inf.

    LSE is not looked at where the function gives none.
    8-bit keys and values are given in float64, times their scales.
    """
    if len(q) == 0:
        return
    seen = seen_by(extras, len(q), len(k))
    exact = _attend(q, k, v, seen, sm_scale, extras, plain=False)
    plain = _attend(q, k, v, seen, sm_scale, extras, plain=True)
    blank = o[~seen.any(-1)].astype(np.float32)
    assert not (blank != 0).any(), f"{what}: a row that sees no key is {blank[blank != 0][:4]}"
    rounded = plain.o.astype(o.dtype).astype(np.float64)
    oracle.assert_rows_close(o, exact.o, rounded, oracle.FLOOR[o.dtype.name], what)
    if lse is None:
        return
    slack = _rotation_slack(q, k, sm_scale) if extras.rope is not None else 0.0
    oracle.assert_lse_close(lse, exact.lse, plain.lse.astype(np.float64), what, slack)


def _rotation_slack(q: np.ndarray, k: np.ndarray, sm_scale: float) -> float:
    """How far rounding rotated queries and keys to the dtype of q may move a score, in log2.

    Kernels round keys as they are stored, before their scale, so not the values that the oracle
    rounds: four deviations of independent roundings of the longest rows.
    """
    if q.dtype == np.float32 or len(k) == 0:
        return 0.0
    rounding = float(ml_dtypes.finfo(q.dtype).eps) / 2
    longest = [np.linalg.norm(x.astype(np.float64), axis=-1).max() for x in (q, k)]
    moved = 4 * rounding * longest[0] * longest[1] / math.sqrt(q.shape[-1])
    return moved * sm_scale * oracle.LOG2E


def pack_bits(masks: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """mask_indptr and packed_mask of the (rows, keys) booleans of each request."""
    parts = [np.packbits(mask.reshape(-1), bitorder="little") for mask in masks]
    indptr = np.concatenate([[0], np.cumsum([len(part) for part in parts])]).astype(np.int32)
    return indptr, np.concatenate([np.zeros(0, np.uint8), *parts])


def random_tree(rng: np.random.Generator, nodes: int, kind: str = "forest") -> np.ndarray:
    """Intervals (nodes, 2), int32, as TVM's cache makes them: parents come before children.

    Parameters
    ----------
    rng : numpy.random.Generator
        Where the parents come from.
    nodes : int
        How many.
    kind : str
        "chain", "star" (roots only) or "forest".
    """
    if kind == "chain":
        parent = np.arange(nodes) - 1
    elif kind == "star":
        parent = np.full(nodes, -1)
    else:
        parent = np.array([int(rng.integers(-1, i)) for i in range(nodes)], int)
    children: dict[int, list[int]] = {}
    for node, above in enumerate(parent):
        children.setdefault(int(above), []).append(node)
    intervals = np.zeros((nodes, 2), np.int32)
    order = 0

    def visit(node: int) -> None:
        nonlocal order
        intervals[node, 0] = order
        order += 1
        for child in children.get(node, []):
            visit(child)
        intervals[node, 1] = order

    for root in children.get(-1, []):
        visit(root)
    return intervals


def tree_masks(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of a tree see which, and the depth of each."""
    n = len(parents)
    visible, depths = np.zeros((n, n), bool), np.zeros(n, int)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node], depths[node] = visible[parent], depths[parent] + 1
        visible[node, node] = True
    return visible, depths

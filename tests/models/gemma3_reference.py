"""Gemma 3 in plain NumPy: all tokens at once, full matrices of attention with explicit masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np


def forward(
    tensor: Callable[[str], np.ndarray],
    ids: Sequence[int],
    rows: Sequence[int],
    *,
    num_layers: int,
    num_heads: int,
    head_dim: int,
    window: int,
    eps: float,
) -> np.ndarray:
    """Return logits (rows, vocab_size) of a text of so many ids, in float32.

    `tensor` gives the tensors of llama.cpp's GGUF file by their names; `window` is how many tokens
    five layers of six see, themselves included.
    """

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * tensor(name)

    n = len(ids)
    place = np.arange(n)
    distance = place[:, None] - place[None, :]
    embedding = tensor("token_embd.weight")
    x = embedding[np.asarray(ids)] * np.float32(np.sqrt(embedding.shape[1]))
    for layer in range(num_layers):
        is_global = layer % 6 == 5

        def of(name: str, layer: int = layer) -> str:
            return f"blk.{layer}.{name}.weight"

        def project(x: np.ndarray, name: str) -> np.ndarray:
            return x @ tensor(of(name)).T

        h = norm(x, of("attn_norm"))
        q, k, v = (project(h, f"attn_{which}").reshape(n, -1, head_dim) for which in "qkv")
        theta = 1e6 if is_global else 1e4
        q = rotate(norm(q, of("attn_q_norm")), theta)
        k = rotate(norm(k, of("attn_k_norm")), theta)
        seen = (distance >= 0) & (is_global | (distance < window))
        scores = np.einsum("nhd,md->hnm", q, k[:, 0], optimize=True) / np.float32(np.sqrt(head_dim))
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("hnm,md->nhd", weights, v[:, 0], optimize=True)
        out = project(out.reshape(n, num_heads * head_dim), "attn_output")
        x = x + norm(out, of("post_attention_norm"))
        h = norm(x, of("ffn_norm"))
        out = project(gelu(project(h, "ffn_gate")) * project(h, "ffn_up"), "ffn_down")
        x = x + norm(out, of("post_ffw_norm"))
    return norm(x[np.asarray(rows)], "output_norm.weight") @ embedding.T


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    """Rotate tokens (n, heads, head_dim) by their places, dimension i with i + head_dim / 2."""
    half = x.shape[-1] // 2
    angles = np.outer(np.arange(len(x)), theta ** (-np.arange(half) / half))[:, None]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    first, second = x[..., :half], x[..., half:]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], -1)


def gelu(x: np.ndarray) -> np.ndarray:
    """The tanh form."""
    return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (x + 0.044715 * x**3)))

"""Whole models in float64: tokens in, logits out, with the edits that a cache offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cache_oracle import rotate, tree_masks

from examples.llama.model import LlamaConfig


class Reference:
    """A decoder over sequences whose tokens keep, in each layer, what their keys are made of.

    A subclass gives the attention. Positions are indices among the tokens that a sequence holds,
    as TVM's cache counts them: a sequence that slides gives its tokens new ones. So nothing is
    rotated in what is held.
    """

    #: Numbers that a token leaves in each layer.
    token_size: int

    def __init__(
        self, config: Any, weights: Mapping[str, np.ndarray], *, page_size: int = 16
    ) -> None:
        self.config = config
        self.weights = {name: array.astype(np.float64) for name, array in weights.items()}
        self.page_size = page_size
        self.held: dict[int, list[np.ndarray]] = {}
        self.shared: dict[int, int] = {}
        self.slides: dict[int, tuple[int, int]] = {}

    def add(self, seq: int) -> None:
        """Start an empty sequence."""
        self.held[seq] = [np.zeros((0, self.token_size))] * self.config.num_hidden_layers
        self.shared[seq] = 0

    def fork(self, parent: int, child: int, at: int = -1) -> None:
        """Start a sequence from the first `at` tokens of another one, or from all of them."""
        self.held[child] = [x if at < 0 else x[:at] for x in self.held[parent]]
        whole_pages = self.length(child) // self.page_size * self.page_size
        self.shared[child] = whole_pages
        self.shared[parent] = max(self.shared[parent], whole_pages)

    def pop(self, seq: int, count: int) -> None:
        """Take the last tokens from a sequence."""
        self.held[seq] = [x[: len(x) - count] for x in self.held[seq]]

    def remove(self, seq: int) -> None:
        """Drop a sequence."""
        del self.held[seq]

    def slide(self, seq: int, window: int, sink: int) -> None:
        """Keep `window` tokens after each step, the first `sink` of them being those of the start.

        A step itself sees all of its own tokens beside the window. Pages that sequences share stay
        with them, as sinks.
        """
        self.slides[seq] = window, max(sink, self.shared[seq])

    def commit(self, seq: int, accepted: Sequence[int], tree_size: int) -> None:
        """Keep some of the nodes of the last tree, given by their numbers in it."""

        def kept(x: np.ndarray) -> np.ndarray:
            past = len(x) - tree_size
            return np.concatenate([x[:past], x[past:][list(accepted)]])

        self.held[seq] = [kept(x) for x in self.held[seq]]

    def length(self, seq: int) -> int:
        """Count the tokens that a sequence holds."""
        return len(self.held[seq][0])

    def step(
        self,
        tokens: Mapping[int, Sequence[int]],
        trees: Mapping[int, Sequence[int]] | None = None,
    ) -> dict[int, np.ndarray]:
        """Append tokens and return the logits after each: (n, vocab_size) for each sequence.

        `trees` gives the parent of each token, -1 for a root.
        """
        return {
            seq: self._forward(seq, ids, None if trees is None else trees[seq])
            for seq, ids in tokens.items()
        }

    def _forward(self, seq: int, ids: Sequence[int], tree: Sequence[int] | None) -> np.ndarray:
        weights, past, n = self.weights, self.length(seq), len(ids)
        new, depths = (
            (np.tril(np.ones((n, n), bool)), np.arange(n)) if tree is None else tree_masks(tree)
        )
        seen = np.concatenate([np.ones((n, past), bool), new], 1)
        positions = np.concatenate([np.arange(past), past + depths])
        x = weights["embed.weight"][np.asarray(ids)]
        layers = []
        for layer, old in enumerate(self.held[seq]):
            h = self.norm(f"layers.{layer}.attn_norm", x)
            layers.append(np.concatenate([old, self.kept_of(layer, h)]))
            x = x + self.attend(layer, h, layers[layer], positions, seen)
            x = x + self.mlp(layer, self.norm(f"layers.{layer}.mlp_norm", x))
        if seq in self.slides and past + n > self.slides[seq][0]:
            window, sink = self.slides[seq]
            first = past + n - window + sink
            layers = [np.concatenate([kept[:sink], kept[first:]]) for kept in layers]
        self.held[seq] = layers
        return self.norm("norm", x) @ weights["lm_head.weight"].T

    def linear(self, layer: int, name: str, x: np.ndarray) -> np.ndarray:
        """Apply a projection of a layer."""
        return x @ self.weights[f"layers.{layer}.{name}.weight"].T

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        """RMSNorm."""
        scale = np.sqrt((x**2).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * self.weights[f"{name}.weight"]

    def mlp(self, layer: int, x: np.ndarray) -> np.ndarray:
        """SwiGLU."""
        gate, up = np.split(self.linear(layer, "mlp.gate_up_proj", x), 2, axis=-1)
        return self.linear(layer, "mlp.down_proj", gate / (1 + np.exp(-gate)) * up)

    def kept_of(self, layer: int, h: np.ndarray) -> np.ndarray:
        """Return what the tokens (n, hidden_size) leave in a layer: (n, token_size)."""
        raise NotImplementedError

    def attend(
        self,
        layer: int,
        h: np.ndarray,
        kept: np.ndarray,
        positions: np.ndarray,
        seen: np.ndarray,
    ) -> np.ndarray:
        """Attend from the last tokens of `kept`, whose states are `h`, and project the result."""
        raise NotImplementedError


class LlamaReference(Reference):
    """The model of examples/llama."""

    def __init__(self, config: LlamaConfig, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__(config, weights)
        self.token_size = 2 * config.num_key_value_heads * config.head_dim

    def _qkv(self, layer: int, h: np.ndarray) -> np.ndarray:
        return self.linear(layer, "attn.qkv_proj", h)

    def kept_of(self, layer: int, h: np.ndarray) -> np.ndarray:
        """Keys and values."""
        return self._qkv(layer, h)[:, -self.token_size :]

    def attend(
        self,
        layer: int,
        h: np.ndarray,
        kept: np.ndarray,
        positions: np.ndarray,
        seen: np.ndarray,
    ) -> np.ndarray:
        """Grouped-query attention with RoPE."""
        config, n = self.config, len(h)
        q = self._qkv(layer, h)[:, : -self.token_size].reshape(n, -1, config.head_dim)
        k, v = kept.reshape(len(kept), 2, -1, config.head_dim).swapaxes(0, 1)
        q = rotate(q, positions[-n:], theta=config.rope_theta)
        k = rotate(k, positions, theta=config.rope_theta)
        group = config.num_attention_heads // config.num_key_value_heads
        out = attention(q, k.repeat(group, 1), v.repeat(group, 1), seen, config.head_dim**-0.5)
        return self.linear(layer, "attn.o_proj", out.reshape(n, -1))


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, seen: np.ndarray, sm_scale: float
) -> np.ndarray:
    """Softmax attention: q (n, H, d), k and v (m, H, ·), seen (n, m) -> (n, H, ·)."""
    scores = (q.swapaxes(0, 1) @ k.transpose(1, 2, 0)) * sm_scale
    scores = np.where(seen[None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return (weights @ v.swapaxes(0, 1)).swapaxes(0, 1)

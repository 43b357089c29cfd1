"""Sequences in float64: their keys and values, and attention over them as a cache has to do it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cache_models import NUM_LAYERS, Model
from cache_oracle import rotate
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

SM_SCALE = 0.25


@dataclass(frozen=True)
class Slide:
    """How a sequence slides as a whole: the tokens it keeps, and how many of them are its first."""

    window: int
    sink: int


class Oracle:
    """Keys and values of each sequence in float64, and attention over them.

    Keys are held as the pages hold them: rotated, but for a cache that rotates inside attention.
    """

    def __init__(self, model: Model, *, slides: bool = False) -> None:
        self.model = model
        self.inline = slides or model.rope_mode == RopeMode.INLINE
        self.keys: dict[tuple[int, int], np.ndarray] = {}
        self.values: dict[tuple[int, int], np.ndarray] = {}
        self.slides: dict[int, Slide] = {}

    def rotate(self, x: np.ndarray, positions: np.ndarray, num_rows: int) -> np.ndarray:
        """RoPE as the model has it, in a step of so many rows."""
        model = self.model
        if model.rope_mode == RopeMode.NONE:
            return x
        scaling, factors = json.loads(model.rope_scaling), None
        if scaling.get("rope_type") == "longrope":
            half = len(model.ext_factors) // 2
            long = num_rows > scaling["original_max_position_embeddings"]
            factors = np.array(model.ext_factors[:half] if long else model.ext_factors[half:])
        return rotate(
            x,
            positions,
            theta=model.rope_theta,
            scale=model.rope_scale,
            rotary_dim=model.rotary_dim,
            scaling=scaling,
            ext_factors=factors,
        )

    def attend(
        self,
        layer: int,
        seqs: Sequence[int],
        lens: Sequence[int],
        qkv: np.ndarray,
        visible: Sequence[np.ndarray] | None = None,
        depths: Sequence[np.ndarray] | None = None,
        sinks: np.ndarray | None = None,
    ) -> np.ndarray:
        """Append a step's keys and values, and attend to all of them.

        `visible` and `depths` describe token trees: which new tokens each new token sees, and how
        deep it is. `sinks` has one of each query head.
        """
        model = self.model
        h, g = model.num_qo_heads, model.num_kv_heads
        window = model.window_of(layer)
        out, start = [], 0
        for index, (seq, n) in enumerate(zip(seqs, lens, strict=True)):
            x = qkv[start : start + n].astype(np.float64)
            start += n
            old_k = self.keys.get((seq, layer), np.zeros((0, g, x.shape[2])))
            old_v = self.values.get((seq, layer), np.zeros((0, g, x.shape[2])))
            past = len(old_k)
            places = past + (np.arange(n) if depths is None else depths[index])
            q, k, v = x[:, :h], x[:, h : h + g], x[:, h + g :]
            if not self.inline:
                k = self.rotate(k, places, len(qkv))
            k, v = np.concatenate([old_k, k]), np.concatenate([old_v, v])
            self.keys[seq, layer], self.values[seq, layer] = k, v
            if self.inline:
                k = self.rotate(k, np.arange(past + n), len(qkv))
            q = self.rotate(q, places, len(qkv))
            new = np.tril(np.ones((n, n), bool)) if visible is None else visible[index]
            old = np.ones((n, past), bool)
            seen = np.concatenate([old, new], 1)
            if window >= 0:
                # A row counts itself. TVM goes by rows in a tree too, whatever their depth.
                tail = past if visible is not None else past + n
                rows = past + np.arange(n)[:, None]
                seen[:, :tail] &= np.arange(tail) > rows - window
            scores = np.einsum("nhd,mhd->hnm", q, k.repeat(h // g, 1)) * SM_SCALE
            if model.soft_cap:
                scores = model.soft_cap * np.tanh(scores / model.soft_cap)
            if model.alibi_slopes:
                distances = np.concatenate([np.arange(past), places]) - places[:, None]
                scores = scores + np.array(model.alibi_slopes)[:, None, None] * distances
            scores = np.where(seen[None], scores, -np.inf)
            top = scores.max(-1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(-1, keepdims=True)
            if sinks is not None:
                total += np.exp(sinks.astype(np.float64)[:, None, None] - top)
            weights /= total
            out.append(np.einsum("hnm,mhd->nhd", weights, v.repeat(h // g, 1)))
            self._slide(seq, layer)
        return np.concatenate(out)

    def attend_to_pages(
        self, layer: int, seqs: Sequence[int], lens: Sequence[int], q: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Output and LSE of rows that see all tokens of their sequence, as the pages hold them."""
        outs, sums = [], []
        group = self.model.num_qo_heads // self.model.num_kv_heads
        rows = np.split(q.astype(np.float64), np.cumsum(lens)[:-1])
        for seq, x in zip(seqs, rows, strict=True):
            k, v = (
                held.get((seq, layer), np.zeros((0, 1, 1))) for held in (self.keys, self.values)
            )
            if len(k) == 0:
                outs.append(np.zeros(x.shape))
                sums.append(np.full(x.shape[:2], -np.inf))
                continue
            scores = np.einsum("nhd,mhd->nhm", x, k.repeat(group, 1)) * SM_SCALE
            weights = np.exp(scores)
            total = weights.sum(-1)
            outs.append(np.einsum("nhm,mhd->nhd", weights, v.repeat(group, 1)) / total[..., None])
            sums.append(np.log2(total))
        return np.concatenate(outs), np.concatenate(sums)

    def _slide(self, seq: int, layer: int) -> None:
        slide = self.slides.get(seq)
        if slide is None or len(self.keys[seq, layer]) <= slide.window:
            return
        for held in (self.keys, self.values):
            x = held[seq, layer]
            last = x[len(x) - slide.window + slide.sink :]
            held[seq, layer] = np.concatenate([x[: slide.sink], last])

    def edit(self, seq: int, keep: Callable[[np.ndarray], np.ndarray], to: int) -> None:
        """Make a sequence of what another one keeps of its tokens."""
        for held in (self.keys, self.values):
            for layer in range(NUM_LAYERS):
                if (seq, layer) in held:
                    held[to, layer] = keep(held[seq, layer])

"""Encoders and decoders whose attention is products and a softmax, and the same in NumPy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

Weights = dict[str, np.ndarray]


@dataclass(frozen=True)
class Config:
    """Dimensions of a model.

    Attributes
    ----------
    kind : str
        "bert": normalised after each part, with a mask of padding; the mean of the states is
        returned. "gpt": normalised before, causal, and KV heads that serve two query heads. "vit":
        normalised before, all tokens see all. States are returned. For others see `small_decoders`.
    """

    kind: str
    layers: int
    heads: int
    head_dim: int
    inner: int
    vocab: int = 64
    positions: int = 64
    eps: float = 1e-5

    @property
    def width(self) -> int:
        """The size of a state."""
        return self.heads * self.head_dim

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.heads // 2 if self.kind in ("gpt", "llama") else self.heads


class Attention(nn.Module):
    """Multi-head attention without an operator of attention."""

    def __init__(self, config: Config) -> None:
        self.config = config
        kv_width = config.kv_heads * config.head_dim
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, kv_width)
        self.value = nn.Linear(config.width, kv_width)
        self.output = nn.Linear(config.width, config.width)

    def forward(self, x: nn.Tensor, hidden: nn.Tensor | None) -> nn.Tensor:
        """`hidden` is added to scores."""
        c = self.config
        batch, length, _ = x.shape

        def heads(layer: nn.Linear, count: int) -> nn.Tensor:
            parted = op.reshape(layer(x), (batch, length, count, c.head_dim))
            return op.permute_dims(parted, (0, 2, 1, 3))

        q, k, v = (
            heads(self.query, c.heads),
            heads(self.key, c.kv_heads),
            heads(self.value, c.kv_heads),
        )
        if c.kv_heads != c.heads:
            k, v = (op.repeat(y, c.heads // c.kv_heads, axis=1) for y in (k, v))
        scores = op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))) / math.sqrt(c.head_dim)
        if hidden is not None:
            scores = scores + hidden
        out = op.permute_dims(op.matmul(op.softmax(scores, axis=-1), v), (0, 2, 1, 3))
        return self.output(op.reshape(out, (batch, length, c.width)))


class Layer(nn.Module):
    """Attention and a feed-forward network."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.attention = Attention(config)
        self.norm1 = nn.LayerNorm(config.width, eps=config.eps)
        self.up = nn.Linear(config.width, config.inner)
        self.down = nn.Linear(config.inner, config.width)
        self.norm2 = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, x: nn.Tensor, hidden: nn.Tensor | None) -> nn.Tensor:
        """One layer."""
        if self.config.kind == "bert":
            x = self.norm1(x + self.attention(x, hidden))
            return self.norm2(x + self.down(op.gelu(self.up(x))))
        x = x + self.attention(self.norm1(x), hidden)
        return x + self.down(op.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A model of some kind."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.words = nn.Embedding(config.vocab, config.width)
        self.places = nn.Embedding(config.positions, config.width)
        self.norm = nn.LayerNorm(config.width, eps=config.eps)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.layers)])

    def forward(self, ids: nn.Tensor, mask: nn.Tensor) -> nn.Tensor:
        """`ids` and `mask` are (batch, length); 1 is a token, 0 is padding."""
        c = self.config
        batch, length = ids.shape
        dtype = self.words.weight.dtype
        lowest = -65504.0 if dtype == "float16" else -1e9
        places = self.places(op.arange(0, length, 1, "int32"))
        x = self.words(ids) + op.reshape(places, (1, length, c.width))
        hidden = None
        if c.kind == "bert":
            x = self.norm(x)
            seen = op.astype(op.reshape(mask, (batch, 1, 1, length)), dtype)
            hidden = (nn.Tensor.from_scalar(1.0, dtype) - seen) * lowest
        if c.kind == "gpt":
            hidden = op.triu(
                op.full((length, length), nn.Tensor.from_scalar(lowest, dtype), dtype), 1
            )
        for layer in self.layers:
            x = layer(x, hidden)
        if c.kind != "bert":
            return self.norm(x)
        kept = op.astype(op.reshape(mask, (batch, length, 1)), dtype)
        return op.sum(x * kept, 1) / op.sum(kept, 1)

    def export(
        self, dtype: str, batch: int | str = "batch", length: int | str = "length"
    ) -> tuple[Any, list[str]]:
        """The module, by default of any batch and length, and the names of its parameters."""
        self.to(dtype)
        tokens = nn.spec.Tensor([batch, length], "int32")
        mod, params = self.export_tvm(spec={"forward": {"ids": tokens, "mask": tokens}})
        return mod, [name for name, _ in params]


def random_weights(model: nn.Module, rng: np.random.Generator) -> Weights:
    """Weights by the names of a model, in float64."""
    weights = {}
    for name, param in model.named_parameters():
        shape = [int(size) for size in param.shape]
        spread = 1 / math.sqrt(shape[-1]) if len(shape) == 2 else 0.1
        weights[name] = spread * rng.standard_normal(shape)
        if "norm" in name and name.endswith("weight"):
            weights[name] += 1
    return weights


def reference(config: Config, weights: Weights, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """What `Transformer` computes, in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + config.eps)
        return centred / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attention(x: np.ndarray, name: str) -> np.ndarray:
        batch, length, _ = x.shape
        q, k, v = (
            linear(x, f"{name}.{part}").reshape(batch, length, -1, config.head_dim)
            for part in ("query", "key", "value")
        )
        k, v = (y.repeat(config.heads // config.kv_heads, 2) for y in (k, v))
        scores = np.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(config.head_dim)
        if config.kind == "bert":
            scores = np.where(mask[:, None, None] > 0, scores, -np.inf)
        if config.kind == "gpt":
            scores = np.where(np.tril(np.ones((length, length))) > 0, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out = np.einsum("bhnm,bmhd->bnhd", weights, v)
        return linear(out.reshape(batch, length, -1), f"{name}.output")

    def network(x: np.ndarray, name: str) -> np.ndarray:
        up = linear(x, f"{name}.up")
        erf = np.vectorize(math.erf)(up / math.sqrt(2))
        return linear(0.5 * up * (1 + erf), f"{name}.down")

    x = w["words.weight"][ids] + w["places.weight"][: ids.shape[1]]
    x = norm(x, "norm") if config.kind == "bert" else x
    for i in range(config.layers):
        name = f"layers.{i}"
        if config.kind == "bert":
            x = norm(x + attention(x, f"{name}.attention"), f"{name}.norm1")
            x = norm(x + network(x, name), f"{name}.norm2")
        else:
            x = x + attention(norm(x, f"{name}.norm1"), f"{name}.attention")
            x = x + network(norm(x, f"{name}.norm2"), name)
    if config.kind != "bert":
        return norm(x, "norm")
    kept = mask[..., None]
    return (x * kept).sum(1) / kept.sum(1)

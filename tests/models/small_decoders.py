"""A decoder like Llama's and an encoder with a decoder like Whisper's, and the same in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from small_transformers import Config, Transformer, Weights, random_weights
from tvm import relax as rx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

THETA = 10000.0


def make_model(config: Config) -> nn.Module:
    """The model of a kind: those of `Transformer`, "llama" and "whisper"."""
    return {"llama": Llama, "whisper": Whisper}.get(config.kind, Transformer)(config)


def make_weights(config: Config, rng: np.random.Generator) -> Weights:
    """Weights by the names of the model, in float64."""
    return random_weights(make_model(config), rng)


def attend(q: nn.Tensor, k: nn.Tensor, v: nn.Tensor, hidden: nn.Tensor | None) -> nn.Tensor:
    """Products and a softmax over (batch, heads, length, head_dim); heads are joined after it."""
    batch, heads, length, dim = q.shape
    if k.shape[1] != heads:
        k, v = (op.repeat(x, heads // k.shape[1], axis=1) for x in (k, v))
    scores = op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))) / math.sqrt(dim)
    if hidden is not None:
        scores = scores + hidden
    out = op.permute_dims(op.matmul(op.softmax(scores, axis=-1), v), (0, 2, 1, 3))
    return op.reshape(out, (batch, length, heads * dim))


def parted(x: nn.Tensor, heads: int) -> nn.Tensor:
    """Heads before lengths."""
    batch, length, width = x.shape
    return op.permute_dims(op.reshape(x, (batch, length, heads, width // heads)), (0, 2, 1, 3))


def triangle(length: Any, dtype: str) -> nn.Tensor:
    """What is added to causal scores."""
    lowest = nn.Tensor.from_scalar(-65504.0 if dtype == "float16" else -1e9, dtype)
    return op.triu(op.full((length, length), lowest, dtype), 1)


class LlamaLayer(nn.Module):
    """Rotary embedding, grouped heads, and a gated network, each behind an RMS norm."""

    def __init__(self, config: Config) -> None:
        c = self.config = config
        kv_width = c.kv_heads * c.head_dim
        self.norm1 = nn.RMSNorm(c.width, axes=-1, epsilon=c.eps, bias=False)
        self.query = nn.Linear(c.width, c.width, bias=False)
        self.key = nn.Linear(c.width, kv_width, bias=False)
        self.value = nn.Linear(c.width, kv_width, bias=False)
        self.output = nn.Linear(c.width, c.width, bias=False)
        self.norm2 = nn.RMSNorm(c.width, axes=-1, epsilon=c.eps, bias=False)
        self.gate = nn.Linear(c.width, c.inner, bias=False)
        self.up = nn.Linear(c.width, c.inner, bias=False)
        self.down = nn.Linear(c.inner, c.width, bias=False)

    def forward(self, x: nn.Tensor, hidden: nn.Tensor, cos: nn.Tensor, sin: nn.Tensor) -> nn.Tensor:
        """One layer."""
        c = self.config

        def rotated(y: nn.Tensor) -> nn.Tensor:
            first, second = op.split(y, 2, axis=-1)
            return y * cos + op.concat([op.negative(second), first], -1) * sin

        y = self.norm1(x)
        q, k = rotated(parted(self.query(y), c.heads)), rotated(parted(self.key(y), c.kv_heads))
        x = x + self.output(attend(q, k, parted(self.value(y), c.kv_heads), hidden))
        y = self.norm2(x)
        return x + self.down(op.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """A causal decoder; its states are returned."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.words = nn.Embedding(config.vocab, config.width)
        self.layers = nn.ModuleList([LlamaLayer(config) for _ in range(config.layers)])
        self.norm = nn.RMSNorm(config.width, axes=-1, epsilon=config.eps, bias=False)

    def forward(self, ids: nn.Tensor, mask: nn.Tensor) -> nn.Tensor:
        """`ids` is (batch, length); `mask` is not read."""
        _, length = ids.shape
        half, dtype = self.config.head_dim // 2, self.words.weight.dtype
        pairs = rx.const((THETA ** (-np.arange(half) / half)).astype("float32")[None])
        places = op.reshape(op.astype(op.arange(0, length, 1, "int32"), "float32"), (length, 1))
        angles = places * nn.Tensor(_expr=pairs)
        angles = op.concat([angles, angles], -1)
        cos, sin = (
            op.astype(nn.wrap_nested(f(angles._expr), f.__name__), dtype)
            for f in (rx.op.cos, rx.op.sin)
        )
        x, hidden = self.words(ids), triangle(length, dtype)
        for layer in self.layers:
            x = layer(x, hidden, cos, sin)
        return self.norm(x)

    export = Transformer.export


class WhisperLayer(nn.Module):
    """Self-attention, attention to an encoder's states in a decoder, and a network."""

    def __init__(self, config: Config, crosses: bool) -> None:
        c = self.config = config
        self.parts = ["own", "cross"] if crosses else ["own"]
        for part in self.parts:
            for name in ("query", "key", "value", "output"):
                setattr(self, f"{part}_{name}", nn.Linear(c.width, c.width))
            setattr(self, f"{part}_norm", nn.LayerNorm(c.width, eps=c.eps))
        self.up = nn.Linear(c.width, c.inner)
        self.down = nn.Linear(c.inner, c.width)
        self.norm = nn.LayerNorm(c.width, eps=c.eps)

    def forward(
        self, x: nn.Tensor, states: nn.Tensor | None = None, hidden: nn.Tensor | None = None
    ) -> nn.Tensor:
        """One layer."""
        for part in self.parts:
            y = getattr(self, f"{part}_norm")(x)
            of = y if part == "own" else states
            q, k, v = (
                parted(getattr(self, f"{part}_{name}")(z), self.config.heads)
                for name, z in (("query", y), ("key", of), ("value", of))
            )
            out = attend(q, k, v, hidden if part == "own" else None)
            x = x + getattr(self, f"{part}_output")(out)
        return x + self.down(op.gelu(self.up(self.norm(x))))


class Whisper(nn.Module):
    """An encoder, and a causal decoder whose states are returned."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.sounds = nn.Embedding(config.vocab, config.width)
        self.words = nn.Embedding(config.vocab, config.width)
        count = range(config.layers)
        self.encoder = nn.ModuleList([WhisperLayer(config, False) for _ in count])
        self.decoder = nn.ModuleList([WhisperLayer(config, True) for _ in count])
        self.norm = nn.LayerNorm(config.width, eps=config.eps)

    def forward(self, ids: nn.Tensor, words: nn.Tensor) -> nn.Tensor:
        """`ids` is (batch, frames), in the place of what sounds are turned into."""
        states = self.sounds(ids)
        for layer in self.encoder:
            states = layer(states)
        x = self.words(words)
        hidden = triangle(words.shape[1], self.words.weight.dtype)
        for layer in self.decoder:
            x = layer(x, states, hidden)
        return self.norm(x)

    def export(
        self, dtype: str, batch: int | str = "batch", length: int | str = "frames",
        words: int | str = "words",
    ) -> tuple[Any, list[str]]:  # fmt: skip
        """The module, by default of any batch and lengths, and the names of its parameters."""
        self.to(dtype)
        inputs = {
            "ids": nn.spec.Tensor([batch, length], "int32"),
            "words": nn.spec.Tensor([batch, words], "int32"),
        }
        mod, params = self.export_tvm(spec={"forward": inputs})
        return mod, [name for name, _ in params]


def _attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, heads: int, causal: bool) -> np.ndarray:
    """Of (batch, length, width) each, in float64."""
    dim = q.shape[-1] // heads
    q, k, v = (x.reshape(*x.shape[:2], -1, dim) for x in (q, k, v))
    k, v = (x.repeat(heads // x.shape[2], 2) for x in (k, v))
    scores = np.einsum("bnhd,bmhd->bhnm", q, k) / math.sqrt(dim)
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[-2:])) > 0, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("bhnm,bmhd->bnhd", weights, v).reshape(*q.shape[:2], -1)


def llama_reference(config: Config, weights: Weights, ids: np.ndarray) -> np.ndarray:
    """What `Llama` computes, in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    half = config.head_dim // 2
    angles = np.arange(ids.shape[1])[:, None] * THETA ** (-np.arange(half) / half)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.eps) * w[f"{name}.weight"]

    def rotated(x: np.ndarray) -> np.ndarray:
        y = x.reshape(*x.shape[:2], -1, config.head_dim)
        turned = np.concatenate([-y[..., half:], y[..., :half]], -1)
        return (y * cos + turned * sin).reshape(x.shape)

    x = w["words.weight"][ids]
    for i in range(config.layers):
        part = {name: w[f"layers.{i}.{name}.weight"].T for name in _LLAMA}
        y = norm(x, f"layers.{i}.norm1")
        q, k, v = (y @ part[name] for name in ("query", "key", "value"))
        x = x + _attention(rotated(q), rotated(k), v, config.heads, True) @ part["output"]
        y = norm(x, f"layers.{i}.norm2")
        gate = y @ part["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (y @ part["up"])) @ part["down"]
    return norm(x, "norm")


_LLAMA = ("query", "key", "value", "output", "gate", "up", "down")


def whisper_reference(
    config: Config, weights: Weights, ids: np.ndarray, words: np.ndarray
) -> np.ndarray:
    """What `Whisper` computes, in float64."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1, keepdims=True)
        deviation = np.sqrt((centred**2).mean(-1, keepdims=True) + config.eps)
        return centred / deviation * w[f"{name}.weight"] + w[f"{name}.bias"]

    def attended(x: np.ndarray, states: np.ndarray | None, name: str, causal: bool) -> np.ndarray:
        y = norm(x, f"{name}_norm")
        of = y if states is None else states
        q, k, v = (
            linear(z, f"{name}_{kind}") for kind, z in (("query", y), ("key", of), ("value", of))
        )
        return x + linear(_attention(q, k, v, config.heads, causal), f"{name}_output")

    def network(x: np.ndarray, name: str) -> np.ndarray:
        up = linear(norm(x, f"{name}.norm"), f"{name}.up")
        erf = np.vectorize(math.erf)(up / math.sqrt(2))
        return x + linear(0.5 * up * (1 + erf), f"{name}.down")

    states, x = w["sounds.weight"][ids], w["words.weight"][words]
    for i in range(config.layers):
        states = network(attended(states, None, f"encoder.{i}.own", False), f"encoder.{i}")
    for i in range(config.layers):
        x = attended(x, None, f"decoder.{i}.own", True)
        x = network(attended(x, states, f"decoder.{i}.cross", False), f"decoder.{i}")
    return norm(x, "norm")

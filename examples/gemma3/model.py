"""Gemma 3 in TVM's ``nn`` frontend.

Five layers of six see a window of tokens and rotate with one theta, the sixth sees all tokens and
rotates with another. A cache of TVM has one theta, so the model rotates queries and keys by itself
and asks the cache for positions alone. The window is that of `DispatchKVCacheCreation`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode

from examples.llama.model import causal_lm_spec, generic_kv_cache, take

#: Not in GGUF files: the theta of layers with a window, and how many layers make a period.
LOCAL_THETA = 10000.0
PERIOD = 6


@dataclasses.dataclass(frozen=True)
class Gemma3Config:
    """Dimensions of a Gemma 3 model.

    ``rope_theta`` is that of the layers that see all tokens, ``sliding_window`` how many tokens the
    others see.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int

    family: ClassVar[str] = "gemma3"

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any]) -> Gemma3Config:
        """Read the dimensions from the metadata of a GGUF file.

        Raises
        ------
        ValueError
            If the architecture is not ``gemma3`` or the file rescales its rotary frequencies.
        """
        arch = metadata["general.architecture"]
        if arch != "gemma3":
            raise ValueError(f"got a GGUF file of architecture {arch!r}, expected 'gemma3'")
        scaling = metadata.get("gemma3.rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(f"got RoPE scaling {scaling!r}; this example knows none")
        return cls(
            hidden_size=metadata["gemma3.embedding_length"],
            intermediate_size=metadata["gemma3.feed_forward_length"],
            num_hidden_layers=metadata["gemma3.block_count"],
            num_attention_heads=metadata["gemma3.attention.head_count"],
            num_key_value_heads=metadata["gemma3.attention.head_count_kv"],
            head_dim=metadata["gemma3.attention.key_length"],
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
            context_length=metadata["gemma3.context_length"],
            rms_norm_eps=metadata["gemma3.attention.layer_norm_rms_epsilon"],
            rope_theta=metadata.get("gemma3.rope.freq_base", 1_000_000.0),
            sliding_window=metadata["gemma3.attention.sliding_window"],
        )

    def model(self) -> Gemma3ForCausalLM:
        """Make the module."""
        return Gemma3ForCausalLM(self)

    def slides(self, layer_id: int) -> bool:
        """Whether a layer sees a window of tokens, not all."""
        return (layer_id + 1) % PERIOD != 0


Rotation = tuple[Tensor, Tensor]


def rotation(positions: Tensor, head_dim: int, theta: float) -> Rotation:
    """Compute cosines and sines (n, 1, head_dim / 2) float32 of positions (n,)."""

    def table(of: Any, name: str) -> Tensor:
        def compute(x: te.Tensor) -> te.Tensor:
            def angle(i: tirx.Var, _: tirx.Var, j: tirx.Var) -> tirx.Expr:
                power = tirx.Cast("float32", j) * tirx.const(-2.0 / head_dim, "float32")
                frequency = tirx.pow(tirx.const(theta, "float32"), power)
                return of(tirx.Cast("float32", x[i]) * frequency)

            return te.compute((x.shape[0], 1, head_dim // 2), angle, name=name)

        return op.tensor_expr_op(compute, name, [positions])

    return table(tirx.cos, "rope_cos"), table(tirx.sin, "rope_sin")


def rotate(x: Tensor, by: Rotation) -> Tensor:
    """Rotate heads (b, s, h, head_dim), pairing dimension i with i + head_dim / 2."""
    cos, sin = by
    first, second = op.split(x.astype("float32"), 2, axis=-1)
    both = [first * cos - second * sin, second * cos + first * sin]
    return op.concat(both, dim=-1).astype(x.dtype)


class Gemma3Attention(nn.Module):
    """Grouped-query attention with normalised queries and keys."""

    def __init__(self, config: Gemma3Config) -> None:
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        fused = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, fused, bias=False)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(config.head_dim, -1, config.rms_norm_eps, bias=False)
        self.k_norm = nn.RMSNorm(config.head_dim, -1, config.rms_norm_eps, bias=False)

    def forward(self, x: Tensor, cache: PagedKVCache, layer_id: int, by: Rotation) -> Tensor:
        """Map states (b, s, hidden_size) to states."""
        b, s, _ = x.shape
        h, g, d = self.num_heads, self.num_kv_heads, self.head_dim
        qkv = op.reshape(self.qkv_proj(x), (b, s, h + 2 * g, d))
        q, k, v = op.split(qkv, [h, h + g], axis=2)
        q, k = rotate(self.q_norm(q), by), rotate(self.k_norm(k), by)
        qkv = op.concat([q, k, v], dim=2)
        out = cache.attention_with_fused_qkv(layer_id, qkv, h, sm_scale=d**-0.5)
        return self.o_proj(op.reshape(out, (b, s, h * d)))


class Gemma3MLP(nn.Module):
    """GeGLU, with the gate and up projections fused."""

    def __init__(self, config: Gemma3Config) -> None:
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map states (b, s, hidden_size) to states."""
        gate, up = op.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(op.gelu(gate, approximate="tanh") * up)


class Gemma3Layer(nn.Module):
    """One decoder layer; attention and MLP have a norm before and behind them."""

    def __init__(self, config: Gemma3Config) -> None:
        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)

        self.attn_norm, self.post_attn_norm = norm(), norm()
        self.attn = Gemma3Attention(config)
        self.mlp_norm, self.post_mlp_norm = norm(), norm()
        self.mlp = Gemma3MLP(config)

    def forward(self, x: Tensor, cache: PagedKVCache, layer_id: int, by: Rotation) -> Tensor:
        """Map states (b, s, hidden_size) to states."""
        x = x + self.post_attn_norm(self.attn(self.attn_norm(x), cache, layer_id, by))
        return x + self.post_mlp_norm(self.mlp(self.mlp_norm(x)))


class Gemma3ForCausalLM(nn.Module):
    """The whole model, with the functions that ``module_spec`` exports."""

    def __init__(self, config: Gemma3Config) -> None:
        self.config = config
        self.dtype = "float32"
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Gemma3Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)

    def to(self, dtype: str | None = None) -> None:
        """Convert the parameters, and the cache to be created, to ``dtype``."""
        super().to(dtype=dtype)
        if dtype is not None:
            self.dtype = dtype

    def hidden_states(self, input_ids: Tensor, cache: PagedKVCache) -> Tensor:
        """Run the layers: ids (b, s) int32 -> normalised states (b, s, hidden_size)."""
        config = self.config
        b, s = input_ids.shape
        positions = cache.get_query_positions(b * s)
        tables = {
            slides: self._rotation(positions, b, s, LOCAL_THETA if slides else config.rope_theta)
            for slides in (True, False)
        }
        x = take(self.embed.weight, input_ids, axis=0) * config.hidden_size**0.5
        for layer_id, layer in enumerate(self.layers):
            x = layer(x, cache, layer_id, tables[config.slides(layer_id)])
        return self.norm(x)

    def _rotation(self, positions: Tensor, b: Any, s: Any, theta: float) -> Rotation:
        half = self.config.head_dim // 2
        cos, sin = rotation(positions, self.config.head_dim, theta)
        return op.reshape(cos, (b, s, 1, half)), op.reshape(sin, (b, s, 1, half))

    def logits(self, x: Tensor) -> Tensor:
        """Project states (b, s, hidden_size) to logits (b, s, vocab_size) float32."""
        return op.matmul(x, op.permute_dims(self.embed.weight), out_dtype="float32")

    def prefill(self, input_ids: Tensor, logit_positions: Tensor, cache: PagedKVCache) -> Tensor:
        """Append the tokens of one step and return logits at chosen rows.

        ``input_ids`` is (1, n) int32, the sequences of the step one after the other;
        ``logit_positions`` (m,) int32 picks rows of it; the result is (1, m, vocab_size) float32.
        """
        x = self.hidden_states(input_ids, cache)
        return self.logits(take(x, logit_positions, axis=1))

    def decode(self, input_ids: Tensor, cache: PagedKVCache) -> Tensor:
        """Append one token to each sequence: (batch, 1) int32 -> (batch, 1, vocab_size)."""
        return self.logits(self.hidden_states(input_ids, cache))

    def create_paged_kv_cache(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ) -> PagedKVCache:
        """Ask for a paged KV cache without saying which kernels serve it, as MLC's models do."""
        config = self.config
        return generic_kv_cache(
            [
                "mha_sliding" if config.slides(layer_id) else "mha"
                for layer_id in range(config.num_hidden_layers)
            ],
            [
                max_batch_size,
                max_total_seq_len,
                prefill_chunk_size,
                page_size,
                support_sliding_window,
            ],
            config,
            RopeMode.NONE,
            1,
            self.dtype,
        )

    def module_spec(self) -> dict[str, Any]:
        """Give the specification of the exported functions for ``export_tvm``."""
        return causal_lm_spec()

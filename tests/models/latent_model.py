"""A small model with multi-head latent attention, after DeepSeek-V2, and the same in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from cache_oracle import rotate as rotate_exactly
from reference import Reference, attention
from tvm import tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode

from examples.gemma3.model import Rotation, rotate, rotation
from examples.llama.model import LlamaMLP, causal_lm_spec, generic_kv_cache, take


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Dimensions.

    A token leaves ``latent_dim + rope_dim`` numbers in a layer: what the keys and values of all
    heads are made of, and the part of their keys that is rotated, which all heads share.
    """

    latent_dim: int
    rope_dim: int
    nope_dim: int
    value_dim: int
    num_attention_heads: int = 4
    num_key_value_heads: int = 1
    num_hidden_layers: int = 2
    hidden_size: int = 64
    intermediate_size: int = 128
    vocab_size: int = 96
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    family: ClassVar[str] = "latent"

    def model(self) -> LatentForCausalLM:
        """Make the module."""
        return LatentForCausalLM(self)

    @property
    def sm_scale(self) -> float:
        """What scores are multiplied with."""
        return (self.nope_dim + self.rope_dim) ** -0.5


class LatentAttention(nn.Module):
    """Attention to new tokens by their own keys, and to pages by what their keys are made of."""

    def __init__(self, config: LatentConfig) -> None:
        self.config = config
        heads, latent = config.num_attention_heads, config.latent_dim
        self.q_proj = nn.Linear(
            config.hidden_size, heads * (config.nope_dim + config.rope_dim), bias=False
        )
        self.kv_proj = nn.Linear(config.hidden_size, latent + config.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(latent, -1, config.rms_norm_eps, bias=False)
        self.key_up = nn.Parameter((heads, config.nope_dim, latent))
        self.value_up = nn.Parameter((heads, config.value_dim, latent))
        self.o_proj = nn.Linear(heads * config.value_dim, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cache: PagedKVCache, layer_id: int, by: Rotation, mode: str
    ) -> Tensor:
        """Map states (b, s, hidden_size) to states."""
        config = self.config
        b, s, _ = x.shape
        heads = config.num_attention_heads
        q = op.reshape(self.q_proj(x), (b, s, heads, config.nope_dim + config.rope_dim))
        q_nope, q_rope = op.split(q, [config.nope_dim], axis=-1)
        kv = op.reshape(self.kv_proj(x), (b, s, 1, config.latent_dim + config.rope_dim))
        latent, k_rope = op.split(kv, [config.latent_dim], axis=-1)
        latent = self.kv_norm(latent)
        q_rope, k_rope = rotate(q_rope, by), rotate(k_rope, by)
        cache = cache.append_mla_kv(layer_id, op.concat([latent, k_rope], dim=-1))
        if mode == "decode":
            out, _ = self._cross(q_nope, q_rope, cache, layer_id)
        else:
            out, lse = self._self(q_nope, q_rope, latent, k_rope, cache, layer_id)
            if mode == "extend":
                past = self._cross(q_nope, q_rope, cache, layer_id)
                out, _ = cache.merge_attn_output_inplace(out, lse, *past)
        return self.o_proj(op.reshape(out, (b, s, heads * config.value_dim)))

    def _self(
        self,
        q_nope: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        k_rope: Tensor,
        cache: PagedKVCache,
        layer_id: int,
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        b, s, heads, _ = q_nope.shape
        k_nope = per_head(op.broadcast_to(latent, (b, s, heads, config.latent_dim)), self.key_up)
        v = per_head(op.broadcast_to(latent, (b, s, heads, config.latent_dim)), self.value_up)
        k = op.concat([k_nope, op.broadcast_to(k_rope, (b, s, heads, config.rope_dim))], dim=-1)
        q = op.concat([q_nope, q_rope], dim=-1)
        return cache.self_attention(layer_id, q, k, v, config.sm_scale)

    def _cross(
        self, q_nope: Tensor, q_rope: Tensor, cache: PagedKVCache, layer_id: int
    ) -> tuple[Tensor, Tensor]:
        config = self.config
        q = per_head(q_nope, op.permute_dims(self.key_up, [0, 2, 1]))
        q = op.concat([q, q_rope], dim=-1)
        out, lse = cache.cross_attention(layer_id, q, config.latent_dim, config.sm_scale)
        return per_head(out, self.value_up), lse


def per_head(x: Tensor, weight: Tensor) -> Tensor:
    """Apply a matrix to each head: (b, s, heads, n), (heads, m, n) -> (b, s, heads, m)."""
    b, s, heads, n = x.shape
    rows = op.permute_dims(op.reshape(x, (b * s, heads, n)), [1, 0, 2])
    out = op.matmul(rows, op.permute_dims(weight, [0, 2, 1]))
    return op.reshape(op.permute_dims(out, [1, 0, 2]), (b, s, heads, weight.shape[1]))


class LatentLayer(nn.Module):
    """One decoder layer."""

    def __init__(self, config: LatentConfig) -> None:
        self.attn_norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.attn = LatentAttention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.mlp = LlamaMLP(config)


class LatentForCausalLM(nn.Module):
    """The whole model. A step in which no sequence has tokens is `prefill`, others are `extend`."""

    def __init__(self, config: LatentConfig) -> None:
        self.config = config
        self.dtype = "float32"
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LatentLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def to(self, dtype: str | None = None) -> None:
        """Convert the parameters, and the cache to be created."""
        super().to(dtype=dtype)
        self.dtype = dtype or self.dtype

    def _logits(
        self, input_ids: Tensor, cache: PagedKVCache, mode: str, rows: Tensor | None = None
    ) -> Tensor:
        b, s = input_ids.shape
        half = self.config.rope_dim // 2
        tables = rotation(
            cache.get_query_positions(b * s), self.config.rope_dim, self.config.rope_theta
        )
        by = op.reshape(tables[0], (b, s, 1, half)), op.reshape(tables[1], (b, s, 1, half))
        x = take(self.embed.weight, input_ids, axis=0)
        for layer_id, layer in enumerate(self.layers):
            x = x + layer.attn(layer.attn_norm(x), cache, layer_id, by, mode)
            x = x + layer.mlp(layer.mlp_norm(x))
        x = self.norm(x if rows is None else take(x, rows, axis=1))
        return op.matmul(x, op.permute_dims(self.lm_head.weight), out_dtype="float32")

    def prefill(self, input_ids: Tensor, logit_positions: Tensor, cache: PagedKVCache) -> Tensor:
        """Append the first tokens of sequences, as in examples/llama."""
        return self._logits(input_ids, cache, "prefill", logit_positions)

    def extend(self, input_ids: Tensor, logit_positions: Tensor, cache: PagedKVCache) -> Tensor:
        """Append tokens to sequences that may have some."""
        return self._logits(input_ids, cache, "extend", logit_positions)

    def decode(self, input_ids: Tensor, cache: PagedKVCache) -> Tensor:
        """Append one token to each sequence."""
        return self._logits(input_ids, cache, "decode")

    def create_paged_kv_cache(
        self,
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
    ) -> PagedKVCache:
        """Ask for a paged KV cache as MLC's model of DeepSeek-V2 does."""
        config = self.config
        sizes = [
            max_batch_size,
            max_total_seq_len,
            prefill_chunk_size,
            page_size,
            support_sliding_window,
        ]
        head_dims = (
            config.latent_dim + config.rope_dim,
            config.latent_dim,
            config.nope_dim + config.rope_dim,
            config.value_dim,
        )
        return generic_kv_cache("mla", sizes, config, RopeMode.NONE, 1, self.dtype, head_dims)

    def module_spec(self) -> dict[str, Any]:
        """Give the specification of the exported functions for ``export_tvm``."""
        return causal_lm_spec() | {"extend": causal_lm_spec()["prefill"]}


class LatentReference(Reference):
    """The model in float64; keys and values are made anew for all tokens in each step."""

    def __init__(self, config: LatentConfig, weights: Mapping[str, np.ndarray]) -> None:
        super().__init__(config, weights)
        self.token_size = config.latent_dim + config.rope_dim

    def kept_of(self, layer: int, h: np.ndarray) -> np.ndarray:
        """What keys and values are made of."""
        kv = self.linear(layer, "attn.kv_proj", h)
        latent, rope = np.split(kv, [self.config.latent_dim], axis=-1)
        return np.concatenate([self.norm(f"layers.{layer}.attn.kv_norm", latent), rope], -1)

    def attend(
        self,
        layer: int,
        h: np.ndarray,
        kept: np.ndarray,
        positions: np.ndarray,
        seen: np.ndarray,
    ) -> np.ndarray:
        """Attention of as many KV heads as there are query heads."""
        config, n, heads = self.config, len(h), self.config.num_attention_heads
        latent, rope = np.split(kept, [config.latent_dim], axis=-1)
        k, v = (
            np.einsum("mc,hdc->mhd", latent, self.weights[f"layers.{layer}.attn.{name}"])
            for name in ("key_up", "value_up")
        )
        rope = rotate_exactly(rope[:, None], positions, theta=config.rope_theta)
        k = np.concatenate([k, rope.repeat(heads, 1)], -1)
        q = self.linear(layer, "attn.q_proj", h).reshape(n, heads, -1)
        q_nope, q_rope = np.split(q, [config.nope_dim], axis=-1)
        q_rope = rotate_exactly(q_rope, positions[-n:], theta=config.rope_theta)
        out = attention(np.concatenate([q_nope, q_rope], -1), k, v, seen, config.sm_scale)
        return self.linear(layer, "attn.o_proj", out.reshape(n, -1))

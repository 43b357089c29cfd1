"""The Llama family in TVM's ``nn`` frontend.

Attention goes through ``PagedKVCache.attention_with_fused_qkv``, and the cache is created by the
same generic call that MLC LLM's models emit, so the module exported here meets the passes of this
project exactly as an MLC model does.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import tvm
import tvm_ffi
from tvm import relax, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode

GENERIC_CREATE = "mlc.create_paged_kv_cache_generic"


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """Dimensions of a Llama model.

    ``rope_theta`` is the base of the rotary frequencies, ``context_length`` the longest sequence
    the model was trained for, in tokens.
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
    tie_word_embeddings: bool

    family: ClassVar[str] = "llama"

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensor_names: set[str]) -> LlamaConfig:
        """Read the dimensions from the metadata of a GGUF file.

        Parameters
        ----------
        metadata : Mapping[str, Any]
            GGUF key-value pairs, e.g. ``llama.embedding_length``.
        tensor_names : set of str
            Names of the tensors in the file. Without ``output.weight`` the embeddings are tied.

        Raises
        ------
        ValueError
            If the architecture is not ``llama`` or the file rescales its rotary frequencies.
        """
        arch = metadata["general.architecture"]
        if arch != "llama":
            raise ValueError(f"got a GGUF file of architecture {arch!r}, expected 'llama'")
        scaling = metadata.get("llama.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in tensor_names:
            raise ValueError(
                "this example knows no RoPE scaling, and the GGUF file asks for "
                f"{scaling if scaling != 'none' else 'rope_freqs.weight'}; use a model without it"
            )
        hidden_size = metadata["llama.embedding_length"]
        num_heads = metadata["llama.attention.head_count"]
        head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
        rotary_dim = metadata.get("llama.rope.dimension_count", head_dim)
        if rotary_dim != head_dim:
            raise ValueError(f"got rotary dimension {rotary_dim}, expected head_dim {head_dim}")
        return cls(
            hidden_size=hidden_size,
            intermediate_size=metadata["llama.feed_forward_length"],
            num_hidden_layers=metadata["llama.block_count"],
            num_attention_heads=num_heads,
            num_key_value_heads=metadata.get("llama.attention.head_count_kv", num_heads),
            head_dim=head_dim,
            vocab_size=len(metadata["tokenizer.ggml.tokens"]),
            context_length=metadata["llama.context_length"],
            rms_norm_eps=metadata["llama.attention.layer_norm_rms_epsilon"],
            rope_theta=metadata.get("llama.rope.freq_base", 10000.0),
            tie_word_embeddings="output.weight" not in tensor_names,
        )

    def model(self) -> LlamaForCausalLM:
        """Make the module."""
        return LlamaForCausalLM(self)


def take(x: Tensor, indices: Tensor, axis: int) -> Tensor:
    """Gather along an axis, with indices clipped to it: a bad id must not read foreign memory."""
    return op.wrap_nested(relax.op.take(x._expr, indices._expr, axis, mode="clip"), "take")


def generic_kv_cache(
    attn_kind: str | Sequence[str],
    sizes: Sequence[tirx.Var],
    config: Any,
    rope_mode: RopeMode,
    rope_theta: float,
    dtype: str,
    head_dims: Sequence[int] | None = None,
) -> PagedKVCache:
    """Ask for a paged KV cache without saying which kernels serve it, as MLC's models do.

    Parameters
    ----------
    attn_kind : str or sequence of str
        Of all layers, or of each.
    sizes : sequence of tirx.Var
        The five numbers that are known when the cache is created.
    config
        Has the numbers of layers and heads, and ``head_dim`` unless ``head_dims`` is given.
    rope_mode : RopeMode
        Whether the cache rotates queries and keys.
    rope_theta : float
        Its base.
    dtype : str
        Of keys and values.
    head_dims : sequence of int, optional
        Of the keys and of the values in the cache, and of both before they are compressed (MLA).
    """
    key_dim, *other_dims = head_dims or (config.head_dim, config.head_dim, 0, 0)
    kind = (
        tvm.ir.StringImm(attn_kind)
        if isinstance(attn_kind, str)
        else relax.Tuple([tvm.ir.StringImm(kind) for kind in attn_kind])
    )
    return PagedKVCache(
        _expr=relax.call_pure_packed(
            GENERIC_CREATE,
            kind,
            relax.ShapeExpr(sizes),
            relax.ShapeExpr([0, config.num_hidden_layers]),  # layer_partition
            relax.prim_value(config.num_hidden_layers),
            relax.prim_value(config.num_attention_heads),
            relax.prim_value(config.num_key_value_heads),
            relax.prim_value(key_dim),  # qk_head_dim
            # v_head_dim, mla_original_qk_head_dim, mla_original_v_head_dim
            *(relax.prim_value(dim) for dim in other_dims),
            relax.prim_value(rope_mode),
            relax.prim_value(1),  # rope_scale
            relax.prim_value(rope_theta),
            tvm.ir.StringImm(json.dumps({})),  # rope_scaling
            relax.prim_value(0),  # rope_ext_factors: none
            relax.prim_value(key_dim),  # rotary_dim
            relax.prim_value(0),  # enable_disaggregation
            tvm.ir.GenericConst(tvm_ffi.dtype(dtype), relax.AnyType()),
            ty_args=relax.AnyType(),
        ),
        _name="paged_kv_cache",
    )


def causal_lm_spec() -> dict[str, Any]:
    """Give the specification of the exported functions for ``export_tvm``."""
    cache = nn.spec.Object(object_type=PagedKVCache)
    packed = {"param_mode": "packed", "effect_mode": "none"}
    return {
        "prefill": {
            "input_ids": nn.spec.Tensor([1, "seq_len"], "int32"),
            "logit_positions": nn.spec.Tensor(["num_logits"], "int32"),
            "cache": cache,
            "$": packed,
        },
        "decode": {
            "input_ids": nn.spec.Tensor(["batch_size", 1], "int32"),
            "cache": cache,
            "$": packed,
        },
        "create_paged_kv_cache": {
            "max_batch_size": int,
            "max_total_seq_len": int,
            "prefill_chunk_size": int,
            "page_size": int,
            "support_sliding_window": int,
            "$": {"param_mode": "none", "effect_mode": "none"},
        },
    }


class LlamaAttention(nn.Module):
    """Grouped-query attention; the cache rotates queries and keys, stores and attends."""

    def __init__(self, config: LlamaConfig) -> None:
        self.num_heads = config.num_attention_heads
        self.num_fused_heads = config.num_attention_heads + 2 * config.num_key_value_heads
        self.head_dim = config.head_dim
        self.qkv_proj = nn.Linear(
            config.hidden_size, self.num_fused_heads * self.head_dim, bias=False
        )
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cache: PagedKVCache, layer_id: int) -> Tensor:
        """Map states (b, s, hidden_size) to states."""
        b, s, _ = x.shape
        qkv = op.reshape(self.qkv_proj(x), (b, s, self.num_fused_heads, self.head_dim))
        out = cache.attention_with_fused_qkv(
            layer_id, qkv, self.num_heads, sm_scale=self.head_dim**-0.5
        )
        return self.o_proj(op.reshape(out, (b, s, self.num_heads * self.head_dim)))


class LlamaMLP(nn.Module):
    """SwiGLU, with the gate and up projections fused."""

    def __init__(self, config: LlamaConfig) -> None:
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map states (b, s, hidden_size) to states."""
        gate, up = op.split(self.gate_up_proj(x), 2, axis=-1)
        return self.down_proj(op.silu(gate) * up)


class LlamaLayer(nn.Module):
    """One decoder layer: pre-norm attention and pre-norm MLP, both residual."""

    def __init__(self, config: LlamaConfig) -> None:
        self.attn_norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.attn = LlamaAttention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, cache: PagedKVCache, layer_id: int) -> Tensor:
        """Map states (b, s, hidden_size) to states."""
        x = x + self.attn(self.attn_norm(x), cache, layer_id)
        return x + self.mlp(self.mlp_norm(x))


class LlamaForCausalLM(nn.Module):
    """The whole model, with the functions that ``module_spec`` exports."""

    def __init__(self, config: LlamaConfig) -> None:
        self.config = config
        self.dtype = "float32"
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([LlamaLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, -1, config.rms_norm_eps, bias=False)
        if not config.tie_word_embeddings:
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def to(self, dtype: str | None = None) -> None:
        """Convert the parameters, and the cache to be created, to ``dtype``."""
        super().to(dtype=dtype)
        if dtype is not None:
            self.dtype = dtype

    def hidden_states(self, input_ids: Tensor, cache: PagedKVCache) -> Tensor:
        """Run the layers: ids (b, s) int32 -> normalised states (b, s, hidden_size)."""
        x = take(self.embed.weight, input_ids, axis=0)
        for layer_id, layer in enumerate(self.layers):
            x = layer(x, cache, layer_id)
        return self.norm(x)

    def logits(self, x: Tensor) -> Tensor:
        """Project states (b, s, hidden_size) to logits (b, s, vocab_size) float32."""
        head = self.embed.weight if self.config.tie_word_embeddings else self.lm_head.weight
        return op.matmul(x, op.permute_dims(head), out_dtype="float32")

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
        theta = config.rope_theta
        return generic_kv_cache(
            "mha",
            [
                max_batch_size,
                max_total_seq_len,
                prefill_chunk_size,
                page_size,
                support_sliding_window,
            ],
            config,
            RopeMode.NORMAL,
            int(theta) if float(theta).is_integer() else theta,
            self.dtype,
        )

    def module_spec(self) -> dict[str, Any]:
        """Give the specification of the exported functions for ``export_tvm``."""
        return causal_lm_spec()

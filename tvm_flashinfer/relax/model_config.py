"""What a model asks of its KV cache, read from its ``config.json`` or ``mlc-chat-config.json``."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm import relax as rx
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from tvm_flashinfer.kernels.spec import normalize_dtype
from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW
from tvm_flashinfer.relax.config import PagedKVCacheConfig

#: Models whose cache rotates nothing: they have learned positions, or rotate by themselves.
_WITHOUT_ROPE = ("gpt2", "gpt_bigcode", "llama4", "llama4_text")

#: Models with layers of both kinds, every n-th of which sees all tokens.
_WITH_SLIDING_LAYERS = ("gemma3", "gemma3_text")

#: Models without attention through a KV cache.
_WITHOUT_CACHE = ("rwkv5", "rwkv6", "mamba", "mamba2", "bert", "clip")

#: Models whose cache rotates with plain frequencies, whatever scaling the file names: what MLC LLM
#: exports for them leaves it out.
_WITHOUT_SCALING = (
    "baichuan", "chatglm", "cohere", "deepseek", "gemma", "gemma2", "gemma3", "gemma3_text",
    "gpt_neox", "internlm", "internlm2", "minicpm", "mistral", "mixtral", "orion", "phi",
    "phi-msft", "qwen", "qwen2", "qwen2_moe", "qwen3", "qwen3_5", "qwen3_5_text", "qwen3_moe",
    "stablelm", "starcoder2",
)  # fmt: skip

#: What files leave out, because the library they come from has it as its default.
_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    model_type: {
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "rope_theta": 1e6, "sliding_window": 4096, "sliding_window_pattern": 6,
    }
    for model_type in _WITH_SLIDING_LAYERS
} | {
    "llava": {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32},
}  # fmt: skip

#: Where a model for text is inside of one for images and text.
_NESTED = ("text_config", "llm_config", "language_config")

#: Older names of types of RoPE scaling.
_ROPE_ALIASES = {"su": "longrope", "mrope": "default"}


class ModelConfigError(ValueError):
    """A configuration cannot be read; the message names the field."""


@dataclass(frozen=True, eq=False)
class ModelConfig:
    """A model's name, and what its cache is.

    Parameters
    ----------
    model_type : str
        Family of the model, such as ``"llama"``.
    cache : PagedKVCacheConfig
        For one GPU of those that share the model. Its sizes at run time are 1.
    notes : tuple of str
        What the file says and the cache does without.
    """

    model_type: str
    cache: PagedKVCacheConfig
    notes: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The model in a line."""
        cache = self.cache
        dims = f"head_dim {cache.qk_head_dim}"
        if cache.v_head_dim != cache.qk_head_dim:
            dims += f" with values of {cache.v_head_dim}"
        kinds = sorted(set(cache.layer_kinds))
        layers = f"{cache.num_hidden_layers} layers of {' and '.join(kinds)}"
        if cache.has_sliding_layers:
            layers += f" with a window of {cache.layer_sliding_window_size}"
        heads = f"{cache.num_attention_heads} query heads on {cache.num_key_value_heads} KV heads"
        return f"{self.model_type}: {layers}, {heads}, {dims}, {cache.dtype}"


def read_model_config(
    path: str | Path, dtype: str | None = None, tensor_parallel_shards: int | None = None
) -> ModelConfig:
    """Read the file that a model comes with.

    Parameters
    ----------
    path : str or Path
        ``mlc-chat-config.json`` of MLC LLM, or ``config.json`` of Hugging Face.
    dtype : str, optional
        Dtype of the cache; that of the file when it is left out.
    tensor_parallel_shards : int, optional
        How many GPUs share the heads; as the file says, or 1, when it is left out.

    Raises
    ------
    ModelConfigError
        The file is no such configuration, or a field is missing or is not what it should be.
    OSError
        It cannot be read.
    """
    try:
        data = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ModelConfigError(f"{path} holds a {type(data).__name__}, expected an object")
    return parse_model_config(data, dtype, tensor_parallel_shards)


def parse_model_config(
    data: Mapping[str, Any], dtype: str | None = None, tensor_parallel_shards: int | None = None
) -> ModelConfig:
    """Read a configuration; the parameters and errors are those of `read_model_config`."""
    fields = _Fields.of(data)
    if fields.model_type in _WITHOUT_CACHE:
        raise ModelConfigError(
            f"model_type is {fields.model_type!r}; such models have no attention through a KV cache"
        )
    layers = fields.integer("num_hidden_layers", "n_layer", "num_layers")
    if interval := fields.integer("full_attention_interval", default=0):
        layers //= interval  # the others have no keys
    shards = tensor_parallel_shards or fields.integer("tensor_parallel_shards", default=1)
    heads = fields.integer("num_attention_heads", "n_head")
    latent = "kv_lora_rank" in fields.values
    shape = _latent_shape(fields) if latent else _shape(fields, heads)
    kinds, window = "mla", DEFAULT_LAYER_WINDOW
    if not latent:
        kinds, window = _layer_kinds(fields, layers)
        shape["num_key_value_heads"] = _share(
            "num_key_value_heads", shape["num_key_value_heads"], shards
        )
    cache = PagedKVCacheConfig(
        **shape,
        attn_kind=kinds,
        max_batch_size=1,
        max_total_seq_len=1,
        prefill_chunk_size=1,
        page_size=16,
        support_sliding_window=0,
        layer_partition=rx.ShapeExpr([0, layers]),
        num_hidden_layers=layers,
        num_attention_heads=_share("num_attention_heads", heads, shards),
        rope_scale=1.0,
        rope_theta=fields.number("rope_theta", "position_embedding_base", "rotary_emb_base"),
        enable_disaggregation=False,
        dtype=_dtype(fields, dtype),
        layer_sliding_window_size=window,
        **_rope_scaling(fields),
    )
    return ModelConfig(fields.model_type, cache, _notes(fields, data))


def _share(name: str, count: int, shards: int) -> int:
    """Return the part of one GPU."""
    if count % shards != 0:
        raise ModelConfigError(
            f"{name} is {count}, which {shards} tensor_parallel_shards cannot share equally"
        )
    return count // shards


def _shape(fields: _Fields, heads: int) -> dict[str, Any]:
    """Heads and dimensions of multi-head attention."""
    one = fields.model_type == "gpt_bigcode" and fields.values.get("multi_query", True)
    kv_heads = fields.integer(
        "num_key_value_heads", "multi_query_group_num", "num_kv_heads", default=1 if one else heads
    )
    head_dim = fields.integer("head_dim", "kv_channels", default=0)
    if not head_dim:
        head_dim = fields.integer("hidden_size", "n_embd", "n_embed") // heads
    part = fields.number("partial_rotary_factor", "rotary_pct", default=1.0)
    mode = RopeMode.NONE if fields.model_type in _WITHOUT_ROPE else RopeMode.NORMAL
    return {
        "num_key_value_heads": kv_heads,
        "qk_head_dim": head_dim,
        "v_head_dim": head_dim,
        "mla_original_qk_head_dim": 0,
        "mla_original_v_head_dim": 0,
        "rope_mode": mode,
        "rotary_dim": fields.integer("rotary_dim", default=int(head_dim * part)),
    }


def _latent_shape(fields: _Fields) -> dict[str, Any]:
    """Dimensions of latent attention (MLA): one compressed key for all heads."""
    rank, rotated = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim")
    return {
        "num_key_value_heads": 1,
        "qk_head_dim": rank + rotated,
        "v_head_dim": rank,
        "mla_original_qk_head_dim": fields.integer("qk_nope_head_dim") + rotated,
        "mla_original_v_head_dim": fields.integer("v_head_dim"),
        "rope_mode": RopeMode.NONE,
        "rotary_dim": rotated,
    }


def _layer_kinds(fields: _Fields, layers: int) -> tuple[str | tuple[str, ...], int]:
    """Which layers have a window of their own, and how long it is."""
    if fields.model_type not in _WITH_SLIDING_LAYERS:
        return "mha", DEFAULT_LAYER_WINDOW
    named = fields.values.get("layer_types")
    every = fields.integer("sliding_window_pattern", "_sliding_window_pattern")
    slides = (
        [kind == "sliding_attention" for kind in named]
        if isinstance(named, list) and len(named) == layers
        else [(layer + 1) % every != 0 for layer in range(layers)]
    )
    # MLC LLM writes the second one, as -1 where it is not set.
    given = fields.values.get("sliding_window_size")
    by_mlc = isinstance(given, int) and given > 0
    window = fields.integer("sliding_window_size" if by_mlc else "sliding_window")
    return tuple("mha_sliding" if slide else "mha" for slide in slides), window


def _rope_scaling(fields: _Fields) -> dict[str, Any]:
    """How frequencies are scaled, in the words of TVM."""
    given = fields.values.get("rope_scaling") or fields.values.get("rope_parameters") or {}
    if not isinstance(given, dict):
        raise ModelConfigError(f"rope_scaling is {given!r}, expected an object or null")
    kind = given.get("rope_type", given.get("type", "default"))
    kind = "gptj" if fields.model_type == "gptj" else _ROPE_ALIASES.get(kind, kind)
    if kind == "default" or fields.model_type in _WITHOUT_SCALING:
        return {"rope_scaling": {}, "rope_ext_factors": None}
    scaling = {**given, "rope_type": kind}
    for name in ("max_position_embeddings", "original_max_position_embeddings"):
        if name not in scaling and fields.values.get(name):
            scaling[name] = fields.values[name]
    if kind == "yarn":
        scaling = {"beta_fast": 32, "beta_slow": 1, **scaling}
    if kind != "longrope":
        return {"rope_scaling": scaling, "rope_ext_factors": None}
    factors = (given.get("long_factor"), given.get("short_factor"))
    if not all(isinstance(part, list) for part in factors):
        raise ModelConfigError(
            "rope_scaling is of type 'longrope' and lacks the lists long_factor and short_factor"
        )
    return {"rope_scaling": scaling, "rope_ext_factors": (*factors[0], *factors[1])}


def _notes(fields: _Fields, data: Mapping[str, Any]) -> tuple[str, ...]:
    """What MLC LLM leaves out of the models that it exports, and what its runtime would do."""
    notes = []
    window = data.get("sliding_window_size") if "model_config" in data else None
    if fields.model_type in _WITH_SLIDING_LAYERS and isinstance(window, int) and window > 0:
        notes.append(
            f"sliding_window_size is {window}; MLC LLM lets the whole cache slide then, which is "
            "refused where layers have windows of their own. Put -1 into mlc-chat-config.json"
        )
    scaling = fields.values.get("rope_scaling")
    if fields.model_type in _WITHOUT_SCALING and scaling:
        notes.append(f"rope_scaling is {scaling}; the model that MLC LLM exports does without it")
    cap = fields.values.get("attn_logit_softcapping")
    if cap:
        notes.append(
            f"attn_logit_softcapping is {cap}; the model that MLC LLM exports does without it. "
            "FlashInferPagedKVCache takes it as logits_soft_cap"
        )
    return tuple(notes)


def _dtype(fields: _Fields, dtype: str | None) -> str:
    """The dtype of the cache: as given, as quantised (``q4f16_1``), or that of the weights."""
    if dtype is not None:
        return normalize_dtype(dtype)
    quantization = fields.values.get("quantization")
    if isinstance(quantization, str):
        # The last part that names a float is that of activations: e4m3_e4m3_f16, q4bf16_1.
        names = re.findall(r"(?<![a-z0-9])(?:q\d)?(bf16|f16|f32)", quantization)
        if names:
            return normalize_dtype({"f32": "float32"}.get(names[-1], names[-1]))
        raise ModelConfigError(
            f"quantization is {quantization!r}, which names no dtype such as f16; give --dtype"
        )
    for name in ("torch_dtype", "dtype"):
        if isinstance(given := fields.values.get(name), str):
            return normalize_dtype(given.removeprefix("torch."))
    raise ModelConfigError(
        "the configuration has none of quantization, torch_dtype, dtype; give --dtype float16 or "
        "another"
    )


@dataclass(frozen=True)
class _Fields:
    """The fields of a configuration, wherever they stand in it."""

    model_type: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, data: Mapping[str, Any]) -> _Fields:
        values = dict(data)
        for name in ("model_config", *_NESTED):
            if isinstance(inner := values.get(name), dict):
                outer_type = values.get("model_type")
                values |= inner
                values["model_type"] = outer_type or inner.get("model_type")
        if isinstance(rope := values.get("rope_parameters"), dict):
            names = ("rope_theta", "partial_rotary_factor")
            values |= {name: rope[name] for name in names if name in rope}
        model_type = values.get("model_type")
        if not isinstance(model_type, str):
            raise ModelConfigError(
                f"model_type is {model_type!r}, expected the name of a family such as 'llama'. "
                "Give the config.json or mlc-chat-config.json of a model"
            )
        defaults = _DEFAULTS.get(model_type, {})
        return cls(model_type, {**defaults, **{k: v for k, v in values.items() if v is not None}})

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return the first of some fields that is given; 0 means that one is not."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ModelConfigError(f"{name} is {value!r}, expected a positive integer")
        return value

    def number(self, *names: str, default: float = 10000.0) -> float:
        """Return the first of some fields that is given; 0 means that one is not."""
        name, value = self._first(names, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelConfigError(f"{name} is {value!r}, expected a number")
        return float(value)

    def _first(self, names: tuple[str, ...], default: Any) -> tuple[str, Any]:
        for name in names:
            if self.values.get(name):
                return name, self.values[name]
        if default is None:
            raise ModelConfigError(
                f"the configuration of this {self.model_type!r} model has none of the fields "
                f"{', '.join(names)}, which tell what its KV cache is"
            )
        return names[0], default

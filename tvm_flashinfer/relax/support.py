"""Whether a model's paged KV cache can be served, and the reasons why not."""

from __future__ import annotations

import math
import os
from collections.abc import Callable

import tvm_ffi
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm.target import Target
from tvm.tirx import IntImm

from tvm_flashinfer.contract import contract_problems, tvm_name
from tvm_flashinfer.kernels import spec as kernel_spec
from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW, HAS_LAYER_WINDOW
from tvm_flashinfer.relax.config import PagedKVCacheConfig

#: Kinds of target whose attention runs through the packed functions.
TARGETS = ("cuda", "llvm")

#: Dtypes of the portable implementation. Those of CUDA are `kernel_spec.DTYPES`.
CPU_DTYPES = ("float16", "bfloat16", "float32")

#: What stands before each reason in a message.
_REASON = "\n  - "

#: Types of RoPE scaling, and the values that each one needs.
ROPE_TYPES = {
    "default": (),
    "gptj": (),
    "linear": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
    "longrope": ("max_position_embeddings", "original_max_position_embeddings"),
}

#: Query heads per KV head from which TVM decodes through a paged prefill slot that has a plan.
DECODE_BY_PREFILL_RATIO = 4

#: The kind of unit that serves a slot after a plan, by the name that ``flashinfer.cache_slot`` has
#: for the slot.
PLANNED_UNITS = {
    "prefill_ragged": "batch_prefill_ragged",
    "prefill_paged": "batch_prefill_paged",
    "decode_paged": "batch_decode",
    "mla": "batch_mla",
}

#: Those of multi-head attention.
MHA_PLANNED = ("prefill_paged", "prefill_ragged", "decode_paged")


@tvm_ffi.register_error
class UnsupportedConfigError(ValueError):
    """A paged KV cache cannot be served.

    Parameters
    ----------
    reasons : list of str
        Why not, one sentence each. tvm-ffi passes a message that was made from them: an exception
        that leaves a pass goes through C++, which keeps no more than its text.
    """

    #: What the message says before the reasons.
    headline = "this paged KV cache cannot be served by tvm_flashinfer:"

    def __init__(self, reasons: list[str] | str) -> None:
        if isinstance(reasons, str):
            super().__init__(reasons)
            items = reasons.split(_REASON)[1:]
            self.reasons = [item.splitlines()[0] for item in items]
            return
        self.reasons = list(reasons)
        lines = "".join(_REASON + reason for reason in self.reasons)
        super().__init__(self.headline + lines)


def unsupported_reasons(config: PagedKVCacheConfig, target: Target) -> list[str]:
    """Return why a paged KV cache cannot be served: one sentence each, none when it can be.

    A TVM that calls the functions of its cache in another way than ours are called is a reason too.

    Parameters
    ----------
    config : PagedKVCacheConfig
    target : tvm.target.Target
        What the model is compiled for. The environment variable ``MLC_MULTI_ARCH`` adds
        architectures to that of a CUDA target.
    """
    if target.kind.name not in TARGETS:
        return [
            f"the target is {target.kind.name!r}; there are kernels for {' and '.join(TARGETS)}"
        ]
    reasons = [f"{tvm_name()}: {problem}" for problem in contract_problems()]
    reasons += [reason for predicate in _PREDICATES for reason in predicate(config)]
    if target.kind.name == "cuda":
        reasons += _cuda_reasons(config, target)
    else:
        reasons += _cpu_reasons(config)
    return list(dict.fromkeys(reasons))


def target_archs(target: Target) -> tuple[str, ...]:
    """Return the GPU architectures of a CUDA target, such as ``("80", "90a")``.

    They are that of the target and those that MLC LLM is told in ``MLC_MULTI_ARCH``. Empty for
    other kinds of target.
    """
    if target.kind.name != "cuda":
        return ()
    named = [str(target.attrs.get("arch", "")), os.environ.get("MLC_MULTI_ARCH", "")]
    return kernel_spec.parse_archs(named)


def attention_head_dims(config: PagedKVCacheConfig, attention: str) -> tuple[int, int]:
    """Return the head dimensions of a slot: of queries and keys, and of values.

    Parameters
    ----------
    config : PagedKVCacheConfig
    attention : str
        A slot as ``flashinfer.cache_slot`` names it, such as ``"prefill_ragged"``.
    """
    if config.is_mla and attention == "prefill_ragged":
        # New tokens come to this slot as they are before compression.
        return config.mla_original_qk_head_dim, config.mla_original_v_head_dim
    return config.qk_head_dim, config.v_head_dim


def unplanned_reasons(config: PagedKVCacheConfig, target: Target, attention: str) -> list[str]:
    """Return why a slot has no plan on the host; none when it has one.

    FlashInfer's kernels need a plan and are the faster ones. The functions without one serve more.

    Parameters
    ----------
    config : PagedKVCacheConfig
    target : tvm.target.Target
    attention : str
        One of `PLANNED_UNITS`.
    """
    if target.kind.name != "cuda":
        return ["on CPU nothing needs a plan"]
    reasons = []
    if config.rotates and config.rope_mode == RopeMode.INLINE:
        # TVM does not tell functions that have a plan to rotate.
        reasons.append("rope_mode is inline; kernels with a plan take keys that are rotated")
    planned = kernel_spec.planned_head_dims(PLANNED_UNITS[attention])
    dims = attention_head_dims(config, attention)
    if dims not in planned:
        served = ", ".join(map(_dims_text, planned))
        reasons.append(f"head_dim is {_dims_text(dims)}; kernels with a plan have {served}")
    if config.logits_soft_cap:
        reasons.append(f"logits_soft_cap is {config.logits_soft_cap}; kernels with a plan cap none")
    if config.alibi_slopes:
        reasons.append("alibi_slopes are given; kernels with a plan know no positions")
    return reasons


def _dims_text(dims: tuple[int, int]) -> str:
    return f"{dims[0]}" if dims[0] == dims[1] else f"{dims[0]} with values of {dims[1]}"


def kernel_specs(config: PagedKVCacheConfig, target: Target) -> list[kernel_spec.KernelSpec]:
    """Return the kernels that a CUDA model with this cache needs in its library."""
    archs = target_archs(target)
    specs = [kernel_spec.KernelSpec("common", archs=archs)]

    def add(kind: str, dims: tuple[int, int]) -> None:
        spec = kernel_spec.KernelSpec(kind, config.dtype, *dims, archs=archs)
        specs.extend(kernel_spec.on_hopper(spec))

    for attention in ("prefill_ragged", "mla") if config.is_mla else MHA_PLANNED:
        dims = attention_head_dims(config, attention)
        planned = not unplanned_reasons(config, target, attention)
        # The kernel without a plan serves windows, trees, and steps of one token of each sequence.
        if not planned or attention != "mla":
            add("batch_attention", dims)
        if planned and not (attention == "decode_paged" and decodes_by_prefill(config)):
            add(PLANNED_UNITS[attention], dims)
    return list(dict.fromkeys(specs))


def decodes_by_prefill(config: PagedKVCacheConfig) -> bool:
    """Return whether TVM decodes through the paged prefill slot when that one has a plan."""
    return config.head_ratio >= DECODE_BY_PREFILL_RATIO


def _attn_kind(config: PagedKVCacheConfig) -> list[str]:
    if config.is_mla and set(config.layer_kinds) != {"mla"}:
        return ["attn_kind has 'mla' beside other kinds; TVM's cache has pages of one form"]
    return []


def _dtype(config: PagedKVCacheConfig) -> list[str]:
    if not config.dtype.startswith("float8"):
        return []
    return [
        f"the dtype is {config.dtype}; TVM's cache gives queries and outputs the dtype of its "
        "pages. 8-bit pages are served by flashinfer.bind_attention and "
        "flashinfer.bind_append_paged_kv_cache, without TVM's cache"
    ]


def _heads(config: PagedKVCacheConfig) -> list[str]:
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    if kv_heads > 0 and heads > 0 and heads % kv_heads == 0:
        return []
    return [
        f"num_attention_heads is {heads}, which is not a positive multiple of "
        f"num_key_value_heads, {kv_heads}"
    ]


def _head_dims(config: PagedKVCacheConfig) -> list[str]:
    if config.is_mla:
        reasons = []
        if not 0 < config.v_head_dim <= config.qk_head_dim:
            reasons.append(
                f"v_head_dim is {config.v_head_dim} and qk_head_dim is {config.qk_head_dim}; the "
                "value of MLA is the first part of its key"
            )
        for name in ("mla_original_qk_head_dim", "mla_original_v_head_dim"):
            if (dim := getattr(config, name)) < 1:
                reasons.append(f"{name} is {dim}; it must be positive, new tokens have that form")
        return reasons
    if config.v_head_dim == config.qk_head_dim:
        return []
    return [
        f"v_head_dim is {config.v_head_dim} and qk_head_dim is {config.qk_head_dim}; TVM's cache "
        "keeps keys and values of one head_dim"
    ]


def _rope_mode(config: PagedKVCacheConfig) -> list[str]:
    if config.rope_mode != RopeMode.INLINE or not config.has_sliding_layers:
        return []
    if (config.rope_theta, config.rope_scale) == (10000, 1):
        return []
    return [
        f"rope_mode is inline, rope_theta is {config.rope_theta}, rope_scale is "
        f"{config.rope_scale}, and some layers slide; TVM's cache rotates the pages of those with "
        "theta 10000 and scale 1, and their new tokens with the model's"
    ]


def _rope_scaling(config: PagedKVCacheConfig) -> list[str]:
    if not config.rotates:
        return []
    kind = config.rope_type
    if kind not in ROPE_TYPES:
        served = ", ".join(ROPE_TYPES)
        return [f"the RoPE scaling is {kind!r}; {served} are served so far"]
    missing = [key for key in ROPE_TYPES[kind] if key not in config.rope_scaling]
    if missing:
        return [f"rope_scaling of type {kind!r} lacks {', '.join(missing)}"]
    if kind == "yarn" and config.rope_theta <= 1:
        return [f"rope_theta is {config.rope_theta}; yarn needs one above 1"]
    if kind == "longrope" and config.rope_mode == RopeMode.INLINE:
        return ["rope_mode is inline; TVM's cache has factors of longrope in normal mode only"]
    return []


def _rope_numbers(config: PagedKVCacheConfig) -> list[str]:
    if not config.rotates:
        return []
    reasons = []
    for name in ("rope_theta", "rope_scale"):
        value = getattr(config, name)
        if not value > 0:
            reasons.append(f"{name} is {value}; it must be positive")
    return reasons


def _rotary_dim(config: PagedKVCacheConfig) -> list[str]:
    if not config.rotates:
        return []
    if 0 < config.rotary_dim <= config.qk_head_dim and config.rotary_dim % 2 == 0:
        return []
    return [
        f"rotary_dim is {config.rotary_dim}; it must be even, positive and at most head_dim, "
        f"{config.qk_head_dim}"
    ]


def _rope_ext_factors(config: PagedKVCacheConfig) -> list[str]:
    if not config.rotates:
        return []
    factors = config.rope_ext_factors
    absent = factors is None or (isinstance(factors, int | IntImm) and int(factors) == 0)
    if absent and config.rope_type == "longrope":
        return ["the RoPE scaling is 'longrope' and rope_ext_factors are not given"]
    if not absent and config.rope_type != "longrope":
        return [
            f"rope_ext_factors are given and the RoPE scaling is {config.rope_type!r}; they belong "
            "to 'longrope'"
        ]
    return []


def _disaggregation(config: PagedKVCacheConfig) -> list[str]:
    if config.enable_disaggregation:
        return ["enable_disaggregation is set; KV transfer is not served yet"]
    return []


def _layer_window(config: PagedKVCacheConfig) -> list[str]:
    if not config.has_sliding_layers:
        return []
    window = config.layer_sliding_window_size
    if window < 1:
        return [f"layer_sliding_window_size is {window}; it must be positive"]
    if window != DEFAULT_LAYER_WINDOW and not HAS_LAYER_WINDOW:
        return [
            f"layer_sliding_window_size is {window}; this TVM fixes it at {DEFAULT_LAYER_WINDOW}, "
            "apache-tvm 0.27 takes others"
        ]
    return []


def _logits_soft_cap(config: PagedKVCacheConfig) -> list[str]:
    cap = config.logits_soft_cap
    if math.isfinite(cap) and cap >= 0:
        return []
    return [f"logits_soft_cap is {cap}; it must be positive and finite, or 0 for none"]


def _alibi_slopes(config: PagedKVCacheConfig) -> list[str]:
    slopes = config.alibi_slopes
    if not slopes:
        return []
    reasons = []
    if config.is_mla:
        reasons.append("alibi_slopes are given; attn_kind 'mla' has no ALiBi")
    if len(slopes) != config.num_attention_heads:
        reasons.append(
            f"alibi_slopes has {len(slopes)} values; there must be one for each of the "
            f"{config.num_attention_heads} query heads"
        )
    if not all(map(math.isfinite, slopes)):
        reasons.append(f"alibi_slopes has a value that is not finite: {slopes}")
    return reasons


def _attention_sinks(config: PagedKVCacheConfig) -> list[str]:
    if config.attention_sinks is None:
        return []
    return [
        "attention_sinks are given; a cache holds none, since layers differ in them. Let the model "
        "call tvm_flashinfer.relax.attention_with_sinks in the place of the cache's method "
        "attention_with_fused_qkv, with the sinks of the layer"
    ]


def _cpu_reasons(config: PagedKVCacheConfig) -> list[str]:
    if config.dtype in CPU_DTYPES or _dtype(config):
        return []
    return [f"the dtype is {config.dtype}; on CPU there are {', '.join(CPU_DTYPES)}"]


def _cuda_reasons(config: PagedKVCacheConfig, target: Target) -> list[str]:
    if _dtype(config):
        return []  # said already
    # The value head_dim is checked above, so that the sentence names the model's own argument.
    return [
        reason
        for spec in kernel_specs(config, target)
        for reason in kernel_spec.unsupported_reasons(spec)
    ]


_PREDICATES: tuple[Callable[[PagedKVCacheConfig], list[str]], ...] = (
    _attn_kind,
    _dtype,
    _heads,
    _head_dims,
    _rope_mode,
    _rope_scaling,
    _rope_numbers,
    _rotary_dim,
    _rope_ext_factors,
    _disaggregation,
    _layer_window,
    _logits_soft_cap,
    _alibi_slopes,
    _attention_sinks,
)

"""Small configurations of models that MLC LLM knows: two layers, hidden states of 256."""

from __future__ import annotations

from typing import Any

#: Hopper, on a machine that may have no GPU. MLC LLM takes the text as its ``--device``.
TARGET = {
    "kind": "cuda",
    "arch": "sm_90a",
    "max_threads_per_block": 1024,
    "max_shared_memory_per_block": 49152,
    "thread_warp_size": 32,
}

_COMMON: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 512,
    "context_window_size": 2048,
    "prefill_chunk_size": 512,
    "max_batch_size": 8,
}
_NOTHING = object()


def _model(model_type: str, **changes: Any) -> dict[str, Any]:
    config = {"model_type": model_type, **_COMMON, **changes}
    return {name: value for name, value in config.items() if value is not _NOTHING}


_LLAMA3_SCALING = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_QWEN = {"hidden_act": "silu", "rope_theta": 1000000, "head_dim": 128}
_GEMMA = {
    "attention_bias": False,
    "hidden_activation": "gelu_pytorch_tanh",
    "head_dim": 256,
    "num_key_value_heads": 1,
}
_GEMMA3_TEXT = {
    **{name: _COMMON[name] for name in ("hidden_size", "intermediate_size", "rms_norm_eps")},
    **{name: _GEMMA[name] for name in ("head_dim", "hidden_activation", "num_key_value_heads")},
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "rope_theta": 1000000,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
}
_LONGROPE = {"type": "longrope", "long_factor": [2.0] * 48, "short_factor": [1.0] * 48}
_PHI3 = {
    "hidden_size": 384,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
}

#: By a name of the test: what ``config.json`` of the model would be.
MODELS: dict[str, dict[str, Any]] = {
    "llama2": _model("llama", num_key_value_heads=4, head_dim=64),
    "llama3": _model(
        "llama", head_dim=128, num_attention_heads=8, num_key_value_heads=2,
        position_embedding_base=500000, rope_scaling=_LLAMA3_SCALING,
    ),
    "qwen2": _model("qwen2", num_attention_heads=2, **_QWEN),
    "qwen3": _model("qwen3", attention_bias=False, **_QWEN),
    "gemma": _model("gemma", **_GEMMA),
    "gemma2": _model(
        "gemma2", final_logit_softcapping=30.0, attn_logit_softcapping=50.0, sliding_window=2048,
        query_pre_attn_scalar=256, **_GEMMA,
    ),
    "gemma3": _model(
        "gemma3_text", text_config=_GEMMA3_TEXT, num_hidden_layers=6, context_window_size=8192,
    ),
    "mistral": _model(
        "mistral", sliding_window=1024, context_window_size=_NOTHING, head_dim=64,
        prefill_chunk_size=256,
    ),
    "mistral_full": _model("mistral", sliding_window=None, head_dim=128),
    "phi3": _model("phi3", **_PHI3),
    "phi3_longrope": _model(
        "phi3", **{**_PHI3, "max_position_embeddings": 131072}, rope_scaling=_LONGROPE
    ),
    "mixtral": _model("mixtral", head_dim=64, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": _model(
        "deepseek_v2", num_key_value_heads=4, moe_intermediate_size=128, n_shared_experts=1,
        n_routed_experts=4, num_experts_per_tok=2, norm_topk_prob=True, first_k_dense_replace=1,
        moe_layer_freq=1, routed_scaling_factor=1.0, scoring_func="softmax", topk_method="greedy",
        n_group=1, topk_group=1, attention_bias=False, kv_lora_rank=512, qk_rope_head_dim=64,
        v_head_dim=128, qk_nope_head_dim=128, rope_theta=10000, q_lora_rank=None,
        rope_scaling={
            "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 0.707,
            "mscale_all_dim": 0.707, "original_max_position_embeddings": 4096,
        },
    ),
    "qwen3_5": _model(
        "qwen3_5", num_hidden_layers=4, head_dim=256, linear_num_key_heads=2,
        linear_num_value_heads=2, tie_word_embeddings=True,
    ),
    "bert": _model(
        "bert", head_dim=64, layer_norm_eps=1e-5, hidden_act="gelu", num_key_value_heads=_NOTHING,
        rms_norm_eps=_NOTHING, max_position_embeddings=512, context_window_size=512,
    ),
}  # fmt: skip

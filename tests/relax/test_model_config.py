"""What a model's file says of its KV cache, for the layouts of fields that models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from tvm_flashinfer.relax.model_config import (
    ModelConfigError,
    parse_model_config,
    read_model_config,
)
from tvm_flashinfer.relax.support import unsupported_reasons

LLAMA31_8B = {
    "model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
}  # fmt: skip
QWEN3_06B = {
    "model_type": "qwen3", "hidden_size": 1024, "num_attention_heads": 16, "head_dim": 128,
    "num_hidden_layers": 28, "num_key_value_heads": 8, "rope_theta": 1000000,
    "rope_scaling": None, "dtype": "bfloat16",
}  # fmt: skip
GEMMA3_1B = {
    "model_type": "gemma3_text", "hidden_size": 1152, "num_attention_heads": 4,
    "num_key_value_heads": 1, "num_hidden_layers": 26, "sliding_window": 512,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 27, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40},
}  # fmt: skip
PHI35_MINI = {
    "model_type": "phi3", "hidden_size": 3072, "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 32, "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "su", "long_factor": [1.5] * 48, "short_factor": [1.0] * 48},
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "dtype": "float16"}
BIGCODE = {**GPT2, "model_type": "gpt_bigcode", "n_embd": 2048, "n_head": 16}
GPTJ = {**GPT2, "model_type": "gptj", "n_embd": 4096, "n_head": 16, "rotary_dim": 64}
STABLELM_3B = {
    "model_type": "stablelm", "hidden_size": 2560, "num_attention_heads": 32,
    "num_hidden_layers": 32, "partial_rotary_factor": 0.25, "torch_dtype": "float16",
}  # fmt: skip
CHATGLM3 = {
    "model_type": "chatglm", "hidden_size": 4096, "num_attention_heads": 32, "kv_channels": 128,
    "num_layers": 28, "multi_query_group_num": 2, "torch_dtype": "float16",
}  # fmt: skip
QWEN35 = {
    "model_type": "qwen3_5", "torch_dtype": "bfloat16",
    "text_config": {
        "model_type": "qwen3_5_text", "num_attention_heads": 8, "num_key_value_heads": 2,
        "head_dim": 256, "num_hidden_layers": 24, "full_attention_interval": 4,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25},
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (LLAMA31_8B, {"num_key_value_heads": 8, "qk_head_dim": 128, "rope_type": "llama3"}),
        (QWEN3_06B, {"qk_head_dim": 128, "rope_theta": 1e6, "dtype": "bfloat16"}),
        (
            DEEPSEEK_V2_LITE,
            {
                "attn_kind": "mla", "num_key_value_heads": 1, "qk_head_dim": 576,
                "v_head_dim": 512, "mla_original_qk_head_dim": 192,
                "mla_original_v_head_dim": 128, "rope_mode": int(RopeMode.NONE),
            },
        ),
        (PHI35_MINI, {"qk_head_dim": 96, "rope_type": "longrope", "rotary_dim": 96}),
        (GPT2, {"qk_head_dim": 64, "num_key_value_heads": 12, "rope_mode": int(RopeMode.NONE)}),
        (BIGCODE, {"qk_head_dim": 128, "num_key_value_heads": 1}),
        (GPTJ, {"qk_head_dim": 256, "rotary_dim": 64, "rope_type": "gptj"}),
        (STABLELM_3B, {"qk_head_dim": 80, "rotary_dim": 20, "num_key_value_heads": 32}),
        (CHATGLM3, {"num_hidden_layers": 28, "num_key_value_heads": 2, "qk_head_dim": 128}),
        (QWEN35, {"num_hidden_layers": 6, "rotary_dim": 64, "rope_theta": 1e7}),
    ],
    ids=lambda value: value.get("model_type", ""),
)  # fmt: skip
def test_families(data: dict[str, Any], expected: dict[str, Any], cuda: Any) -> None:
    """What each model's card says; all of them are served on Hopper."""
    cache = parse_model_config(data).cache
    assert {name: getattr(cache, name) for name in expected} == expected
    assert unsupported_reasons(cache, cuda) == []


def test_layers_with_windows() -> None:
    """Every sixth layer of Gemma 3 sees all tokens; newer files name each layer."""
    cache = parse_model_config(GEMMA3_1B).cache
    whole = [layer for layer, kind in enumerate(cache.layer_kinds) if kind == "mha"]
    assert whole == [5, 11, 17, 23]
    assert (cache.qk_head_dim, cache.layer_sliding_window_size) == (256, 512)
    types = ["sliding_attention"] * 25 + ["full_attention"]
    cache = parse_model_config({**GEMMA3_1B, "layer_types": types}).cache
    assert cache.layer_kinds.index("mha") == 25


@pytest.mark.parametrize(
    ("outer", "inner", "window"),
    [({}, {"sliding_window": 512}, 512), ({}, {"sliding_window_size": 512}, 512), ({}, {}, 4096),
     ({"sliding_window_size": -1}, {"sliding_window_size": 512}, 512),
     ({"sliding_window_size": -1}, {"sliding_window": 512}, 512)],
)  # fmt: skip
def test_names_of_the_window(outer: dict, inner: dict, window: int) -> None:
    """That of Hugging Face and that of MLC LLM, inside of a model for text and images."""
    text = {name: value for name, value in GEMMA3_1B.items() if name != "sliding_window"}
    data = {"model_type": "gemma3", "model_config": {**outer, "text_config": {**text, **inner}}}
    assert parse_model_config(data).cache.layer_sliding_window_size == window


def test_file_of_mlc(tmp_path: Path) -> None:
    """Fields are inside of model_config, and the quantisation names the dtype."""
    data = {
        "model_type": "llama",
        "quantization": "q4f16_1",
        "model_config": {**LLAMA31_8B, "tensor_parallel_shards": 2, "head_dim": 0},
    }
    path = tmp_path / "mlc-chat-config.json"
    path.write_text(json.dumps(data))
    cache = read_model_config(path).cache
    assert (cache.num_attention_heads, cache.num_key_value_heads) == (16, 4)
    assert (cache.qk_head_dim, cache.dtype) == (128, "float16")
    cache = read_model_config(path, dtype="bf16", tensor_parallel_shards=4).cache
    assert (cache.num_attention_heads, cache.dtype) == (8, "bfloat16")


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [
        ("q0f16", "float16"),
        ("q0bf16", "bfloat16"),
        ("q0f32", "float32"),
        ("q4bf16_1", "bfloat16"),
        ("q4f16_ft", "float16"),
        ("e4m3_e4m3_f16", "float16"),
    ],
)
def test_dtype_of_a_quantisation(quantization: str, dtype: str) -> None:
    data = {"model_type": "gpt2", "quantization": quantization, "model_config": GPT2}
    assert parse_model_config(data).cache.dtype == dtype


def test_what_mlc_leaves_out_is_noted() -> None:
    scaling = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    model = parse_model_config({**QWEN3_06B, **scaling, "attn_logit_softcapping": 50.0})
    assert model.cache.rope_scaling == {}
    assert "'dynamic'" in model.notes[0]
    assert "attn_logit_softcapping is 50.0" in model.notes[1]
    assert parse_model_config(QWEN3_06B).notes == ()


@pytest.mark.parametrize(("window", "noted"), [(512, True), (-1, False)])
def test_window_of_the_whole_cache_beside_those_of_layers(window: int, noted: bool) -> None:
    """MLC LLM's file has one for its runtime, outside of the model's fields."""
    data = {"model_type": "gemma3_text", "model_config": GEMMA3_1B, "sliding_window_size": window}
    model = parse_model_config(data)
    assert model.cache.layer_sliding_window_size == 512
    assert any("Put -1 into mlc-chat-config.json" in note for note in model.notes) == noted


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": None}, "model_type is None, expected the name of a family"),
        ({"model_type": "rwkv6"}, "'rwkv6'; such models have no attention"),
        ({"num_hidden_layers": None}, "none of the fields num_hidden_layers, n_layer, num_layers"),
        ({"num_attention_heads": "many"}, "num_attention_heads is 'many', expected a positive"),
        ({"num_attention_heads": -1}, "num_attention_heads is -1, expected a positive"),
        ({"hidden_size": None}, "none of the fields hidden_size, n_embd, n_embed"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4', expected a number"),
        ({"rope_scaling": 8}, "rope_scaling is 8, expected an object"),
        ({"rope_scaling": {"type": "su"}}, "lacks the lists long_factor and short_factor"),
        ({"torch_dtype": None}, "none of quantization, torch_dtype, dtype"),
        ({"quantization": "q8"}, "quantization is 'q8', which names no dtype"),
        ({"tensor_parallel_shards": 3}, "which 3 tensor_parallel_shards cannot share"),
    ],
)
def test_errors_name_the_field(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        parse_model_config({**LLAMA31_8B, **change})


@pytest.mark.parametrize(
    ("text", "message"), [("", "is no JSON"), ("[" * 10**6, "is no JSON"), ("[1]", "holds a list")]
)
def test_file_that_is_none(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ModelConfigError, match=message):
        read_model_config(path)

"""What is read from a model's file, against what MLC LLM's own models ask of their cache."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tvm_flashinfer.relax.model_config import ModelConfigError, parse_model_config

#: Prints MLC LLM's presets with the arguments of the calls that create their caches.
PRESETS = """
import copy, json, logging
logging.disable(logging.CRITICAL)
import mlc_llm.nn.kv_cache
from mlc_llm.model.model import MODELS
from mlc_llm.model.model_preset import MODEL_PRESETS
from tvm import tirx

class Asked(Exception):
    pass

def ask(**arguments):
    raise Asked({name: value for name, value in arguments.items() if name != "layer_partition"})

mlc_llm.nn.kv_cache.PagedKVCache.create_generic = staticmethod(ask)
sizes = [tirx.Var(name, "int64") for name in "abcde"]
for name, preset in MODEL_PRESETS.items():
    kind = MODELS[preset["model_type"]]
    model = kind.model(kind.config.from_dict(copy.deepcopy(preset)))
    asked = None
    try:
        if hasattr(model, "create_paged_kv_cache"):
            model.create_paged_kv_cache(*sizes)
    except Asked as error:
        asked = error.args[0]
    print(json.dumps([name, preset, asked], default=lambda value: None))
"""

NUMBERS = (
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "qk_head_dim",
    "v_head_dim", "mla_original_qk_head_dim", "mla_original_v_head_dim", "rope_mode",
)  # fmt: skip


def test_presets(run_with_mlc_llm: Callable[[str], str]) -> None:
    """Every one of them: heads, dimensions, layers with windows, RoPE and its scaling."""
    lines = [line for line in run_with_mlc_llm(PRESETS).splitlines() if line.startswith('["')]
    presets = [json.loads(line) for line in lines]
    assert len(presets) > 50
    for name, preset, asked in presets:
        if asked is None:
            with pytest.raises(ModelConfigError, match="no attention through a KV cache"):
                parse_model_config(preset, "float16")
            continue
        cache = parse_model_config(preset, "float16").cache
        numbers = {number: int(asked.get(number) or 0) for number in NUMBERS}
        assert {number: getattr(cache, number) for number in NUMBERS} == numbers, name
        kinds = asked["attn_kind"]
        assert cache.attn_kind == (kinds if isinstance(kinds, str) else tuple(kinds)), name
        if not asked["rope_mode"]:
            continue
        assert cache.rope_theta == asked["rope_theta"], name
        assert cache.rotary_dim == (asked.get("rotary_dim") or asked["qk_head_dim"]), name
        scaling = asked.get("rope_scaling") or {}
        assert cache.rope_type == scaling.get("rope_type", "default"), name

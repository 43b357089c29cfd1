"""MLC LLM itself, where it is installed: ``python -m mlc_llm compile`` beside a released TVM.

The models are small ones of `MODELS`, compiled for a GPU that need not be there.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest
from mlc_models import MODELS, TARGET

from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW
from tvm_flashinfer.report import ReportError

OURS = "create_flashinfer_paged_kv_cache"
TVMS = "create_tir_paged_kv_cache"

#: Which functions make our cache.
FUNCTIONS = {name: {OURS} for name in MODELS} | {
    "gemma3": {OURS, TVMS},
    "mistral": {OURS, TVMS},
    "qwen3_5": {TVMS},
}
WITH_CACHE = [name for name in MODELS if name != "bert"]


def functions(library: Any) -> set[str]:
    """Names of the functions of a library that is for another machine."""
    text = library.read_bytes()
    return {name for name in (OURS, TVMS, "create_rnn_state") if name.encode() in text}


def assert_native(compiled: Any, sites: set[str]) -> None:
    assert compiled.returncode == 0, compiled.text[-3000:]
    report = compiled.report
    assert report.fallbacks == [], compiled.text[-3000:]
    assert {row.site for row in report.rows} == sites
    for row in report.rows:
        line = f"tvm-flashinfer: {row.site} {row.slot}: native ({row.kernel}, {row.arch})"
        assert line in compiled.text.splitlines()


@pytest.mark.parametrize("quantization", ["q0f16", "q0bf16", "q4f16_1"])
@pytest.mark.parametrize("name", WITH_CACHE)
def test_models(name: str, quantization: str, compile_model) -> None:
    """Every slot is ours, for 16-bit and quantised weights."""
    if name == "gemma3" and not HAS_LAYER_WINDOW:
        pytest.skip("TVM 0.26 fixes the window of layers at 1024")
    assert_native(compile_model(name, quantization, TVM_FLASHINFER_STRICT="1"), FUNCTIONS[name])


def test_window_that_this_tvm_lacks(compile_model) -> None:
    if HAS_LAYER_WINDOW:
        pytest.skip("this TVM takes the window")
    compiled = compile_model("gemma3")
    assert compiled.returncode == 0, compiled.text[-3000:]
    assert "all: fallback: layer_sliding_window_size is 512" in compiled.text


@pytest.mark.parametrize("preset", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("name", ["llama3", "mixtral"])
def test_presets(name: str, preset: str, compile_model) -> None:
    compiled = compile_model(name, opt=preset)
    if preset in ("O0", "O1"):  # they ask for no FlashInfer
        assert compiled.returncode == 0, compiled.text[-3000:]
        with pytest.raises(ReportError):
            _ = compiled.report
        return
    assert_native(compiled, {OURS})


@pytest.mark.parametrize("shards", [1, 2, 4])
def test_tensor_parallel(shards: int, compile_model) -> None:
    config = {**MODELS["llama3"], "num_key_value_heads": 4}
    assert_native(compile_model(config, overrides=f"tensor_parallel_shards={shards}"), {OURS})


def test_pipeline_stages(compile_model) -> None:
    assert_native(compile_model("llama3", overrides="pipeline_parallel_stages=2"), {OURS})


def test_both_kinds_of_parallelism(compile_model) -> None:
    overrides = "tensor_parallel_shards=2;pipeline_parallel_stages=2"
    assert_native(compile_model("llama3", overrides=overrides), {OURS})


def test_hybrid_model_keeps_its_state(compile_model) -> None:
    compiled = compile_model("qwen3_5")
    assert functions(compiled.library) == {TVMS, "create_rnn_state"}


def test_attention_outside_of_a_cache(compile_model) -> None:
    """Of BERT: with a head_dim that MLC LLM gives to FlashInfer, and with another one."""
    config = {**MODELS["bert"], "hidden_size": 512}
    assert_native(compile_model({**config, "head_dim": 128}), {"prefill"})
    compiled = compile_model("bert")
    assert compiled.returncode == 0, compiled.text[-3000:]
    (row,) = compiled.report.rows
    assert (row.slot, row.status) == ("sequence_prefill", "fallback")
    assert compile_model("bert", TVM_FLASHINFER_STRICT="1").returncode != 0


def test_flashinfer_is_off(compile_model) -> None:
    """Nothing of ours is in the library, and nothing is told."""
    compiled = compile_model("mistral", opt="flashinfer=0")
    assert compiled.returncode == 0, compiled.text[-3000:]
    assert "tvm-flashinfer:" not in compiled.text
    assert b"flashinfer." not in compiled.library.read_bytes()


@pytest.mark.parametrize("strict", ["0", "1"])
def test_fallback(strict: str, compile_model) -> None:
    """Told with its cause; in strict mode no library is left."""
    compiled = compile_model("llama3", "q0f32", TVM_FLASHINFER_STRICT=strict)
    assert "all: fallback: the dtype is float32" in compiled.text
    assert (compiled.returncode == 0) == (strict == "0")
    assert compiled.library.exists() == (strict == "0")


def test_target_that_turns_it_off(compile_model) -> None:
    """Those that there are."""
    target = {**TARGET, "arch": "sm_75"}
    compiled = compile_model("llama3", "q4f16_1", target=target, TVM_FLASHINFER_STRICT="1")
    assert compiled.returncode != 0
    assert "'75'; the kernels need 8.0 (Ampere)" in compiled.text
    assert not compiled.library.exists()


def test_switched_off(compile_model) -> None:
    """MLC LLM meets a TVM as it is, and does not even start."""
    compiled = compile_model("llama3", TVM_FLASHINFER_DISABLE="1")
    assert compiled.returncode != 0
    assert "tvm-flashinfer:" not in compiled.text


@pytest.mark.nvcc
def test_self_contained_library(compile_model, monkeypatch) -> None:
    """It names no kernel that is looked up elsewhere, and loads where this package is not."""
    compiled = compile_model("llama3", TVM_FLASHINFER_SHIP="")
    assert_native(compiled, {OURS})
    assert compiled.report.ship == "self-contained"
    code = """
import json, sys
sys.modules["tvm_flashinfer"] = None
import tvm
library = tvm.runtime.load_module(sys.argv[1])
print(json.dumps([library.implements_function(name, query_imports=True) for name in sys.argv[2:]]))
"""
    names = [OURS, TVMS, "flashinfer_report"]
    done = subprocess.run(
        [sys.executable, "-c", code, str(compiled.library), *names],
        env={**os.environ, "TVM_FLASHINFER_DISABLE": "1"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert json.loads(done.stdout) == [True] * 3

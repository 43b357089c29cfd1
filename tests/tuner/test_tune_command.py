"""The command ``tune``: what it would measure, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tuning_texts import identity_of_here

from tvm_flashinfer.cli import main
from tvm_flashinfer.cli import tune as tune_module
from tvm_flashinfer.kernels.spec import attention_specs, mla_specs
from tvm_flashinfer.tuner import Limits, Point, Tactic, grid

DEEPSEEK_V2_LITE = {
    "model_type": "deepseek_v2", "hidden_size": 2048, "num_attention_heads": 16,
    "num_key_value_heads": 16, "num_hidden_layers": 27, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "torch_dtype": "bfloat16",
    "rope_scaling": {"type": "yarn", "factor": 40},
}  # fmt: skip

HEADS = ("--heads", "32/8", "--head-dim", "128")


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, ["tune", *map(str, arguments)])


def test_dry_run() -> None:
    lines = invoke(*HEADS, "--dry-run", "--max-batch", 4, "--max-keys", 1024).stdout.splitlines()
    assert "decode_paged, batch 4, rows 1, keys 1024" in lines
    assert "prefill_ragged, batch 1, rows 512, keys 512, causal" in lines
    assert not any("batch 8, rows 1," in line for line in lines)


def test_shape_of_a_model(tmp_path: Path) -> None:
    """A shard of a model with 8 query heads per KV head."""
    path = tmp_path / "config.json"
    config = {
        "model_type": "llama", "hidden_size": 8192, "num_attention_heads": 64,
        "num_key_value_heads": 8, "num_hidden_layers": 2, "head_dim": 128, "rope_theta": 10000,
        "context_window_size": 4096, "max_position_embeddings": 4096, "vocab_size": 100,
        "intermediate_size": 100, "torch_dtype": "bfloat16",
    }  # fmt: skip
    path.write_text(json.dumps(config))
    [found] = tune_module._shapes(path, None, None, None, 4)
    assert (found.num_qo_heads, found.num_kv_heads, found.dtype) == (16, 2, "bfloat16")


def test_shapes_of_latent_attention(tmp_path: Path) -> None:
    """DeepSeek's models attend to new tokens before compression."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(DEEPSEEK_V2_LITE))
    latent, new_tokens = tune_module._shapes(path, None, None, None, None)
    assert (latent.num_qo_heads, latent.is_mla) == (16, True)
    assert new_tokens.num_kv_heads == 16
    assert (new_tokens.head_dim_qk, new_tokens.head_dim_vo) == (192, 128)
    assert {point.slot for point in grid(new_tokens, Limits())} == {"prefill_ragged"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give CONFIG, or --heads and --head-dim"),
        (("--heads", "32/8"), "give CONFIG, or --heads and --head-dim"),
        (("--heads", "32", "--head-dim", "128"), "expected two numbers as 32/8"),
        (("--heads", "32/5", "--head-dim", "128"), "expected a multiple as in 32/8"),
        (("--heads", "32/8", "--head-dim", "96"), "the head dimension is 96; 64, 128, 256 have"),
        ((*HEADS, "--dtype", "float32"), "the dtype is float32; kernels have"),
    ],
)
def test_used_wrongly(arguments: Any, message: str) -> None:
    result = invoke(*arguments, "--dry-run")
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_device_that_is_not_there() -> None:
    result = invoke(*HEADS, "--device", 63)
    assert result.exit_code == 1
    assert "the device is cuda:63; the CUDA driver shows" in result.stderr


def test_only_kernels_that_are_not_loaded_are_compiled() -> None:
    """Names are those of the native library, which a library of other dtypes does not have."""
    specs = attention_specs(["float16"], [128], ["90a"]) + mla_specs(["bfloat16"], ["90a"])
    kinds = lambda *loaded: [spec.kind for spec in tune_module._missing(specs, loaded)]  # noqa: E731
    everything = [
        "batch_prefill_plan@80", "batch_decode:f16:d128@80", "batch_decode_plan:f16:d128@80",
        "batch_prefill_paged:f16:d128@80,90a", "batch_prefill_paged_sm90:f16:d128@90a",
        "batch_prefill_ragged:f16:d128@80,90a", "batch_prefill_ragged_sm90:f16:d128@90a",
        "batch_attention:f16:d128@80,90a", "batch_mla:bf16:d576x512@80",
        "batch_mla_sm90:bf16:d576x512@90a",
    ]  # fmt: skip
    left = set(kinds(*everything))
    assert left <= {"batch_prefill_ragged", "batch_prefill_ragged_sm90", "batch_attention"}
    assert "common" in kinds()
    assert "batch_decode" in kinds("batch_prefill_plan@80", "batch_decode:bf16:d128@80")


def test_interrupted_and_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Point] = []

    def measure(point: Point, tactic: Tactic) -> float:
        if len(asked) == 20:
            asked.append(point)
            raise KeyboardInterrupt
        asked.append(point)
        return 1e-5

    monkeypatch.setattr(tune_module, "_identity", lambda _: identity_of_here())
    monkeypatch.setattr(tune_module, "_measurement", lambda *_: measure)
    path = tmp_path / "tuning.json"
    arguments = (*HEADS, "--output", path, "--max-batch", 4, "--max-keys", 1024)
    result = invoke(*arguments)
    assert result.exit_code == 130
    assert f"what was measured is in {path}.partial" in result.stderr
    first = result.stdout.splitlines()
    assert first[0].startswith("[1/")
    result = invoke(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[0].startswith(f"[{len(first) + 1}/")
    assert str(path) in result.stdout.splitlines()[-1]
    other = tmp_path / "other.json"
    other.write_text("{}")
    result = invoke(*HEADS, "--output", other)
    assert result.exit_code == 1
    assert "is no file of tuning" in result.stderr

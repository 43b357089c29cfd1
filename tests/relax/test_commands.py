"""The commands about models: `report` of a library, and `support` of a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from test_model_config import DEEPSEEK_V2_LITE, LLAMA31_8B

from tvm_flashinfer.cli import main
from tvm_flashinfer.relax import CompileReport, ReportRow, read_report

ROW = ReportRow("create", "decode", "native", "flashinfer.batch_decode_run", "sm_90a")
FALLBACK = ReportRow("create", "tree", "fallback", "tir_tree", "sm_90a", ("no kernel yet",))


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA31_8B))
    return path


def test_report_of_a_library(library: Path) -> None:
    result = invoke("report", library)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0] == f"{library}: 13 of 13 native (llvm, shared)"
    assert lines[2] == "create_flashinfer_paged_kv_cache"
    assert lines[4].split() == ["append", "native", "cpu", "flashinfer.append_paged_kv_cache"]
    assert lines[-1].endswith("`pip install 'tvm-flashinfer>=0.1.0'`, which is here")


def test_report_as_json(library: Path) -> None:
    result = invoke("report", "--json", library)
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["requires"] == "pip install 'tvm-flashinfer>=0.1.0'"
    assert data["satisfied"]
    assert CompileReport.from_json(result.stdout) == read_report(library)


def test_report_with_a_fallback(tmp_path: Path) -> None:
    """Of a library with its own kernels, which needs nothing."""
    path = tmp_path / "model.so"
    text = CompileReport("cuda", "self-contained", [ROW, FALLBACK]).to_json()
    path.write_bytes(b"\x7fELF" + text.encode())
    result = invoke("report", path)
    assert result.exit_code == 1
    assert "1 of 2 native (cuda, self-contained)" in result.stdout
    assert "no kernel yet" in result.stdout
    assert "needs" not in result.stdout
    assert json.loads(invoke("report", path, "--json").stdout)["requires"] is None


def test_report_of_a_tuned_library(tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    report = CompileReport("cuda", "self-contained", [ROW], "NVIDIA H200, 3 entries, 12ab")
    path.write_bytes(b"\x7fELF" + report.to_json().encode())
    assert read_report(path) == report
    expected = "1 of 1 native (cuda, self-contained, tuned for NVIDIA H200, 3 entries, 12ab)"
    assert expected in invoke("report", path).stdout


def test_report_of_a_library_that_cannot_be_loaded_here(library: Path, tmp_path: Path) -> None:
    newer = tmp_path / "newer.so"
    newer.write_bytes(library.read_bytes().replace(b"flashinfer>=0.1.0", b"flashinfer>=9.8.7"))
    result = invoke("report", newer)
    assert result.exit_code == 4
    assert "13 of 13 native" in result.stdout
    assert "`pip install 'tvm-flashinfer>=9.8.7'`, which is missing here" in result.stdout


def test_report_loads_nothing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A library is a file to it: it is not given to the dynamic linker."""
    import ctypes

    import tvm_ffi

    def load(*_: Any, **__: Any) -> None:
        pytest.fail("the library was loaded")

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.setattr(tvm_ffi, "load_module", load)
    assert invoke("report", library).exit_code == 0
    assert str(library) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"text", "is no library: it begins with"), (b"\x7fELF", "holds no report")],
)
def test_report_of_another_file(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    path.write_bytes(content)
    result = invoke("report", path)
    assert result.exit_code == 3
    assert message in result.stderr
    assert invoke("report", tmp_path / "none.so").exit_code == 2


def test_support_of_a_model(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels for each architecture, and one table for all that are served alike."""
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(tmp_path / "cache"))
    result = invoke("support", config, "--arch", "80,90a")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("llama: 32 layers of mha, 32 query heads on 8 KV heads")
    assert lines[2] == "sm_80,sm_90a: 13 of 13 native"
    named = {line.split()[0] for line in lines if line.startswith(("batch_", "common_"))}
    kinds = ("common", *(f"batch_{k}_bf16_d128" for k in ("attention", "prefill_paged")))
    assert {f"{kind}_sm{arch}" for kind in kinds for arch in ("80", "90a")} <= named


def test_support_as_json(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("MLC_MULTI_ARCH", "89,cpu")
    result = invoke("support", config, "--json", "--dtype", "fp16")
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert data["model"]["qk_head_dim"] == 128
    assert data["model"]["dtype"] == "float16"
    assert set(data["archs"]) == {"89", "cpu"}
    assert data["archs"]["cpu"]["kernels"] == {}
    states = data["archs"]["89"]["kernels"]
    assert set(states.values()) <= {"to compile", "cannot be compiled here"}
    assert "batch_prefill_paged_f16_d128_sm89" in states


def test_support_where_something_falls_back(config: Path) -> None:
    result = invoke("support", config, "--arch", "75,cpu")
    assert result.exit_code == 1
    assert "sm_75: 0 of 1 native" in result.stdout
    assert "8.0 (Ampere) or newer" in result.stdout
    assert "cpu: 13 of 13 native" in result.stdout


def test_support_names_the_kernel_of_hopper(config: Path, tmp_path: Path) -> None:
    config.write_text(json.dumps(DEEPSEEK_V2_LITE))
    found = json.loads(invoke("support", config, "--arch", "80,90a", "--json").stdout)["archs"]
    names = {arch: set(answer["kernels"]) for arch, answer in found.items()}
    assert "batch_mla_sm90_bf16_d576x512_sm90a" in names["90a"]
    assert not any("mla_sm90" in name for name in names["80"])


def test_support_of_what_cannot_be_read(config: Path) -> None:
    config.write_text(json.dumps({**LLAMA31_8B, "num_hidden_layers": None}))
    result = invoke("support", config)
    assert result.exit_code == 2
    assert "none of the fields num_hidden_layers" in result.stderr
    assert invoke("support", config, "--tensor-parallel-shards", "0").exit_code == 2


def test_support_says_where_no_kernel_was_measured(config: Path) -> None:
    note = "no kernel was ever measured on sm_80, sm_89: the rules"
    arguments = ("support", config, "--arch", "80,89,90a,cpu")
    assert f"note: {note}" in invoke(*arguments).stdout
    assert json.loads(invoke(*arguments, "--json").stdout)["never_measured"].startswith(note)
    assert "ever measured" not in invoke("support", config, "--arch", "90a").stdout

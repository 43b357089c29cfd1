"""The command line, as a user types it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from build_sandbox import compilations
from click.testing import CliRunner

import tvm_flashinfer
from tvm_flashinfer.cli import main


def invoke(*arguments):
    return CliRunner().invoke(main, arguments)


def test_build(sandbox, cache_dir):
    result = invoke("build", "--dtype", "fp16", "--head-dim", "128", "--arch", "sm_80", "-j", "2")
    assert result.exit_code == 0
    names = result.stdout.splitlines()[:5]
    assert names[0] == "common_sm80"
    assert names[3] == "batch_decode_f16_d128_sm80"
    assert "[5/5]" in result.stderr
    assert str(cache_dir / "libraries") in result.stdout.splitlines()[-1]
    again = invoke("build", "--preset", "fp16-d128", "--arch", "80")
    assert again.exit_code == 0
    assert again.stderr == ""
    assert len(compilations(sandbox)) == 5


def test_build_fails(sandbox, csrc):
    (csrc / "kernels" / "cuda" / "units" / "common.cu").write_text("broken")
    result = invoke("build", "--preset", "common", "--arch", "80")
    assert result.exit_code == 1
    assert "common_sm80: the build failed" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--preset", "llama"], "'llama' is not one of"),
        (["--preset", "all", "--dtype", "float16"], "give one or the other"),
        (["--head-dim", "100"], "head_dim is 100; there are kernels for 16, 32"),
        (["--arch", "75"], "8.0 (Ampere) or newer"),
        (["--jobs", "0"], "0 is not in the range"),
    ],
)
def test_usage_errors(sandbox, arguments, message):
    result = invoke("build", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert compilations(sandbox) == []


def test_dry_run(sandbox, cache_dir):
    result = invoke("build", "--preset", "all", "--arch", "80,90a", "--dry-run")
    assert result.exit_code == 0
    assert len(result.stdout.splitlines()) == 51
    one = ("--dtype", "float16", "--head-dim", "64", "--arch", "80", "--dry-run")
    result = invoke("build", "--kv-dtype", "float8_e4m3fn", *one)
    assert result.stdout.splitlines()[-1] == "batch_attention_f16_e4m3_d64_sm80"
    assert len(result.stdout.splitlines()) == 6
    assert not cache_dir.exists()


def test_cache(sandbox, cache_dir):
    assert invoke("cache", "dir").stdout.strip() == str(cache_dir)
    assert "0 files" in invoke("cache", "list").stdout
    assert json.loads(invoke("cache", "list", "--json").stdout) == []
    invoke("build", "--preset", "common", "--arch", "80")
    objects = [e for e in json.loads(invoke("cache", "list", "--json").stdout) if ".o" in e["path"]]
    assert [entry["name"] for entry in objects] == ["common_sm80"]
    assert objects[0]["size"] > 0
    assert "compiled kernels in" in invoke("doctor").stdout
    assert json.loads(invoke("doctor", "--json").stdout)["cache"]["kernels"] == ["common_sm80"]
    listing = invoke("cache", "list").stdout
    assert "common_sm80" in listing
    assert "2 files" in listing
    assert "removed 0 files" in invoke("cache", "prune").stdout
    assert "removed 2 files" in invoke("cache", "prune", "--all").stdout
    assert "0 files" in invoke("cache", "list").stdout


def test_doctor(sandbox, cache_dir, headers_dir):
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert found["nvcc"]["version"] == "12.8.93"
    assert found["flashinfer_headers"]["path"] == str(headers_dir)
    assert found["cache"]["path"] == str(cache_dir)
    assert found["problems"] == []
    assert "can be built" in invoke("doctor").stdout


def test_doctor_names_what_mlc_llm_is_given_and_what_not(sandbox, cache_dir, headers_dir):
    changes = json.loads(invoke("doctor", "--json").stdout)["mlc_llm"]
    printed = invoke("doctor").stdout
    for change in changes:
        wanted = f"{change['name']}: {change['reason']}" if change["supplied"] else change["name"]
        assert wanted in printed


def test_doctor_where_everything_is_broken(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDACXX", "no-such-nvcc")
    monkeypatch.setenv("TVM_FLASHINFER_FLASHINFER_DIR", str(tmp_path / "none"))
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(tmp_path / "file"))
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "problem: no-such-nvcc is not a working nvcc" in result.stdout
    assert "does not hold FlashInfer's headers" in result.stdout
    assert "is not a folder" in result.stdout


def test_doctor_of_a_package_without_its_library(tmp_path):
    """It is what tells that, so it runs where the package cannot be imported."""
    package = Path(tvm_flashinfer.__file__).parent
    shutil.copytree(
        package, tmp_path / "tvm_flashinfer", ignore=shutil.ignore_patterns("lib", "__pycache__")
    )

    def run(*arguments):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        command = [sys.executable, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
        )

    done = run("-c", "import tvm_flashinfer")
    assert done.returncode == 1
    assert "the native library of this package was not built" in done.stderr
    assert "Install tvm-flashinfer again" in done.stderr
    (tmp_path / "pyproject.toml").touch()
    done = run("-c", "import tvm_flashinfer")
    assert f"{tmp_path} is a source checkout" in done.stderr
    done = run("-m", "tvm_flashinfer", "doctor")
    assert done.returncode == 1
    assert "problem: " in done.stdout
    assert "the native library of this package was not built" in done.stdout
    assert "python" in done.stdout


@pytest.mark.parametrize("command", ["doctor", "support", "report", "build"])
def test_help_of_a_command(command):
    """It tells what every exit status means."""
    result = invoke(command, "--help")
    assert result.exit_code == 0
    text = result.stdout
    assert "\n  Exit status:\n    0  " in text
    assert "\n    2  the command was used wrongly" in text


@pytest.mark.parametrize("command", [[], ["cache"], ["cache", "list"], ["cache", "prune"]])
def test_help(command):
    assert invoke(*command, "--help").exit_code == 0

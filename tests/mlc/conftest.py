"""Running Python in a process of its own in which MLC LLM, or a stand-in for it, imports TVM."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mlc_models import MODELS, TARGET

import tvm_flashinfer
from tvm_flashinfer.report import CompileReport, report_of_file

_ENTRY_POINT = "[tvm.backends]\nflashinfer = tvm_flashinfer.hooks:_autoload\n"


def _is_installed() -> bool:
    points = importlib.metadata.entry_points(group="tvm.backends")
    return any(point.value.startswith("tvm_flashinfer.") for point in points)


@pytest.fixture(scope="session")
def python_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """``PYTHONPATH`` of a process in which ``import tvm`` finds the hook, also in a checkout."""
    path = [str(Path(tvm_flashinfer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    if not _is_installed():
        site = tmp_path_factory.mktemp("site")
        info = site / "tvm_flashinfer-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tvm-flashinfer\n")
        (info / "entry_points.txt").write_text(_ENTRY_POINT)
        path.insert(0, str(site))
    return os.pathsep.join(path)


def _run(
    arguments: list[str], python_path: str, folder: Path, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": python_path, "SKIP_LOADING_MLCLLM_SO": "1", **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def run_with_mlc_llm(
    python_path: str, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], str]:
    """Run code that imports MLC LLM and return what it prints; skips where there is none."""
    if importlib.util.find_spec("mlc_llm") is None:
        pytest.skip("MLC LLM is not installed")

    def run(code: str) -> str:
        done = _run(["-c", code], python_path, tmp_path_factory.mktemp("mlc_llm"))
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def stand_in(python_path: str, tmp_path: Path) -> Callable[..., str]:
    """Run code with a package `mlc_llm` made of the files given; return what is printed."""

    def run(files: dict[str, str], code: str = "import mlc_llm", **variables: str) -> str:
        for name, text in files.items():
            path = tmp_path / "mlc_llm" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        path = os.pathsep.join([str(tmp_path), python_path])
        done = _run(["-W", "error", "-c", textwrap.dedent(code)], path, tmp_path, **variables)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    return run


@dataclass
class Compiled:
    """How a run of ``mlc_llm compile`` ended."""

    returncode: int
    text: str
    library: Path

    @property
    def report(self) -> CompileReport:
        """What the library says of itself."""
        return report_of_file(self.library)


@pytest.fixture
def compile_model(python_path: str, tmp_path: Path) -> Callable[..., Compiled]:
    """Run ``python -m mlc_llm compile`` on one of `MODELS`; skips where there is no MLC LLM."""
    if importlib.util.find_spec("mlc_llm") is None:
        pytest.skip("MLC LLM is not installed")

    def run(
        model: str | dict[str, Any],
        quantization: str = "q0f16",
        *,
        opt: str = "flashinfer=1",
        overrides: str = "",
        target: dict[str, Any] = TARGET,
        **variables: str,
    ) -> Compiled:
        config, library = tmp_path / "config.json", tmp_path / "model.so"
        config.write_text(json.dumps(MODELS[model] if isinstance(model, str) else model))
        arguments = ["-m", "mlc_llm", "compile", str(config), "--quantization", quantization]
        arguments += ["--device", json.dumps(target), "--host", "x86_64-unknown-linux-gnu"]
        arguments += ["--opt", opt, "--overrides", overrides, "-o", str(library)]
        variables = {"TVM_FLASHINFER_SHIP": "shared", **variables}
        done = _run(arguments, python_path, tmp_path, **variables)
        return Compiled(done.returncode, done.stdout + done.stderr, library)

    return run

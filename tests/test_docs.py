"""The documentation site: it builds, and what its pages say of messages and commands is so."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"

_LITERAL = r'"((?:[^"\\\n]|\\.)*)"'
_PLACEHOLDER = "…"

#: Messages of TVM; the tests of what causes them check the words.
OF_TVM = {
    "Library binary was created using {pip install 'tvm-flashinfer>=…'} but a loader of that name "
    "is not registered",
    "Cannot find ffi::Function flashinfer.… in either Relax VM kernel library, or in TVM runtime "
    "ffi::Function registry",
}


def _environment() -> dict[str, str]:
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PATH": os.pathsep.join(programs),
    }


def test_site_builds_without_warnings(tmp_path: Path) -> None:
    """Links, anchors, the command line and every docstring of the reference."""
    for module in ("mkdocs", "mkdocstrings", "mkdocs_click"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f'{module} is missing; pip install "tvm-flashinfer[docs]"')
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    command_line = (tmp_path / "cli.html").read_text(encoding="utf-8")
    for command in ("doctor", "support", "report", "build", "cache"):
        assert f'id="{command}"' in command_line
    reference = (tmp_path / "python.html").read_text(encoding="utf-8")
    for name in ("call_counts", "relax.DispatchAttention", "relax.FlashInferPagedKVCache"):
        assert f'id="tvm_flashinfer.{name}"' in reference


def _messages() -> list[str]:
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    return [heading.strip("` ") for heading in re.findall(r"^### (.*)$", text, re.MULTILINE)]


def _texts_of_python() -> Iterator[str]:
    for path in (ROOT / "tvm_flashinfer").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value


def _texts_of_cpp() -> Iterator[str]:
    for path in [*(ROOT / "csrc").rglob("*.cc"), *(ROOT / "csrc").rglob("*.h")]:
        text = path.read_text(encoding="utf-8")
        # The compiler joins literals that follow each other.
        yield from re.findall(_LITERAL, re.sub(r'"\s*\n\s*"', "", text))


@pytest.fixture(scope="module")
def texts() -> str:
    """All that the code may say, in one text."""
    found = [*_texts_of_python(), *_texts_of_cpp()]
    return "\n".join(" ".join(text.split()) for text in found)


@pytest.mark.parametrize("message", _messages())
def test_messages_are_those_of_the_code(message: str, texts: str) -> None:
    if message in OF_TVM:
        return
    for part in message.split(_PLACEHOLDER):
        words = part.strip(" ,;:.`")
        assert words in texts, f"no message has the words {words!r}"


def test_commands_for_cpp_run(tmp_path: Path) -> None:
    """As they stand in the tutorial, but for the folder of the build."""
    if shutil.which("cmake", path=_environment()["PATH"]) is None or shutil.which("c++") is None:
        pytest.skip("cmake and a C++ compiler build programs in C++")
    text = (DOCS / "tutorials" / "cpp.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"(?:^    (?:cmake|build|  -D).*\n)+", text, re.MULTILINE)
    script = block.replace("build/cpp", str(tmp_path / "cpp"))
    done = subprocess.run(
        ["bash", "-e", "-c", script],
        cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("largest error") == 2


def test_command_of_mlc_runs(tmp_path: Path) -> None:
    """The compile of the tutorial, where MLC LLM is installed."""
    text = (DOCS / "tutorials" / "mlc.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^    (python -m mlc_llm .*)$", text, re.MULTILINE)
    assert "flashinfer=1" in command
    if importlib.util.find_spec("mlc_llm") is None:
        pytest.skip("MLC LLM is not installed")
    done = subprocess.run(
        ["bash", "-c", command.split(" compile ")[0] + " compile --help"],
        cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    for option in re.findall(r"--\w+| -o", command):
        assert option.strip() in done.stdout

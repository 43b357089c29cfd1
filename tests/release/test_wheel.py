"""The files of `make wheel` in clean environments; TVM_FLASHINFER_RELEASE names their folder."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

FOLDER = os.environ.get("TVM_FLASHINFER_RELEASE")
ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")

pytestmark = pytest.mark.skipif(
    FOLDER is None, reason="TVM_FLASHINFER_RELEASE names no folder; `make test-all` does"
)

# The functions are registered and one gives what it should; no GPU is asked for.
TRY = """
import numpy as np, tvm_ffi, tvm_flashinfer
merge = tvm_ffi.get_global_func("flashinfer.merge_state")
value, lse = np.full((1, 1, 64), 3, np.float32), np.ones((1, 1), np.float32)
out, out_lse = np.zeros_like(value), np.zeros_like(lse)
merge(*map(tvm_ffi.from_dlpack, (value, lse, value, lse, out, out_lse)))
print(out[0, 0, 0], out_lse[0, 0])
"""


def only(pattern: str) -> Path:
    (found,) = Path(FOLDER).glob(pattern)
    return found


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command], cwd=cwd, env=environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def python_of(version: str) -> str | None:
    """Return an interpreter of a version, if there is one."""
    pyenv = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    return str(pyenv[-1]) if pyenv else shutil.which(f"python{version}")


def check_installed(python: str, package: Path, work: Path) -> None:
    run(python, "-m", "venv", work / "venv", cwd=work)
    installed = work / "venv" / "bin" / "python"
    run(installed, "-m", "pip", "install", "--quiet", package, cwd=work)
    assert run(installed, "-c", TRY, cwd=work) == "3.0 2.0\n"
    assert "tvm_flashinfer" in run(installed, "-m", "tvm_flashinfer", "doctor", cwd=work)


def test_wheel_has_an_old_tag_and_the_licenses() -> None:
    wheel = only("*.whl")
    major, minor = re.search(r"-py3-none-manylinux_(\d+)_(\d+)_x86_64", wheel.name).groups()
    assert (int(major), int(minor)) <= (2, 28)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for path in (ROOT / "licenses").iterdir():
        assert any(name.endswith(f".dist-info/licenses/licenses/{path.name}") for name in names)
    assert [name for name in names if "libtvm_ffi" in name] == []


def test_wheel_has_the_kernels_of_both_architectures() -> None:
    with zipfile.ZipFile(only("*.whl")) as archive:
        objects = [Path(name).stem for name in archive.namelist() if name.endswith(".o")]
    if not objects:
        pytest.skip("the wheel was made without kernels")
    assert any(name.endswith("_sm80_sm90a") for name in objects)
    assert any(name.endswith("_sm90_f16_d128_sm90a") for name in objects)


@pytest.mark.parametrize("version", PYTHONS)
def test_wheel_in_a_clean_environment(version: str, tmp_path: Path) -> None:
    python = python_of(version)
    if python is None:
        pytest.skip(f"there is no Python {version}")
    check_installed(python, only("*.whl"), tmp_path)


def test_sdist_in_a_clean_environment(tmp_path: Path) -> None:
    check_installed(sys.executable, only("*.tar.gz"), tmp_path)

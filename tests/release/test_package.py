"""What is shipped: licenses, supported versions of Python, and pinned tools."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LICENSES = sorted(path.name for path in (ROOT / "licenses").iterdir())


def test_every_text_of_a_license_is_listed() -> None:
    table = (ROOT / "licenses" / "THIRD-PARTY.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`([\w-]+\.txt)`", table)) == set(LICENSES) - {"THIRD-PARTY.md"}


def test_the_version_of_flashinfer_is_the_one_whose_license_is_shipped() -> None:
    from tvm_flashinfer.kernels.headers import FLASHINFER_VERSION

    table = (ROOT / "licenses" / "THIRD-PARTY.md").read_text(encoding="utf-8")
    assert f"FlashInfer {FLASHINFER_VERSION}," in table


@pytest.mark.parametrize("folder", ["tvm_flashinfer", "release", "examples"])
def test_code_is_that_of_the_oldest_python(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), str(path), feature_version=(3, 10))


def test_tools_of_a_release_are_pinned_by_hash() -> None:
    text = (ROOT / "release" / "requirements.txt").read_text(encoding="utf-8")
    pinned = re.findall(
        r"^([\w-]+)==\S+[^\n]*\\\n    --hash=sha256:[0-9a-f]{64}", text, re.MULTILINE
    )
    named = re.findall(r"^([\w-]+)", text, re.MULTILINE)
    assert pinned == named
    wanted = (ROOT / "release" / "requirements.in").read_text(encoding="utf-8").split()
    assert set(wanted) <= set(pinned)


def test_sdist(tmp_path: Path) -> None:
    """It holds all that builds the package, and nothing that was built."""
    pytest.importorskip("scikit_build_core", reason="scikit-build-core makes the sdist")
    code = "import scikit_build_core.build as b, sys; print(b.build_sdist(sys.argv[1]))"
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / done.stdout.split()[-1]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"LICENSE", "NOTICE", "SECURITY.md", "CMakeLists.txt", "csrc/ops/ops.h"} <= names
    assert {f"licenses/{name}" for name in LICENSES} <= names
    assert [name for name in names if name.endswith((".so", ".a", ".o", ".pyc"))] == []


def test_installed_package() -> None:
    try:
        found = importlib.metadata.distribution("tvm-flashinfer")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("tvm-flashinfer runs from the checkout; it is not installed")
    tags = re.findall(r"^Tag: (.*)$", found.read_text("WHEEL") or "", re.MULTILINE)
    assert [tag for tag in tags if not tag.startswith("py3-none-")] == []
    files = {Path(path).name for path in found.files or () if "licenses" in Path(path).parts}
    assert {"LICENSE", "NOTICE", *LICENSES} <= files

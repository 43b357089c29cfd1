"""Builds the sdist and the wheel of a release; `make wheel` runs it with pinned tools.

The wheel is made from the sdist, first without kernels: its Python code then compiles those. What
is written to the folder was granted its tag by auditwheel.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from compiler import make_compiler

ROOT = Path(__file__).resolve().parent.parent
WORK = ROOT / "build" / "release"

#: What the prebuilt kernels of a release are compiled for, and how large a wheel may be.
KERNELS = ("--preset", "all", "--arch", "80,90a")
MAX_BYTES = 60_000_000


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-kernels", action="store_true", help="leave out prebuilt kernels")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder to write to")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    compiler = make_compiler(WORK / "compiler")
    sdist = _build("--sdist", ROOT, WORK / "sdist", compiler)
    source = _unpack(sdist, WORK / "source")
    wheel = _build("--wheel", source, WORK / "plain", compiler)
    if not arguments.no_kernels:
        _add_kernels(source, compiler)
        wheel = _build("--wheel", source, WORK / "whole", compiler)
    repaired = _repair(wheel, WORK / "repaired")
    size = repaired.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{repaired} has {size} bytes; a wheel may have {MAX_BYTES}")
    for path in (sdist, repaired):
        print(f"{path.stat().st_size / 1e6:8.1f} MB  {shutil.copy(path, arguments.out)}")


def _run(command: Sequence[str | Path], **environment: str | Path) -> None:
    given = {name: str(value) for name, value in environment.items()}
    tools = Path(sys.executable).parent
    path = os.pathsep.join([str(tools), os.environ.get("PATH", os.defpath)])
    subprocess.run(
        [str(part) for part in command], env={**os.environ, "PATH": path, **given}, check=True
    )


def _empty(folder: Path) -> Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def _only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def _build(what: str, source: Path, out: Path, compiler: Path) -> Path:
    command: list[str | Path] = [sys.executable, "-m", "build", what, "--no-isolation", "--outdir"]
    command += [_empty(out), f"--config-setting=build-dir={WORK / 'cmake'}", source]
    _run(command, CXX=compiler)
    return _only(out)


def _unpack(sdist: Path, folder: Path) -> Path:
    with tarfile.open(sdist) as archive:
        archive.extractall(_empty(folder), filter="data")
    return _only(folder)


def _add_kernels(source: Path, compiler: Path) -> None:
    command = [sys.executable, "-m", "tvm_flashinfer", "build", *KERNELS, "--prebuilt"]
    _run(
        command,
        PYTHONPATH=source,
        TVM_FLASHINFER_PREBUILT_DIR=source / "tvm_flashinfer" / "lib" / "kernels" / "prebuilt",
        CUDAHOSTCXX=compiler,
    )


def _repair(wheel: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtvm_ffi.so"]
    _run([*command, "--wheel-dir", _empty(out), wheel])
    return _only(out)


if __name__ == "__main__":
    main()

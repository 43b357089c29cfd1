"""The compilers and linkers of this machine: nvcc, a C++ compiler, the static CUDA runtime."""

from __future__ import annotations

import functools
import os
import re
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tvm_flashinfer.kernels.errors import ToolchainError, UnsupportedKernelError
from tvm_flashinfer.kernels.process import probe
from tvm_flashinfer.kernels.spec import ARCHS, KernelSpec

#: The oldest CUDA whose nvcc the CCCL headers of FlashInfer accept.
MINIMUM_CUDA = (12, 0)

#: What names an nvcc, in this order.
_NVCC_VARIABLES = ("TVM_FLASHINFER_NVCC", "CUDACXX")

#: Options that only newer compilers have; they are used when `nvcc --help` names them.
_OPTIONAL_FLAGS = ("--compress-mode", "--static-global-template-stub")


@dataclass(frozen=True)
class Nvcc:
    """An nvcc and what it can do.

    Attributes
    ----------
    path : Path
        The executable.
    version : tuple of int
        CUDA version, such as ``(13, 0)``.
    release : str
        The full version, such as ``"13.0.88"``.
    archs : tuple of str
        The members of `ARCHS` that it compiles for.
    flags : frozenset of str
        The optional flags that it has.
    cudart_static : Path or None
        ``libcudart_static.a`` of its toolkit.
    """

    path: Path
    version: tuple[int, int]
    release: str
    archs: tuple[str, ...]
    flags: frozenset[str]
    cudart_static: Path | None


@dataclass(frozen=True)
class Toolchain:
    """What is needed to compile kernels and link them into a shared library.

    Attributes
    ----------
    nvcc : Nvcc
        The CUDA compiler.
    cxx : Path
        The C++ compiler, which nvcc uses too.
    cxx_version : str
        The first line of its version.
    cudart_static : Path
        The static CUDA runtime.
    """

    nvcc: Nvcc
    cxx: Path
    cxx_version: str
    cudart_static: Path

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the compiled code depends on, for keys of the cache."""
        return {
            "nvcc": self.nvcc.release,
            "cxx": self.cxx_version,
            # nvcc reads these by itself.
            "prepend": os.environ.get("NVCC_PREPEND_FLAGS", ""),
            "append": os.environ.get("NVCC_APPEND_FLAGS", ""),
        }

    def check_archs(self, specs: Iterable[KernelSpec]) -> None:
        """Raise `UnsupportedKernelError` when nvcc cannot compile for an architecture of a spec."""
        archs = {arch for spec in specs for arch in spec.archs}
        unknown = sorted(archs - set(self.nvcc.archs))
        if unknown:
            raise UnsupportedKernelError(
                [
                    f"nvcc {self.nvcc.release} at {self.nvcc.path} does not compile for "
                    f"architecture {arch!r}; it does for {', '.join(self.nvcc.archs)}. Install a "
                    "newer CUDA toolkit, or name another architecture."
                    for arch in unknown
                ]
            )


def find_nvcc() -> Nvcc | None:
    """Return the nvcc to use, or None.

    Looked for in this order: the environment variables ``TVM_FLASHINFER_NVCC`` and ``CUDACXX`` (a
    path or a name), ``CUDA_HOME`` and ``CUDA_PATH`` (the toolkit's folder), ``PATH``, and the
    default folder of CUDA's installer.
    """
    path = _nvcc_path()
    return None if path is None else _probe_nvcc(path)


def find_cxx() -> tuple[Path, str] | None:
    """Return the C++ compiler and the first line of its version, or None.

    Looked for in this order: the environment variables ``CUDAHOSTCXX``, ``NVCC_CCBIN`` and ``CXX``,
    then ``g++`` in ``PATH``.
    """
    for name in (*map(os.environ.get, ("CUDAHOSTCXX", "NVCC_CCBIN", "CXX")), "g++"):
        path = shutil.which(name) if name else None
        version = _first_line(path) if path else None
        if path and version:
            return Path(path), version
    return None


def find_gnu_ld() -> Path | None:
    """Return GNU ld, or None. Other linkers cannot make the object of a model library."""
    for name in ("ld.bfd", "ld"):
        path = shutil.which(name)
        if path and "GNU ld" in (_first_line(path) or ""):
            return Path(path)
    return None


def missing_tools(*, model_object: bool = False) -> list[str]:
    """Return what keeps kernels from being compiled here, one sentence each.

    Parameters
    ----------
    model_object : bool
        Also ask for what `build_model_object` needs.
    """
    missing = []
    nvcc = find_nvcc()
    if nvcc is None:
        path = _nvcc_path()
        missing.append(
            f"{path} is not a working nvcc: {_nvcc_remedy()}."
            if path
            else "nvcc is missing: install the CUDA toolkit (12.8 or newer is best), and add its "
            "bin folder to PATH or set CUDA_HOME to its folder."
        )
    elif nvcc.version < MINIMUM_CUDA:
        missing.append(
            f"nvcc {nvcc.release} at {nvcc.path} is too old: FlashInfer's headers need CUDA "
            f"{MINIMUM_CUDA[0]}.{MINIMUM_CUDA[1]} or newer. Install a newer CUDA toolkit and set "
            "CUDA_HOME to its folder."
        )
    elif nvcc.cudart_static is None:
        missing.append(
            f"libcudart_static.a is missing from the CUDA toolkit of {nvcc.path}: install the "
            "toolkit's development files of the CUDA runtime."
        )
    if find_cxx() is None:
        missing.append("a C++ compiler is missing: install g++, or set CUDAHOSTCXX to one.")
    return missing + (missing_binutils() if model_object else [])


def missing_binutils() -> list[str]:
    """Return what keeps the object of a model from being linked here, one sentence each."""
    missing = []
    if find_gnu_ld() is None:
        missing.append("GNU ld is missing: install binutils. Other linkers do not fit.")
    if shutil.which("objcopy") is None:
        missing.append("objcopy is missing: install binutils.")
    return missing


def find_toolchain(*, model_object: bool = False) -> Toolchain:
    """Return the toolchain of this machine.

    Raises
    ------
    ToolchainError
        With everything that `missing_tools` reports.
    """
    missing = missing_tools(model_object=model_object)
    nvcc, cxx = find_nvcc(), find_cxx()
    if missing or nvcc is None or cxx is None or nvcc.cudart_static is None:
        raise ToolchainError(missing)
    return Toolchain(nvcc, cxx[0], cxx[1], nvcc.cudart_static)


def _nvcc_path() -> Path | None:
    for variable in _NVCC_VARIABLES:
        # A variable that names no executable is an error to report, not a reason to look further.
        if name := os.environ.get(variable):
            return Path(shutil.which(name) or name)
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if (home := os.environ.get(variable)) and (path := _executable(Path(home, "bin", "nvcc"))):
            return path
    if found := shutil.which("nvcc"):
        return Path(found)
    return _executable(Path("/usr/local/cuda/bin/nvcc"))


def _nvcc_remedy() -> str:
    """What to do about an nvcc that does not work: the variable that named it comes first."""
    named = next((x for x in _NVCC_VARIABLES if os.environ.get(x)), None)
    if named is None:
        return "set CUDA_HOME to the folder of a CUDA toolkit"
    return f"it is what {named} names; set that to a working one, or unset it"


def _executable(path: Path) -> Path | None:
    return path if os.access(path, os.X_OK) else None


@functools.lru_cache(maxsize=8)
def _first_line(path: str) -> str | None:
    output = probe([path, "--version"])
    return output.strip().splitlines()[0] if output and output.strip() else None


@functools.lru_cache(maxsize=8)
def _probe_nvcc(path: Path) -> Nvcc | None:
    match = re.search(r"\bV(\d+)\.(\d+)\.(\d+)", probe([path, "--version"]) or "")
    if match is None:
        return None
    codes = set(re.findall(r"\bsm_(\d+)", probe([path, "--list-gpu-code"]) or ""))
    usage = probe([path, "--help"]) or ""
    return Nvcc(
        path=path,
        version=(int(match.group(1)), int(match.group(2))),
        release=".".join(match.groups()),
        archs=tuple(arch for arch in ARCHS if arch.rstrip("a") in codes),
        flags=frozenset(flag for flag in _OPTIONAL_FLAGS if flag in usage),
        cudart_static=_find_cudart_static(path),
    )


def _find_cudart_static(nvcc: Path) -> Path | None:
    """Return libcudart_static.a of nvcc's toolkit, which nvcc knows best: it may be a wrapper."""
    folders: list[Path] = []
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "empty.cu")
        source.touch()
        listing = probe([nvcc, "--dryrun", "-o", Path(work, "empty"), source]) or ""
    for line in listing.splitlines():
        if line.startswith("#$ LIBRARIES="):
            folders += [Path(folder) for folder in re.findall(r'"?-L([^"\s]+)"?', line)]
        elif line.startswith("#$ TOP="):
            top = Path(line.removeprefix("#$ TOP=").strip())
            folders += [top / "lib64", top / "lib"]
    root = nvcc.resolve().parent.parent
    folders += [root / "lib64", root / "lib"]
    for folder in folders:
        if (library := folder / "libcudart_static.a").is_file():
            return library.resolve()
    return None

"""Kernels that were built ahead of time, which compiles use where neither nvcc nor headers are.

A set of them is a folder: an object file of each unit, a shared library with all units, the static
CUDA runtime, and a manifest. It is made under another name and put in place by one rename.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tvm_flashinfer.kernels.cache import digest, file_digest
from tvm_flashinfer.kernels.errors import KernelError
from tvm_flashinfer.kernels.headers import FLASHINFER_VERSION
from tvm_flashinfer.kernels.paths import csrc_dir, lib_dir
from tvm_flashinfer.kernels.spec import KernelSpec
from tvm_flashinfer.kernels.toolchain import Toolchain

#: Names the folder of prebuilt kernels in place of the one in the package.
PREBUILT_VARIABLE = "TVM_FLASHINFER_PREBUILT_DIR"

LIBRARY = "libtvm_flashinfer_kernels.so"
CUDART = "libcudart_static.a"

_MANIFEST = "kernels.json"

#: Changes when sets that were built before do not fit any more, whatever the sources say.
_FORMAT = 1

_HEADER_SUFFIXES = (".h", ".cuh", ".hpp", ".inc")


def prebuilt_dir() -> Path:
    """Return the folder of prebuilt kernels; it may not exist."""
    if folder := os.environ.get(PREBUILT_VARIABLE):
        return Path(folder).expanduser().absolute()
    return lib_dir() / "kernels" / "prebuilt"


def headers_digest(csrc: Path) -> str:
    """Return the hash of every header of ours that a unit may include."""
    root = csrc / "kernels"
    found = [*root.glob("*"), *(root / "cuda").rglob("*")]
    files = sorted(path for path in found if path.suffix in _HEADER_SUFFIXES)
    return digest({path.relative_to(root).as_posix(): file_digest(path) for path in files})


def unit_source(csrc: Path, spec: KernelSpec) -> Path:
    """Return the source file of a unit.

    Raises
    ------
    KernelError
        It is not there.
    """
    unit = csrc / spec.source
    if not unit.is_file():
        raise KernelError(f"the source of {spec.name} is missing: {unit}")
    return unit


@dataclass(frozen=True)
class Prebuilt:
    """A set of prebuilt kernels that fits the sources of this package.

    Attributes
    ----------
    root : Path
        The folder.
    nvcc : str
        Version of the compiler.
    kernels : mapping
        By the name of a spec without architectures: ``file``, ``archs`` and ``sha256``.
    """

    root: Path
    nvcc: str
    kernels: Mapping[str, Mapping[str, Any]]

    @property
    def library(self) -> Path:
        """The shared library with all units."""
        return self.root / LIBRARY

    @property
    def cudart_static(self) -> Path:
        """The static CUDA runtime that the units were compiled for."""
        return self.root / CUDART

    @property
    def names(self) -> list[str]:
        """The names of the kernels, with their architectures."""
        return sorted(Path(kernel["file"]).stem for kernel in self.kernels.values())

    @property
    def size(self) -> int:
        """Bytes of the whole folder."""
        return sum(path.stat().st_size for path in self.root.iterdir())

    def lacks(self, specs: Iterable[KernelSpec]) -> list[str]:
        """Return the names of the specs that the set cannot serve."""
        return [spec.name for spec in specs if not self._serves(spec)]

    def objects(self, specs: Iterable[KernelSpec]) -> dict[KernelSpec, Path]:
        """Return the object files of specs that the set does not lack.

        Raises
        ------
        KernelError
            A file is missing or damaged.
        """
        return {spec: self._object(self.kernels[_key(spec)]) for spec in specs}

    def object_digest(self, spec: KernelSpec) -> str:
        """Return the hash of the object file of a spec that the set does not lack."""
        return self.kernels[_key(spec)]["sha256"]

    def _serves(self, spec: KernelSpec) -> bool:
        kernel = self.kernels.get(_key(spec))
        return kernel is not None and all(
            any(_runs_on(built, arch) for built in kernel["archs"]) for arch in spec.archs
        )

    def _object(self, kernel: Mapping[str, Any]) -> Path:
        path = self.root / kernel["file"]
        if not path.is_file() or file_digest(path) != kernel["sha256"]:
            raise KernelError(
                f"the prebuilt kernel {path} is damaged or missing: remove {self.root} to compile "
                "kernels when they are needed, or put a whole set of prebuilt kernels there"
            )
        return path


def find_prebuilt(csrc: Path | None = None) -> tuple[Prebuilt | None, str]:
    """Return the prebuilt kernels, or None and why there are none.

    Parameters
    ----------
    csrc : Path, optional
        The sources that they must have been built from; those of this package when it is left out.
    """
    root = prebuilt_dir()
    try:
        manifest = json.loads((root / _MANIFEST).read_text(encoding="utf-8"))
        kernels, sources = manifest["kernels"], manifest["sources"]
        found = Prebuilt(root, manifest["nvcc"], kernels)
        units = {kernel["unit"] for kernel in kernels.values()}
        wanted = _sources(csrc_dir() if csrc is None else csrc, units)
        names = found.names
    except FileNotFoundError:
        return None, f"there are no prebuilt kernels in {root}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return None, f"the prebuilt kernels in {root} cannot be read: {error!r}"
    if sources != wanted:
        return None, f"the prebuilt kernels in {root} are of another version of this package"
    if not names or not all((root / name).is_file() for name in (LIBRARY, CUDART)):
        return None, f"the prebuilt kernels in {root} are not complete"
    return found, ""


def write_prebuilt(
    objects: Mapping[KernelSpec, Path], library: Path, toolchain: Toolchain, csrc: Path
) -> Path:
    """Put a set of prebuilt kernels in place of the one that is there, and return its folder.

    Parameters
    ----------
    objects : mapping
        The object file of each spec.
    library : Path
        The shared library with all of them.
    toolchain : Toolchain
        What they were compiled with.
    csrc : Path
        What they were compiled from.

    Raises
    ------
    KernelError
        The folder cannot be written.
    """
    root = prebuilt_dir()
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=root.parent, prefix=".prebuilt-") as work:
            made, former = Path(work, "made"), Path(work, "former")
            made.mkdir()
            _fill(made, objects, library, toolchain, csrc)
            if root.exists():
                os.rename(root, former)
            os.rename(made, root)
    except OSError as error:
        raise KernelError(
            f"prebuilt kernels cannot be put into {root}: {error}. Set {PREBUILT_VARIABLE} to a "
            "folder that this user may write to."
        ) from error
    return root


def _fill(
    folder: Path,
    objects: Mapping[KernelSpec, Path],
    library: Path,
    toolchain: Toolchain,
    csrc: Path,
) -> None:
    kernels = {}
    for spec, path in objects.items():
        name = f"{spec.name}.o"
        shutil.copyfile(path, folder / name)
        kernels[_key(spec)] = {
            "file": name,
            "unit": spec.source,
            "archs": list(spec.archs),
            "sha256": file_digest(path),
        }
    shutil.copyfile(library, folder / LIBRARY)
    shutil.copyfile(toolchain.cudart_static, folder / CUDART)
    manifest = {
        "nvcc": toolchain.nvcc.release,
        "sources": _sources(csrc, {spec.source for spec in objects}),
        "kernels": kernels,
    }
    (folder / _MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _key(spec: KernelSpec) -> str:
    return replace(spec, archs=()).name


def _sources(csrc: Path, units: Iterable[str]) -> str:
    """Return the hash of what units are compiled from; nothing of it needs nvcc."""
    parts = {unit: file_digest(csrc / unit) if (csrc / unit).is_file() else "" for unit in units}
    return digest(
        {
            "format": _FORMAT,
            "flashinfer": FLASHINFER_VERSION,
            "headers": headers_digest(csrc),
            "units": parts,
        }
    )


def _runs_on(built: str, arch: str) -> bool:
    """Return whether machine code for one architecture runs on GPUs of another.

    It runs on its own major version, from its minor version on; that with a letter on one chip.
    """
    have, want = (re.fullmatch(r"(\d+)(\d)([af]?)", name) for name in (built, arch))
    if have is None or want is None:
        return built == arch
    if have[3]:
        return have.groups()[:2] == want.groups()[:2]
    return have[1] == want[1] and int(have[2]) <= int(want[2])


def libraries_to_load() -> Sequence[Path]:
    """Return the libraries of units that need no compiler: the prebuilt one, and others by hand."""
    found, _ = find_prebuilt()
    by_hand = sorted((lib_dir() / "kernels").glob("*.so"))
    return [*([] if found is None else [found.library]), *by_hand]

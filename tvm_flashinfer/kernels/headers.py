"""FlashInfer's headers, at the one version that this package is written for.

FlashInfer promises no stable headers, so exactly one version is used. Its wheel carries them; the
Python code in the wheel is never run.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from tvm_flashinfer.kernels.cache import KernelCache, Notice, file_digest
from tvm_flashinfer.kernels.errors import HeadersError
from tvm_flashinfer.kernels.spec import SM90A_KINDS, KernelSpec

#: The version of flashinfer-python whose headers are used.
FLASHINFER_VERSION = "0.7.4"

#: SHA-256 of its wheel.
FLASHINFER_WHEEL_SHA256 = "a051a62e09a2738e8b0de47a1944fd2f0f3eff01b728b662141ea660cb09dd32"

#: Names a folder with the headers.
HEADERS_VARIABLE = "TVM_FLASHINFER_FLASHINFER_DIR"

#: Include folders of the kernels, in the order the compiler searches them. CCCL comes before
#: FlashInfer and, since these are searched first, before the older CCCL of the CUDA toolkit.
_INCLUDES = ("cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "include")

#: Kept with them for the kernels that need CUTLASS.
_EXTRACTED = (*_INCLUDES, "cutlass/include")

#: A header in each, to tell the folder from an empty submodule.
_PROBES: Mapping[str, str] = {
    "cccl/cub": "cub/cub.cuh",
    "cccl/libcudacxx/include": "cuda/std/type_traits",
    "cccl/thrust": "thrust/version.h",
    "include": "flashinfer/attention/prefill.cuh",
}


@dataclass(frozen=True)
class Headers:
    """Where the headers are.

    Attributes
    ----------
    root : Path
        The folder that holds them.
    include_dirs : tuple of Path
        Folders for the compiler, in order.
    cutlass : Path or None
        CUTLASS' include folder, where there is one.
    origin : str
        Where they come from, in words.
    digest : str
        SHA-256 of the contents of `include_dirs`, for keys of the cache.
    """

    root: Path
    include_dirs: tuple[Path, ...]
    cutlass: Path | None
    origin: str
    digest: str

    def include_dirs_of(self, spec: KernelSpec) -> tuple[Path, ...]:
        """Return the folders for the compiler of one unit, in order."""
        if spec.kind not in SM90A_KINDS:
            return self.include_dirs
        return (*self.include_dirs, self._cutlass(spec))

    def digest_of(self, spec: KernelSpec) -> str:
        """Return the hash of what `include_dirs_of` holds."""
        if spec.kind not in SM90A_KINDS:
            return self.digest
        return self.digest + _folders_digest((("cutlass/include", self._cutlass(spec)),))

    def _cutlass(self, spec: KernelSpec) -> Path:
        if self.cutlass is None:
            raise HeadersError(
                f"{spec.name} needs CUTLASS' headers, and {self.root} has no cutlass/include "
                "beside FlashInfer's; please " + _how_to_supply()
            )
        return self.cutlass


def find_headers(cache: KernelCache | None = None) -> Headers | None:
    """Return the headers when they are on this machine; nothing is fetched.

    Looked for in this order: the folder that the environment variable
    ``TVM_FLASHINFER_FLASHINFER_DIR`` names (``flashinfer/data`` of a wheel, or a source checkout of
    FlashInfer with its submodules); an installed flashinfer-python of the pinned version, which is
    not imported; the cache.

    Raises
    ------
    HeadersError
        The folder that the variable names does not fit.
    """
    if folder := os.environ.get(HEADERS_VARIABLE):
        return _from_user(Path(folder).expanduser().absolute())
    return _from_installed() or _from_cache(KernelCache() if cache is None else cache)


def get_headers(cache: KernelCache | None = None, notice: Notice | None = None) -> Headers:
    """Return the headers, fetching the pinned wheel with pip when they are not on this machine.

    Parameters
    ----------
    cache : KernelCache, optional
        Where fetched headers are kept.
    notice : callable, optional
        Is told of the download, which is about 100 MB.

    Raises
    ------
    HeadersError
        They could not be fetched, or the wheel is not the pinned one.
    """
    cache = KernelCache() if cache is None else cache
    if headers := find_headers(cache):
        return headers
    waiting = f"FlashInfer {FLASHINFER_VERSION} is being fetched by another process; waiting"
    with cache.lock("flashinfer-headers", waiting, notice):
        if headers := _from_cache(cache):
            return headers
        if notice is not None:
            notice(
                f"fetching the headers of FlashInfer {FLASHINFER_VERSION} with pip (about 100 MB, "
                "once)"
            )
        with cache.work_dir() as work:
            extract_wheel(_download(work), _cached_root(cache), work)
    headers = _from_cache(cache)
    if headers is None:
        raise HeadersError(
            f"the wheel of FlashInfer {FLASHINFER_VERSION} was fetched, but its headers are not "
            f"where they belong, in {_cached_root(cache)}; please report this"
        )
    return headers


def extract_wheel(wheel: Path, target: Path, work: Path) -> None:
    """Check a wheel of FlashInfer and put its headers in place, all of them or none.

    Parameters
    ----------
    wheel : Path
        The wheel.
    target : Path
        The folder that is to hold the headers.
    work : Path
        A folder for temporary files on the same disk.

    Raises
    ------
    HeadersError
        The wheel is not the pinned one.
    """
    got = file_digest(wheel)
    if got != FLASHINFER_WHEEL_SHA256:
        raise HeadersError(
            f"{wheel.name} is not the wheel of FlashInfer {FLASHINFER_VERSION} that this package "
            f"was made for, and is not used: its SHA-256 is {got}, expected "
            f"{FLASHINFER_WHEEL_SHA256}. Check the package index that pip is set up to use, or "
            + _how_to_supply()
        )
    prefixes = {f"flashinfer/data/{folder}/": len("flashinfer/data/") for folder in _EXTRACTED}
    licenses = f"flashinfer_python-{FLASHINFER_VERSION}.dist-info/"
    prefixes[licenses + "licenses/"] = len(licenses)
    extracted = work / "headers"
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            cut = next((n for prefix, n in prefixes.items() if name.startswith(prefix)), None)
            if cut is None or name.endswith("/") or ".." in name.split("/"):
                continue
            path = extracted / name[cut:]
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, open(path, "wb") as sink:
                shutil.copyfileobj(source, sink)
    (extracted / "digest").write_text(_digest(_layout(extracted) or {}))
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():  # damaged: _from_cache did not take it
        os.rename(target, work / "damaged")
    os.rename(extracted, target)


def _how_to_supply() -> str:
    return (
        f"set {HEADERS_VARIABLE} to a folder with the headers: `flashinfer/data` of an unzipped "
        f"flashinfer_python-{FLASHINFER_VERSION}-py3-none-any.whl, or a source checkout of "
        f"FlashInfer v{FLASHINFER_VERSION} with its submodules."
    )


def _layout(root: Path) -> dict[str, Path] | None:
    """Return the include folders below root, by their names in the wheel, or None."""
    for third_party in (root, root / "3rdparty"):
        folders = {name: (root if name == "include" else third_party) / name for name in _INCLUDES}
        if all((folder / _PROBES[name]).is_file() for name, folder in folders.items()):
            return folders
    return None


def _headers(root: Path, origin: str, digest: str | None = None) -> Headers | None:
    folders = _layout(root)
    if folders is None:
        return None
    cutlass = (folders["cccl/cub"].parent.parent / "cutlass" / "include").absolute()
    return Headers(
        root=root,
        include_dirs=tuple(folders[name] for name in _INCLUDES),
        cutlass=cutlass if (cutlass / "cutlass" / "cutlass.h").is_file() else None,
        origin=origin,
        digest=digest or _digest(folders),
    )


def _from_user(folder: Path) -> Headers:
    version = _checkout_version(folder)
    if version not in (None, FLASHINFER_VERSION):
        raise HeadersError(
            f"{HEADERS_VARIABLE} names {folder}, which is FlashInfer {version}; the kernels are "
            f"written for {FLASHINFER_VERSION}, and FlashInfer's headers change between versions. "
            f"Check out v{FLASHINFER_VERSION} there, or " + _how_to_supply()
        )
    for root in (folder, folder / "data", folder / "flashinfer" / "data"):
        if headers := _headers(root, f"{HEADERS_VARIABLE}={folder}"):
            return headers
    expected = ", ".join(f"{name}/{probe}" for name, probe in _PROBES.items())
    raise HeadersError(
        f"{HEADERS_VARIABLE} names {folder}, which does not hold FlashInfer's headers. Expected "
        f"there, or with cccl below 3rdparty: {expected}. Please " + _how_to_supply()
    )


def _checkout_version(folder: Path) -> str | None:
    """Return the version that a source checkout or an unpacked wheel states, or None."""
    for path in (folder / "version.txt", folder.parent / "_build_meta.py"):
        try:
            match = re.search(r"\d+\.\d+\.\d+\w*", path.read_text())
        except (OSError, ValueError):
            continue
        if match:
            return match.group()
    return None


def _from_installed() -> Headers | None:
    try:
        found = importlib.metadata.distribution("flashinfer-python")
        if found.version != FLASHINFER_VERSION:
            return None
        root = Path(str(found.locate_file("flashinfer/data")))
    except (importlib.metadata.PackageNotFoundError, OSError, KeyError):
        return None
    return _headers(root, f"flashinfer-python {FLASHINFER_VERSION} as installed")


def _cached_root(cache: KernelCache) -> Path:
    return cache.root / "flashinfer" / f"{FLASHINFER_VERSION}-{FLASHINFER_WHEEL_SHA256[:12]}"


def _from_cache(cache: KernelCache) -> Headers | None:
    root = _cached_root(cache)
    try:
        digest = (root / "digest").read_text().strip()
    except OSError:
        return None
    if not re.fullmatch("[0-9a-f]{64}", digest):
        return None
    return _headers(root, f"flashinfer-python {FLASHINFER_VERSION}, fetched", digest)


def _digest(folders: Mapping[str, Path]) -> str:
    return _folders_digest(tuple(sorted(folders.items())))


@functools.lru_cache(maxsize=8)
def _folders_digest(folders: Iterable[tuple[str, Path]]) -> str:
    state = hashlib.sha256()
    for name, folder in folders:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            contents = path.read_bytes()
            relative = path.relative_to(folder).as_posix()
            state.update(f"{name}/{relative}\0{len(contents)}\0".encode())
            state.update(contents)
    return state.hexdigest()


def _download(work: Path) -> Path:
    """Fetch the pinned wheel as the user's pip is set up to, and return it."""
    requirement = f"flashinfer-python=={FLASHINFER_VERSION}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--progress-bar=off", "--dest", str(work), requirement]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise HeadersError(_not_fetched(str(error))) from error
    wheels = list(work.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise HeadersError(_not_fetched(done.stdout))
    return wheels[0]


def _not_fetched(output: str) -> str:
    said = "\n".join(output.strip().splitlines()[-8:])
    if "No module named pip" in output:
        said = "this Python has no pip; install it with `python -m ensurepip`"
    return (
        f"the headers of FlashInfer {FLASHINFER_VERSION}, which the kernels are compiled from, are "
        f"not on this machine and could not be fetched:\n{said}\n"
        f"Install flashinfer-python=={FLASHINFER_VERSION}, or " + _how_to_supply()
    )

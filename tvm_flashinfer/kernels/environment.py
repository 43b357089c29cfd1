"""What this machine has for building and running kernels. Every probe is guarded: none can fail."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import importlib.util
import os
import platform
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tvm_flashinfer.kernels.cache import KernelCache
from tvm_flashinfer.kernels.errors import KernelError, UnsupportedKernelError
from tvm_flashinfer.kernels.headers import FLASHINFER_VERSION, find_headers
from tvm_flashinfer.kernels.paths import lib_dir, native_library
from tvm_flashinfer.kernels.prebuilt import find_prebuilt, prebuilt_dir
from tvm_flashinfer.kernels.spec import ARCHS, DEFAULT_ARCHS, arch_for_capability, parse_archs
from tvm_flashinfer.kernels.toolchain import find_cxx, find_nvcc, missing_tools

# Numbers of the CUDA driver's interface.
_MULTIPROCESSOR_COUNT = 16
_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76


def gpus() -> list[dict[str, Any]]:
    """Return the GPUs of this machine: ``name``, ``capability`` (major, minor), ``num_sm`` of each.

    Asks the driver; a machine without one has none.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int()
        if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return []
        return [_gpu(driver, ordinal) for ordinal in range(count.value)]
    except (OSError, AttributeError):
        return []


def driver() -> dict[str, str] | None:
    """Return the version of NVIDIA's driver and of the newest CUDA it runs; None without one."""
    try:
        number = ctypes.c_int()
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number)) != 0:
            return None
    except (OSError, AttributeError):
        return None
    found = {"cuda": f"{number.value // 1000}.{number.value % 1000 // 10}"}
    with contextlib.suppress(OSError):
        text = Path("/proc/driver/nvidia/version").read_text()
        if match := re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", text):
            found["version"] = match[1]
    return found


def _gpu(driver: ctypes.CDLL, ordinal: int) -> dict[str, Any]:
    device = ctypes.c_int()
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGetName(name, len(name), device)
    values = []
    for attribute in (_COMPUTE_CAPABILITY_MAJOR, _COMPUTE_CAPABILITY_MINOR, _MULTIPROCESSOR_COUNT):
        value = ctypes.c_int()
        driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
        values.append(value.value)
    return {
        "name": name.value.decode(errors="replace"),
        "capability": values[:2],
        "num_sm": values[2],
    }


def default_archs() -> tuple[str, ...]:
    """Return the architectures of this machine's GPUs, or `DEFAULT_ARCHS` when it has none."""
    found = {arch_for_capability(*gpu["capability"]) for gpu in gpus()}
    return parse_archs([arch for arch in found if arch]) or DEFAULT_ARCHS


def device_arch(device_id: int) -> str:
    """Return the architecture to compile for a GPU, such as ``"90a"``.

    Parameters
    ----------
    device_id : int
        Its number, as the CUDA runtime counts.

    Raises
    ------
    UnsupportedKernelError
        There is no such GPU, or no kernel runs on it.
    """
    found = gpus()
    if not 0 <= device_id < len(found):
        raise UnsupportedKernelError(
            [f"the device is cuda:{device_id}; the CUDA driver shows {len(found)} GPUs"]
        )
    major, minor = found[device_id]["capability"]
    arch = arch_for_capability(major, minor)
    if arch is None:
        raise UnsupportedKernelError(
            [
                f"cuda:{device_id}, {found[device_id]['name']}, has compute capability "
                f"{major}.{minor}; there are kernels for {', '.join(ARCHS)}"
            ]
        )
    return arch


def environment() -> dict[str, Any]:
    """Return what this machine has, as values that JSON can hold.

    Returns
    -------
    environment : dict
        Versions of this package, TVM and the tools; the native library; how TVM's cache calls its
        functions; what MLC LLM is given when it imports TVM; where the headers and the cache are;
        the GPUs, and on which of them no kernel was ever measured; the file of tuning; and
        ``problems``, what keeps kernels from being built here. Parts that could not be found out
        are None.
    """
    problems: list[str] = []
    return {
        "tvm_flashinfer": _version("tvm-flashinfer"),
        "native_library": _guarded(_native_library, problems),
        "apache_tvm_ffi": _version("apache-tvm-ffi"),
        "tvm": _guarded(_tvm, problems),
        "tvm_contract": _guarded(_contract, problems),
        "mlc_llm": _guarded(_mlc_llm, problems),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "nvcc": _guarded(_nvcc, problems),
        "cxx": _guarded(_cxx, problems),
        "flashinfer_version": FLASHINFER_VERSION,
        "flashinfer_headers": _guarded(_flashinfer, problems),
        "prebuilt_kernels": _guarded(_prebuilt, problems),
        "cache": _guarded(_cache, problems),
        "driver": driver(),
        "gpus": gpus(),
        "tuning": _guarded(_tuning, problems),
        "never_measured": _guarded(_never_measured, problems),
        "problems": problems + (_guarded(missing_tools, problems) or []),
    }


def _guarded(probe: Callable[[], Any], problems: list[str]) -> Any:
    try:
        return probe()
    except KernelError as error:
        if str(error) not in problems:
            problems.append(str(error))
    except Exception as error:  # a report is wanted most where things are broken
        problems.append(f"{probe.__name__.strip('_')}: {type(error).__name__}: {error}")
    return None


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _native_library() -> str:
    """The library with the functions, loaded unless the package is turned off."""
    from tvm_flashinfer import _native
    from tvm_flashinfer.hooks import turned_off

    return str(native_library() if turned_off() else _native.load())


def _tvm() -> str | None:
    if importlib.util.find_spec("tvm") is None:
        return None
    names = importlib.metadata.packages_distributions().get("tvm", [])
    return ", ".join(f"{name} {_version(name)}" for name in dict.fromkeys(names)) or "not installed"


def _tuning() -> dict[str, Any] | None:
    """The file that TVM_FLASHINFER_TUNING names, and why it cannot be used; None without one."""
    from tvm_flashinfer.hooks import turned_off
    from tvm_flashinfer.tuning import TUNING_VARIABLE, tuning_files

    path = os.environ.get(TUNING_VARIABLE)
    if not path or turned_off():
        return None
    try:
        used = [file for file in tuning_files() if file["source"] == path]
    except ValueError as error:
        return {"path": path, "unused": str(error)}
    return {**used[0], "unused": ""} if used else {"path": path, "unused": "another is in use"}


def _never_measured() -> str | None:
    """Which GPUs of this machine kernels were never measured on."""
    from tvm_flashinfer.hooks import turned_off
    from tvm_flashinfer.tuning import never_measured

    found = gpus()
    if not found or turned_off():
        return None
    return never_measured("{}{}".format(*gpu["capability"]) for gpu in found)


def _contract() -> dict[str, Any] | None:
    """Whether TVM calls the functions of its KV cache as ours are called; None without TVM."""
    if importlib.util.find_spec("tvm") is None:
        return None
    from tvm_flashinfer.contract import try_contract

    problems = try_contract()
    return {"fits": not problems, "differences": list(problems)}


def _mlc_llm() -> list[dict[str, Any]] | None:
    """What MLC LLM is given beside the installed TVM; None without TVM."""
    if importlib.util.find_spec("tvm") is None:
        return None
    importlib.import_module("tvm")
    from tvm_flashinfer.mlc import CHANGES

    return [
        {"name": change.name, "reason": change.reason, "supplied": change.needed()}
        for change in CHANGES
    ]


def _nvcc() -> dict[str, Any] | None:
    nvcc = find_nvcc()
    if nvcc is None:
        return None
    return {"path": str(nvcc.path), "version": nvcc.release, "archs": list(nvcc.archs)}


def _cxx() -> dict[str, str] | None:
    found = find_cxx()
    return None if found is None else {"path": str(found[0]), "version": found[1]}


def _flashinfer() -> dict[str, str] | None:
    headers = find_headers()
    return None if headers is None else {"path": str(headers.root), "origin": headers.origin}


def _prebuilt() -> dict[str, Any]:
    """What came with the package or was put beside it, and is loaded without a compiler.

    ``unused`` says why there are no prebuilt kernels; empty when there are some.
    """
    found, why = find_prebuilt()
    by_hand = [path.name for path in (lib_dir() / "kernels").glob("*.so")]
    return {
        "path": str(prebuilt_dir()),
        "unused": why,
        "nvcc": None if found is None else found.nvcc,
        "kernels": [] if found is None else found.names,
        "libraries": sorted(by_hand),
    }


def _cache() -> dict[str, Any]:
    cache = KernelCache()
    entries = cache.entries()
    names = {entry.name for entry in entries if entry.path.parent.name == "objects"}
    return {
        "path": str(cache.root),
        "bytes": sum(entry.size for entry in entries),
        "kernels": sorted(names),
    }

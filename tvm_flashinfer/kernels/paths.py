"""Where the package keeps what the kernel build reads: ``csrc`` and ``lib``.

An installed package has both inside it. A source checkout has ``csrc`` beside the package, and
``lib`` inside it once the native library was built. The same goes for ``cmake``, which programs in
C++ read.
"""

from __future__ import annotations

from pathlib import Path

from tvm_flashinfer.kernels.errors import KernelError

_PACKAGE = Path(__file__).resolve().parent.parent


def csrc_dir() -> Path:
    """Return the folder of the native sources.

    Raises
    ------
    KernelError
        The installation has none.
    """
    for folder in (_PACKAGE / "csrc", _PACKAGE.parent / "csrc"):
        if (folder / "kernels" / "cuda").is_dir():
            return folder
    raise KernelError(
        f"the sources of the CUDA kernels are missing: neither {_PACKAGE / 'csrc'} nor "
        f"{_PACKAGE.parent / 'csrc'} holds kernels/cuda. Install tvm-flashinfer again."
    )


def cmake_dir() -> Path:
    """Return the folder with ``tvm_flashinfer-config.cmake``, for ``find_package`` of CMake.

    Raises
    ------
    KernelError
        The installation has none.
    """
    for folder in (_PACKAGE / "cmake", _PACKAGE.parent / "cmake"):
        if (folder / "tvm_flashinfer-config.cmake").is_file():
            return folder
    raise KernelError(
        f"tvm_flashinfer-config.cmake is neither in {_PACKAGE / 'cmake'} nor in "
        f"{_PACKAGE.parent / 'cmake'}. Install tvm-flashinfer again."
    )


def lib_dir() -> Path:
    """Return the folder of the native libraries; it may not exist."""
    return _PACKAGE / "lib"


def native_library() -> Path:
    """Return ``libtvm_flashinfer.so``, which registers the packed functions."""
    return _library("libtvm_flashinfer.so")


def static_library() -> Path:
    """Return ``libflashinfer_tvm.a``, the ops to link into a model library."""
    return _library("libflashinfer_tvm.a")


def _library(name: str) -> Path:
    path = lib_dir() / name
    if not path.is_file():
        raise KernelError(
            f"{path} is missing: the native library of this package was not built. "
            + (
                f"{path.parents[2]} is a source checkout, which hides an installed package from "
                "programs that run in it: run them elsewhere, or `make demo` there once"
                if (path.parents[2] / "pyproject.toml").is_file()
                else "Install tvm-flashinfer again"
            )
        )
    return path

"""Making kernels available to the packed functions of this process."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tvm_flashinfer.kernels.build import Progress, build_library, print_progress
from tvm_flashinfer.kernels.spec import KernelSpec


def ensure_library(
    specs: Iterable[KernelSpec],
    jobs: int | None = None,
    progress: Progress | None = print_progress,
) -> Path:
    """Return a shared library with the units, built when the cache has none.

    The parameters and errors are those of `build_library`.
    """
    return build_library(specs, jobs, progress)


def load(
    specs: Iterable[KernelSpec],
    jobs: int | None = None,
    progress: Progress | None = print_progress,
) -> Path:
    """Build the units if need be and give them to the packed functions of this process.

    The parameters and errors are those of `build_library`.

    Returns
    -------
    library : Path
        The library that was loaded. It stays loaded as long as the process lives.
    """
    library = ensure_library(specs, jobs, progress)
    _native_load(library)
    return library


def _native_load(library: Path) -> None:
    """Call the native library. The one place where the kernel build meets it."""
    import tvm_ffi  # the build itself works where it is not installed

    tvm_ffi.get_global_func("flashinfer.load_kernels")(str(library))

"""TVM without its compiler (``TVM_USE_RUNTIME_LIB=1``, or a wheel of the runtime alone)."""

from __future__ import annotations

import contextlib
from pathlib import Path

from tvm_ffi.libinfo import load_lib_ctypes

#: Parts of TVM's runtime that lie beside it: CUDA devices, and what several GPUs need (disco).
_PARTS = ("tvm_runtime_cuda", "tvm_runtime_extra")


def load_parts() -> None:
    """Load the parts of TVM's runtime that it loads with its compiler only, where they are there.

    Without them such a process has no CUDA device. A part that cannot be loaded is left out, as TVM
    does: that of CUDA needs the driver.
    """
    from tvm.base import _LOADED_LIBS

    folder = Path(_LOADED_LIBS["tvm_runtime"]._name).resolve().parent
    for name in _PARTS:
        if name in _LOADED_LIBS:
            continue
        with contextlib.suppress(OSError, RuntimeError):
            _LOADED_LIBS[name] = load_lib_ctypes(
                package="tvm", target_name=name, extra_lib_paths=[folder], mode="RTLD_LOCAL"
            )

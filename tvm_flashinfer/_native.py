"""The native library: found, loaded once, and connected to the kernel build."""

from __future__ import annotations

import functools
from pathlib import Path

import tvm_ffi

#: Registered by the native library; its presence tells that it is loaded.
_PROBE = "flashinfer.load_kernels"


@functools.cache
def load() -> Path:
    """Load ``libtvm_flashinfer.so``, which registers the ``flashinfer.*`` globals.

    Returns
    -------
    path : Path
        The library that was loaded.

    Raises
    ------
    ImportError
        The package was installed without its native library, or another copy of it registered
        the functions before.
    """
    from tvm_flashinfer.kernels.errors import KernelError
    from tvm_flashinfer.kernels.paths import native_library

    try:
        path = native_library()
    except KernelError as error:
        raise ImportError(str(error)) from error
    if tvm_ffi.get_global_func(_PROBE, allow_missing=True) is not None:
        # That copy may be of another version, and is not connected to the kernel build.
        raise ImportError(
            f"the flashinfer.* functions were registered by another library; {path} was not "
            "loaded. Load one copy of libtvm_flashinfer.so in a process."
        )
    tvm_ffi.load_module(path)
    tvm_ffi.register_global_func("flashinfer.load_prebuilt_kernels", _load_prebuilt_kernels)
    tvm_ffi.register_global_func("flashinfer.request_kernels", _request_kernels)
    tvm_ffi.register_global_func("flashinfer.check_tvm", _check_tvm)
    return path


@functools.cache
def _load_prebuilt_kernels() -> None:
    """Load the kernels that need no compiler: prebuilt ones, and libraries in ``lib/kernels``."""
    from tvm_flashinfer.kernels.prebuilt import libraries_to_load

    for library in libraries_to_load():
        tvm_ffi.get_global_func("flashinfer.load_kernels")(str(library))


def _check_tvm() -> None:
    """Raise when the imported TVM calls its cache's functions in another way than ours are called.

    The native library asks when a cache is created: a model may run under another TVM than the one
    it was compiled with.
    """
    from tvm_flashinfer.contract import check_contract

    check_contract()


def _request_kernels(
    kind: str, dtype: str, head_dim_qk: int, head_dim_vo: int, device_id: int, kv_dtype: str
) -> None:
    """Build and load the unit that a call on a GPU needs; the native library asks for it."""
    from tvm_flashinfer.kernels import KernelSpec, device_arch, load
    from tvm_flashinfer.kernels.spec import PLAIN_KINDS

    arch = (device_arch(device_id),)
    # The common unit comes along: it is needed by every call and compiles beside the other.
    specs = {KernelSpec("common", archs=arch)}
    if kind in PLAIN_KINDS:
        specs.add(KernelSpec(kind, archs=arch))
    else:
        specs.add(KernelSpec(kind, dtype, head_dim_qk, head_dim_vo, arch, kv_dtype))
    load(sorted(specs, key=lambda spec: spec.name))

"""CUDA kernels: what they are called, how they are compiled, where they are kept.

A kernel is described by a `KernelSpec`. `build_library` compiles specs to a shared library and
`build_model_object` to an object file for a model library; both keep what they build in a cache.
Nothing here imports TVM or PyTorch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_flashinfer.kernels.build import (
        build_library,
        build_model_object,
        build_objects,
        build_prebuilt,
    )
    from tvm_flashinfer.kernels.cache import KernelCache
    from tvm_flashinfer.kernels.environment import default_archs, device_arch
    from tvm_flashinfer.kernels.errors import (
        CacheError,
        HeadersError,
        KernelBuildError,
        KernelError,
        ToolchainError,
        UnsupportedKernelError,
    )
    from tvm_flashinfer.kernels.headers import FLASHINFER_VERSION
    from tvm_flashinfer.kernels.loader import ensure_library, load
    from tvm_flashinfer.kernels.spec import (
        PRESETS,
        KernelSpec,
        attention_specs,
        preset_specs,
        unsupported_reasons,
    )
    from tvm_flashinfer.kernels.toolchain import missing_tools

__all__ = [
    "FLASHINFER_VERSION",
    "PRESETS",
    "CacheError",
    "HeadersError",
    "KernelBuildError",
    "KernelCache",
    "KernelError",
    "KernelSpec",
    "ToolchainError",
    "UnsupportedKernelError",
    "attention_specs",
    "build_library",
    "build_model_object",
    "build_objects",
    "build_prebuilt",
    "default_archs",
    "device_arch",
    "ensure_library",
    "load",
    "missing_tools",
    "preset_specs",
    "unsupported_reasons",
]

# Imported when first asked for: `import tvm` imports this package, and seldom builds kernels.
_MODULES = {
    "build": ("build_library", "build_model_object", "build_objects", "build_prebuilt"),
    "cache": ("KernelCache",),
    "environment": ("default_archs", "device_arch"),
    "errors": (
        "CacheError",
        "HeadersError",
        "KernelBuildError",
        "KernelError",
        "ToolchainError",
        "UnsupportedKernelError",
    ),
    "headers": ("FLASHINFER_VERSION",),
    "loader": ("ensure_library", "load"),
    "spec": ("PRESETS", "KernelSpec", "attention_specs", "preset_specs", "unsupported_reasons"),
    "toolchain": ("missing_tools",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__

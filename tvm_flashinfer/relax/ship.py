"""Where the kernels of a model are: in its own library, or in this package."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict

import tvm
import tvm_ffi
from tvm.target import Target

from tvm_flashinfer import _native
from tvm_flashinfer.kernels.spec import KernelSpec
from tvm_flashinfer.relax.config import PagedKVCacheConfig
from tvm_flashinfer.relax.support import kernel_specs

SELF_CONTAINED = "self-contained"
SHARED = "shared"

#: Environment variable that decides for CUDA where no argument does, such as in MLC LLM.
SHIP_VARIABLE = "TVM_FLASHINFER_SHIP"

#: Attribute of a module: the kernels that `link_kernels` attached, and where.
_LINKED = "tvm_flashinfer.linked_kernels"


def resolve_ship(ship: str | None, target: Target) -> str:
    """Return how to ship a model for a target.

    Parameters
    ----------
    ship : str or None
        ``"self-contained"``, ``"shared"``, or None: on CUDA as ``TVM_FLASHINFER_SHIP`` says, else
        self-contained.
    target : tvm.target.Target

    Raises
    ------
    ValueError
        For another word, and for ``"self-contained"`` on a target other than CUDA.
    """
    on_cuda = target.kind.name == "cuda"
    if ship is None:
        if not on_cuda:
            return SHARED
        ship = os.environ.get(SHIP_VARIABLE) or SELF_CONTAINED
    if ship not in (SELF_CONTAINED, SHARED):
        raise ValueError(f"ship is {ship!r}, expected {SELF_CONTAINED!r} or {SHARED!r}")
    if ship == SELF_CONTAINED and not on_cuda:
        raise ValueError(
            f"ship is {ship!r} and the target is {target.kind.name!r}; only CUDA kernels can be "
            f"linked into a model, use {SHARED!r}"
        )
    return ship


def external_modules(
    configs: Iterable[PagedKVCacheConfig], target: Target, ship: str
) -> list[tvm.runtime.Module]:
    """Return the modules to link into a model so that it has the kernels of its caches, or asks.

    All caches share one object file: two would both define the functions that they have in common.
    A model that is shipped shared gets `requirement` instead.

    Parameters
    ----------
    configs : iterable of PagedKVCacheConfig
        Supported ones.
    target : tvm.target.Target
    ship : str
        What `resolve_ship` returns.

    Returns
    -------
    modules : list of tvm.runtime.Module
        One, or none when the model has no cache.
    """
    configs = list(configs)
    if not configs:
        return []
    if ship == SHARED:
        return [requirement()]
    return [_model_module([spec for config in configs for spec in kernel_specs(config, target)])]


def link_kernels(
    mod: tvm.IRModule, specs: Iterable[KernelSpec], target: Target, ship: str
) -> tvm.IRModule:
    """Return a module that has kernels attached, to be linked into the model's library.

    What an earlier call attached becomes part of one new object file, since two would both define
    the functions that they have in common. A model that is shipped shared gets `requirement`.

    Parameters
    ----------
    mod : tvm.IRModule
    specs : iterable of KernelSpec
        Supported ones; none on targets other than CUDA.
    target : tvm.target.Target
    ship : str
        What `resolve_ship` returns.
    """
    specs = list(specs)
    attrs = mod.attrs or {}
    modules = list(attrs.get("external_mods", []))
    if ship == SHARED:
        needed = requirement()
        asked = any(module.kind == needed.kind for module in modules)
        return mod if asked else mod.with_attr("external_mods", [*modules, needed])
    if _LINKED in attrs:
        earlier = json.loads(attrs[_LINKED])
        specs = [KernelSpec(**fields) for fields in earlier["specs"]] + specs
        modules[earlier["index"]] = _model_module(specs)
        index = earlier["index"]
    else:
        index = len(modules)
        modules.append(_model_module(specs))
    linked = {"specs": [asdict(spec) for spec in dict.fromkeys(specs)], "index": index}
    return mod.with_attr("external_mods", modules).with_attr(_LINKED, json.dumps(linked))


def _model_module(specs: Iterable[KernelSpec]) -> tvm.runtime.Module:
    """Return one object file with the kernels of a model, built if it must be."""
    # Late, because it looks for compilers, which a model that is shipped shared does without.
    from tvm_flashinfer.kernels import build_model_object

    path = build_model_object(list(dict.fromkeys(specs)))
    return tvm.runtime.load_static_library(str(path), func_names=[])


def requirement() -> tvm.runtime.Module:
    """Return the module that keeps a library from loading where this package is missing.

    TVM makes the modules of a library again when it loads it. A process without this package, or
    with one that is too old, does not know this kind, and TVM's error names it: the kind is the
    command that installs what is missing.
    """
    _native.load()
    return tvm_ffi.get_global_func("flashinfer.requirement")()

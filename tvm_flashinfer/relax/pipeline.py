"""The pipeline ``"flashinfer"``: TVM's default one for a target with our passes in front."""

from __future__ import annotations

from types import ModuleType

import tvm
from tvm import relax as rx
from tvm.relax import pipeline as tvm_pipeline
from tvm.relax.backend.cpu_generic import pipeline as cpu_pipeline
from tvm.relax.backend.cuda import pipeline as cuda_pipeline
from tvm.target import Target

from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW
from tvm_flashinfer.relax.dispatch_attention import DispatchAttention
from tvm_flashinfer.relax.dispatch_kv_cache_creation import DispatchKVCacheCreation
from tvm_flashinfer.relax.dispatch_sampling import DispatchSampling
from tvm_flashinfer.relax.support import TARGETS

#: The name for ``relax.get_pipeline`` and ``tvm.compile(..., relax_pipeline=...)``.
NAME = "flashinfer"


def library_dispatch_passes(
    target: Target,
    ship: str | None = None,
    strict: bool | None = None,
    binary_masks: bool = False,
    layer_sliding_window_size: int = DEFAULT_LAYER_WINDOW,
) -> list[tvm.transform.Pass]:
    """Return our passes, and TVM's of the same kind for a target.

    Parameters
    ----------
    target : tvm.target.Target
        Of kind ``cuda`` or ``llvm``.
    ship, strict, binary_masks, layer_sliding_window_size
        See `DispatchAttention` and `DispatchKVCacheCreation`.
    """
    return [
        DispatchKVCacheCreation(target, ship, strict, layer_sliding_window_size),
        DispatchAttention(target, ship, strict, binary_masks),
        DispatchSampling(target, ship, strict),
        *_backend(target).library_dispatch_passes(target),
    ]


def flashinfer_pipeline(
    target: Target | None = None,
    ship: str | None = None,
    strict: bool | None = None,
    binary_masks: bool = False,
    layer_sliding_window_size: int = DEFAULT_LAYER_WINDOW,
) -> tvm.transform.Pass:
    """Return the whole pipeline, down to what the virtual machine runs.

    Parameters
    ----------
    target : tvm.target.Target, optional
        The current target when it is left out; ``tvm.compile`` sets it.
    ship, strict, binary_masks, layer_sliding_window_size
        See `DispatchAttention` and `DispatchKVCacheCreation`.

    Raises
    ------
    ValueError
        When the pass runs and no target is known, or one of another kind.
    """

    @tvm.transform.module_pass(opt_level=0, name="flashinfer_pipeline")
    def run(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        chosen = target or Target.current(allow_none=True)
        if chosen is None:
            raise ValueError(
                "the target is not known; give it to get_pipeline('flashinfer', target=...) or run "
                "the pipeline inside `with target:`"
            )
        ours = library_dispatch_passes(
            chosen, ship, strict, binary_masks, layer_sliding_window_size
        )
        with chosen:
            return tvm.transform.Sequential([*ours, *_lowering(chosen)])(mod)

    return run


def _lowering(target: Target) -> list[tvm.transform.Pass]:
    """Return TVM's passes after the dispatch to libraries."""
    backend = _backend(target)
    return [
        *backend.legalize_passes(target),
        *backend.dataflow_lower_passes(target),
        *backend.finalize_passes(target),
    ]


def _backend(target: Target) -> ModuleType:
    """Return TVM's module of the passes for a target."""
    kind = target.kind.name
    if kind not in TARGETS:
        raise ValueError(
            f"the target is {kind!r}; the pipeline {NAME!r} is for {' and '.join(TARGETS)}"
        )
    return cuda_pipeline if kind == "cuda" else cpu_pipeline


if NAME not in tvm_pipeline.PIPELINE_MAP:
    rx.register_pipeline(NAME)(flashinfer_pipeline)

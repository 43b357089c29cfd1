"""What ``mlc_llm compile`` does with our cache: which functions make it, its window, what is told.

`tvm_flashinfer.mlc` puts what is here round functions of MLC LLM.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import tvm
from tvm.target import Target

from tvm_flashinfer.kernels.build import print_progress
from tvm_flashinfer.kernels.spec import KernelSpec, unsupported_reasons
from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW
from tvm_flashinfer.relax.dispatch_kv_cache_creation import DispatchKVCacheCreation
from tvm_flashinfer.relax.mlc_sites import attention_sites
from tvm_flashinfer.relax.report import attach_report
from tvm_flashinfer.relax.ship import link_kernels, resolve_ship
from tvm_flashinfer.relax.slots import fallback_rows
from tvm_flashinfer.relax.strict import StrictModeError, strict_mode, strict_violations
from tvm_flashinfer.relax.support import target_archs
from tvm_flashinfer.report import NATIVE, CompileReport, ReportRow

#: The function of a model that MLC LLM's pass replaces.
_CREATION = "create_paged_kv_cache"

#: Attribute of MLC LLM's flags: whether FlashInfer was asked for, before a target turned it off.
_ASKED_FOR = "_tvm_flashinfer_asked_for"

#: Flags of MLC LLM, and the function of TVM without which what they ask for cannot be compiled or
#: loaded, with the name of its library.
_LIBRARIES = (
    ("cublas_gemm", "relax.ext.cublas", "cuBLAS"),
    ("cutlass", "cutlass.group_gemm", "CUTLASS"),
    ("ipc_allreduce_strategy", "runtime.disco.cuda_ipc.custom_allreduce", "all-reduce over IPC"),
)


@dataclass
class _Compile:
    """The compile that is under way."""

    model_config: Any = None
    asked_for: bool = False
    report: CompileReport | None = None


_now = _Compile()


def update_flags(update: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``OptimizationFlags.update``, which turns off what a target has no use for.

    It remembers whether FlashInfer was asked for, and turns off what this TVM is built without.
    """

    def updating(self: Any, target: Target, quantization: Any) -> None:
        setattr(self, _ASKED_FOR, self.flashinfer)
        update(self, target, quantization)
        for flag, function, library in _LIBRARIES:
            value = getattr(self, flag)
            if value and tvm.get_global_func(function, allow_missing=True) is None:
                setattr(self, flag, type(value)(0))
                print_progress(f"{flag} is turned off: this TVM is built without {library}")

    return updating


def compile_model(compile_: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``mlc_llm.interface.compile._compile``: its end tells what serves the model."""

    def compiling(args: Any, model_config: Any) -> None:
        global _now
        _now = _Compile(model_config, getattr(args.opt, _ASKED_FOR, False))
        try:
            compile_(args, model_config)
        finally:
            if _now.report is not None:
                for row in _now.report.rows:
                    print_progress(_line(row))
            _now = _Compile()

    return compiling


def dispatch_pass(theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap MLC LLM's ``DispatchKVCacheCreation``: where FlashInfer is asked for, ours runs."""

    def make(target: Target, flashinfer: bool, metadata: dict[str, Any]) -> Any:
        if target.kind.name != "cuda" or not (flashinfer or _now.asked_for):
            return theirs(target, flashinfer, metadata)

        @tvm.transform.module_pass(opt_level=0, name="DispatchKVCacheCreation")
        def dispatch(mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
            if flashinfer:
                mod, rows = _with_our_caches(mod, target, metadata)
            else:  # the target turned it off
                rows = _turned_off(mod, target)
                mod = theirs(target, False, metadata)(mod)
            _now.report = CompileReport(target.kind.name, resolve_ship(None, target), rows)
            violations = strict_violations(rows)
            if violations and strict_mode():
                raise StrictModeError(violations)
            return attach_report(mod, _now.report) if rows else mod

        return dispatch

    return make


def our_functions(metadata: Mapping[str, Any]) -> tuple[str, ...]:
    """Return which creation functions of a model make our cache.

    MLC LLM's runtime takes ``create_tir_paged_kv_cache`` when the whole cache slides. It makes the
    state of a hybrid model only where there is no ``create_flashinfer_paged_kv_cache``.

    Parameters
    ----------
    metadata : mapping
        That of MLC LLM, with ``kv_state_kind`` and ``sliding_window_size``.
    """
    if metadata.get("kv_state_kind") == "hybrid":
        return ("tir",)
    if metadata.get("sliding_window_size", -1) != -1:
        return ("flashinfer", "tir")
    return ("flashinfer",)


def layer_window(model_config: Any) -> int | None:
    """Return the window of the layers that slide, which MLC LLM's call does not carry.

    Parameters
    ----------
    model_config : object
        MLC LLM's configuration of the model. That of the text model in it goes first.

    Returns
    -------
    window : int or None
        In tokens; None when the configuration names none.
    """
    for config in (getattr(model_config, "text_config", None), model_config):
        for name in ("sliding_window_size", "sliding_window"):
            window = getattr(config, name, None)
            if isinstance(window, int) and window > 0:
                return window
    return None


def _with_our_caches(
    mod: tvm.IRModule, target: Target, metadata: dict[str, Any]
) -> tuple[tvm.IRModule, list[ReportRow]]:
    sites = attention_sites(mod)
    caches = DispatchKVCacheCreation(
        target,
        strict=False,  # the caller looks at all rows
        layer_sliding_window_size=layer_window(_now.model_config) or DEFAULT_LAYER_WINDOW,
        ours=our_functions(metadata),
    )
    specs = [spec for site in sites for spec in site.specs(target)]
    if specs:
        mod = link_kernels(mod, specs, target, resolve_ship(None, target))
    mod = caches(mod)
    for config in caches.configs:  # as MLC LLM's pass does, for its runtime
        metadata["kv_cache"] = {
            "num_hidden_layers": config.num_hidden_layers,
            "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads,
            "head_dim": config.qk_head_dim,
        }
    rows = [] if caches.report is None else caches.report.rows
    return mod, rows + [site.row(target) for site in sites]


def _turned_off(mod: tvm.IRModule, target: Target) -> list[ReportRow]:
    """Return the row of a cache for whose target MLC LLM asks for no FlashInfer."""
    if all(var.name_hint != _CREATION for var in mod.get_global_vars()):
        return []
    reasons = unsupported_reasons(KernelSpec("common", archs=target_archs(target)))
    reasons = reasons or ["MLC LLM turned FlashInfer off for this target"]
    return fallback_rows(reasons, target, "create_tir_paged_kv_cache")


def _line(row: ReportRow) -> str:
    if row.status == NATIVE:
        return f"{row.site} {row.slot}: native ({row.kernel}, {row.arch})"
    return f"{row.site} {row.slot}: fallback: {'; '.join(row.reasons)}"

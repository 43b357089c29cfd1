"""A pass that turns the generic creation of a paged KV cache into that of ours and of TVM's."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import tvm
from tvm import relax as rx
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache
from tvm.target import Target

from tvm_flashinfer.kernels.errors import KernelError
from tvm_flashinfer.relax import slots
from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW, HAS_LAYER_WINDOW
from tvm_flashinfer.relax.bind_layer_windows import bind_windows_of
from tvm_flashinfer.relax.config import (
    GENERIC_SYMBOL,
    KVCacheCallError,
    PagedKVCacheConfig,
    parse_generic_call,
)
from tvm_flashinfer.relax.kv_cache import carried_description, creation_call
from tvm_flashinfer.relax.report import CompileReport, ReportRow, attach_report
from tvm_flashinfer.relax.ship import link_kernels, resolve_ship
from tvm_flashinfer.relax.strict import (
    FallbackWarning,
    StrictModeError,
    strict_mode,
    strict_violations,
)
from tvm_flashinfer.relax.support import kernel_specs, unsupported_reasons

#: The functions that a creation function becomes: ``create_<kind>_paged_kv_cache``.
_KINDS = ("flashinfer", "tir")


@dataclass(frozen=True, eq=False)
class _Site:
    """A function that creates a cache, and the binding in it that does."""

    var: tvm.ir.GlobalVar
    function: rx.Function
    binding: rx.VarBinding
    config: PagedKVCacheConfig

    def name_for(self, kind: str) -> str:
        """``create_paged_kv_cache`` -> ``create_<kind>_paged_kv_cache``, which MLC LLM looks up."""
        name = self.var.name_hint
        if name.startswith("create_"):
            return f"create_{kind}_{name.removeprefix('create_')}"
        return f"{name}_{kind}"


@tvm.transform.module_pass(opt_level=0, name="DispatchKVCacheCreation")
class DispatchKVCacheCreation:
    """Replace each function that calls ``mlc.create_paged_kv_cache_generic`` by two functions.

    ``create_paged_kv_cache`` becomes ``create_flashinfer_paged_kv_cache``, whose cache runs on
    ``flashinfer.*``, and ``create_tir_paged_kv_cache``, whose cache runs on TVM's kernels; the
    runtime of MLC LLM takes the first one unless the model slides its window globally. A cache that
    cannot be served, or whose kernels cannot be built, gets the second one only, and one that TVM
    has no kernels for (MLA on CPU, longrope) the first. Where layers slide, attention calls are
    told their window, as by `BindLayerWindows`. All other functions stay the same objects.

    The module gets a report, as an attribute and as the function ``flashinfer_report``.

    Parameters
    ----------
    target : tvm.target.Target, optional
        What the model is compiled for; the current target when it is left out.
    ship : str, optional
        ``"self-contained"``: the kernels are attached to the module, to be linked into its library;
        the default on CUDA. ``"shared"``: the library looks them up when it is loaded.
    strict : bool, optional
        Raise when anything the model runs into falls back to TVM's kernels, instead of warning.
        Left out, the environment variable ``TVM_FLASHINFER_STRICT`` decides.
    layer_sliding_window_size : int
        Window of the layers of kind ``mha_sliding``, which the generic call does not carry.
    ours : sequence of str
        Which of the two functions make our cache: ``"flashinfer"``, ``"tir"`` or both. The first
        one is left out of the module when it is not named.

    Attributes
    ----------
    configs : list of PagedKVCacheConfig
        The caches of the last module.
    report : CompileReport or None
        What the last module ended in; None before the first, and for one without such a call.

    Raises
    ------
    KVCacheCallError
        When a call is not the one that MLC LLM emits, or stands where it cannot be rewritten.
    StrictModeError
        In strict mode, with the reasons.
    """

    def __init__(
        self,
        target: Target | None = None,
        ship: str | None = None,
        strict: bool | None = None,
        layer_sliding_window_size: int = DEFAULT_LAYER_WINDOW,
        ours: Sequence[str] = ("flashinfer",),
    ) -> None:
        if not ours or not set(ours) <= set(_KINDS):
            raise ValueError(f"ours is {tuple(ours)}, expected one or both of {', '.join(_KINDS)}")
        self.target = target
        self.ship = ship
        self.strict = strict
        self.layer_sliding_window_size = layer_sliding_window_size
        self.ours = tuple(ours)
        self.configs: list[PagedKVCacheConfig] = []
        self.report: CompileReport | None = None

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite a module; one without the call is returned as it is."""
        self.report = None
        sites = _find_sites(mod, self.layer_sliding_window_size)
        self.configs = [site.config for site in sites]
        if not sites:
            return mod
        target = self._target()
        ship = resolve_ship(self.ship, target)
        reasons = [unsupported_reasons(site.config, target) for site in sites]
        self._check_strict(self._rows(sites, reasons, target))
        served = [site for site, why_not in zip(sites, reasons, strict=True) if not why_not]
        specs = [spec for site in served for spec in kernel_specs(site.config, target)]
        try:
            mod = link_kernels(mod, specs, target, ship) if served else mod
        except KernelError as error:
            reasons = [why or [f"{type(error).__name__}: {error}"] for why in reasons]
        rows = self._rows(sites, reasons, target)
        self._check_strict(rows)

        new_mod = _without(mod, sites)
        builder = rx.BlockBuilder(new_mod)
        for site, why_not in zip(sites, reasons, strict=True):
            self._add_creations(builder, site, target, served=not why_not)
        new_mod = _with_distinct_symbols(builder.get(), mod)
        if not all(reasons):
            new_mod, note = bind_windows_of(new_mod, self.configs)
            rows = _with_window_note(rows, sites, note)
        tuning = carried_description(target) if served else ""
        self.report = CompileReport(target.kind.name, ship, rows, tuning)
        _warn_of_fallbacks(sites, reasons)
        return attach_report(new_mod, self.report)

    def _rows(
        self, sites: list[_Site], reasons: list[list[str]], target: Target
    ) -> list[ReportRow]:
        rows = []
        for site, why_not in zip(sites, reasons, strict=True):
            names = [site.name_for(kind) for kind in self.ours]
            if why_not:
                rows += slots.fallback_rows(why_not, target, names[0])
            else:
                rows += [
                    row for name in names for row in slots.native_rows(site.config, target, name)
                ]
        return rows

    def _add_creations(
        self, builder: rx.BlockBuilder, site: _Site, target: Target, served: bool
    ) -> None:
        for kind in _KINDS:
            if served and kind in self.ours:
                _add_creation(builder, site, kind, target, creation_call)
            elif kind == "tir" and (not served or _tvm_serves(site.config, target)):
                _add_creation(builder, site, kind, target, _tir_creation_call)

    def _target(self) -> Target:
        target = self.target or Target.current(allow_none=True)
        if target is None:
            raise ValueError(
                "the target is not known; give it to DispatchKVCacheCreation or run the pass "
                "inside `with target:`"
            )
        return target

    def _check_strict(self, rows: list[ReportRow]) -> None:
        violations = strict_violations(rows)
        if violations and strict_mode(self.strict):
            raise StrictModeError(violations)


def _with_window_note(rows: list[ReportRow], sites: list[_Site], note: str) -> list[ReportRow]:
    """Return a report that says of new tokens in sliding layers what becomes of them."""
    sliding = {
        site.name_for(kind) for site in sites if site.config.has_sliding_layers for kind in _KINDS
    }
    return [
        replace(row, reasons=(*row.reasons, note))
        if row.site in sliding and row.slot == slots.PREFILL_RAGGED.name
        else row
        for row in rows
    ]


def _find_sites(mod: tvm.IRModule, layer_window: int) -> list[_Site]:
    sites = []
    for var, function in mod.functions_items():
        if not isinstance(function, rx.Function) or not _calls_generic(function):
            continue
        bindings = [
            binding
            for block in function.body.blocks
            for binding in block.bindings
            if isinstance(binding, rx.VarBinding) and _is_generic_call(binding.value)
        ]
        if len(bindings) != 1:
            raise KVCacheCallError(
                f"{var.name_hint} has {len(bindings)} calls of {GENERIC_SYMBOL} bound to a "
                "variable of its body. Expected 1: a function creates one cache, outside of "
                "branches"
            )
        config = parse_generic_call(
            bindings[0].value, rx.analysis.get_var2val(function).get, layer_window
        )
        sites.append(_Site(var, function, bindings[0], config))
    return sorted(sites, key=lambda site: site.var.name_hint)


def _is_generic_call(expr: rx.Expr) -> bool:
    return (
        isinstance(expr, rx.Call)
        and expr.op == tvm.ir.Op.get("relax.call_pure_packed")
        and isinstance(expr.args[0], rx.ExternFunc)
        and expr.args[0].global_symbol == GENERIC_SYMBOL
    )


def _calls_generic(function: rx.Function) -> bool:
    found = []

    def visit(expr: rx.Expr) -> None:
        if isinstance(expr, rx.ExternFunc) and expr.global_symbol == GENERIC_SYMBOL:
            found.append(expr)

    rx.analysis.post_order_visit(function, visit)
    return bool(found)


def _without(mod: tvm.IRModule, sites: list[_Site]) -> tvm.IRModule:
    """Return the module without the functions of the sites, its other functions as they are."""
    removed = {site.var.name_hint for site in sites}
    functions = {var: fn for var, fn in mod.functions_items() if var.name_hint not in removed}
    for var, function in functions.items():
        used = rx.analysis.all_global_vars(function) if isinstance(function, rx.Function) else []
        called = removed & {used_var.name_hint for used_var in used}
        if called:
            raise KVCacheCallError(
                f"{var.name_hint} calls {', '.join(sorted(called))}, which this pass replaces by "
                "two functions. Create the cache from outside the module"
            )
    attrs = dict(mod.attrs) if mod.attrs is not None else None
    return tvm.IRModule(functions, attrs=attrs, global_infos=mod.global_infos)


def _add_creation(
    builder: rx.BlockBuilder,
    site: _Site,
    kind: str,
    target: Target,
    make_call: Callable[[PagedKVCacheConfig, Target], rx.Call],
) -> None:
    """Add a copy of the function of a site in which a call makes the cache."""
    # A variable may be bound once in a module, and the two functions bind the same ones. The copy
    # has symbolic variables of its own too, so its call is read again.
    function = rx.utils.copy_with_new_vars(site.function)
    copied = _find_sites(
        tvm.IRModule({site.var.name_hint: function}), site.config.layer_sliding_window_size
    )[0]
    name = site.name_for(kind)
    attrs = {**dict(function.attrs or {}), "global_symbol": name}
    with builder.function(name, list(function.params), attrs=attrs, pure=function.is_pure):
        for block in function.body.blocks:
            dataflow = isinstance(block, rx.DataflowBlock)
            with builder.dataflow() if dataflow else nullcontext():
                for binding in block.bindings:
                    if binding.var.same_as(copied.binding.var):
                        cache = builder.normalize(make_call(copied.config, target))
                        binding = rx.VarBinding(binding.var, cache)
                    builder.emit_normalized(binding)
        builder.emit_func_output(function.body.body)


def _with_distinct_symbols(mod: tvm.IRModule, earlier: tvm.IRModule) -> tvm.IRModule:
    """Give each function that was added a global symbol of its own.

    TVM's kernels for two caches of different shapes have the same ones, and a module that has two
    functions of one symbol cannot be compiled.
    """
    old = {var.name_hint for var in earlier.get_global_vars()}
    added = sorted(
        (var for var in mod.get_global_vars() if var.name_hint not in old),
        key=lambda var: var.name_hint,
    )
    taken = {_symbol(mod[var]) for var in mod.get_global_vars() if var.name_hint in old}
    for var in added:
        symbol = _symbol(mod[var])
        if symbol in taken:
            symbol = var.name_hint
            mod.update_func(var, mod[var].with_attr("global_symbol", symbol))
        taken.add(symbol)
    return mod


def _symbol(function: tvm.ir.BaseFunc) -> str | None:
    return (function.attrs or {}).get("global_symbol")


def _tvm_serves(config: PagedKVCacheConfig, target: Target) -> bool:
    """Return whether TVM can make the cache on its own kernels.

    It has none of MLA on CPU, and its rotation by longrope does not parse, in 0.26 as in 0.27.
    """
    if config.is_mla:
        return target.kind.name != "llvm"
    return config.rope_type != "longrope"


def _tir_creation_call(config: PagedKVCacheConfig, target: Target) -> rx.Call:
    """Return the call that makes TVM's cache on its own kernels."""
    arguments = config.builder_arguments()
    arguments["rope_scaling"] = config.tvm_rope_scaling
    if config.rope_type == "linear":
        # TVM has no such type, and its rope_scale does the same.
        arguments["rope_scale"] /= config.rope_scaling["factor"]
    if HAS_LAYER_WINDOW:
        arguments["layer_sliding_window_size"] = config.layer_sliding_window_size
    return tvm_kv_cache.TIRPagedKVCache(**arguments, target=target)._expr


def _warn_of_fallbacks(sites: list[_Site], reasons: list[list[str]]) -> None:
    for site, why_not in zip(sites, reasons, strict=True):
        if why_not:
            lines = "".join(f"\n  - {reason}" for reason in why_not)
            warnings.warn(
                f"the cache of {site.var.name_hint} runs on TVM's own kernels:{lines}",
                FallbackWarning,
                stacklevel=2,
            )

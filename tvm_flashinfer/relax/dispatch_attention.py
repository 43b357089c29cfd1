"""A pass that puts the attention of any model on ``flashinfer.attention_*``."""

from __future__ import annotations

import tvm
from tvm import relax as rx
from tvm.target import Target

from tvm_flashinfer.relax.attention_calls import emit_attention
from tvm_flashinfer.relax.attention_match import read_products
from tvm_flashinfer.relax.attention_ops import read_operator
from tvm_flashinfer.relax.attention_site import AttentionSite
from tvm_flashinfer.relax.attention_support import (
    kernel_head_dims,
    needed_specs,
    padding_notes,
    unserved_reasons,
)
from tvm_flashinfer.relax.graph import Graph
from tvm_flashinfer.relax.patterns import PREFIX
from tvm_flashinfer.relax.report import FALLBACK, NATIVE, CompileReport, ReportRow, attach_report
from tvm_flashinfer.relax.ship import link_kernels, resolve_ship
from tvm_flashinfer.relax.slots import arch_text
from tvm_flashinfer.relax.strict import (
    StrictModeError,
    strict_mode,
    strict_violations,
    warn_of_fallbacks,
)


@tvm.transform.module_pass(opt_level=0, name="DispatchAttention")
class DispatchAttention:
    """Rewrite attention to calls of ``flashinfer.attention_dense`` and its siblings.

    The calls pass their output, so that TVM plans its memory and can capture them in CUDA graphs.
    What no kernel serves keeps its meaning, is named in the report with the reasons, and warned of.
    A module without attention is returned as it is.

    Parameters
    ----------
    target : tvm.target.Target, optional
        What the model is compiled for; the current target when it is left out.
    ship : str, optional
        ``"self-contained"``: the kernels are attached to the module, to be linked into its library;
        the default on CUDA. ``"shared"``: the library looks them up when it is loaded.
    strict : bool, optional
        Raise when some attention cannot be rewritten, instead of warning. Left out, the environment
        variable ``TVM_FLASHINFER_STRICT`` decides.
    binary_masks : bool
        Whether the numbers that masks are made from are 0 and 1 alone, as the ``attention_mask``
        of most models is. Nothing in a model tells, so such masks are not served by default.

    Attributes
    ----------
    report : CompileReport or None
        What the last module ended in; None before the first, and for one without attention.

    Raises
    ------
    StrictModeError
        In strict mode, with the reasons.
    """

    def __init__(
        self,
        target: Target | None = None,
        ship: str | None = None,
        strict: bool | None = None,
        binary_masks: bool = False,
    ) -> None:
        self.target = target
        self.ship = ship
        self.strict = strict
        self.binary_masks = binary_masks
        self.report: CompileReport | None = None

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite a module; one without attention is returned as it is."""
        self.report = None
        sites = {
            var: found
            for var, function in mod.functions_items()
            if isinstance(function, rx.Function)
            and not _is_of_another_backend(function)
            and (found := find_sites(function, self.binary_masks))
        }
        if not sites:
            return mod
        target = self._target()
        ship = resolve_ship(self.ship, target)
        rows: list[ReportRow] = []
        served: dict[tvm.ir.GlobalVar, list[AttentionSite]] = {}
        for var, found in sites.items():
            reasons = [unserved_reasons(site, target) for site in found]
            rows += _rows(var.name_hint, found, reasons, target)
            served[var] = [s for s, why_not in zip(found, reasons, strict=True) if not why_not]
        violations = strict_violations(rows)
        if violations and strict_mode(self.strict):
            raise StrictModeError(violations)
        self.report = CompileReport(target.kind.name, ship, rows)
        warn_of_fallbacks("attention", violations)
        specs = [
            spec
            for found in served.values()
            for site in found
            for spec in needed_specs(site, target)
        ]
        if any(served.values()):
            mod = link_kernels(_rewritten(mod, served, target), specs, target, ship)
        return attach_report(mod, self.report)

    def _target(self) -> Target:
        target = self.target or Target.current(allow_none=True)
        if target is None:
            raise ValueError(
                "the target is not known; give it to DispatchAttention or run the pass inside "
                "`with target:`"
            )
        return target


def _is_of_another_backend(function: rx.Function) -> bool:
    """Return whether a function was parted for a compiler that takes its operators as they are."""
    attrs = function.attrs or {}
    pattern = str(attrs.get("Composite", PREFIX))
    return "Codegen" in attrs or not pattern.startswith(PREFIX)


def find_sites(function: rx.Function, binary_masks: bool = False) -> list[AttentionSite]:
    """Return every attention in a function, in the order of the bindings."""
    graph = Graph(function)
    found = (
        read_operator(graph, binding.var, binding.value, binary_masks)
        or read_products(graph, binding.var, binding.value, binary_masks)
        for binding in graph.bindings
    )
    return [site for site in found if site is not None]


def _rows(
    function: str, sites: list[AttentionSite], reasons: list[list[str]], target: Target
) -> list[ReportRow]:
    arch = arch_text(target)
    rows = []
    for site, why_not in zip(sites, reasons, strict=True):
        if why_not:
            status, kernel, notes = FALLBACK, site.form, why_not
        else:
            notes = [*site.notes, *padding_notes(site, target)]
            status, kernel = NATIVE, site.kernel
        rows.append(ReportRow(function, f"attention {site.name}", status, kernel, arch, notes))
    return rows


def _rewritten(
    mod: tvm.IRModule, served: dict[tvm.ir.GlobalVar, list[AttentionSite]], target: Target
) -> tvm.IRModule:
    mutator = _Rewriter(mod, target)
    for var, sites in served.items():
        if sites:
            mutator.rewrite(var, sites)
    return mutator.builder_.get()


@rx.expr_functor.mutator
class _Rewriter(rx.PyExprMutator):
    """Puts the calls in the place of the roots of sites."""

    def __init__(self, mod: tvm.IRModule, target: Target) -> None:
        super().__init__(mod)
        self.mod = mod
        self.target = target
        self.sites: list[AttentionSite] = []

    def rewrite(self, var: tvm.ir.GlobalVar, sites: list[AttentionSite]) -> None:
        """Rewrite one function."""
        self.sites = sites
        function = self.visit_expr(self.mod[var])
        self.builder_.update_func(var, rx.analysis.remove_all_unused(function))

    def visit_call_(self, call: rx.Call) -> rx.Expr:
        """Emit the calls of a site whose root this is."""
        site = next((site for site in self.sites if site.root.same_as(call)), None)
        if site is None:
            return super().visit_call_(call)
        dims = kernel_head_dims(site, self.target)
        return emit_attention(self.builder_, site, dims, self.visit_expr)

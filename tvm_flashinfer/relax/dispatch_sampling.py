"""A pass that puts sampling on ``flashinfer.sampling.*``."""

from __future__ import annotations

import tvm
from tvm import relax as rx
from tvm.target import Target

from tvm_flashinfer.kernels.spec import KernelSpec, unsupported_reasons
from tvm_flashinfer.relax.report import FALLBACK, NATIVE, CompileReport, ReportRow, attach_report
from tvm_flashinfer.relax.sampling_sites import SamplingSite, find_sampling
from tvm_flashinfer.relax.ship import link_kernels, resolve_ship
from tvm_flashinfer.relax.slots import arch_text
from tvm_flashinfer.relax.strict import (
    StrictModeError,
    strict_mode,
    strict_violations,
    warn_of_fallbacks,
)
from tvm_flashinfer.relax.support import TARGETS, target_archs


@tvm.transform.module_pass(opt_level=0, name="DispatchSampling")
class DispatchSampling:
    """Rewrite sampling to calls of ``flashinfer.sampling.*``.

    Served are ``relax.multinomial_from_uniform``, and what TVM's frontend makes of
    ``sample_top_p_top_k_from_sorted_prob`` and ``renormalize_top_p_top_k_prob``: their running sums
    and searches become one call. It works on modules that TVM has not lowered yet; a site counts
    when its computations are those of TVM, whatever they are called.

    The calls pass their output, so that TVM plans its memory. What no function serves keeps its
    meaning, is named in the report with the reasons, and warned of. A module without sampling is
    returned as it is.

    Parameters
    ----------
    target : tvm.target.Target, optional
        What the model is compiled for; the current target when it is left out.
    ship, strict
        See `DispatchAttention`.

    Attributes
    ----------
    report : CompileReport or None
        What the last module ended in; None before the first, and for one without sampling.

    Raises
    ------
    StrictModeError
        In strict mode, with the reasons.
    """

    def __init__(
        self, target: Target | None = None, ship: str | None = None, strict: bool | None = None
    ) -> None:
        self.target = target
        self.ship = ship
        self.strict = strict
        self.report: CompileReport | None = None

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite a module; one without sampling is returned as it is."""
        self.report = None
        sites = {
            var: found
            for var, function in mod.functions_items()
            if isinstance(function, rx.Function) and (found := find_sampling(function, mod))
        }
        if not sites:
            return mod
        target = self._target()
        ship = resolve_ship(self.ship, target)
        specs = _specs(target)
        reasons = _target_reasons(target, specs)
        for site in (site for found in sites.values() for site in found):
            site.problems += reasons
        rows = [_row(var.name_hint, site, target) for var, found in sites.items() for site in found]
        violations = strict_violations(rows)
        if violations and strict_mode(self.strict):
            raise StrictModeError(violations)
        self.report = CompileReport(target.kind.name, ship, rows)
        warn_of_fallbacks("sampling", violations)
        served = {
            var: [site for site in found if not site.problems] for var, found in sites.items()
        }
        if any(served.values()):
            mod = link_kernels(_rewritten(mod, served), specs, target, ship)
        return attach_report(mod, self.report)

    def _target(self) -> Target:
        target = self.target or Target.current(allow_none=True)
        if target is None:
            raise ValueError(
                "the target is not known; give it to DispatchSampling or run the pass inside "
                "`with target:`"
            )
        return target


def _specs(target: Target) -> list[KernelSpec]:
    """Return the kernels that sampling needs on CUDA, none on other targets."""
    if target.kind.name != "cuda":
        return []
    archs = target_archs(target)
    return [KernelSpec(kind, archs=archs) for kind in ("common", "sampling")]


def _target_reasons(target: Target, specs: list[KernelSpec]) -> list[str]:
    if target.kind.name not in TARGETS:
        return [f"the target is {target.kind.name!r}; there are kernels for {', '.join(TARGETS)}"]
    return list(dict.fromkeys(reason for spec in specs for reason in unsupported_reasons(spec)))


def _row(function: str, site: SamplingSite, target: Target) -> ReportRow:
    slot = f"sampling {site.name}"
    arch = arch_text(target)
    if site.problems:
        return ReportRow(function, slot, FALLBACK, site.form, arch, site.problems)
    return ReportRow(function, slot, NATIVE, site.kernel, arch, site.notes)


def _rewritten(
    mod: tvm.IRModule, served: dict[tvm.ir.GlobalVar, list[SamplingSite]]
) -> tvm.IRModule:
    mutator = _Rewriter(mod)
    for var, sites in served.items():
        if sites:
            mutator.rewrite(var, sites)
    return _without_orphans(mutator.builder_.get(), mod)


def _without_orphans(after: tvm.IRModule, before: tvm.IRModule) -> tvm.IRModule:
    """Return a module without the private functions that were called before and are no longer."""
    for name in _called(before) - _called(after):
        function = after[name]
        if isinstance(function, tvm.tirx.PrimFunc) and "global_symbol" not in (
            function.attrs or {}
        ):
            del after[name]
    return after


def _called(mod: tvm.IRModule) -> set[str]:
    """Return the names of the functions that others name."""
    found: set[str] = set()

    def visit(expr: rx.Expr) -> None:
        if isinstance(expr, tvm.ir.GlobalVar):
            found.add(expr.name_hint)

    for function in mod.functions.values():
        if isinstance(function, rx.Function):
            rx.analysis.post_order_visit(function, visit)
    return found


@rx.expr_functor.mutator
class _Rewriter(rx.PyExprMutator):
    """Puts the calls in the place of the roots of sites."""

    def __init__(self, mod: tvm.IRModule) -> None:
        super().__init__(mod)
        self.mod = mod
        self.sites: list[SamplingSite] = []

    def rewrite(self, var: tvm.ir.GlobalVar, sites: list[SamplingSite]) -> None:
        """Rewrite one function."""
        self.sites = sites
        function = self.visit_expr(self.mod[var])
        self.builder_.update_func(var, rx.analysis.remove_all_unused(function))

    def visit_call_(self, call: rx.Call) -> rx.Expr:
        """Emit the call of a site whose root this is."""
        site = next((site for site in self.sites if site.root.same_as(call)), None)
        if site is None:
            return super().visit_call_(call)
        tensors = [self._operand(self.visit_expr(x)) for x in site.operands]
        numbers = [rx.prim_value(tvm.tirx.const(x, "int64")) for x in site.scalars]
        shape = list(call.ty.shape)
        is_draw = len(shape) == 2 and str(call.ty.dtype).startswith("int")
        ty = rx.TensorType(
            shape[:1] if is_draw else shape, "int32" if is_draw else "float32", call.ty.vdevice
        )
        result = rx.call_dps_packed(site.kernel, rx.Tuple([*tensors, *numbers]), ty)
        if not is_draw:
            return result
        result = rx.op.reshape(self.builder_.emit(result), shape)
        if str(call.ty.dtype) == "int32":
            return result
        return rx.op.astype(self.builder_.emit(result), call.ty.dtype)

    def _operand(self, x: rx.Expr) -> rx.Expr:
        """Return an operand as the functions take it: one number a row, integers of 32 bits."""
        if not isinstance(x, rx.Var):
            x = self.builder_.emit(x)
        shape = list(x.ty.shape)
        if len(shape) == 2 and isinstance(shape[1], tvm.tirx.IntImm) and int(shape[1]) == 1:
            x = self.builder_.emit(rx.op.reshape(x, shape[:1]))
        if str(x.ty.dtype) == "int64":
            x = self.builder_.emit(rx.op.astype(x, "int32"))
        return x

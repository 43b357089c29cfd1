"""The report of a compile in a module, and reading it from a compiled model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tvm
from tvm import relax as rx

from tvm_flashinfer.relax._compat import StringImm
from tvm_flashinfer.report import FALLBACK, NATIVE, CompileReport, ReportRow, report_of_file

__all__ = [
    "FALLBACK", "NATIVE", "REPORT_ATTRIBUTE", "REPORT_FUNCTION", "CompileReport", "ReportRow",
    "attach_report", "emit_report", "last_report", "read_report", "remember_report",
    "report_function",
]  # fmt: skip

#: Function of a compiled model that returns the report as JSON, and attribute of a module with it.
REPORT_FUNCTION = "flashinfer_report"
REPORT_ATTRIBUTE = "tvm_flashinfer.report"

_last: CompileReport | None = None


def report_function(report: CompileReport) -> rx.Function:
    """Return the Relax function that a compiled model has its report in.

    It takes nothing and returns the JSON, so that reading it makes no cache:
    ``CompileReport.from_json(vm["flashinfer_report"]())``.
    """
    builder = rx.BlockBuilder()
    with builder.function(REPORT_FUNCTION, []):
        builder.emit_func_output(StringImm(report.to_json()))
    return builder.get()[REPORT_FUNCTION]


def attach_report(mod: tvm.IRModule, report: CompileReport) -> tvm.IRModule:
    """Return the module with a report in it: as an attribute, and as a function of the library.

    A report that the module has already is extended. The result is what `last_report` returns.
    """
    report = _extending(mod, report)
    mod = mod.with_attr(REPORT_ATTRIBUTE, report.to_json())
    mod.update_func(_report_var(mod) or tvm.ir.GlobalVar(REPORT_FUNCTION), report_function(report))
    remember_report(report)
    return mod


def emit_report(builder: rx.BlockBuilder, report: CompileReport) -> None:
    """Add a report to the module of a builder, which may be in the middle of a function.

    A report that the module has already is extended. A builder cannot set attributes of its module,
    so there is the function only.
    """
    mod = builder.get()
    report = _extending(mod, report)
    var = _report_var(mod)
    if var is None:
        builder.add_func(report_function(report), REPORT_FUNCTION)
    else:
        builder.update_func(var, report_function(report))
    remember_report(report)


def _extending(mod: tvm.IRModule, report: CompileReport) -> CompileReport:
    var = _report_var(mod)
    if var is None:
        return report
    earlier = CompileReport.from_json(mod[var].body.body.value)
    return earlier.extended(report.rows, report.tuning)


def _report_var(mod: tvm.IRModule) -> tvm.ir.GlobalVar | None:
    names = {var.name_hint: var for var in mod.get_global_vars()}
    return names.get(REPORT_FUNCTION)


def read_report(library: Any) -> CompileReport:
    """Return the report of a compiled model.

    Parameters
    ----------
    library : str or Path or relax.VirtualMachine or runtime.Module
        The file of the model, which is read and not loaded, or what has the function
        ``flashinfer_report``.

    Raises
    ------
    KeyError
        When the model was compiled without our passes.
    ReportError
        When a file is no library, or was compiled without our passes.
    """
    if isinstance(library, str | Path):
        return report_of_file(library)
    try:
        function = library[REPORT_FUNCTION]
    except (AttributeError, ValueError, RuntimeError) as error:
        raise KeyError(
            f"the library has no function {REPORT_FUNCTION!r}: it was not compiled through "
            "tvm_flashinfer"
        ) from error
    return CompileReport.from_json(str(function()))


def remember_report(report: CompileReport) -> None:
    """Make a report the one that `last_report` returns."""
    global _last
    _last = report


def last_report() -> CompileReport | None:
    """Return the report of the last compile of this process, or None before the first."""
    return _last

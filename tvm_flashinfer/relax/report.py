"""What a compile ended in: each attention site and KV-cache slot, with its kernel or why not."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import tvm
from tvm import relax as rx

from tvm_flashinfer.relax._compat import StringImm

#: Function of a compiled model that returns the report as JSON, and attribute of a module with it.
REPORT_FUNCTION = "flashinfer_report"
REPORT_ATTRIBUTE = "tvm_flashinfer.report"

NATIVE = "native"
FALLBACK = "fallback"

_last: CompileReport | None = None


@dataclass(frozen=True)
class ReportRow:
    """One attention site or KV-cache slot.

    Parameters
    ----------
    site : str
        Function of the model in which it is.
    slot : str
        What is computed there, such as ``"prefill_paged"``.
    status : str
        `NATIVE`: one of our kernels. `FALLBACK`: TVM's own.
    kernel : str
        Name of the function that is called.
    arch : str
        Architectures it is compiled for, such as ``"sm_80,sm_90a"``, or ``"cpu"``.
    reasons : tuple of str
        Why it is a fallback; for a native one, what there is to know about it.
    """

    site: str
    slot: str
    status: str
    kernel: str
    arch: str
    reasons: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "reasons", tuple(self.reasons))
        if self.status not in (NATIVE, FALLBACK):
            raise ValueError(f"status is {self.status!r}, expected {NATIVE!r} or {FALLBACK!r}")


@dataclass
class CompileReport:
    """The rows of a compile.

    Parameters
    ----------
    target : str
        Kind of target that the model was compiled for.
    ship : str
        Where the kernels are: ``"self-contained"`` in the model's library, ``"shared"`` in ours.
    rows : list of ReportRow
    """

    target: str
    ship: str
    rows: list[ReportRow] = field(default_factory=list)

    @property
    def fallbacks(self) -> list[ReportRow]:
        """The rows that no kernel of ours serves."""
        return [row for row in self.rows if row.status == FALLBACK]

    def extended(self, rows: Iterable[ReportRow]) -> CompileReport:
        """Return the report with more rows; a row for the same site and slot is replaced."""
        merged = {(row.site, row.slot): row for row in [*self.rows, *rows]}
        return CompileReport(self.target, self.ship, list(merged.values()))

    def to_json(self) -> str:
        """Return the report as JSON, which `from_json` reads."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> CompileReport:
        """Return the report that `to_json` wrote.

        Raises
        ------
        ValueError
            When the text is not such a report.
        """
        try:
            data: Mapping[str, Any] = json.loads(text)
            rows = [ReportRow(**row) for row in data["rows"]]
            return cls(data["target"], data["ship"], rows)
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"got {text[:80]!r}, expected the JSON of a report: {type(error).__name__} {error}"
            ) from error

    def __str__(self) -> str:
        native = len(self.rows) - len(self.fallbacks)
        lines = [f"{native} of {len(self.rows)} native ({self.target}, {self.ship})"]
        columns = zip(*self._cells(), strict=True)
        widths = [max(len(cell) for cell in column) for column in columns]
        for row, cells in zip(self.rows, self._cells(), strict=True):
            line = "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
            lines += [f"  {line.rstrip()}", *(f"      {reason}" for reason in row.reasons)]
        return "\n".join(lines)

    def _cells(self) -> list[tuple[str, ...]]:
        return [(row.site, row.slot, row.status, row.kernel, row.arch) for row in self.rows]


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
    return CompileReport.from_json(mod[var].body.body.value).extended(report.rows)


def _report_var(mod: tvm.IRModule) -> tvm.ir.GlobalVar | None:
    names = {var.name_hint: var for var in mod.get_global_vars()}
    return names.get(REPORT_FUNCTION)


def read_report(library: Any) -> CompileReport:
    """Return the report of a compiled model.

    Parameters
    ----------
    library : relax.VirtualMachine or runtime.Module
        What has the function ``flashinfer_report``.

    Raises
    ------
    KeyError
        When the model was compiled without our passes.
    """
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

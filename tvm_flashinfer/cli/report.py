"""``tvm-flashinfer report``: what a compiled model runs on."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path

import click

from tvm_flashinfer.cli.output import console, echo_json, echo_rows, exit_statuses, json_option
from tvm_flashinfer.report import (
    CompileReport,
    ReportError,
    is_satisfied,
    printable,
    report_of_file,
    requirement_of_file,
)

#: Exit statuses.
_FALLS_BACK, _NO_REPORT, _LACKING = 1, 3, 4


@exit_statuses(
    {
        0: "every slot of the cache and every attention site is native",
        1: "something runs on TVM's own kernels; the reasons are printed",
        2: "the command was used wrongly",
        3: "the file is no library, or holds no report",
        4: "the library needs functions that are missing here; it says what to install",
    }
)
@click.command()
@click.argument("library", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@json_option
def report(library: Path, as_json: bool) -> None:
    """Tell what the attention of a compiled model runs on.

    LIBRARY is the file that MLC LLM, or export_library of TVM, wrote. It is read and not loaded:
    nothing of it runs, and it may be for another machine.
    """
    try:
        found, needed = report_of_file(library), requirement_of_file(library)
    except (ReportError, OSError) as error:
        failure = click.ClickException(str(error))
        failure.exit_code = _NO_REPORT
        raise failure from error
    lacking = needed is not None and not is_satisfied(needed)
    if as_json:
        needs = {"requires": needed, "satisfied": not lacking}
        echo_json({"library": str(library), **needs, **json.loads(found.to_json())})
    else:
        _print(library, found)
        if needed is not None:
            here = "which is missing here" if lacking else "which is here"
            console().print(f"the library needs `{needed}`, {here}")
    if lacking:
        raise SystemExit(_LACKING)
    if found.fallbacks:
        raise SystemExit(_FALLS_BACK)


def _print(library: Path, found: CompileReport) -> None:
    out = console()
    out.print(f"{library}: {found.summary}")
    for site, rows in groupby(found.rows, lambda row: row.site):
        out.print()
        out.print(printable(site), style="bold")
        echo_rows(rows)

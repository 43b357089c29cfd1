"""What the commands print: tables for people, JSON for scripts."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tvm_flashinfer.kernels.errors import KernelError
from tvm_flashinfer.report import FALLBACK, NATIVE, ReportRow, printable

#: Colours of words that say how it is.
_STYLES = {NATIVE: "green", FALLBACK: "bold red", "problem": "bold red"}

#: Lines go on as they are where nobody looks at them, such as in a pipe.
_UNLIMITED = 100_000

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


def exit_statuses(meanings: Mapping[int, str]) -> Callable[[click.Command], click.Command]:
    """Return a decorator that tells in a command's help what its exit statuses mean."""

    def document(command: click.Command) -> click.Command:
        lines = [f"  {number}  {meaning}" for number, meaning in sorted(meanings.items())]
        # The first character keeps click from making one line of all.
        text = inspect.cleandoc(command.help or "")
        command.help = "\n".join([text, "", "\b", "Exit status:", *lines])
        return command

    return document


def console() -> Console:
    """Return where to print. It is made when it is needed, since tests replace standard output."""
    width = None if sys.stdout.isatty() else _UNLIMITED
    return Console(width=width, highlight=False, markup=False, emoji=False)


def echo_table(rows: Iterable[Sequence[str]], columns: Sequence[str] = ()) -> None:
    """Print rows of cells, with bold names of the columns above when they are given."""
    table = Table(box=None, pad_edge=False, header_style="bold", show_header=bool(columns))
    rows = [[_cell(cell) for cell in row] for row in rows]
    for name in columns or [""] * len(rows[0] if rows else ()):
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    out = console()
    with out.capture() as captured:
        out.print(table)
    # Columns are filled up with spaces, the last one too.
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _cell(text: str) -> Text:
    return Text(printable(text), style=_STYLES.get(text, ""))


def echo_rows(rows: Iterable[ReportRow]) -> None:
    """Print the slots and attention sites of a report, with the reasons below them."""
    cells = []
    for row in rows:
        cells.append((row.slot, row.status, row.arch, row.kernel))
        cells += [("", "", "", f"  {reason}") for reason in row.reasons]
    echo_table(cells, ("slot", "status", "arch", "kernel"))


def echo_json(data: Any) -> None:
    """Print what JSON can hold."""
    click.echo(json.dumps(data, indent=2))


def guarded(call: Callable[[], Any]) -> Any:
    """Return what `call` returns, or end with its message and exit status 1."""
    try:
        return call()
    except KernelError as error:
        raise click.ClickException(str(error)) from error

"""``tvm-flashinfer doctor``: what this machine has and lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from tvm_flashinfer.cli.output import console, echo_json, echo_table, exit_statuses, json_option
from tvm_flashinfer.kernels.environment import environment

#: What does not fit a line of the table.
_PRINTED_BELOW = (
    "problems", "tvm_contract", "mlc_llm", "prebuilt_kernels", "cache", "never_measured",
    "tuning",
)  # fmt: skip


@exit_statuses(
    {
        0: "the package can be used here, even when something to compile kernels is missing",
        1: "it cannot: its native library is not there, or TVM calls its functions otherwise",
        2: "the command was used wrongly",
    }
)
@click.command()
@json_option
def doctor(as_json: bool) -> None:
    """Tell what this machine has for building and running kernels.

    It also makes a small KV cache and compares how the installed TVM calls the functions of it with
    what those here take. Paste the output into bug reports.
    """
    found = environment()
    contract = found["tvm_contract"]
    if as_json:
        echo_json(found)
    else:
        _print_environment(found)
    if found["native_library"] is None or (contract is not None and not contract["fits"]):
        raise SystemExit(1)


def _print_environment(found: dict[str, Any]) -> None:
    contract = found["tvm_contract"]
    echo_table(
        [
            (name.replace("_", " "), _describe(value))
            for name, value in found.items()
            if name not in _PRINTED_BELOW
        ]
    )
    _echo_kernels(found)
    _echo_mlc_llm(found["mlc_llm"] or [])
    out = console()
    if tuning := found["tuning"]:
        problem = f"problem: {tuning['unused']}" if tuning["unused"] else ""
        out.print(problem or f"kernels are chosen by {tuning['source']}: {tuning['gpu']}")
    if found["never_measured"]:
        out.print(f"note: {found['never_measured']}")
    if contract is not None and contract["fits"]:
        out.print("TVM's KV cache calls the functions here as they take it", style="green")
    for difference in contract["differences"] if contract is not None else ():
        out.print(
            f"problem: TVM's KV cache calls the functions here otherwise: {difference}",
            style="bold red",
        )
    for problem in found["problems"]:
        out.print(f"problem: {problem}", style="bold red")
    if not found["problems"]:
        out.print("kernels can be built on this machine", style="green")


def _describe(value: Any) -> str:
    if value is None:
        return "not found"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_describe(part)}" for key, part in value.items())
    if isinstance(value, list):
        return "; ".join(_describe(part) for part in value) if value else "none"
    return str(value)


def _echo_kernels(found: dict[str, Any]) -> None:
    """Print which kernels need no compiler any more."""
    if prebuilt := found["prebuilt_kernels"]:
        names = prebuilt["kernels"] + prebuilt["libraries"]
        _echo_list(f"prebuilt kernels in {prebuilt['path']}: {len(names)}", names)
        if prebuilt["unused"]:
            click.echo(f"  {prebuilt['unused']}")
    if cache := found["cache"]:
        names = cache["kernels"]
        _echo_list(f"compiled kernels in {cache['path']}: {len(names)}", names)


def _echo_list(title: str, lines: Iterable[str]) -> None:
    click.echo(title)
    for line in lines:
        click.echo(f"  {line}")


def _echo_mlc_llm(changes: list[dict[str, Any]]) -> None:
    """Print what MLC LLM is given when it imports the installed TVM, and why."""
    given = [f"{change['name']}: {change['reason']}" for change in changes if change["supplied"]]
    title = f"what MLC LLM is given when it imports this TVM: {len(given)} of {len(changes)}"
    _echo_list(title, given)
    if others := [change["name"] for change in changes if not change["supplied"]]:
        click.echo(f"what it does not need with this TVM: {', '.join(others)}")

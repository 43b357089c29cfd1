"""`python -m benchmarks`: time rows, list them, build what peers need, draw and write down."""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from . import work


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="time rows, and write results after each")
    _add_rows(run)
    run.add_argument("--side", action="append", help="time these sides alone")
    run.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    run.add_argument("--json", type=Path, help="write the results here, after each row")
    run.add_argument("--update", action="store_true", help="keep the other rows of that file")
    run.add_argument("--repeats", type=int, default=7, help="timings of each side")
    run.add_argument("--seconds", type=float, help="start no row after so many seconds")
    run.add_argument("--no-cross-check", action="store_true", help="no graph and no profiler")
    listing = commands.add_parser("list", help="print rows with what they move and compute")
    _add_rows(listing)
    peers = commands.add_parser("build-peers", help="compile what flashinfer-python would")
    _add_rows(peers)
    peers.add_argument("--side", action="append", help="for these sides alone")
    readme = commands.add_parser("readme", help="write the tables of results into the README")
    readme.add_argument("results", type=Path, nargs="*", help="all of benchmarks/results without")
    readme.add_argument("--readme", type=Path, default=Path("README.md"))
    plot = commands.add_parser("plot", help="draw results as SVG; needs matplotlib")
    plot.add_argument("results", type=Path)
    plot.add_argument("--folder", type=Path, help="where; beside the results by default")
    return parser


def _add_rows(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--row", action="append", default=[], help="a name, * and ? allowed")
    parser.add_argument("--set", choices=list(work.SETS), default="headline", help="without --row")


def build_sides(case: Any, wanted: list[str] | None) -> tuple[list[Any], dict[str, Any]]:
    """Sides that are there, and why the others are not, in the order of the registry."""
    from .sides import Absent, builders

    sides, absent = [], {}
    for name, build in builders().items():
        if wanted and name not in wanted:
            continue
        try:
            sides.append(build(case))
        except Absent as reason:
            absent[name] = {"absent": str(reason)}
        except Exception as error:
            # A peer that cannot be built is told of; the others are timed.
            text = str(error).strip().splitlines() or [""]
            absent[name] = {"absent": f"{type(error).__name__}: {text[0][:300]}"}
    return sides, absent


def print_row(entry: dict[str, Any]) -> None:
    """A line for each side that has something to say."""
    limit = f"  limit {entry['limit_us']:.1f} us by {entry['limit']}" if entry["limit_us"] else ""
    print(f"{entry['row']}{limit}")
    absent: dict[str, list[str]] = {}
    for name, side in entry["sides"].items():
        if "absent" in side:
            absent.setdefault(side["absent"], []).append(name)
            continue
        if "refused" in side:
            print(f"    {name:22} REFUSED: {side['refused']}")
            continue
        us, hot = side["us"], side["hot_us"]
        line = f"    {name:22} {us['median']:10.1f} us  +-{us['quartile_range']:.1f}"
        line += f"  hot {hot['median']:.1f}" if hot else ""
        line += f"  {side['share_of_limit']:.0%} of limit" if "share_of_limit" in side else ""
        line += f"  {side['kernel']}" + (f", tuned: {side['tuned']}" if side["tuned"] else "")
        if "clocks_agree" in side:
            graph = side["graph_us"]
            line += f"  graph {graph:.1f}" if graph else f"  no graph: {side['not_captured'][:60]}"
            if side["kernels"]:
                line += f"  CUPTI {side['profiler_us']:.1f} {', '.join(side['kernels'])}"
            line += "" if side["clocks_agree"] else "  THE CLOCKS DIFFER"
        print(line)
    for reason, names in absent.items():
        print(f"    absent: {', '.join(names)}: {reason}")
    sys.stdout.flush()


def whole_command(given: list[str]) -> str:
    """What repeats a run, wherever its results are to go."""
    parts = iter(given)
    kept = [x for x in parts if x != "--update" and not (x == "--json" and next(parts, None))]
    return f"python -m benchmarks {shlex.join(kept)}"


def row_command(row: work.Row, options: argparse.Namespace) -> str:
    """What repeats one row."""
    sides = [f" --side {name}" for name in options.side or ()]
    device = "" if options.device == "cuda" else f" --device {options.device}"
    return f"python -m benchmarks run --row {row.name}{''.join(sides)}{device}"


def run(options: argparse.Namespace) -> int:
    """Time rows; the exit status is 1 when a side was refused."""
    from . import results
    from .cases import make_case
    from .machine import open_machine
    from .measure import Options, Refused, measure
    from .sides import builders

    rows = work.select(options.row, options.set)
    for name in options.side or ():
        if name not in builders():
            raise ValueError(f"no side {name!r}; there are {', '.join(builders())}")
    begun = time.perf_counter()
    machine = open_machine(options.device)
    limits = machine.limits()
    how = Options(options.repeats, cross_check=not options.no_cross_check)
    found = results.header(machine, limits, how, whole_command(options.given))
    if options.json and options.update and options.json.exists():
        found = results.continue_from(options.json, found)
    copy, product = limits["copy_bytes_per_s"] / 1e12, limits["flops_per_s"] / 1e12
    print(f"{machine.name}: copies {copy:.2f} TB/s, multiplies {product:.2f} TFLOP/s")
    refused, skipped = 0, []
    for row in rows:
        if options.seconds and time.perf_counter() - begun > options.seconds:
            skipped.append(row.name)
            continue
        try:
            case = make_case(row, machine)
            sides, absent = build_sides(case, options.side)
            times = measure(case, sides, how, results.limit_seconds(row, limits)[0])
        except Exception as error:
            # What one row lacks, memory or a kernel, the next one may not.
            kind = "" if isinstance(error, Refused) else f"{type(error).__name__}: "
            print(f"{row.name} REFUSED: {kind}{error}", flush=True)
            refused += 1
            continue
        refused += sum("refused" in side for side in times.values())
        entry = results.row_entry(row, limits, row_command(row, options), {**times, **absent})
        print_row(entry)
        results.put_row(found, entry)
        if options.json:
            results.write(options.json, found)
        # Calls hold gigabytes of tensors, in cycles.
        del case, sides, times
        gc.collect()
    print(f"{time.perf_counter() - begun:.0f} s, {len(found['rows'])} rows, {refused} refused")
    if skipped:
        print(f"not timed, since --seconds were over: {', '.join(skipped)}")
    return 1 if refused or skipped else 0


def show(options: argparse.Namespace) -> int:
    """Print rows."""
    for row in work.select(options.row, options.set):
        print(
            f"{row.name:36} {row.kind:10} {row.bytes / 1e6:10.1f} MB {row.flops / 1e9:12.1f} GFLOP"
        )
    return 0


def build_peers(options: argparse.Namespace) -> int:
    """Compile the kernels of flashinfer-python."""
    from .sides import Absent, flashinfer_jit

    every = (flashinfer_jit.CUDA_CORES, flashinfer_jit.FA2, flashinfer_jit.FA3)
    try:
        flashinfer_jit.build_modules(
            work.select(options.row, options.set), print, options.side or every
        )
    except Absent as reason:
        print(f"nothing to build: {reason}", file=sys.stderr)
        return 1
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Run one of the commands."""
    given = sys.argv[1:] if arguments is None else arguments
    parser = _parser()
    options = parser.parse_args(given)
    options.given = given
    try:
        if options.command == "readme":
            from .readme import write_tables

            return write_tables(options.readme, options.results)
        if options.command == "plot":
            from .plots import draw

            return draw(options.results, options.folder)
        return {"run": run, "list": show, "build-peers": build_peers}[options.command](options)
    except (ValueError, RuntimeError) as error:
        parser.exit(2, f"{error}\n")


if __name__ == "__main__":
    sys.exit(main())

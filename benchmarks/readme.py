"""The tables of the README, written from files of results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from . import results
from .sides import PEERS
from .work import GATES, NORMS

#: What a cell without a figure holds.
NOTHING = "-"

BEGIN, END = "<!-- measured figures: begin -->", "<!-- measured figures: end -->"

#: Headings, and the kinds of rows below each.
GROUPS = (
    ("Decode", ("decode",)),
    ("Prompts", ("ragged", "paged")),
    ("Decode over compressed pages (MLA)", ("mla",)),
    ("Rows that are moved or merged", ("rotary", "append", "merge", "copy_page", "compact")),
    (
        "Attention that TVM's cache calls without a plan",
        ("slot_decode", "slot_prefill", "slot_tree_paged", "slot_tree_ragged"),
    ),
    ("Whole models, ours through the pipeline of this package", ("model",)),
    ("Norms, gates and rows of sampling", (*NORMS, *GATES, "rope", "rotary_append", "softmax")),
    ("Time of the host for a call", ("host_plan", "host_run")),
)


def best_peer(sides: dict[str, Any]) -> tuple[str, float] | None:
    """The fastest of the peers that were timed, and its microseconds."""
    times = {name: sides[name]["us"]["median"] for name in PEERS if "us" in sides.get(name, {})}
    if not times:
        return None
    name = min(times, key=lambda peer: times[peer])
    return name, times[name]


def rate(row: dict[str, Any], microseconds: float) -> str:
    """Bytes or operations a second, whichever limits the row."""
    if row["limit"] == "flops":
        return f"{row['flops'] / microseconds / 1e6:.0f} TFLOP/s"
    return f"{row['bytes'] / microseconds / 1e6:.2f} TB/s"


def _cell(side: dict[str, Any] | None) -> str:
    if side is None or "absent" in side:
        return NOTHING
    return f"{side['us']['median']:.1f}" if "us" in side else "refused"


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Lines of one table: a row each, a column for each side that was timed in any of them."""
    names = dict.fromkeys(name for row in rows for name in row["sides"])
    timed = [
        name
        for name in names
        if any("absent" not in row["sides"].get(name, {"absent": ""}) for row in rows)
    ]
    device = rows[0]["limit"] in ("bytes", "flops")
    rates = ["rate", "of the limit"] if device else []
    head = ["row", *(f"{name}, µs" for name in timed), *rates, "best peer / ours"]
    lines = [f"| {' | '.join(head)} |", f"| --- |{' ---: |' * (len(head) - 1)}"]
    for row in rows:
        sides = row["sides"]
        cells = [f"`{row['row']}`", *(_cell(sides.get(name)) for name in timed)]
        ours, peer = sides.get("ours", {}), best_peer(sides)
        if device and "us" in ours:
            cells += [rate(row, ours["us"]["median"]), f"{ours['share_of_limit']:.0%}"]
        elif device:
            cells += [NOTHING, NOTHING]
        ratio = f"{peer[1] / ours['us']['median']:.2f}" if peer and "us" in ours else NOTHING
        lines.append(f"| {' | '.join([*cells, ratio])} |")
    return lines


def never_timed(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each reason why peers are in no table."""
    reasons: dict[str, list[str]] = {}
    for name in PEERS:
        sides = [row["sides"][name] for row in rows if name in row["sides"]]
        told = [side["absent"] for side in sides if "absent" in side]
        if sides and len(told) == len(sides):
            # The commonest: the others are of rows that the peer does not serve anyway.
            reasons.setdefault(max(told, key=told.count), []).append(name)
    return [f"Not timed: {', '.join(names)}: {reason}." for reason, names in reasons.items()]


def tables(found: dict[str, Any], path: str) -> str:
    """What stands in the README for a file of results."""
    machine, software, limits = found["machine"], found["software"], found["limits"]
    versions = ", ".join(f"{name} {version}" for name, version in software.items() if version)
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    copy = f"{limits['copy_bytes_per_s'] / 1e12:.2f} TB/s"
    product = f"{limits['flops_per_s'] / 1e12:.0f} TFLOP/s"
    count, file = found["method"]["repeats"], Path(path).name
    lines = [
        f"{machine['name']}{driver}; {versions}; {found['date']}. In the same run a copy moved "
        f"{copy} and a matrix product did {product}, which the shares of the limit refer to. "
        f"Medians of {count} timings, buffers rotated past the L2 cache; spread, hot figures, "
        f"kernels and the command of each row are in [{file}]({path}), made by "
        f"`{found['command']}`.",
    ]
    for title, kinds in GROUPS:
        rows = [row for row in found["rows"] if row["kind"] in kinds]
        if rows:
            lines += ["", f"{title}:", "", *table(rows)]
    for line in never_timed(found["rows"]):
        lines += ["", line]
    return "\n".join(lines)


def recorded(folder: Path) -> list[Path]:
    """The files of results that this harness wrote, of a folder; others have no schema."""
    files = sorted(folder.glob("*.json"))
    return [path for path in files if "schema" in json.loads(path.read_text(encoding="utf-8"))]


def write_tables(readme: Path, files: Sequence[Path] = ()) -> int:
    """Put the tables of files between the markers of the README.

    Parameters
    ----------
    readme : Path
        The file that is changed.
    files : sequence of Path
        Results; by default those recorded in `benchmarks/results` beside the README.

    Raises
    ------
    ValueError
        When the README has not one pair of markers.
    """
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{readme} needs the lines {BEGIN} and {END}, once and in this order")
    folder = readme.resolve().parent
    files = files or recorded(folder / "benchmarks" / "results")
    parts = [
        tables(results.read(path), path.resolve().relative_to(folder).as_posix()) for path in files
    ] or ["No run of `python -m benchmarks` is recorded yet."]
    before, after = text.partition(BEGIN)[0], text.partition(END)[2]
    middle = "\n\n".join(parts)
    readme.write_text(f"{before}{BEGIN}\n{middle}\n{END}{after}", encoding="utf-8")
    return 0

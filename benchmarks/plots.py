"""Results as pictures: a roofline, and how ours stands beside the best peer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from . import results
from .readme import best_peer

MARKERS = "os^Dv<>PX*"


def draw(path: Path, folder: Path | None = None) -> int:
    """Write two SVG files beside a file of results, or into a folder."""
    try:
        import matplotlib
    except ImportError:
        print('drawing needs matplotlib: pip install "tvm-flashinfer[bench]"', file=sys.stderr)
        return 1
    matplotlib.use("svg")
    # The same results give the same file.
    matplotlib.rcParams.update({"svg.hashsalt": "tvm-flashinfer", "font.size": 8})
    found = results.read(path)
    where = folder or path.parent
    where.mkdir(parents=True, exist_ok=True)
    for name, make in (("roofline", _roofline), ("ratio", _ratio)):
        figure = make(found)
        figure.savefig(where / f"{path.stem}_{name}.svg", metadata={"Date": None})
        print(where / f"{path.stem}_{name}.svg")
    return 0


def _figure(width: float, height: float) -> Any:
    from matplotlib.figure import Figure

    return Figure((width, height), layout="constrained")


def _roofline(found: dict[str, Any]) -> Any:
    """Operations a second over operations a byte, with the measured limits."""
    figure = _figure(8, 5)
    axes = figure.add_subplot()
    copy, product = (found["limits"][name] for name in ("copy_bytes_per_s", "flops_per_s"))
    rows = [row for row in found["rows"] if row["flops"] and row["limit_us"]]
    names = dict.fromkeys(name for row in rows for name in row["sides"])
    for marker, name in zip(MARKERS, names, strict=False):
        points = [
            (row["flops"] / row["bytes"], row["flops"] / row["sides"][name]["us"]["median"] / 1e6)
            for row in rows
            if "us" in row["sides"].get(name, {})
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker, label=name, markersize=4, alpha=0.8)
    spread = [row["flops"] / row["bytes"] for row in rows] or [1.0]
    edge = product / copy
    x = sorted([min(spread) / 2, edge, max([*spread, edge]) * 2])
    axes.plot(x, [min(value * copy, product) / 1e12 for value in x], "k-", linewidth=1)
    axes.set(xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s")
    axes.set_title(f"{found['machine']['name']}, cold, beside the limits measured in the run")
    if rows:
        axes.legend()
    return figure


def _ratio(found: dict[str, Any]) -> Any:
    """Time of the best peer over ours, a bar for each row; below 1 the peer is faster."""
    bars = []
    for row in found["rows"]:
        peer, ours = best_peer(row["sides"]), row["sides"].get("ours", {})
        if peer and "us" in ours:
            bars.append((f"{row['row']} ({peer[0]})", peer[1] / ours["us"]["median"]))
    figure = _figure(8, 1 + 0.2 * max(1, len(bars)))
    axes = figure.add_subplot()
    labels = [label for label, _ in bars][::-1]
    values = [value for _, value in bars][::-1]
    colors = ["tab:green" if value >= 1 else "tab:red" for value in values]
    axes.barh(labels, values, color=colors)
    axes.axvline(1, color="black", linewidth=1)
    axes.set(xscale="log", xlabel="time of the best peer / ours")
    axes.set_title(f"{found['machine']['name']}, cold")
    return figure

"""Files of results: what is in them, and what must be there."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import subprocess
from pathlib import Path
from typing import Any

import tvm_flashinfer

from .work import Row

SCHEMA = 1
#: What a side of a row has: its figures, or why it has none.
FIGURES = {
    "us", "hot_us", "calls", "kernel", "tuned", "largest_error", "relative_error",
}  # fmt: skip
SUMMARY = {"median", "min", "max", "quartile_range", "repeats"}
HEADER = {"schema", "date", "machine", "software", "limits", "method", "command", "rows"}
PACKAGES = (
    "apache-tvm", "apache-tvm-ffi", "tvm-flashinfer", "torch", "triton", "flashinfer-python",
    "numpy",
)  # fmt: skip


def header(machine: Any, limits: dict[str, float], options: Any, command: str) -> dict[str, Any]:
    """What is known before the first row."""
    return {
        "schema": SCHEMA,
        "date": datetime.date.today().isoformat(),
        "machine": {**machine.describe(), "driver": _driver()},
        "software": {**_versions(), "cuda": _cuda()},
        "limits": limits,
        "method": {
            "rotated_bytes": machine.rotate_bytes,
            "repeats": options.repeats,
            "pause_s": options.pause,
            "tuning": tvm_flashinfer.tuning_files(),
            "clock": "CUDA events, the host ahead" if machine.kind == "cuda" else "wall",
        },
        "command": command,
        "rows": [],
    }


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    if found["tvm-flashinfer"] is None:
        found["tvm-flashinfer"] = f"{tvm_flashinfer.__version__} (checkout)"
    return found


def _cuda() -> str | None:
    from tvm_flashinfer.kernels.toolchain import find_nvcc

    nvcc = find_nvcc()
    return nvcc.release if nvcc else None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def limit_seconds(row: Row, limits: dict[str, float]) -> tuple[float, str]:
    """The least time of a row at the measured limits, and which limit it is."""
    if row.kind == "model" or row.kind.startswith("host"):
        return 0.0, "host" if row.kind != "model" else "none"
    memory = row.bytes / limits["copy_bytes_per_s"]
    products = row.flops / limits["flops_per_s"]
    return (products, "flops") if products > memory else (memory, "bytes")


def row_entry(
    row: Row, limits: dict[str, float], command: str, sides: dict[str, Any]
) -> dict[str, Any]:
    """A row of the file."""
    seconds, kind = limit_seconds(row, limits)
    return {
        "row": row.name,
        "kind": row.kind,
        "shape": row.shape,
        "bytes": row.bytes,
        "flops": row.flops,
        "limit": kind,
        "limit_us": seconds * 1e6,
        "command": command,
        "sides": sides,
    }


def check(found: dict[str, Any]) -> None:
    """Raise where a file of results is not what this version writes.

    Raises
    ------
    ValueError
        With the place and what is wrong there.
    """
    if missing := HEADER - set(found):
        raise ValueError(f"the results lack {sorted(missing)}")
    if found["schema"] != SCHEMA:
        raise ValueError(f"the results have schema {found['schema']}, expected {SCHEMA}")
    for row in found["rows"]:
        place = f"row {row.get('row')!r}"
        if missing := {"row", "kind", "limit_us", "command", "sides"} - set(row):
            raise ValueError(f"{place} lacks {sorted(missing)}")
        for name, side in row["sides"].items():
            _check_side(f"{place}, side {name!r}", side)


def _check_side(place: str, side: dict[str, Any]) -> None:
    if "absent" in side or "refused" in side:
        if len(side) != 1 or not str(next(iter(side.values()))):
            raise ValueError(f"{place} has no figures, and more than the reason: {side}")
        return
    if missing := FIGURES - set(side):
        raise ValueError(f"{place} lacks {sorted(missing)}")
    for name in ("us", "hot_us"):
        if side[name] is None and name == "hot_us":
            continue
        if missing := SUMMARY - set(side[name]):
            raise ValueError(f"{place}: {name} lacks {sorted(missing)}")
        if not 0 < side[name]["min"] <= side[name]["median"] <= side[name]["max"]:
            raise ValueError(f"{place}: {name} is no summary of times: {side[name]}")


def read(path: Path) -> dict[str, Any]:
    """Read and check a file of results."""
    found = json.loads(path.read_text(encoding="utf-8"))
    check(found)
    return found


def write(path: Path, found: dict[str, Any]) -> None:
    """Write a file whole or not at all."""
    check(found)
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_suffix(path.suffix + ".part")
    fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, path)


def put_row(found: dict[str, Any], entry: dict[str, Any]) -> None:
    """Add a row, or put it in the place of the one of that name."""
    names = [row["row"] for row in found["rows"]]
    if entry["row"] in names:
        found["rows"][names.index(entry["row"])] = entry
    else:
        found["rows"].append(entry)


def continue_from(path: Path, fresh: dict[str, Any]) -> dict[str, Any]:
    """A header with the rows of an earlier run on the same machine and software.

    Raises
    ------
    ValueError
        When the earlier run was on others: its rows would stand beside figures of today.
    """
    old = read(path)
    for part in ("machine", "software"):
        if old[part] != fresh[part]:
            differing = sorted(
                key
                for key in {*old[part], *fresh[part]}
                if old[part].get(key) != fresh[part].get(key)
            )
            raise ValueError(
                f"{path} is of another {part} ({', '.join(differing)} differ); write to another "
                "file, or leave out --update"
            )
    return {**fresh, "rows": old["rows"]}

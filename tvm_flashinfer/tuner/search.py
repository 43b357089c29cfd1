"""The search for the fastest kernels, and the file that it ends in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_flashinfer.tuner.grid import ModelShape, Point, Tactic, tactics
from tvm_flashinfer.tuning import FORMAT, clear_tuning, kernel_choice

#: A kernel takes the place of the default only where it takes less than this part of its time:
#: what differs by less differs between runs.
WORTH_IT = 0.97

#: Returns the seconds of a call, or raises `TacticError`.
Measure = Callable[[Point, Tactic], float]


class TuningError(ValueError):
    """Tuning cannot go on with the file that is there."""


class TacticError(RuntimeError):
    """A kernel does not serve a point, or its result is wrong."""


@dataclass(frozen=True)
class Progress:
    """What was found for a point.

    Parameters
    ----------
    done, total : int
        How many points there are an answer for, and how many there are.
    point : Point
    seconds : dict
        By the tactics that ran.
    failed : dict
        Why the others did not.
    best : Tactic
    """

    done: int
    total: int
    point: Point
    seconds: Mapping[Tactic, float]
    failed: Mapping[Tactic, str]
    best: Tactic

    def __str__(self) -> str:
        times = ", ".join(f"{t} {s * 1e6:.1f} us" for t, s in self.seconds.items())
        failed = "".join(f"; {tactic}: {why}" for tactic, why in self.failed.items())
        return f"[{self.done}/{self.total}] {self.point}: {times}{failed} -> {self.best}"


def tune(
    path: Path,
    shape: ModelShape,
    identity: Mapping[str, Any],
    points: Sequence[Point],
    measure: Measure,
    notify: Callable[[Progress], None] = lambda _: None,
    restart: bool = False,
) -> Path:
    """Measure each point with each kernel, and write the fastest ones to a file.

    Entries of other models that the file has are kept. While it works, what was found is in a file
    beside it, with ``.partial`` behind the name: after an interruption the same call goes on there.

    Parameters
    ----------
    path : Path
    shape : ModelShape
    identity : mapping
        ``gpu`` and ``versions``, as the file has them.
    points : sequence of Point
    measure : callable
        Returns the seconds of a call with a tactic, or raises `TacticError`.
    notify : callable
        Called after each point.
    restart : bool
        Measure again what the files have already.

    Returns
    -------
    path : Path

    Raises
    ------
    TuningError
        A file is there of another GPU or version, or that is none of tuning; or no kernel served a
        point.
    """
    clear_tuning()  # the default is what the rules say
    partial = path.with_name(path.name + ".partial")
    entries: dict[tuple[Any, ...], dict[str, Any]] = {}
    for file in (path, partial):
        for entry in _entries_of(file, identity):
            entries[_key(entry)] = entry
    wanted = {_key(entry_fields(shape, point)): point for point in points}
    if restart:
        entries = {key: entry for key, entry in entries.items() if key not in wanted}
    done = sum(key in entries for key in wanted)
    gpu = identity["gpu"]
    for key, point in wanted.items():
        if key in entries:
            continue
        result = _best(shape, point, gpu, measure)
        done += 1
        progress = Progress(done, len(wanted), point, *result)
        entries[key] = {
            **entry_fields(shape, point),
            "kernel": progress.best.kernel,
            "split_keys": progress.best.split_keys,
            "microseconds": {str(t): round(s * 1e6, 2) for t, s in progress.seconds.items()},
        }
        _write(partial, identity, entries.values())
        notify(progress)
    _write(partial, identity, entries.values())
    os.replace(partial, path)
    return path


def _best(
    shape: ModelShape, point: Point, gpu: Mapping[str, Any], measure: Measure
) -> tuple[dict[Tactic, float], dict[Tactic, str], Tactic]:
    """Return the seconds of the tactics that ran, why others did not, and the one to use."""
    default = Tactic(_default_kernel(shape, point, gpu))
    candidates = dict.fromkeys([default, *tactics(shape, point, gpu["arch"], gpu["num_sm"])])
    seconds: dict[Tactic, float] = {}
    failed: dict[Tactic, str] = {}
    for tactic in candidates:
        try:
            seconds[tactic] = measure(point, tactic)
        except TacticError as error:
            failed[tactic] = str(error)
    if not seconds:
        reasons = "; ".join(f"{tactic}: {why}" for tactic, why in failed.items())
        raise TuningError(f"no kernel served {point}: {reasons}")
    best = min(seconds, key=seconds.__getitem__)
    if default in seconds and seconds[best] >= WORTH_IT * seconds[default]:
        best = default
    return seconds, failed, best


def _default_kernel(shape: ModelShape, point: Point, gpu: Mapping[str, Any]) -> str:
    dims = (shape.head_dim_qk, shape.head_dim_vo)
    lens = [point.keys] * point.batch, [point.rows] * point.batch
    named = (gpu["name"], gpu["arch"], gpu["num_sm"])
    heads = (shape.num_qo_heads, 1 if shape.is_mla else shape.num_kv_heads)
    return kernel_choice(point.slot, *heads, dims, *lens, causal=point.causal, gpu=named)["kernel"]


def entry_fields(shape: ModelShape, point: Point) -> dict[str, Any]:
    """Return the fields that say what an entry is for."""
    return {
        "slot": point.slot,
        "num_qo_heads": shape.num_qo_heads,
        "num_kv_heads": 1 if shape.is_mla else shape.num_kv_heads,
        "head_dim_qk": shape.head_dim_qk,
        "head_dim_vo": shape.head_dim_vo,
        "causal": point.causal,
        "batch": point.batch,
        "rows": point.rows,
        "keys": point.keys,
    }


def _key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return what tells entries apart; with one row the mask changes nothing."""
    names = ("slot", "num_qo_heads", "num_kv_heads", "head_dim_qk", "head_dim_vo")
    causal = entry["causal"] and entry["rows"] > 1
    return (*(entry[name] for name in names), causal, entry["batch"], entry["rows"], entry["keys"])


def _entries_of(path: Path, identity: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries of a file that may be there, and must be of this machine then."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return []
    advice = "; give another path, or remove the file"
    try:
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError(f"the format is {data['format']!r}")
        for entry in data["entries"]:
            _key(entry)
    except (KeyError, TypeError, ValueError) as error:
        raise TuningError(
            f"{path} is no file of tuning: {type(error).__name__}: {error}{advice}"
        ) from error
    for part in ("gpu", "versions"):
        if data.get(part) != identity[part]:
            raise TuningError(
                f"{path} has figures of {part} {data.get(part)}, here it is {identity[part]}"
                f"{advice}"
            )
    return list(data["entries"])


def _write(path: Path, identity: Mapping[str, Any], entries: Any) -> None:
    """Write a file so that whoever reads it finds all of it, or what was there before."""
    lines = ",\n".join(json.dumps(entry) for entry in entries)
    head = json.dumps({"format": FORMAT, **identity})[:-1]
    unfinished = path.with_name(path.name + ".writing")
    unfinished.write_text(f'{head}, "entries": [\n{lines}\n]}}\n', encoding="utf-8")
    os.replace(unfinished, path)

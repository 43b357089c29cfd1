"""The search of the tuner with a clock that is made up: what it finds, writes, and goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tuning_texts import H200, tuning

from tvm_flashinfer import clear_tuning, kernel_choice, load_tuning
from tvm_flashinfer.tuner import (
    Limits,
    ModelShape,
    Point,
    Tactic,
    TacticError,
    TuningError,
    grid,
    tactics,
    tune,
)
from tvm_flashinfer.tuner.search import Progress

LLAMA = ModelShape(32, 8, 128, 128)
SMALL = Limits(max_batch=4, max_keys=1024, max_rows=256)
IDENTITY = {name: tuning()[name] for name in ("gpu", "versions")}
POINTS = [Point("decode_paged", batch, 1, 4096) for batch in (1, 8, 64)]


class Clock:
    """Seconds of tactics by a function; what was asked; where it breaks off."""

    def __init__(self, seconds: Callable[[Point, Tactic], float]) -> None:
        self.seconds = seconds
        self.asked: list[tuple[Point, Tactic]] = []
        self.stop_after: int | None = None

    def __call__(self, point: Point, tactic: Tactic) -> float:
        """Tell the time."""
        if len(self.asked) == self.stop_after:
            raise KeyboardInterrupt
        self.asked.append((point, tactic))
        return self.seconds(point, tactic)


def fastest(name: str) -> Clock:
    """A clock by which one tactic takes half of the time of all others."""
    return Clock(lambda _, tactic: 1e-5 if str(tactic) == name else 2e-5)


def run(path: Path, clock: Clock, points: Any = POINTS, **arguments: Any) -> list[Progress]:
    clear_tuning()
    seen: list[Progress] = []
    found = tune(path, LLAMA, IDENTITY, points, clock, seen.append, **arguments)
    assert found == path
    assert not path.with_name(path.name + ".partial").exists()
    return seen


def chosen(path: Path, batch: int) -> tuple[str, int, str]:
    """What a plan would choose by a file."""
    load_tuning(path)
    found = kernel_choice("decode_paged", 32, 8, 128, [4096] * batch, gpu=H200)
    clear_tuning()
    return found["kernel"], found["split_keys"], found["source"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tuning.json"


@pytest.mark.parametrize("name", ["cuda_core", "batch_attention", "fa2", "fa2/1024"])
def test_the_fastest_is_chosen(path, name):
    """And plans follow it, where it was a candidate; the default is tried first."""
    clock = fastest(name)
    seen = run(path, clock)
    kernel, _, split = name.partition("/")
    for point, progress in zip(POINTS, seen, strict=True):
        assert progress.point == point
        expected = (kernel, int(split or 0))
        if Tactic(*expected) not in progress.seconds:  # too many blocks for so many requests
            expected = ("fa2", 0)
        assert chosen(path, point.batch) == (*expected, "tuned")
    assert [progress.done for progress in seen] == [1, 2, 3]
    assert clock.asked[0] == (POINTS[0], Tactic("fa2"))
    assert len(clock.asked) == len(set(clock.asked))


def test_noise_does_not_displace_the_default(path):
    run(path, Clock(lambda _, tactic: 1e-5 if tactic.kernel == "fa2" else 0.98e-5))
    assert chosen(path, 8) == ("fa2", 0, "tuned")


def test_times_are_in_the_file(path):
    run(path, fastest("cuda_core"), POINTS[:1])
    [entry] = json.loads(path.read_text())["entries"]
    assert entry["microseconds"]["cuda_core"] == 10
    assert entry["microseconds"]["fa2"] == 20


def test_kernels_that_fail_are_left_out(path):
    def seconds(_: Point, tactic: Tactic) -> float:
        if tactic.kernel == "fa2":
            raise TacticError("its result differs")
        return 1e-5 if tactic.kernel == "cuda_core" else 2e-5

    seen = run(path, Clock(seconds))
    assert chosen(path, 8)[0] == "cuda_core"
    assert seen[0].failed[Tactic("fa2")] == "its result differs"
    assert "fa2: its result differs" in str(seen[0])


def test_no_kernel_at_all(path):
    def seconds(_: Point, tactic: Tactic) -> float:
        raise TacticError(f"no {tactic}")

    with pytest.raises(TuningError, match=r"no kernel served decode_paged.*no batch_attention"):
        run(path, Clock(seconds))
    assert not path.exists()


@pytest.mark.parametrize("stop_after", [0, 1, 4, 11])
def test_goes_on_after_an_interruption(path, stop_after):
    """Only whole points count; none is measured twice, and the end is that of one run."""
    first, second, whole = (fastest("cuda_core") for _ in range(3))
    first.stop_after = stop_after
    with pytest.raises(KeyboardInterrupt):
        run(path, first)
    assert not path.exists()
    seen = run(path, second)
    before = {point for point, _ in first.asked} - {progress.point for progress in seen}
    assert [progress.point for progress in seen] == [p for p in POINTS if p not in before]
    assert {point for point, _ in second.asked}.isdisjoint(before)
    assert seen[0].done == len(before) + 1
    other = path.with_name("whole.json")
    run(other, whole)
    assert path.read_text() == other.read_text()


def test_nothing_is_left_to_do(path):
    run(path, fastest("cuda_core"))
    clock = fastest("batch_attention")
    assert run(path, clock) == []
    assert clock.asked == []
    assert chosen(path, 8)[0] == "cuda_core"
    run(path, clock, restart=True)
    assert chosen(path, 8)[0] == "batch_attention"


def test_entries_of_other_models_are_kept(path):
    run(path, fastest("cuda_core"))
    gemma = ModelShape(8, 4, 256, 256)
    tune(path, gemma, IDENTITY, POINTS, fastest("batch_attention"))
    assert len(json.loads(path.read_text())["entries"]) == 2 * len(POINTS)
    assert chosen(path, 8)[0] == "cuda_core"


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json.dumps(tuning(gpu=("NVIDIA A100", 80, 108))), "has figures of gpu .*NVIDIA A100"),
        (json.dumps(tuning(tvm_flashinfer="0.0.1")), "has figures of versions .*0.0.1"),
        (json.dumps(tuning(cuda_driver=12)), "has figures of versions"),
        (json.dumps(tuning(format="other")), "is no file of tuning: ValueError: the format"),
        (json.dumps(tuning({"slot": "mla"})), "is no file of tuning: KeyError"),
        ("{", "is no file of tuning"),
        ("[]", "is no file of tuning"),
    ],
)
def test_files_of_another_machine_are_left_alone(path, text, message, partial):
    """A file in the way is never written over, nor is one that was interrupted there."""
    there = path.with_name(path.name + ".partial") if partial else path
    there.write_text(text)
    clock = fastest("fa2")
    with pytest.raises(TuningError, match=message) as error:
        run(path, clock, restart=True)
    assert str(there) in str(error.value)
    assert "remove the file" in str(error.value)
    assert clock.asked == []
    assert there.read_text() == text


def test_grid_is_what_the_cache_plans():
    by_slot = {point.slot: point for point in grid(LLAMA, SMALL)}
    assert set(by_slot) == {"decode_paged", "prefill_paged", "prefill_ragged"}
    assert all(p.causal == (p.slot == "prefill_ragged") for p in grid(LLAMA, SMALL))
    few = ModelShape(32, 32, 128, 128)
    decode = [p for p in grid(few, SMALL) if p.rows == 1]
    assert {p.slot for p in decode} == {"decode_paged"}
    assert {p.slot for p in grid(ModelShape(128, 1, 512, 512, is_mla=True), SMALL)} == {"mla"}
    assert len(grid(LLAMA, Limits())) == len(set(grid(LLAMA, Limits())))
    for point in grid(LLAMA, Limits()):
        assert point.batch * point.keys * LLAMA.token_bytes <= Limits().max_bytes
        for size in (point.batch, point.rows, point.keys):
            assert size & (size - 1) == 0


@pytest.mark.parametrize(
    ("shape", "point", "arch", "expected"),
    [
        (LLAMA, Point("decode_paged", 64, 1, 4096), 90, {"fa2", "batch_attention", "cuda_core"}),
        (LLAMA, Point("prefill_paged", 64, 1, 4096), 90, {"fa2", "batch_attention"}),
        (LLAMA, Point("prefill_ragged", 1, 512, 512), 90, {"fa2", "batch_attention", "fa3"}),
        (LLAMA, Point("prefill_paged", 1, 512, 512), 90,
         {"fa2", "batch_attention", "fa3", "fa3_copy"}),
        (LLAMA, Point("prefill_ragged", 1, 512, 512), 80, {"fa2", "batch_attention"}),
        (ModelShape(40, 8, 128, 128), Point("decode_paged", 1, 1, 512), 90,
         {"fa2", "batch_attention"}),
        (ModelShape(16, 1, 512, 512, is_mla=True), Point("mla", 1, 1, 512), 90, {"fa2", "sm90"}),
        (ModelShape(16, 1, 512, 512, is_mla=True), Point("mla", 1, 1, 512), 89, {"fa2"}),
    ],
)  # fmt: skip
def test_candidates(shape, point, arch, expected):
    found = tactics(shape, point, arch, 132)
    assert {tactic.kernel for tactic in found} == expected
    for tactic in found:
        assert tactic.split_keys == 0 or (tactic.kernel == "fa2" and point.rows == 1)
        assert tactic.split_keys < point.keys

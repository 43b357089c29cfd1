"""What the harness refuses to time: case C60, and sides of every other kind of lie."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from benchmarks.machine import HostBound, NotCaptured, Processor
from benchmarks.measure import Options, Refused, measure
from benchmarks.sides import Side, Tuner


def _fake(case: Any, call_of: Callable[[int], Callable[[], object]], **more: Any) -> Side:
    return Side("fake", [call_of(i) for i in range(len(case.buffers))], "fake", **more)


def test_right_side_is_timed(timed: Any, right: Side) -> None:
    found = timed(right)["ours"]
    assert found["us"]["repeats"] == 3
    assert 0 < found["us"]["min"] <= found["us"]["median"]
    assert found["hot_us"] is not None
    assert found["largest_error"] < 1e-5


def test_side_that_does_not_run(timed: Any, case: Any) -> None:
    found = timed(_fake(case, lambda i: lambda: None))
    assert "left unwritten" in found["fake"]["refused"]


def test_stale_output(timed: Any, case: Any, right: Side) -> None:
    """The first call of each buffer is right, and no later one writes anything."""
    done: set[int] = set()

    def call_of(i: int) -> Callable[[], object]:
        def call() -> None:
            if i not in done:
                done.add(i)
                right.calls[i]()

        return call

    assert "left unwritten" in timed(_fake(case, call_of))["fake"]["refused"]


def test_output_of_a_side_is_not_that_of_another(timed: Any, case: Any, right: Side) -> None:
    """What the right side wrote into the same buffers does not serve one that does nothing."""
    found = timed(right, _fake(case, lambda i: lambda: None))
    assert "us" in found["ours"]
    assert "left unwritten" in found["fake"]["refused"]


@pytest.mark.parametrize("factor", [1.001, 0.0])
def test_wrong_output(timed: Any, case: Any, right: Side, factor: float) -> None:
    def call_of(i: int) -> Callable[[], object]:
        def call() -> None:
            right.calls[i]()
            case.buffers[i]["o"] *= factor

        return call

    assert "wrong output" in timed(_fake(case, call_of))["fake"]["refused"]


def test_one_wrong_row_that_is_checked(timed: Any, case: Any, right: Side) -> None:
    last = int(case.sampled_rows[-1])

    def call_of(i: int) -> Callable[[], object]:
        def call() -> None:
            right.calls[i]()
            case.buffers[i]["o"][last, -1, -1] += 0.5

        return call

    assert "wrong output" in timed(_fake(case, call_of))["fake"]["refused"]


def test_one_buffer_for_all(timed: Any, case: Any, right: Side) -> None:
    """A side that reads one buffer in every call would be hot."""
    found = timed(_fake(case, lambda i: right.calls[0]))
    assert "buffer 1 were left unwritten" in found["fake"]["refused"]


def test_missing_calls(timed: Any, right: Side) -> None:
    right.calls.pop()
    assert "buffers" in timed(right)["ours"]["refused"]


def test_side_that_counts_no_calls_of_its_kernel(timed: Any, case: Any, right: Side) -> None:
    """The output is right, and comes from elsewhere."""
    found = timed(_fake(case, lambda i: right.calls[i], done=lambda: 7))
    assert "counts 0" in found["fake"]["refused"]


def test_returned_output_is_checked(timed: Any, case: Any) -> None:
    found = timed(_fake(case, lambda i: lambda: None, returned=lambda i: None))
    assert "did not run" in found["fake"]["refused"]


def test_side_that_raises_stops_no_other(timed: Any, case: Any, right: Side) -> None:
    def fail() -> None:
        raise RuntimeError("no kernel\nmore text")

    found = timed(_fake(case, lambda i: fail), right)
    assert found["fake"] == {"refused": "RuntimeError: no kernel"}
    assert "us" in found["ours"]


def test_tuner_that_never_ran(timed: Any, right: Side) -> None:
    right.tuner = Tuner(lambda: 0, lambda: "nothing")
    assert "never ran" in timed(right)["ours"]["refused"]


def test_tuning_left_on(timed: Any, case: Any, right: Side) -> None:
    runs = [0]

    def call_of(i: int) -> Callable[[], object]:
        def call() -> None:
            runs[0] += 1
            right.calls[i]()

        return call

    side = _fake(case, call_of, tuner=Tuner(lambda: runs[0], lambda: "this time"))
    assert "tuned while it was timed" in timed(side)["fake"]["refused"]


def test_tuned_side_says_what_it_chose(timed: Any, right: Side) -> None:
    right.tuner = Tuner(lambda: 1, lambda: "rows: 64")
    assert timed(right)["ours"]["tuned"] == "rows: 64"


def test_kernel_that_changes(timed: Any, case: Any, right: Side) -> None:
    side = _fake(case, lambda i: lambda: None)
    count = [0]

    def call_of(i: int) -> Callable[[], object]:
        def call() -> None:
            right.calls[i]()
            count[0] += 1
            side.kernel = "one" if count[0] < 2 * len(case.buffers) else "another"

        return call

    side.calls = [call_of(i) for i in range(len(case.buffers))]
    side.kernel = "one"
    assert "its kernel was one" in timed(side)["fake"]["refused"]


def test_hot_cache(case: Any, right: Side) -> None:
    """Buffers that fit into the cache give no cold figure."""
    case.machine.cache_bytes = 1 << 30
    with pytest.raises(Refused, match="stay in the cache"):
        measure(case, [right], Options(repeats=1), 1e-6)


@pytest.mark.parametrize(("seconds", "repeats"), [(1e-3, 5), (0.1, 3), (1.0, 1)])
def test_slow_sides_are_timed_less_often(
    case: Any, right: Side, seconds: float, repeats: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed(calls: Any, again: Any = None) -> float:
        for call in calls:
            call()
        return seconds

    monkeypatch.setattr(case.machine, "timed", timed)
    found = measure(case, [right], Options(repeats=5, pause=0.0), 1e-6)["ours"]["us"]
    assert found["repeats"] == repeats
    assert found["median"] == pytest.approx(seconds * 1e6)


def test_all_buffers_take_turns(timed: Any, case: Any, right: Side) -> None:
    """Between two calls on a buffer all others are called."""
    order: list[int] = []

    def call_of(i: int) -> Callable[[], object]:
        def call() -> None:
            order.append(i)
            right.calls[i]()

        return call

    case.machine.batch_seconds = 1e-9  # batches of one call
    total = len(case.buffers)
    timed(_fake(case, call_of))
    cold = order[total + 2 :][::2]  # each cold call is followed by a hot one
    assert total > 2
    assert cold == [i % total for i in range(len(cold))]


class Graphs(Processor):
    """A processor that pretends to have graphs and a profiler."""

    cross_checks = True
    replays = True
    seen = 1
    factor = 1.0

    def graph_timed(self, calls: Any, again: Any = None) -> float:
        """What a replay takes."""
        if not self.replays:
            return 1e-6
        return self.timed(calls) * self.factor

    def kernels(self, calls: Any, again: Any = None) -> Any:
        """What a profiler saw."""
        seconds = self.timed(calls)
        return ({"attend": self.seen * len(calls)} if self.seen else {}), seconds * self.factor


@pytest.fixture
def machine(request: pytest.FixtureRequest) -> Processor:
    """That machine for the tests below; the plain one for those above."""
    return (Graphs if "graphs" in request.node.name else Processor)(512 << 10)


@pytest.fixture
def steady(case: Any, right: Side) -> Side:
    """Our side with the name of a peer, which counts nothing."""
    return _fake(case, lambda i: right.calls[i])


def test_graphs_kernel_that_was_never_captured(timed: Any, case: Any, steady: Side) -> None:
    case.machine.replays = False
    assert "left unwritten" in timed(steady)["fake"]["refused"]


def test_graphs_that_are_refused_are_told_of(
    timed: Any, case: Any, steady: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(calls: Any, again: Any = None) -> float:
        raise NotCaptured("plans are not captured")

    monkeypatch.setattr(case.machine, "graph_timed", refuse)
    found = timed(steady)["fake"]
    assert found["graph_us"] is None
    assert found["not_captured"] == "plans are not captured"
    assert found["kernels"] == {"attend": 1.0}


def test_graphs_of_no_kernel(timed: Any, case: Any, steady: Side) -> None:
    """The profiler saw nothing run: the output came from the processor."""
    case.machine.seen = 0
    assert "started 0 kernels" in timed(steady)["fake"]["refused"]


def test_graphs_of_a_side_that_is_faster_than_the_limit(case: Any, steady: Side) -> None:
    found = measure(case, [steady], Options(repeats=2, pause=0.0), 1.0)
    assert "of the limit that was measured in this run" in found["fake"]["refused"]


def test_graphs_without_a_profiler(
    timed: Any, case: Any, steady: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing can be profiled the figures stand, without the names of kernels."""
    monkeypatch.setattr(
        case.machine, "kernels", lambda *given: Processor.kernels(case.machine, *given)
    )
    found = timed(steady)["fake"]
    assert found["kernels"] is None
    assert "us" in found


def test_graphs_whose_clocks_differ(timed: Any, case: Any, steady: Side) -> None:
    case.machine.factor = 1000.0
    assert timed(steady)["fake"]["clocks_agree"] is False


def test_call_that_waits_for_the_gpu(
    timed: Any, case: Any, right: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bound(calls: Any, again: Any = None) -> float:
        raise HostBound("a call waits for the GPU")

    monkeypatch.setattr(case.machine, "timed", bound)
    assert "waits for the GPU" in timed(right)["ours"]["refused"]


def test_nan_that_should_be_there(case: Any, right: Side) -> None:
    """A NaN among what is right refuses all sides: the comparison would say nothing."""
    case.expected[0] = np.full_like(case.expected[0], np.nan)
    found = measure(case, [right], Options(repeats=1, pause=0.0), 1e-6)
    assert "wrong output" in found["ours"]["refused"]

"""How a row is timed, and what is refused.

Every side of a row gets the same buffers, enough of them that none is in the L2 cache when its turn
comes again; hot figures, of one buffer, are kept apart. Before each timing the outputs are filled
with NaN, after it they are compared with float64, and the calls that a side counted with those that
were made. Repeats of the sides take turns, with pauses. Times come from CUDA events around calls
that were all issued before the first one began; a graph replay and CUPTI measure them again.

Nothing is reported for a side that left an output, was wrong, did not run, was not tuned where it
has a tuner, tuned while it was timed, changed its kernel, made the GPU wait for the host, or was
faster than the limit of the machine.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .cases import Case
from .machine import HostBound, NotCaptured
from .sides import Side


class Refused(Exception):
    """A side's time would not be one of the work of the row."""


@dataclass
class Options:
    """How much is measured.

    Attributes
    ----------
    repeats : int
        Timings of each side, if a call takes less than 20 ms; else 3, and 1 above 300 ms.
    pause : float
        Seconds between timings of two sides.
    cross_check : bool
        Whether to replay a graph and ask CUPTI too.
    """

    repeats: int = 7
    pause: float = 0.01
    cross_check: bool = True


SLOW_CALL, VERY_SLOW_CALL = 0.02, 0.3
#: More of the measured limit than this is nothing that a GPU can do; a processor's limits, which
#: other programs share, are too loose for it.
MOST_OF_LIMIT = 1.15
#: How far the three clocks may be apart: a part of the time, and seconds for each kernel of a call,
#: since events have the gaps between kernels in them and CUPTI has not.
CLOCKS_AGREE = (0.1, 2e-6)
#: Calls of a timing of the host at most: more would wait for places in the GPU's queue.
HOST_CALLS = 50


def summary(seconds: Sequence[float]) -> dict[str, float]:
    """Median and spread of times, in microseconds."""
    if not seconds:
        raise ValueError("no times to summarise")
    times = sorted(x * 1e6 for x in seconds)
    quarters = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {
        "median": statistics.median(times),
        "min": times[0],
        "max": times[-1],
        "quartile_range": quarters[2] - quarters[0],
        "repeats": len(times),
    }


def forget(case: Case, side: Side, used: Sequence[int]) -> None:
    """Fill what calls of these buffers write with NaN."""
    for i in set(used):
        case.poison(i)
        if side.forget:
            side.forget(i)
    case.machine.sync()


def verify(case: Case, side: Side, used: Sequence[int]) -> tuple[float, float]:
    """Largest error, and relative error, of the outputs of these buffers.

    Raises
    ------
    Refused
        When an output was left, or is wrong.
    """
    case.machine.sync()
    buffers, scalars = sorted(set(used)), []
    for i in buffers:
        returned = side.returned(i) if side.returned else None
        if side.returned and returned is None:
            raise Refused(f"did not run: buffer {i} has no output")
        scalars += case.errors(i, returned)
    numbers = case.machine.numbers(scalars)
    largest = relative = 0.0
    for place, i in enumerate(buffers):
        missing, worst, off, right = numbers[4 * place : 4 * place + 4]
        if missing:
            raise Refused(f"outputs of buffer {i} were left unwritten, or are NaN")
        error = (off / right) ** 0.5 if right else 0.0
        # A NaN that a comparison meets is an error too.
        if not (worst <= case.tolerance[0] and error <= case.tolerance[1]):
            raise Refused(
                f"wrong output of buffer {i}: largest error {worst:.2e}, relative {error:.2e}; "
                f"allowed are {case.tolerance[0]:.0e} and {case.tolerance[1]:.0e}"
            )
        largest, relative = max(largest, worst), max(relative, error)
    return largest, relative


class Measured:
    """The timings of one side of a case."""

    def __init__(self, case: Case, side: Side, options: Options) -> None:
        self.case, self.side, self.options = case, side, options
        self.machine = case.machine
        self.cold: list[float] = []
        self.hot: list[float] = []
        self.host = case.row.kind.startswith("host")
        self._next = 0
        if len(side.calls) != len(case.buffers):
            raise Refused(f"{len(side.calls)} calls for {len(case.buffers)} buffers")
        self.error = self._checked(range(len(case.buffers)), self._run)
        tuner = side.tuner
        if tuner and not tuner.runs():
            raise Refused("it has a tuner, which never ran")
        self._tuned = tuner.runs() if tuner else 0
        self._kernel = side.kernel
        rough = self._checked([0], self._time)
        self.slow = rough > SLOW_CALL
        if not self.slow:
            rough = min(rough, self._checked([0], self._time))
        self.rough = rough
        most = len(case.buffers) if case.once else 200
        if self.host:
            most = max(1, HOST_CALLS // side.inner)
        self.count = max(1, min(most, int(self.machine.batch_seconds / max(rough, 1e-7))))

    @property
    def repeats(self) -> int:
        """How often this side is timed."""
        if self.rough > VERY_SLOW_CALL:
            return 1
        return min(3, self.options.repeats) if self.slow else self.options.repeats

    def _run(self, calls: Sequence[Any], again: Any) -> None:
        for call in calls:
            call()

    def _time(self, calls: Sequence[Any], again: Any) -> float:
        clock = self.machine.host_timed if self.host else self.machine.timed
        try:
            return clock(calls, again) / self.side.inner
        except HostBound as error:
            raise Refused(str(error)) from error

    def _checked(self, used: Sequence[int], action: Any) -> Any:
        """What an action on the calls of some buffers gives, between poison and check."""
        side = self.side
        forget(self.case, side, used)
        before = side.done() if side.done else 0
        result = action([side.calls[i] for i in used], lambda: forget(self.case, side, used))
        found = verify(self.case, side, used)
        made = len(used) * side.inner
        if side.done and side.done() - before < made:
            raise Refused(f"{made} calls were made, and it counts {side.done() - before} of them")
        return found if action == self._run else result

    def _window(self) -> list[int]:
        """The next buffers in turn."""
        total = len(self.case.buffers)
        used = [(self._next + j) % total for j in range(self.count)]
        self._next = (self._next + self.count) % total
        return used

    def repeat(self) -> None:
        """Time one batch of calls, cold and, where that is another figure, hot."""
        self.cold.append(self._checked(self._window(), self._time))
        if len(self.case.buffers) > 1 and not self.case.once:
            self.hot.append(self._checked([0] * self.count, self._time))
        tuner = self.side.tuner
        if tuner and tuner.runs() != self._tuned:
            raise Refused("it was tuned while it was timed")
        if self.side.kernel != self._kernel:
            raise Refused(f"its kernel was {self._kernel}, and became {self.side.kernel}")

    def cross_check(self) -> dict[str, Any]:
        """The same calls by a graph and by CUPTI, and the kernels that ran."""
        found: dict[str, Any] = {}
        used = self._window()
        try:
            if self.slow:
                raise NotCaptured("calls of more than 20 ms are not measured again")
            seconds = self._checked_once(used, self.machine.graph_timed)
            found["graph_us"] = seconds * 1e6
        except NotCaptured as error:
            found["graph_us"], found["not_captured"] = None, str(error)
        sample = used[:20]
        profile = self._checked(sample, self.machine.kernels)
        found["kernels"] = found["profiler_us"] = None
        if profile is not None:
            kernels, seconds = profile
            if sum(kernels.values()) < len(sample):
                raise Refused(f"{len(sample)} calls started {sum(kernels.values())} kernels")
            found["kernels"] = {name: n / len(sample) for name, n in kernels.items()}
            found["profiler_us"] = seconds * 1e6
        median = statistics.median(self.cold) * 1e6
        part, least = CLOCKS_AGREE
        kernels = sum(found["kernels"].values()) if found["kernels"] else 1
        allowed = max(part * median, least * 1e6 * kernels)
        others = [x for x in (found["graph_us"], found["profiler_us"]) if x is not None]
        found["clocks_agree"] = all(abs(x - median) <= allowed for x in others)
        return found

    def _checked_once(self, used: Sequence[int], action: Any) -> Any:
        """`_checked` where the calls are counted when they are captured, and run in a replay."""
        done, self.side.done = self.side.done, None
        try:
            return self._checked(used, action)
        finally:
            self.side.done = done

    def result(self, limit_seconds: float) -> dict[str, Any]:
        """What a file of results has of a side, after the last checks."""
        side = self.side
        cold = summary(self.cold)
        found: dict[str, Any] = {
            "us": cold,
            "hot_us": summary(self.hot) if self.hot else None,
            "calls": self.count,
            "kernel": side.kernel,
            "tuned": side.tuner.chosen() if side.tuner else None,
            "largest_error": self.error[0],
            "relative_error": self.error[1],
        }
        if limit_seconds:
            share = found["share_of_limit"] = limit_seconds * 1e6 / cold["median"]
            if share > MOST_OF_LIMIT and self.machine.cross_checks:
                raise Refused(
                    f"{cold['median']:.1f} us is {share:.0%} of the limit that was measured in "
                    "this run: it read from the cache, or did less than the row"
                )
        if self.options.cross_check and self.machine.cross_checks and not self.host:
            found |= self.cross_check()
        return found


def measure(case: Case, sides: Sequence[Side], options: Options, limit: float) -> dict[str, Any]:
    """Time the sides of a case beside each other.

    Parameters
    ----------
    case : Case
        The row's tensors.
    sides : sequence of Side
        What is timed; the results have the same order.
    options : Options
        How much is measured.
    limit : float
        Seconds that the row takes at the measured limits of the machine.

    Returns
    -------
    found : dict
        By side: its figures, or `{"refused": reason}`.
    """
    if not case.row.kind.startswith("host") and not case.cold:
        raise Refused(
            f"{case.row.name}: {len(case.buffers)} buffers of {case.row.bytes} bytes stay in the "
            f"cache of {case.machine.cache_bytes} bytes"
        )
    found: dict[str, Any] = {side.name: None for side in sides}
    going: dict[str, Measured] = {}

    def attempt(name: str, action: Any) -> Any:
        try:
            return action()
        except Exception as error:
            # A peer's failure is its own: the others are timed all the same.
            reason = (
                str(error) if isinstance(error, Refused) else f"{type(error).__name__}: {error}"
            )
            found[name] = {"refused": reason.strip().splitlines()[0][:300]}
            going.pop(name, None)
            return None

    for side in sides:
        measured = attempt(side.name, lambda side=side: Measured(case, side, options))
        if measured is not None:
            going[side.name] = measured
    for number in range(options.repeats):
        names = list(going)
        start = number % max(1, len(names))
        for name in names[start:] + names[:start]:
            if number < going[name].repeats:
                time.sleep(options.pause)
                attempt(name, going[name].repeat)
    for name, measured in list(going.items()):
        figures = attempt(name, lambda measured=measured: measured.result(limit))
        if figures is not None:
            found[name] = figures
    return found

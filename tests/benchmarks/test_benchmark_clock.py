"""The GPU's clock, against a stream that is simulated: only what the GPU did may count."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import machine as machines
from benchmarks.machine import Gpu, HostBound, kernel_name

RATE = 1e9  # cycles a second of the simulated GPU


class Simulated:
    """A host and one stream, each with a time of its own."""

    def __init__(self) -> None:
        self.host = self.stream = 0.0
        self.cuda = self

    def Event(self, enable_timing: bool) -> Any:
        """An event on the stream."""
        return SimulatedEvent(self)

    def synchronize(self) -> None:
        """Let the host wait for the stream."""
        self.host = max(self.host, self.stream)

    def _sleep(self, cycles: int) -> None:
        self.work(cycles / RATE)

    def work(self, seconds: float, issue: float = 0.0) -> None:
        """Issue a kernel: it starts when the host has issued it and the stream is free."""
        self.host += issue
        self.stream = max(self.stream, self.host) + seconds

    def perf_counter(self) -> float:
        """The time of the host."""
        return self.host


class SimulatedEvent:
    """A point in the time of the stream."""

    def __init__(self, simulated: Simulated) -> None:
        self.simulated, self.at = simulated, 0.0

    def record(self) -> None:
        """Put the event behind what was issued."""
        self.at = max(self.simulated.stream, self.simulated.host)
        self.simulated.stream = self.at

    def query(self) -> bool:
        """Whether the stream has passed it by the time of the host."""
        return self.at <= self.simulated.host

    def elapsed_time(self, end: SimulatedEvent) -> float:
        """Milliseconds between two events."""
        return (end.at - self.at) * 1e3


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    found = Simulated()
    monkeypatch.setattr(machines.time, "perf_counter", found.perf_counter)
    return found


@pytest.fixture
def gpu(simulated: Simulated) -> Gpu:
    found = Gpu.__new__(Gpu)
    found.torch, found._cycles_per_second = simulated, RATE
    return found


@pytest.mark.parametrize("issue", [1e-6, 8e-6, 300e-6])
def test_five_microseconds_whatever_the_host_takes(
    gpu: Gpu, simulated: Simulated, issue: float
) -> None:
    """A kernel of 5 us takes 5 us, and not the time that a call takes to issue."""
    again: list[int] = []
    seconds = gpu.timed([lambda: simulated.work(5e-6, issue)] * 100, lambda: again.append(1))
    assert seconds == pytest.approx(5e-6)
    assert bool(again) == (issue > 50e-6)


def test_call_that_waits_is_refused(gpu: Gpu, simulated: Simulated) -> None:
    def call() -> None:
        simulated.work(5e-6, 1e-6)
        simulated.synchronize()

    with pytest.raises(HostBound, match="waits for the GPU"):
        gpu.timed([call] * 3)


def test_time_of_the_host(gpu: Gpu, simulated: Simulated) -> None:
    """What a call costs the host is not what the GPU takes for it."""
    seconds = gpu.host_timed([lambda: simulated.work(500e-6, 8e-6)] * 10)
    assert seconds == pytest.approx(8e-6)


def test_names_of_kernels() -> None:
    full = (
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<1>, "
        "flashinfer::Params>(flashinfer::Params)"
    )
    assert kernel_name(full) == "BatchPrefillWithPagedKVCacheKernel"
    assert kernel_name("main_kernel") == "main_kernel"
    assert kernel_name("void (anonymous namespace)::copy<int>(int*)") == "copy"

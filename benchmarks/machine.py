"""What a benchmark runs on: tensors, clock and limits of a GPU (through PyTorch) or a processor."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi

Call = Callable[[], object]


class NotCaptured(RuntimeError):
    """A side cannot be captured in a CUDA graph; the message says why."""


class HostBound(RuntimeError):
    """Calls could not be issued faster than the device ran them."""


class Processor:
    """The processor: NumPy arrays and the clock of the wall."""

    kind = "cpu"
    #: Whether there are graphs and a profiler to measure times again.
    cross_checks = False
    xp: Any = np
    #: Times of one batch of calls: a few milliseconds.
    batch_seconds = 2e-3

    def __init__(self, rotate_bytes: int = 8 << 20) -> None:
        self.tvm_device = tvm.cpu()
        self.target = tvm.target.Target("llvm")
        self.name = _processor_name()
        self.cache_bytes = rotate_bytes // 4
        self.rotate_bytes = rotate_bytes
        self._rng = np.random.default_rng(0)

    def normal(self, *shape: int, dtype: str = "float32") -> Any:
        """Random normal numbers."""
        return self._rng.standard_normal(shape, np.float32).astype(dtype)

    def put(self, array: np.ndarray) -> Any:
        """A tensor with the elements of an array."""
        return np.ascontiguousarray(array)

    def empty(self, *shape: int, dtype: str = "float32") -> Any:
        """A tensor whose float elements are NaN."""
        return self.put(np.full(shape, np.nan if "float" in dtype else 0, dtype))

    def poison(self, tensor: Any) -> None:
        """Fill with NaN."""
        tensor[...] = np.nan

    def copy(self, source: Any, target: Any) -> None:
        """Copy the elements of one tensor into another."""
        target[...] = source

    def clone(self, tensor: Any) -> Any:
        """A tensor of its own with the same elements."""
        return tensor.copy()

    def float64(self, tensor: Any) -> Any:
        """The elements in float64."""
        return tensor.astype(np.float64)

    def numbers(self, values: Sequence[Any]) -> list[float]:
        """Scalars of the device as numbers of the host."""
        return [float(value) for value in values]

    def tvm(self, tensor: Any) -> Any:
        """The same memory as a tensor of TVM."""
        return tvm_ffi.from_dlpack(tensor)

    def sync(self) -> None:
        """Wait for the device."""

    def timed(self, calls: Sequence[Call], again: Call | None = None) -> float:
        """Mean seconds of calls that are issued one after another."""
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    host_timed = timed

    def kernels(
        self, calls: Sequence[Call], again: Call | None = None
    ) -> tuple[dict[str, int], float] | None:
        """What a profiler saw of calls: None, since there is none for the processor."""
        self.timed(calls)
        return None
        return None

    def graph_timed(self, calls: Sequence[Call], again: Call | None = None) -> float:
        """Mean seconds of calls in a graph that is replayed."""
        raise NotCaptured("a processor has no CUDA graphs")

    def limits(self) -> dict[str, float]:
        """Bytes and operations a second: of a copy larger than the cache, of a matrix product."""
        source = np.ones(self.rotate_bytes * 2, np.uint8)
        target = np.empty_like(source)
        a = self.normal(512, 512)
        copy = _best(lambda: np.copyto(target, source), self.timed)
        product = _best(lambda: a @ a, self.timed)
        return {"copy_bytes_per_s": 2 * source.size / copy, "flops_per_s": 2 * 512**3 / product}

    def describe(self) -> dict[str, Any]:
        """What a file of results says of the machine."""
        return {"device": self.kind, "name": self.name, "cores": os.cpu_count()}


class Gpu:
    """The first GPU: PyTorch's tensors, CUDA events, graphs and CUPTI through its profiler."""

    kind = "cuda"
    cross_checks = True
    batch_seconds = 4e-3

    def __init__(self, rotate_bytes: int = 300 << 20) -> None:
        import torch

        self.torch = self.xp = torch
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch sees no GPU; `--device cpu` times the processor")
        self.tvm_device = tvm.cuda(0)
        self.target = tvm.target.Target.from_device(self.tvm_device)
        if self.tvm_device.compute_version == "9.0":
            attrs = {**dict(self.target.attrs), "kind": "cuda", "arch": "sm_90a"}
            self.target = tvm.target.Target(attrs)
        properties = torch.cuda.get_device_properties(0)
        self.name = properties.name
        self.processors = int(properties.multi_processor_count)
        self.cache_bytes = int(properties.L2_cache_size)
        self.rotate_bytes = max(rotate_bytes, 4 * self.cache_bytes)
        self._generator = torch.Generator("cuda").manual_seed(0)
        self._cycles_per_second = self._sleep_rate()
        self._profiles: bool | None = None

    def _sleep_rate(self) -> float:
        """Cycles a second of the kernel that keeps the GPU busy while calls are issued."""
        cycles = 20_000_000
        self.torch.cuda._sleep(cycles)
        start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self.torch.cuda._sleep(cycles)
        end.record()
        self.sync()
        return cycles / (start.elapsed_time(end) * 1e-3)

    def normal(self, *shape: int, dtype: str = "float32") -> Any:
        """Random normal numbers."""
        kind = getattr(self.torch, dtype)
        return self.torch.randn(shape, dtype=kind, device="cuda", generator=self._generator)

    def put(self, array: np.ndarray) -> Any:
        """A tensor with the elements of an array."""
        return self.torch.from_numpy(np.ascontiguousarray(array)).cuda()

    def empty(self, *shape: int, dtype: str = "float32") -> Any:
        """A tensor whose float elements are NaN."""
        value = float("nan") if "float" in dtype else 0
        return self.torch.full(shape, value, dtype=getattr(self.torch, dtype), device="cuda")

    def poison(self, tensor: Any) -> None:
        """Fill with NaN."""
        tensor.fill_(float("nan"))

    def copy(self, source: Any, target: Any) -> None:
        """Copy the elements of one tensor into another."""
        target.copy_(source)

    def clone(self, tensor: Any) -> Any:
        """A tensor of its own with the same elements."""
        return tensor.clone()

    def float64(self, tensor: Any) -> Any:
        """The elements in float64."""
        return tensor.double()

    def numbers(self, values: Sequence[Any]) -> list[float]:
        """Scalars of the device as numbers of the host, after one wait."""
        return self.torch.stack([value.double() for value in values]).tolist()

    def tvm(self, tensor: Any) -> Any:
        """The same memory as a tensor of TVM."""
        return tvm_ffi.from_dlpack(tensor)

    def sync(self) -> None:
        """Wait for the device."""
        self.torch.cuda.synchronize()

    def timed(self, calls: Sequence[Call], again: Call | None = None) -> float:
        """Mean seconds of calls by events, which the host does not show in.

        The GPU is kept busy until all calls are issued. Where the first event has passed by then
        the time would be that of the host: after `again` it is tried with more time, and then
        refused.
        """
        ahead = 1e-4 + 5e-5 * len(calls)
        for attempt in range(5):
            if attempt and again:
                again()
            start, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.sync()
            self.torch.cuda._sleep(int(ahead * self._cycles_per_second))
            begun = time.perf_counter()
            start.record()
            for call in calls:
                call()
            covered = not start.query()
            issued = time.perf_counter() - begun
            end.record()
            self.sync()
            if covered:
                return start.elapsed_time(end) * 1e-3 / len(calls)
            ahead = max(2 * ahead, 1.5 * issued)
        raise HostBound(
            f"{len(calls)} calls took {issued * 1e3:.1f} ms to issue, and the GPU had done some of "
            "them by then: a call waits for the GPU"
        )

    def host_timed(self, calls: Sequence[Call], again: Call | None = None) -> float:
        """Mean seconds that the host takes to issue calls."""
        self.sync()
        start = time.perf_counter()
        for call in calls:
            call()
        seconds = time.perf_counter() - start
        self.sync()
        return seconds / len(calls)

    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        """Let PyTorch's and TVM's functions use a stream."""
        with tvm_ffi.use_raw_stream(self.tvm_device, stream.cuda_stream):
            yield

    def _capture(self, graph: Any, calls: Sequence[Call]) -> None:
        with warnings.catch_warnings():
            # PyTorch warns of an empty graph where a side refuses to be captured.
            warnings.simplefilter("ignore", UserWarning)
            with self.torch.cuda.graph(graph, capture_error_mode="thread_local"):
                with self._on(self.torch.cuda.current_stream()):
                    for call in calls:
                        call()

    def graph_timed(self, calls: Sequence[Call], again: Call | None = None) -> float:
        """Mean seconds of calls in a CUDA graph: of its second replay, since the first loads it."""
        graph = self.torch.cuda.CUDAGraph()
        self.sync()
        gc.collect()
        try:
            self._capture(graph, calls)
        except Exception as error:
            self.sync()
            raise NotCaptured(str(error).strip().splitlines()[0]) from error
        graph.replay()
        self.sync()
        if again:
            again()
        return self.timed([graph.replay], again) / len(calls)

    def kernels(
        self, calls: Sequence[Call], again: Call | None = None
    ) -> tuple[dict[str, int], float] | None:
        """Names of what the GPU ran, with their numbers, and mean seconds of a call by CUPTI.

        None where CUPTI does not see the kernel of a tensor that is filled.
        """
        if self._profiles is None:
            filled = self.torch.empty(1 << 20, device="cuda")
            self._profiles = bool(self._profile([filled.zero_])[0])
        if self._profiles:
            return self._profile(calls)
        self.timed(calls)
        return None

    def _profile(self, calls: Sequence[Call]) -> tuple[dict[str, int], float]:
        profiler = self.torch.profiler
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            for call in calls:
                call()
            self.sync()
        names: dict[str, int] = {}
        nanoseconds = 0
        for event in profile.profiler.kineto_results.events():
            if "CUDA" not in str(event.device_type()) or event.duration_ns() <= 0:
                continue
            short = kernel_name(event.name())
            names[short] = names.get(short, 0) + 1
            nanoseconds += event.duration_ns()
        return names, nanoseconds * 1e-9 / len(calls)

    def limits(self) -> dict[str, float]:
        """Bytes and operations a second: of a copy of 4 GB, of an 8192-cubed matrix product."""
        size = 4 << 30
        bytes_of = [self.torch.empty(size, dtype=self.torch.uint8, device="cuda") for _ in "ab"]
        copy = _best(lambda: bytes_of[0].copy_(bytes_of[1]), self.timed)
        bytes_of.clear()
        a, b = (self.normal(8192, 8192, dtype="bfloat16") for _ in range(2))
        product = _best(lambda: a @ b, self.timed)
        return {"copy_bytes_per_s": 2 * size / copy, "flops_per_s": 2 * 8192**3 / product}

    def describe(self) -> dict[str, Any]:
        """What a file of results says of the machine."""
        return {"device": self.kind, "name": self.name, "l2_bytes": self.cache_bytes}


def _best(call: Call, timed: Callable[[Sequence[Call]], float]) -> float:
    """The least of a few times, after two calls that are not timed."""
    call(), call()
    return min(timed([call] * 5) for _ in range(5))


def kernel_name(full: str) -> str:
    """The name of a kernel without its return type, namespaces, template and parameters."""
    text = re.sub(r"^void ", "", full)
    text = re.split(r"[<(]", text.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
    return text.rsplit("::", 1)[-1].strip() or full[:80]


def _processor_name() -> str:
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return "unknown processor"


def open_machine(kind: str) -> Any:
    """The machine that ``--device`` names."""
    return Processor() if kind == "cpu" else Gpu()

"""CUDA graphs through the driver's own library, for tests of what may be captured."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import tvm_ffi


@functools.cache
def _driver() -> Any:
    """The library that is there wherever a GPU is."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        pytest.skip(f"no CUDA driver library to capture graphs with: {error}")


def _call(name: str, *args: Any) -> None:
    status = getattr(_driver(), name)(*args)
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorName(status, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} ({status})")


class Stream:
    """A stream of its own, on which TVM's functions run inside `current`."""

    def __init__(self, device: Any) -> None:
        self.device = device
        device.sync()  # makes the device's context current on this thread
        self.handle = ctypes.c_void_p()
        not_blocking = 1
        _call("cuStreamCreate", ctypes.byref(self.handle), ctypes.c_uint(not_blocking))

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The current stream of the device inside the block, which is waited for at its end."""
        with tvm_ffi.use_raw_stream(self.device, self.handle.value or 0):
            yield
        self.wait()

    def dirty(self, num_bytes: int = 256 << 20) -> None:
        """Fill scratch memory with NaN and give it back, for what comes next on the stream."""
        address, size = ctypes.c_uint64(), ctypes.c_size_t(num_bytes)
        _call("cuMemAllocAsync", ctypes.byref(address), size, self.handle)
        _call("cuMemsetD8Async", address, ctypes.c_ubyte(0xFF), size, self.handle)
        _call("cuMemFreeAsync", address, self.handle)

    def wait(self) -> None:
        """Wait for all work of the stream."""
        _call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Give the stream back."""
        _call("cuStreamDestroy_v2", self.handle)


@contextlib.contextmanager
def _no_garbage() -> Iterator[None]:
    """No tensor of an earlier test is collected in the block: to free memory ends a capture."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Graph:
    """What `body` puts on the stream, to be run again and again."""

    def __init__(self, stream: Stream, body: Callable[[], None]) -> None:
        self._stream = stream
        graph = ctypes.c_void_p()
        global_mode = 0  # the strictest: no thread may call what waits or is unsafe in a capture
        with _no_garbage(), tvm_ffi.use_raw_stream(stream.device, stream.handle.value or 0):
            _call("cuStreamBeginCapture_v2", stream.handle, ctypes.c_int(global_mode))
            try:
                body()
            finally:
                _call("cuStreamEndCapture", stream.handle, ctypes.byref(graph))
        self._executable = ctypes.c_void_p()
        executable = ctypes.byref(self._executable)
        _call("cuGraphInstantiateWithFlags", executable, graph, ctypes.c_ulonglong(0))
        _call("cuGraphDestroy", graph)

    def replay(self) -> None:
        """Run what was captured, and wait for it."""
        _call("cuGraphLaunch", self._executable, self._stream.handle)
        self._stream.wait()

    def close(self) -> None:
        """Give the graph back."""
        _call("cuGraphExecDestroy", self._executable)

"""CUDA graphs through the driver's own library, for tests of what may be captured."""

from __future__ import annotations

import contextlib
import ctypes
import functools
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
        _call("cuStreamCreate", ctypes.byref(self.handle), not_blocking)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The current stream of the device inside the block, which is waited for at its end."""
        with tvm_ffi.use_raw_stream(self.device, self.handle.value or 0):
            yield
        self.wait()

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """What is put on the stream inside the block is captured, and dropped."""
        with tvm_ffi.use_raw_stream(self.device, self.handle.value or 0):
            _call("cuStreamBeginCapture_v2", self.handle, 0)  # of all threads
            graph = ctypes.c_void_p()
            try:
                yield
            finally:
                _call("cuStreamEndCapture", self.handle, ctypes.byref(graph))
                _call("cuGraphDestroy", graph)

    def wait(self) -> None:
        """Wait for all work of the stream."""
        _call("cuStreamSynchronize", self.handle)

    def close(self) -> None:
        """Give the stream back."""
        _call("cuStreamDestroy_v2", self.handle)


class Graph:
    """What `body` puts on the stream, to be run again and again."""

    def __init__(self, stream: Stream, body: Callable[[], None]) -> None:
        self._stream = stream
        graph = ctypes.c_void_p()
        with tvm_ffi.use_raw_stream(stream.device, stream.handle.value or 0):
            _call("cuStreamBeginCapture_v2", stream.handle, 0)
            try:
                body()
            finally:
                _call("cuStreamEndCapture", stream.handle, ctypes.byref(graph))
        self._executable = ctypes.c_void_p()
        _call(
            "cuGraphInstantiateWithFlags",
            ctypes.byref(self._executable), graph, ctypes.c_ulonglong(0),
        )  # fmt: skip
        _call("cuGraphDestroy", graph)

    def replay(self) -> None:
        """Run what was captured, and wait for it."""
        _call("cuGraphLaunch", self._executable, self._stream.handle)
        self._stream.wait()

    def close(self) -> None:
        """Give the graph back."""
        _call("cuGraphExecDestroy", self._executable)

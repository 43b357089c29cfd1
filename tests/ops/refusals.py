"""What the error tests share: a call with one argument spoiled, and what its refusal must say."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import tvm
from batches import is_cuda
from calls import Args, passed
from device_tensors import DeviceTensor, numpy_dtype, relabelled, to_device

UNSUPPORTED = (ValueError, RuntimeError)


@dataclass(frozen=True)
class Bad:
    """One spoiled argument.

    Attributes
    ----------
    argument : str
        Which one.
    spoil : callable
        From the good value and the device to the bad one.
    error : type or tuple of types
        What must be raised.
    says : tuple of str
        Regular expressions that the message must match.
    """

    name: str
    argument: str
    spoil: Callable[[Any, Any], Any]
    error: Any
    says: tuple[str, ...]


def bad(
    name: str,
    argument: str,
    spoil: Callable[[Any, Any], Any],
    error: Any = ValueError,
    *says: str,
) -> Any:
    """A pytest parameter; without `says` the message must name the argument."""
    wanted = says or (rf"\b{argument}\b",)
    return pytest.param(
        Bad(name, argument, spoil, error, wanted), id=f"{argument}-{name}".replace(" ", "_")
    )


def value(new: Any) -> Callable[[Any, Any], Any]:
    """Spoil by another value."""
    return lambda _old, _device: new


def dtype(name: str) -> Callable[[Any, Any], Any]:
    """Spoil by a tensor of the same values in another dtype."""
    return lambda old, _: to_device(
        np.nan_to_num(old.numpy().astype(np.float32)).astype(numpy_dtype(name)), _device_of(old)
    )


def cut(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[Any, Any], Any]:
    """Spoil by a view of the same memory."""
    return lambda old, _: old.view(change)


def edit(index: int | tuple[int, int], new: int) -> Callable[[Any, Any], Any]:
    """Spoil one element of an index tensor."""

    def spoil(old: DeviceTensor, _: Any) -> DeviceTensor:
        array = old.numpy()
        array[index] = new
        return to_device(array, _device_of(old))

    return spoil


def other_device(old: Any, device: Any) -> Any:
    """Spoil by a tensor on a device that does not fit: CPU among CUDA, or a claimed CUDA one."""
    if is_cuda(device):
        elsewhere = tvm.cpu(0) if is_cuda(_device_of(old)) else device
        return to_device(old.numpy(), elsewhere)
    return relabelled(old, 2)


def strided_copy(old: DeviceTensor, device: Any) -> DeviceTensor:
    """Spoil by a tensor of the right shape with gaps between its rows."""
    array = old.numpy()
    steps = [1] * array.ndim
    for axis in range(array.ndim - 2, -1, -1):
        steps[axis] = steps[axis + 1] * array.shape[axis + 1] + 8
    if array.ndim == 1:
        steps = [2]
    return to_device(array, _device_of(old), strides=steps)


def sparse_last(old: DeviceTensor, _: Any) -> DeviceTensor:
    """Spoil by a tensor whose last dimension has stride 2."""
    array = old.numpy()
    steps = [2] * array.ndim
    for axis in range(array.ndim - 2, -1, -1):
        steps[axis] = steps[axis + 1] * array.shape[axis + 1]
    return to_device(array, _device_of(old), strides=steps)


def _device_of(tensor: DeviceTensor) -> Any:
    return tensor.tensor.device


def assert_says(error: BaseException, *says: str) -> None:
    """The message of `error` matches every pattern."""
    text = str(error)
    for pattern in says:
        assert re.search(pattern, text), f"the message does not match {pattern!r}: {text}"


@contextlib.contextmanager
def refused(error: Any, *says: str) -> Iterator[None]:
    """The block raises exactly `error` with a message that matches every pattern."""
    with pytest.raises(error) as caught:
        yield
    text = str(caught.value)
    allowed = error if isinstance(error, tuple) else (error,)
    assert type(caught.value) in allowed, f"{type(caught.value).__name__}: {text}"
    assert_says(caught.value, *says)


@contextlib.contextmanager
def unchanged(args: Args) -> Iterator[None]:
    """No tensor among `args` changes by a byte."""
    held = {k: x for k, x in args.items() if isinstance(x, DeviceTensor)}
    before = {k: x.raw() for k, x in held.items()}
    yield
    for name, holder in held.items():
        np.testing.assert_array_equal(holder.raw(), before[name], err_msg=f"{name} was written")


def assert_refused(function: Callable[..., Any], args: Args, case: Bad, device: Any) -> None:
    """Calling with one argument spoiled raises, says so, and writes nothing."""
    spoiled = case.spoil(args[case.argument], device)
    with (
        unchanged(args),
        unchanged({case.argument: spoiled}),
        refused(case.error, *case.says),
    ):
        function(*passed(args, {case.argument: spoiled}))


NOT_FINITE = (math.nan, math.inf, -math.inf)

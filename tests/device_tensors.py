"""Tensors for the op tests: any shape, strides and byte offset, on any device, without torch.

Every tensor lies inside an allocation of its own that is filled with 0xFF bytes (NaN in each float
dtype, -1 in each signed one), so a read of what was never written shows up as NaN, and a write
outside the tensor in the guard zones at both ends.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi

GUARD_BYTES = 256
FILL = 0xFF

_TYPE_CODES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4}
_FLOAT8_CODES = {"float8_e4m3fn": 10, "float8_e5m2": 12}
_CPU = 1


class _DLDevice(ctypes.Structure):
    _fields_ = [("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32)]


class _DLDataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = [
    ("dl_tensor", _DLTensor),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", _Deleter),
]

# What a DLPack capsule points to stays here until its consumer calls the deleter.
_alive: dict[int, tuple[Any, ...]] = {}


@_Deleter
def _forget(managed: Any) -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a TVM dtype name, those of ml_dtypes included."""
    return np.dtype(getattr(ml_dtypes, name, name))


def _dl_dtype(dtype: np.dtype) -> _DLDataType:
    if dtype.name in _FLOAT8_CODES:
        return _DLDataType(_FLOAT8_CODES[dtype.name], 8, 1)
    kind = dtype.name.rstrip("0123456789")
    return _DLDataType(_TYPE_CODES[kind], dtype.itemsize * 8, 1)


class _Exporter:
    """A one-shot DLPack producer of a view into `owner`."""

    def __init__(
        self,
        owner: Any,
        pointer: int,
        dtype: np.dtype,
        shape: Sequence[int],
        strides: Sequence[int],
        byte_offset: int,
        device_type: int | None = None,
    ) -> None:
        dims = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        steps = (ctypes.c_int64 * max(1, len(shape)))(*strides)
        if device_type is None:
            device_type = int(owner.device.dlpack_device_type())
        self._device = (device_type, int(owner.device.index))
        self._managed = _DLManagedTensor(
            dl_tensor=_DLTensor(
                pointer, _DLDevice(*self._device), len(shape), _dl_dtype(dtype), dims, steps,
                byte_offset,
            ),
            manager_ctx=None,
            deleter=_forget,
        )  # fmt: skip
        self._parts = (self._managed, dims, steps, owner)

    def __dlpack__(self, **_: Any) -> Any:
        address = ctypes.addressof(self._managed)
        _alive[address] = self._parts
        return _new_capsule(address, b"dltensor", None)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device


def synchronize(device: Any) -> None:
    """Wait for the work of `device`; nothing on CPU."""
    if device.dlpack_device_type() != _CPU:
        device.sync()


def view_of(
    owner: Any, dtype: np.dtype, shape: Sequence[int], strides: Sequence[int], start: int = 0
) -> Any:
    """A tensor over part of `owner`: strides in elements, `start` in bytes in its byte_offset."""
    return tvm_ffi.from_dlpack(
        _Exporter(owner, owner.data_ptr(), np.dtype(dtype), shape, strides, start)
    )


class DeviceTensor:
    """A view into an allocation that this object (or the one it was cut from) owns.

    Attributes
    ----------
    tensor : tvm_ffi.Tensor
        What is passed to packed functions.
    layout : numpy.ndarray
        A host array of the same shape and strides, at the same place of the allocation's host copy.
        Only its geometry is used.
    """

    def __init__(self, owner: Any, stage: np.ndarray, layout: np.ndarray, in_field: bool) -> None:
        self._owner = owner
        self._stage = stage
        self.layout = layout
        item = layout.dtype.itemsize
        start = layout.__array_interface__["data"][0] - stage.__array_interface__["data"][0]
        pointer = owner.data_ptr()
        strides = [step // item for step in layout.strides]
        exporter = _Exporter(
            owner,
            pointer if in_field else pointer + start,
            layout.dtype,
            layout.shape,
            strides,
            start if in_field else 0,
        )
        self.tensor = tvm_ffi.from_dlpack(exporter)
        self._start = start

    def view(
        self, cut: Callable[[np.ndarray], np.ndarray], *, in_field: bool = True
    ) -> DeviceTensor:
        """The view that `cut` makes of an array of this layout, over the same memory.

        With `in_field` the distance to the start of the allocation is put into the tensor's
        `byte_offset`, as TVM does; without it, into the data pointer.
        """
        return DeviceTensor(self._owner, self._stage, cut(self.layout), in_field)

    def raw(self) -> np.ndarray:
        """The bytes of the whole allocation, guards included."""
        synchronize(self._owner.device)
        return self._owner.numpy()

    def numpy(self) -> np.ndarray:
        """A contiguous host copy of the elements."""
        raw = self.raw()
        view = np.ndarray(
            self.layout.shape, self.layout.dtype, raw, self._start, self.layout.strides
        )
        return view.copy()

    def write(self, array: np.ndarray) -> None:
        """Put `array` at the start of every dimension; all other bytes become 0xFF again."""
        self._stage[...] = FILL
        self.layout[tuple(slice(0, n) for n in array.shape)] = array
        self._owner.copyfrom(self._stage)

    def reset(self) -> None:
        """Make the whole allocation what it was at first, or after the last `write`."""
        self._owner.copyfrom(self._stage)

    def assert_guards_intact(self, name: str = "tensor") -> None:
        """Fail when a byte of the guard zones at the ends of the allocation was written."""
        raw = self.raw()
        for where, zone in (("before", raw[:GUARD_BYTES]), ("after", raw[-GUARD_BYTES:])):
            bad = np.flatnonzero(zone != FILL)
            assert bad.size == 0, f"{name}: {bad.size} bytes written {where} the tensor"


def to_device(
    array: np.ndarray,
    device: Any,
    *,
    byte_offset: int | None = None,
    strides: Sequence[int] | None = None,
) -> DeviceTensor:
    """Place `array` on `device`.

    Parameters
    ----------
    array : numpy.ndarray
        The elements; bfloat16 through ml_dtypes.
    device : tvm_ffi.Device
        CPU or CUDA.
    byte_offset : int, optional
        The tensor's `byte_offset` field is GUARD_BYTES + byte_offset. None puts 0 there, and the
        distance into the data pointer.
    strides : sequence of int, optional
        In elements. None is contiguous.
    """
    array = np.asarray(array)
    item = array.dtype.itemsize
    if strides is None:
        steps = [1] * array.ndim
        for axis in range(array.ndim - 2, -1, -1):
            steps[axis] = steps[axis + 1] * max(1, array.shape[axis + 1])
    else:
        steps = list(strides)
    span = 0
    if math.prod(array.shape) > 0:
        span = 1 + sum((n - 1) * step for n, step in zip(array.shape, steps, strict=True))
    start = GUARD_BYTES + (byte_offset or 0)
    stage = np.full(start + span * item + GUARD_BYTES, FILL, np.uint8)
    layout = np.ndarray(array.shape, array.dtype, stage, start, [step * item for step in steps])
    layout[...] = array
    owner = tvm.runtime.tensor(stage, device)
    return DeviceTensor(owner, stage, layout, byte_offset is not None)


def poisoned(shape: Sequence[int], dtype: str, device: Any) -> DeviceTensor:
    """An output: contiguous, every byte 0xFF, so every float is NaN."""
    dt = numpy_dtype(dtype)
    count = math.prod(shape)
    return to_device(np.full(count * dt.itemsize, FILL, np.uint8).view(dt).reshape(shape), device)


def relabelled(tensor: DeviceTensor, device_type: int) -> Any:
    """A tensor over the same memory that claims to lie on another kind of device.

    For calls that must be refused before anything is read: it is no valid tensor.
    """
    layout = tensor.layout
    item = layout.dtype.itemsize
    exporter = _Exporter(
        tensor._owner,
        tensor.tensor.data_ptr(),
        layout.dtype,
        layout.shape,
        [step // item for step in layout.strides],
        0,
        device_type,
    )
    return tvm_ffi.from_dlpack(exporter)

"""Relax functions of one block run in NumPy, so that a test need not compile what it compares with.

Only the operators that models of attention are made of, and the packed functions that they are
rewritten to; packed masks are made by NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import relax as rx
from tvm import tirx

from tvm_flashinfer.relax._compat import Analyzer, constant_array


def _softmax(x: np.ndarray, attrs: Any) -> np.ndarray:
    axis = int(attrs.axis)
    exact = x.astype(np.float64)
    top = exact.max(axis, keepdims=True)
    weights = np.exp(exact - np.where(np.isinf(top), 0, top))
    total = weights.sum(axis, keepdims=True)
    return (weights / np.where(total > 0, total, 1)).astype(x.dtype)


def _permuted(x: np.ndarray, attrs: Any) -> np.ndarray:
    return x.transpose(None if attrs.axes is None else [int(axis) for axis in attrs.axes])


def _cut(x: np.ndarray, axes: Any, begins: Any, ends: Any) -> np.ndarray:
    index = [slice(None)] * x.ndim
    for axis, begin, end in zip(axes, begins, ends, strict=True):
        index[axis] = slice(begin, end)
    return x[tuple(index)]


#: Operators of arrays alone.
_PLAIN: dict[str, Callable[..., Any]] = {
    "matmul": np.matmul, "multiply": np.multiply, "divide": np.divide, "add": np.add,
    "subtract": np.subtract, "maximum": np.maximum, "tanh": np.tanh, "where": np.where,
    "less": np.less, "less_equal": np.less_equal, "greater": np.greater,
    "greater_equal": np.greater_equal, "logical_and": np.logical_and,
    "logical_or": np.logical_or, "logical_not": np.logical_not, "triu": np.triu, "tril": np.tril,
    "reshape": np.reshape, "broadcast_to": np.broadcast_to, "strided_slice": _cut,
}  # fmt: skip

#: Operators with attributes, which come last.
_WITH_ATTRS: dict[str, Callable[..., Any]] = {
    "nn.softmax": _softmax,
    "permute_dims": _permuted,
    "expand_dims": lambda x, attrs: np.expand_dims(x, tuple(int(i) for i in attrs.axis)),
    "squeeze": lambda x, attrs: np.squeeze(x, tuple(int(i) for i in attrs.axis)),
    "repeat": lambda x, attrs: np.repeat(x, attrs.repeats, attrs.axis),
}

#: Operators whose result has the dtype that their type says.
_TYPED: dict[str, Callable[..., Any]] = {
    "arange": lambda dtype, *bounds: np.arange(*bounds).astype(dtype),
    "full": lambda dtype, shape, value: np.full(shape, value, dtype),
    "ones": lambda dtype, shape: np.ones(shape, dtype),
    "astype": lambda dtype, x: x.astype(dtype),
}


def _number(expr: Any) -> int | float:
    return expr.value if hasattr(expr, "value") else Analyzer().simplify(expr).value


def _shape(expr: Any) -> tuple[int, ...]:
    return tuple(_number(size) for size in expr.values)


class _Run:
    """One run, with what variables stand for."""

    def __init__(self) -> None:
        self.values: dict[Any, Any] = {}

    def value(self, expr: Any) -> Any:
        """The value of an expression."""
        constant = constant_array(expr)
        if constant is not None:
            return constant
        if isinstance(expr, rx.Var) and expr in self.values:
            return self.values[expr]
        if isinstance(expr, rx.Tuple):
            return [self.value(field) for field in expr.fields]
        if isinstance(expr, rx.ShapeExpr):
            return _shape(expr)
        if isinstance(expr, rx.Call):
            return self.call(expr)
        return _number(expr)

    def call(self, call: rx.Call) -> Any:
        """The result of an operator."""
        name = str(call.op.name).removeprefix("relax.")
        if name == "call_tir":
            # The packing of masks. Its tensor is packed where it is used, when sizes are known.
            (*_, tensors) = call.args[:2]
            return self.value(tensors)
        if name == "call_dps_packed":
            return self.packed(call)
        args = [self.value(arg) for arg in call.args]
        if name == "reshape" and isinstance(args[0], list):
            return args[0]
        if name in _TYPED:
            return _TYPED[name](str(call.ty.dtype), *args)
        made = _WITH_ATTRS[name](*args, call.attrs) if name in _WITH_ATTRS else _PLAIN[name](*args)
        assert made.shape == _shape(call.ty.shape), f"{name}: {made.shape}, {call.ty}"
        return made

    def packed(self, call: rx.Call) -> np.ndarray:
        """The result of one of our functions."""
        name = str(call.args[0].global_symbol)
        args = self.value(call.args[1])
        if name.endswith("_masked"):
            args[3:5] = _packed_mask(args[4][0], args[0].shape[:2], args[1].shape[1])
        args = [np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x for x in args]
        out = np.full(_shape(call.ty.shape), np.nan, str(call.ty.dtype))
        tvm_ffi.get_global_func(name)(*args, out)
        return out


def _packed_mask(mask: np.ndarray, queries: tuple[int, int], keys: int) -> list[np.ndarray]:
    """Offsets and bytes of (requests, heads, rows, keys) booleans, a request for each of q's."""
    requests, rows = queries
    batch, heads = mask.shape[:2]
    if batch > 1:
        heads = requests // batch
    whole = np.broadcast_to(mask, (requests // heads, heads, rows, keys))
    packed = np.packbits(whole.reshape(requests, -1), axis=-1, bitorder="little")
    indptr = np.arange(requests + 1, dtype=np.int32) * np.int32(packed.shape[1])
    return [indptr, packed.reshape(-1)]


def run_in_numpy(mod: tvm.IRModule, *arrays: np.ndarray) -> np.ndarray:
    """What ``main`` gives. A softmax over keys that are all hidden gives 0."""
    function = mod["main"]
    sizes = {
        size: actual
        for param, array in zip(function.params, arrays, strict=True)
        for size, actual in zip(param.ty.shape.values, array.shape, strict=True)
        if not isinstance(size, tirx.IntImm)
    }
    function = function.bind_symbolic_vars(sizes)
    run = _Run()
    run.values.update(zip(function.params, arrays, strict=True))
    with np.errstate(all="ignore"):
        for block in function.body.blocks:
            for binding in block.bindings:
                run.values[binding.var] = run.value(binding.value)
        return run.value(function.body.body)

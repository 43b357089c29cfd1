"""Keys and values of 8 bits, as the functions of pages store and read them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tvm import te, tirx

#: The largest number of each dtype; what is larger becomes it.
LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def quantized(x: te.Tensor, scale: float, dtype: str = "float8_e4m3fn") -> te.Tensor:
    """Divide by a scale and round to 8 bits, to nearest even; NaN stays NaN.

    What ``flashinfer.bind_append_paged_kv_cache`` does to rows on their way into pages.

    Parameters
    ----------
    x : te.Tensor
        float16, bfloat16 or float32, of any shape.
    scale : float
        Positive: a stored element stands for its value times the scale.
    dtype : str
        ``"float8_e4m3fn"`` or ``"float8_e5m2"``.
    """
    limit = tirx.const(_limit(dtype, scale), "float32")

    def element(*at: Any) -> Any:
        value = x(*at).astype("float32") / tirx.const(scale, "float32")
        code = _code(tirx.min(tirx.abs(value), limit), dtype)
        sign = (tirx.reinterpret("uint32", value) >> _bits(24)) & _bits(0x80)
        code = tirx.Select(tirx.isnan(value), _bits(0x7F), code | sign)
        return tirx.reinterpret(dtype, code.astype("uint8"))

    return te.compute(x.shape, element, name="quantized")


def _code(size: Any, dtype: str) -> Any:
    """Return the bits of a number that is not negative; TVM's own cast drops the smallest ones."""
    mantissa, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    dropped = 23 - mantissa
    bits = tirx.reinterpret("uint32", size)
    half = _bits((1 << (dropped - 1)) - 1) + ((bits >> _bits(dropped)) & _bits(1))
    normal = ((bits + half) >> _bits(dropped)) - _bits((127 - bias) << mantissa)
    # Below the normal numbers codes count steps: a sum whose last bit is a step rounds to them.
    least = 2.0 ** (1 - bias)
    shift = np.float32(least / 2**mantissa * 2**23)
    # TVM's code for CUDA cannot take the bits of a constant.
    steps = tirx.reinterpret("uint32", size + tirx.const(shift, "float32"))
    steps -= _bits(int(shift.view(np.uint32)))
    return tirx.Select(size < tirx.const(least, "float32"), steps, normal)


def _value(element: Any, dtype: str) -> Any:
    """Return what an element stands for in float32; TVM's own cast makes more of 0."""
    mantissa, bias = (3, 7) if dtype == "float8_e4m3fn" else (2, 15)
    code = tirx.reinterpret("uint8", element).astype("uint32")
    size = code & _bits(0x7F)
    bits = (size << _bits(23 - mantissa)) + _bits((127 - bias) << 23)
    small = size.astype("float32") * tirx.const(2.0 ** (1 - bias - mantissa), "float32")
    value = tirx.Select(size < _bits(1 << mantissa), small, tirx.reinterpret("float32", bits))
    if dtype == "float8_e5m2":
        value = tirx.Select(size == _bits(0x7C), tirx.const(math.inf, "float32"), value)
    is_nan = size > _bits(0x7C) if dtype == "float8_e5m2" else size == _bits(0x7F)
    value = tirx.Select(is_nan, tirx.const(math.nan, "float32"), value)
    return tirx.Select(code > _bits(0x7F), -value, value)


def _bits(value: int) -> Any:
    return tirx.const(value, "uint32")


def dequantized(x: te.Tensor, scale: float, dtype: str = "float16") -> te.Tensor:
    """Return what elements of 8 bits stand for: their value times the scale, in another dtype.

    Parameters
    ----------
    x : te.Tensor
        float8_e4m3fn or float8_e5m2, of any shape.
    scale : float
    dtype : str
        Of the result.
    """
    stored = str(x.dtype)
    _limit(stored, scale)

    def element(*at: Any) -> Any:
        return (_value(x(*at), stored) * tirx.const(scale, "float32")).astype(dtype)

    return te.compute(x.shape, element, name="dequantized")


def _limit(dtype: str, scale: float) -> float:
    if dtype not in LARGEST:
        raise ValueError(f"the dtype is {dtype}, expected {' or '.join(LARGEST)}")
    if not scale > 0:
        raise ValueError(f"`scale` is {scale}, expected a positive number")
    return LARGEST[dtype]

"""Masks of booleans as the packed masks that kernels take."""

from __future__ import annotations

from typing import Any

from tvm import te, tirx


def packed_mask_bytes(rows: Any, keys: Any) -> Any:
    """Return how many bytes the packed mask of one request has.

    Parameters
    ----------
    rows, keys : int or PrimExpr
        Query rows and keys of a request.
    """
    return (rows * keys + 7) // 8


def packed_mask(mask: te.Tensor, requests: Any, heads: Any, rows: Any, keys: Any) -> te.Tensor:
    """Pack booleans into bits, a request for each head of each sequence.

    Bit ``n = row * keys + key`` of a request is bit ``n % 8`` of its byte ``n / 8``, as FlashInfer
    packs masks. The bits after the last key of the last row are 0.

    Parameters
    ----------
    mask : te.Tensor
        (requests, heads, rows, keys) booleans, true where a row sees a key. A dimension of size 1
        stands for all indices.
    requests, heads, rows, keys : int or PrimExpr

    Returns
    -------
    packed : te.Tensor
        (requests * heads, `packed_mask_bytes`) of uint8.
    """
    each = packed_mask_bytes(rows, keys)

    def at(size: Any, index: Any) -> Any:
        is_one = isinstance(size, int | tirx.IntImm) and int(size) == 1
        return 0 if is_one else index

    def byte(request: Any, position: Any) -> Any:
        bits = []
        for bit in range(8):
            n = position * 8 + bit
            full = (request // heads, request % heads, n // keys, n % keys)
            index = [at(size, i) for size, i in zip(mask.shape, full, strict=True)]
            value = tirx.if_then_else(
                tirx.all(n < rows * keys, mask(*index)),
                tirx.const(1 << bit, "uint8"),
                tirx.const(0, "uint8"),
            )
            bits.append(value)
        return sum(bits[1:], start=bits[0])

    return te.compute((requests * heads, each), byte, name="packed_mask")


def mask_indptr(requests: Any, each: Any) -> te.Tensor:
    """Return where the packed masks of requests start, when all have the same number of bytes.

    Parameters
    ----------
    requests : int or PrimExpr
    each : int or PrimExpr
        `packed_mask_bytes`.

    Returns
    -------
    indptr : te.Tensor
        (requests + 1,) of int32.
    """
    return te.compute((requests + 1,), lambda at: tirx.Cast("int32", at * each), name="mask_indptr")

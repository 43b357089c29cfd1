"""8-bit pages: rows are divided, rounded and saturated as they are appended; moves copy bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, indptr_of, normal
from cache_calls import FLOAT8
from device_tensors import DeviceTensor, numpy_dtype, poisoned, to_device
from refusals import refused

LARGEST = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}
POOLS = [(6, 2, 16, 64), (9, 3, 5, 80), (2, 1, 7, 33), (3, 4, 1, 256), (4, 2, 3, 2)]


def _ints(values: Any, device: Any) -> DeviceTensor:
    return to_device(np.asarray(values, np.int32), device, byte_offset=4)


def _codes(rng: np.random.Generator, shape: tuple[int, ...], kv_dtype: str) -> np.ndarray:
    return rng.integers(0, 256, shape, np.uint8).view(numpy_dtype(kv_dtype))


def _pool(rng: np.random.Generator, shape: tuple[int, ...], kv_dtype: str) -> np.ndarray:
    num_pages, heads, size, d = shape
    return _codes(rng, (num_pages, 2, heads, size, d), kv_dtype)


def _rounded(rows: np.ndarray, scale: float, kv_dtype: str) -> np.ndarray:
    """Rows over scale in float32, saturated, to nearest even; the NaN without a sign."""
    with np.errstate(invalid="ignore", over="ignore"):
        x = rows.astype(np.float32) / np.float32(scale)
    largest = np.float32(LARGEST[kv_dtype])
    codes = np.clip(x, -largest, largest).astype(numpy_dtype(kv_dtype)).view(np.uint8)
    return np.where(np.isnan(x), np.uint8(0x7F), codes).view(numpy_dtype(kv_dtype))


def _append(ops: Any, device: Any, pool: np.ndarray, k: Any, v: Any, at: Any, **scales: float):
    pages = to_device(pool, device)
    ops.bind_append_paged_kv_cache(json.dumps(scales))(
        pages.tensor,
        to_device(k, device).tensor,
        to_device(v, device, byte_offset=16).tensor,
        _ints(at, device).tensor,
    )
    pages.assert_guards_intact("pages")
    return pages.numpy()


def _same(actual: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(actual.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize("shape", POOLS, ids=str)
@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append(ops, device, rng, dtype, kv_dtype, shape):
    """Every row by the scale of its tensor, none at -1, and no other slot."""
    pool = _pool(rng, shape, kv_dtype)
    num_pages, heads, size, d = shape
    slots = num_pages * size
    count = min(slots, 23)
    at = np.where(rng.random(count) < 0.2, -1, rng.permutation(slots)[:count])
    k, v = (300 * normal(rng, (count, heads, d), "float32") for _ in "kv")
    k, v = k.astype(numpy_dtype(dtype)), v.astype(numpy_dtype(dtype))
    got = _append(ops, device, pool, k, v, at, k_scale=0.37, v_scale=1.9)
    k, v = _rounded(k, 0.37, kv_dtype), _rounded(v, 1.9, kv_dtype)
    _same(got, oracle.appended(pool, k, v, at))


@pytest.mark.parametrize("scale", [1.0, 0.7])
@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_element(ops, device, kv_dtype, dtype, scale):
    """All 65536: ties, subnormals, what overflows, infinities and NaN."""
    rows = np.arange(65536, dtype=np.uint16).view(numpy_dtype(dtype)).reshape(128, 2, 256)
    pool = np.zeros((8, 2, 2, 16, 256), numpy_dtype(kv_dtype))
    got = _append(ops, device, pool, rows, rows[:, ::-1], np.arange(128), k_scale=scale)
    k, v = _rounded(rows, scale, kv_dtype), _rounded(rows[:, ::-1], 1, kv_dtype)
    _same(got, oracle.appended(pool, k, v, np.arange(128)))


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_float32_elements(ops, device, rng, kv_dtype):
    """Every code, the points halfway to the next one, and the floats beside those; and any bits."""
    codes = np.arange(128, dtype=np.uint8).view(numpy_dtype(kv_dtype)).astype(np.float32)
    codes = np.sort(codes[np.isfinite(codes)])
    points = np.concatenate([codes, (codes[1:] + codes[:-1]) / 2, [LARGEST[kv_dtype] * 1.1]])
    points = points.astype(np.float32)
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, np.inf)])
    any_bits = rng.integers(0, 2**32, 4096, np.uint32).view(np.float32)
    rows = np.concatenate([points, -points, any_bits]).astype(np.float32)
    rows = np.resize(rows, (64, 1, 128))
    pool = np.zeros((4, 2, 1, 16, 128), numpy_dtype(kv_dtype))
    got = _append(ops, device, pool, rows, rows, np.arange(64))
    rounded = _rounded(rows, 1, kv_dtype)
    _same(got, oracle.appended(pool, rounded, rounded, np.arange(64)))


@pytest.mark.parametrize("isa", ["baseline", "v3"])
def test_instruction_sets(isa):
    """The rounding of every compiled variant; the best one of this machine is the default."""
    tests = "(every_element or float32_elements) and cpu"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", __file__, "-q", "-k", tests, "-p", "no:cacheprovider"],
        env={**os.environ, "TVM_FLASHINFER_CPU_ISA": isa},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("shape", POOLS, ids=str)
@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_moves(ops, device, rng, kv_dtype, shape):
    """Rows that are 8-bit already, whole pages, slots, and reading: bytes, without scales."""
    pool = _pool(rng, shape, kv_dtype)
    num_pages, heads, size, d = shape
    at = rng.permutation(num_pages * size)[:5]
    k, v = (_codes(rng, (len(at), heads, d), kv_dtype) for _ in "kv")
    _same(_append(ops, device, pool, k, v, at), oracle.appended(pool, k, v, at))

    pages = to_device(pool, device)
    ops.copy_single_page(pages.tensor, 1, 0, size - size // 2)
    expected = pool.copy()
    expected[0, :, :, : size - size // 2] = pool[1, :, :, : size - size // 2]
    _same(pages.numpy(), expected)

    moves = rng.permutation(num_pages * size)[: num_pages * size // 2 * 2].reshape(2, -1)
    indptr = indptr_of([1, moves.shape[1] - 1])
    pages = to_device(pool, device)
    ops.compact_kv_copy(pages.tensor, _ints(indptr, device).tensor, _ints(moves, device).tensor, 2)
    _same(pages.numpy(), oracle.compacted(pool, indptr, moves))

    outs = [poisoned((2, len(at), heads, d), kv_dtype, device) for _ in "kv"]
    ops.debug_get_kv(
        to_device(pool, device).tensor, _ints(at, device).tensor, *(x.tensor for x in outs), 1
    )
    for out, wanted in zip(outs, oracle.gathered(pool, at), strict=True):
        _same(out.numpy()[1], wanted)
        assert (out.numpy()[0].view(np.uint8) == 0xFF).all()
        out.assert_guards_intact()


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_latent(ops, device, rng, kv_dtype):
    """MLA: one scale, for the row that is key and value."""
    pool = _codes(rng, (3, 16, 576), kv_dtype)
    at = np.array([47, -1, 0, 5])
    for dtype in (*DTYPES, kv_dtype):
        scaled = dtype != kv_dtype
        kv = normal(rng, (4, 576), dtype) if scaled else _codes(rng, (4, 576), dtype)
        pages = to_device(pool, device)
        append = ops.bind_append_paged_mla_kv_cache('{"kv_scale": 0.37}' if scaled else "{}")
        append(pages.tensor, to_device(kv, device).tensor, _ints(at, device).tensor)
        expected = pool.copy()
        rounded = _rounded(kv, 0.37, kv_dtype) if scaled else kv
        expected.reshape(-1, 576)[at[at >= 0]] = rounded[at >= 0]
        _same(pages.numpy(), expected)


def test_append_refuses(ops, device, rng):
    """Scales where none are applied, and rows of dtypes that are not for the pages."""
    rows = {name: to_device(normal(rng, (1, 2, 64), name), device).tensor for name in FLOAT8}
    rows["float16"] = to_device(normal(rng, (1, 2, 64), "float16"), device).tensor
    pages = {
        name: to_device(np.zeros((2, 2, 2, 16, 64), numpy_dtype(name)), device).tensor
        for name in (*FLOAT8, "float16")
    }
    at = _ints([3], device).tensor
    for name in ("k_scale", "v_scale"):
        scaled = ops.bind_append_paged_kv_cache(json.dumps({name: 0.5}))
        with refused(ValueError, "pages", "float16", "scales"):
            scaled(pages["float16"], rows["float16"], rows["float16"], at)
        with refused(ValueError, "`k`", "float8_e5m2", "scales"):
            scaled(pages["float8_e5m2"], rows["float8_e5m2"], rows["float8_e5m2"], at)
    append = ops.append_paged_kv_cache
    with refused(TypeError, "`k` is float8_e5m2", "float16"):
        append(pages["float8_e4m3fn"], rows["float8_e5m2"], rows["float8_e5m2"], at)
    with refused(TypeError, "`k` is float8_e5m2", "float16"):
        append(pages["float16"], rows["float8_e5m2"], rows["float8_e5m2"], at)
    with refused(TypeError, "`v` is float16"):
        append(pages["float8_e5m2"], rows["float8_e5m2"], rows["float16"], at)

"""Append, copy, compaction and reading of pages: values move to the bit, nothing else changes."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, Batch, Spec, indptr_of, normal
from calls import decode
from device_tensors import DeviceTensor, numpy_dtype, poisoned, to_device

POOLS = [(6, 2, 16, 64), (9, 3, 5, 80), (40, 1, 1, 128), (3, 4, 32, 256), (2, 1, 512, 64)]


def _pool(rng: np.random.Generator, shape: tuple[int, int, int, int], dtype: str) -> np.ndarray:
    """A pool (P, 2, Hkv, S, d) of random values with NaN in a third of its slots."""
    num_pages, heads, size, d = shape
    pool = normal(rng, (num_pages, 2, heads, size, d), dtype)
    pool.swapaxes(2, 3)[rng.random((num_pages, 2, size)) < 0.3] = np.nan
    return pool


def _same(actual: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Equal to the bit; says where the first difference lies."""
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    wrong = np.argwhere(actual.view(bits) != expected.view(bits))
    assert len(wrong) == 0, (
        f"{what}: {len(wrong)} elements differ, first at {tuple(int(i) for i in wrong[0])}: "
        f"got {actual[tuple(wrong[0])]}, expected {expected[tuple(wrong[0])]}"
    )


def _ints(values: Any, device: Any) -> DeviceTensor:
    return to_device(np.asarray(values, np.int32), device, byte_offset=4)


@pytest.mark.parametrize("shape", POOLS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_append(ops, device, rng, dtype, shape):
    """Rows land at page * S + slot in both K and V; other slots keep their bits, NaN included."""
    pool = _pool(rng, shape, dtype)
    num_pages, heads, size, d = shape
    count = min(num_pages * size, 23)
    positions = rng.permutation(num_pages * size)[:count]
    k, v = normal(rng, (count, heads, d), dtype), normal(rng, (count, heads, d), dtype)
    pages = to_device(pool, device)
    ops.append_paged_kv_cache(
        pages.tensor,
        to_device(k, device).tensor,
        to_device(v, device, byte_offset=16).tensor,
        _ints(positions, device).tensor,
    )
    _same(pages.numpy(), oracle.appended(pool, k, v, positions), "pages")
    pages.assert_guards_intact("pages")


def test_append_skips_minus_one(ops, device, rng):
    """Rows at -1 are not written, whatever they hold; all of them, and some of them."""
    pool = _pool(rng, (4, 2, 16, 64), "float16")
    k, v = normal(rng, (6, 2, 64), "float16"), normal(rng, (6, 2, 64), "float16")
    for positions in (np.full(6, -1), np.array([-1, 3, -1, 63, 0, -1])):
        pages = to_device(pool, device)
        ops.append_paged_kv_cache(
            pages.tensor,
            to_device(k, device).tensor,
            to_device(v, device).tensor,
            _ints(positions, device).tensor,
        )
        _same(pages.numpy(), oracle.appended(pool, k, v, positions), f"pages, {positions}")


def test_append_nothing(ops, device, rng):
    """No rows: the pool is as it was."""
    pool = _pool(rng, (4, 2, 16, 64), "float16")
    pages = to_device(pool, device)
    none = to_device(np.zeros((0, 2, 64), np.float16), device).tensor
    ops.append_paged_kv_cache(pages.tensor, none, none, _ints([], device).tensor)
    _same(pages.numpy(), pool, "pages")


def test_append_many(ops, device, rng):
    """A whole pool of thousands of slots, in random order."""
    pool = np.full((200, 2, 2, 16, 64), np.nan, np.float16)
    positions = rng.permutation(3200)
    k, v = normal(rng, (3200, 2, 64), "float16"), normal(rng, (3200, 2, 64), "float16")
    pages = to_device(pool, device)
    ops.append_paged_kv_cache(
        pages.tensor,
        to_device(k, device).tensor,
        to_device(v, device).tensor,
        _ints(positions, device).tensor,
    )
    _same(pages.numpy(), oracle.appended(pool, k, v, positions), "pages")


@pytest.mark.parametrize("length", ["none", "one", "some", "all"])
@pytest.mark.parametrize("shape", POOLS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy_single_page(ops, device, rng, dtype, shape, length):
    """The first copy_length tokens of every head, K and V; the rest of the target stays."""
    pool = _pool(rng, shape, dtype)
    size = shape[2]
    count = {"none": 0, "one": 1, "some": size // 2, "all": size}[length]
    src, tgt = shape[0] - 1, 0
    pages = to_device(pool, device)
    ops.copy_single_page(pages.tensor, src, tgt, count)
    expected = pool.copy()
    expected[tgt, :, :, :count] = pool[src, :, :, :count]
    _same(pages.numpy(), expected, "pages")
    pages.assert_guards_intact("pages")


def test_copy_page_to_itself(ops, device, rng):
    """Source and target may be the same page."""
    pool = _pool(rng, (3, 2, 16, 64), "float16")
    pages = to_device(pool, device)
    ops.copy_single_page(pages.tensor, 1, 1, 9)
    _same(pages.numpy(), pool, "pages")


@pytest.mark.parametrize("shape", POOLS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compact(ops, device, rng, dtype, shape):
    """Requests move disjoint sets of slots, among them requests that move none."""
    pool = _pool(rng, shape, dtype)
    slots = shape[0] * shape[2]
    each = min(slots // 6, 12)
    picked = rng.permutation(slots)[: 6 * each].reshape(3, 2, each)
    indptr = indptr_of([each, 0, each, each])
    src_dst = np.concatenate(list(picked), axis=1).astype(np.int32)
    pages = to_device(pool, device)
    ops.compact_kv_copy(
        pages.tensor, _ints(indptr, device).tensor, _ints(src_dst, device).tensor, 4
    )
    _same(pages.numpy(), oracle.compacted(pool, indptr, src_dst), "pages")
    pages.assert_guards_intact("pages")


def test_compact_moves_in_order(ops, device, rng):
    """Chains: a slot that was written by one move is the source of the next (tree commits)."""
    pool = _pool(rng, (5, 3, 16, 128), "bfloat16")
    left = np.stack([np.arange(8, 28), np.arange(4, 24)])
    chain = np.stack([np.arange(40, 50), np.arange(41, 51)])
    src_dst = np.concatenate([left, chain], axis=1).astype(np.int32)
    indptr = indptr_of([20, 10])
    pages = to_device(pool, device)
    ops.compact_kv_copy(
        pages.tensor, _ints(indptr, device).tensor, _ints(src_dst, device).tensor, 2
    )
    _same(pages.numpy(), oracle.compacted(pool, indptr, src_dst), "pages")


@pytest.mark.parametrize("batch", [0, 3])
def test_compact_nothing(ops, device, rng, batch):
    """No requests, or none that moves a slot."""
    pool = _pool(rng, (3, 2, 16, 64), "float16")
    pages = to_device(pool, device)
    src_dst = to_device(np.zeros((2, 0), np.int32), device)
    indptr = _ints(np.zeros(batch + 1), device)
    ops.compact_kv_copy(pages.tensor, indptr.tensor, src_dst.tensor, batch)
    _same(pages.numpy(), pool, "pages")


@pytest.mark.parametrize("shape", POOLS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_debug_get(ops, device, rng, dtype, shape):
    """Slots are read, repeated ones too, into one layer of the outputs; other layers stay."""
    pool = _pool(rng, shape, dtype)
    num_pages, heads, size, d = shape
    positions = rng.integers(0, num_pages * size, 19)
    for layer in (0, 2):
        outs = [poisoned((3, 19, heads, d), dtype, device) for _ in range(2)]
        before = [x.numpy() for x in outs]
        pages = to_device(pool, device)
        index = _ints(positions, device)
        ops.debug_get_kv(pages.tensor, index.tensor, outs[0].tensor, outs[1].tensor, layer)
        wanted = oracle.gathered(pool, positions)
        for name, out, expected, old in zip("kv", outs, wanted, before, strict=True):
            old[layer] = expected
            _same(out.numpy(), old, f"{name}, layer {layer}")
            out.assert_guards_intact(name)
        _same(pages.numpy(), pool, "pages")


def test_debug_get_nothing(ops, device, rng):
    """No positions: nothing is written."""
    pool = _pool(rng, (3, 2, 16, 64), "float16")
    outs = [poisoned((1, 0, 2, 64), "float16", device) for _ in range(2)]
    ops.debug_get_kv(
        to_device(pool, device).tensor, _ints([], device).tensor, *(x.tensor for x in outs), 0
    )
    for out in outs:
        out.assert_guards_intact()


def test_append_then_attend(ops, device, workspaces, rng):
    """Appended tokens are what attention over strided views of the same pool reads."""
    spec = Spec((37, 4), heads=(4, 2))
    pool = np.full((8, 2, 2, 16, 64), np.nan, np.float16)
    tables = {0: [5, 1, 6], 1: [3]}
    keys = [normal(rng, (n, 2, 64), "float16") for n in spec.kv_lens]
    values = [normal(rng, (n, 2, 64), "float16") for n in spec.kv_lens]
    positions = [
        tables[b][j // 16] * 16 + j % 16 for b, n in enumerate(spec.kv_lens) for j in range(n)
    ]
    batch = Batch(
        spec, normal(rng, (2, 4, 64), "float16"), keys, values, pool,
        indptr_of([3, 1]), np.array([5, 1, 6, 3], np.int32), np.array([5, 4], np.int32),
    )  # fmt: skip
    call = decode(ops, device, workspaces, batch)
    pages = to_device(pool, device)
    for i, name in enumerate("kv"):
        call.run_args[f"{name}_pages"] = pages.view(lambda a, i=i: a[:, i])
    ops.append_paged_kv_cache(
        pages.tensor,
        to_device(np.concatenate(keys), device).tensor,
        to_device(np.concatenate(values), device).tensor,
        _ints(positions, device).tensor,
    )
    call.plan_run_check()


def test_poison_is_nan():
    """The fill of outputs and unused slots is NaN in every dtype, so a read of it cannot hide."""
    for dtype in DTYPES:
        bits = np.full(numpy_dtype(dtype).itemsize, 0xFF, np.uint8)
        assert np.isnan(bits.view(numpy_dtype(dtype)).astype(np.float32)).all()

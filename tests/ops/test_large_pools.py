"""Pools whose offsets leave 32 bits: pages near index 2.2 million.

The pool spans 9 GB and over 2^32 elements. On CPU it is mapped without being backed, and only the
pages in use are touched; on CUDA it is allocated.
"""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
import oracle
import pytest
from batches import Batch, Spec, indptr_of, is_cuda, normal
from cache_oracle import Extras, assert_request
from device_tensors import poisoned, synchronize, to_device, view_of
from functions import DECODE, PAGED, each

SHAPE = (2_200_000, 2, 1, 16, 64)
PAGE_ELEMENTS = 2 * 16 * 64
# Elements past 0, 2^31 and 2^32 of the pool.
PAGES = np.array([3, 1_048_577, 2_097_153, 2_199_999], np.int32)


class Mapped:
    """Anonymous memory that is not backed until it is touched, as an owner of views."""

    def __init__(self, num_bytes: int) -> None:
        import tvm

        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
        self._map = mmap.mmap(-1, num_bytes, flags=flags)
        self._bytes = np.frombuffer(self._map, np.uint8)
        self.device = tvm.cpu(0)

    def data_ptr(self) -> int:
        """The address of the first byte."""
        return int(self._bytes.ctypes.data)


class Pool:
    """A pool of which single pages can be written and read."""

    def __init__(self, device: Any) -> None:
        import tvm

        num_bytes = SHAPE[0] * PAGE_ELEMENTS * 2
        self._owner: Any
        if is_cuda(device):
            self._owner = tvm.runtime.empty((num_bytes,), "uint8", device)
        else:
            self._owner = Mapped(num_bytes)
        self._device = device
        self.tensor = self._view(SHAPE, (PAGE_ELEMENTS, 1024, 1024, 64, 1), 0)

    def _view(self, shape: tuple[int, ...], strides: tuple[int, ...], element: int) -> Any:
        return view_of(self._owner, np.dtype(np.float16), shape, strides, element * 2)

    def half(self, which: int) -> Any:
        """The K or V pages in HND, as a strided view."""
        return self._view((SHAPE[0], *SHAPE[2:]), (PAGE_ELEMENTS, 1024, 64, 1), which * 1024)

    def page(self, index: int) -> Any:
        """One page as a contiguous tensor (1, 2, 1, 16, 64)."""
        shape = (1, *SHAPE[1:])
        return self._view(shape, (PAGE_ELEMENTS, 1024, 1024, 64, 1), int(index) * PAGE_ELEMENTS)

    def write(self, values: np.ndarray) -> None:
        """Fill the pages of PAGES."""
        for index, page in zip(PAGES, values, strict=True):
            self.page(index).copyfrom(page[None])

    def read(self) -> np.ndarray:
        """The pages of PAGES."""
        synchronize(self._device)
        return np.concatenate([self.page(index).numpy() for index in PAGES])


@pytest.fixture
def pool(device: Any) -> Pool:
    """A pool of 2.2 million pages."""
    return Pool(device)


@each(*PAGED)
def test_attention(attend, rng, pool, function):
    """One request that holds pages at both ends and past 2^31 and 2^32 elements."""
    values = normal(rng, (4, *SHAPE[1:]), "float16")
    pool.write(values)
    spec = Spec((60,), (1,) if function in DECODE else (9,), (4, 1))
    k, v = (values[:, i, 0].reshape(64, 1, 64)[:60] for i in range(2))
    stub = np.zeros((4, *SHAPE[1:]), np.float16)
    q = normal(rng, (sum(spec.rows), 4, 64), "float16")
    batch = Batch(spec, q, [k], [v], stub, indptr_of([4]), PAGES, np.array([12], np.int32))
    call = attend.call(function, batch)
    if "pages" in call.run_args:
        call.run_args["pages"] = pool.tensor
    else:
        call.run_args["k_pages"], call.run_args["v_pages"] = pool.half(0), pool.half(1)
    call.plan_run_check()


def _positions(slots: list[int]) -> np.ndarray:
    return (PAGES.astype(np.int64) * 16 + np.array(slots)).astype(np.int32)


def test_append_and_read(ops, device, rng, pool):
    """Rows appended past 2^32 elements are read back from there."""
    values = normal(rng, (4, *SHAPE[1:]), "float16")
    pool.write(values)
    k, v = normal(rng, (4, 1, 64), "float16"), normal(rng, (4, 1, 64), "float16")
    slots = [0, 15, 7, 15]
    positions = to_device(_positions(slots), device)
    ops.append_paged_kv_cache(
        pool.tensor, to_device(k, device).tensor, to_device(v, device).tensor, positions.tensor
    )
    local = np.arange(4) * 16 + slots
    np.testing.assert_array_equal(pool.read(), oracle.appended(values, k, v, local))
    outs = [poisoned((1, 4, 1, 64), "float16", device) for _ in range(2)]
    ops.debug_get_kv(pool.tensor, positions.tensor, *(x.tensor for x in outs), 0)
    np.testing.assert_array_equal(outs[0].numpy()[0], k)
    np.testing.assert_array_equal(outs[1].numpy()[0], v)


def test_copy_and_compact(ops, device, rng, pool):
    """A page and single slots move between the two ends of the pool."""
    values = normal(rng, (4, *SHAPE[1:]), "float16")
    pool.write(values)
    ops.copy_single_page(pool.tensor, int(PAGES[3]), int(PAGES[0]), 11)
    values[0, :, :, :11] = values[3, :, :, :11]
    moves = np.stack([_positions([1, 2, 3, 4])[[3, 2]], _positions([5, 6, 7, 8])[[0, 1]]])
    ops.compact_kv_copy(
        pool.tensor,
        to_device(indptr_of([1, 1]), device).tensor,
        to_device(moves, device).tensor,
        2,
    )
    local = np.array([[3 * 16 + 4, 2 * 16 + 3], [5, 16 + 6]])
    expected = oracle.compacted(values, np.array([0, 1, 2]), local)
    np.testing.assert_array_equal(pool.read(), expected)


def test_latent_attention(ops, rng):
    """MLA with pages of 32 rows up to page 1000000: past 2^31 and past 2^32 elements, on CPU."""
    num_pages, size, d, vo, heads = 1_000_001, 32, 576, 512, 16
    chosen = [5, 116_600, 233_100, 1_000_000]
    owner = Mapped(num_pages * size * d * 2)
    cpu = owner.device
    half = np.dtype(np.float16)

    def at(page: int) -> Any:
        return view_of(owner, half, (1, size, d), (size * d, d, 1), page * size * d * 2)

    whole = view_of(owner, half, (num_pages, size, d), (size * d, d, 1))
    keys = normal(rng, (4 * size, d), "float16")
    slots = np.array(chosen)[:, None] * size + np.arange(size)
    indices = [to_device(np.array(x, np.int32), cpu).tensor for x in (chosen, slots.reshape(-1))]
    ops.append_paged_mla_kv_cache(whole, to_device(keys, cpu).tensor, indices[1])
    for b, page in enumerate(chosen):
        np.testing.assert_array_equal(at(page).numpy()[0], keys[b * size : (b + 1) * size])
    ends, rows, last = (to_device(np.array(x, np.int32), cpu).tensor for x in ([0, 4], [0, 2], [9]))
    q = normal(rng, (2, heads, d), "float16")
    o, lse = poisoned((2, heads, vo), "float16", cpu), poisoned((2, heads), "float32", cpu)
    placed = to_device(q, cpu).tensor
    ops.bind_attention_mla("{}")(
        placed, rows, whole, ends, indices[0], last, o.tensor, lse.tensor, 1, d**-0.5
    )
    k = keys[: 3 * size + 9, None]
    extras = Extras(causal=True)
    assert_request(o.numpy(), lse.numpy(), q, k, k[..., :vo], extras, d**-0.5, "MLA")
    ops.copy_single_page_mla(whole, 1_000_000, 5, 7)
    np.testing.assert_array_equal(at(5).numpy()[0, :7], keys[-size:][:7])
    out = poisoned((1, size, d), "float16", cpu)
    ops.debug_get_kv_mla(whole, to_device(slots[3].astype(np.int32), cpu).tensor, out.tensor, 0)
    np.testing.assert_array_equal(out.numpy()[0], keys[-size:])

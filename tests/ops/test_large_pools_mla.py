"""MLA pools whose offsets leave 32 bits: pages of 32 tokens near index a million.

The pool spans 37 GB and over 2^34 elements. On CPU it is mapped without being backed, and only the
pages in use are touched; on CUDA it is allocated.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import is_cuda, normal
from device_tensors import poisoned, synchronize, to_device, view_of
from mla_calls import MLASpec, mla_call
from test_large_pools import Mapped

NUM_PAGES, PAGE_SIZE, WIDTH = 1_000_001, 32, 576
PAGE_ELEMENTS = PAGE_SIZE * WIDTH
# Elements past 0, 2^31, 2^32 and 2^34 of the pool.
PAGES = np.array([3, 116_509, 233_017, 1_000_000], np.int32)


class Pool:
    """A pool of latent rows of which single pages can be written and read."""

    def __init__(self, device: Any) -> None:
        import tvm

        num_bytes = NUM_PAGES * PAGE_ELEMENTS * 2
        on_cuda = is_cuda(device)
        self._owner = (
            tvm.runtime.empty((num_bytes,), "uint8", device) if on_cuda else Mapped(num_bytes)
        )
        self._device = device
        self.tensor = self.part(0, WIDTH)

    def part(self, first: int, columns: int, page: int | None = None) -> Any:
        """Columns of all pages, or of one, as TVM's cache passes them: a strided view."""
        pages, start = (NUM_PAGES, 0) if page is None else (1, page * PAGE_ELEMENTS)
        shape, strides = (pages, PAGE_SIZE, columns), (PAGE_ELEMENTS, WIDTH, 1)
        return view_of(self._owner, np.dtype(np.float16), shape, strides, (start + first) * 2)

    def write(self, values: np.ndarray) -> None:
        """Fill the pages of PAGES."""
        for index, page in zip(PAGES, values, strict=True):
            self.part(0, WIDTH, int(index)).copyfrom(page[None])

    def read(self) -> np.ndarray:
        """The pages of PAGES."""
        synchronize(self._device)
        return np.concatenate([self.part(0, WIDTH, int(index)).numpy() for index in PAGES])


@pytest.fixture
def pool(device: Any) -> Pool:
    """A pool of a million pages."""
    return Pool(device)


@pytest.mark.parametrize("rows", [1, 9])
def test_attention(ops, device, workspaces, rng, pool, rows):
    """One request that holds pages at both ends of the pool, and between."""
    spec = MLASpec((4 * PAGE_SIZE - 4,), (rows,), page_size=PAGE_SIZE)
    call = mla_call(ops, device, workspaces, rng, spec)
    values = np.zeros((4, PAGE_SIZE, WIDTH), np.float16)
    values.reshape(-1, WIDTH)[: len(call.keys[0])] = call.keys[0]
    pool.write(values)
    call.plan()
    call.run(
        ckv=pool.part(0, 512), kpe=pool.part(512, 64), page_indices=to_device(PAGES, device).tensor
    )
    call.check()


def test_append_copy_and_read(ops, device, rng, pool):
    """Rows appended and pages copied past 2^34 elements are read back from there."""
    values = normal(rng, (4, PAGE_SIZE, WIDTH), "float16")
    pool.write(values)
    rows, slots = normal(rng, (4, WIDTH), "float16"), [0, 31, 7, 31]
    positions = (PAGES.astype(np.int64) * PAGE_SIZE + slots).astype(np.int32)
    at = to_device(positions, device)
    ops.append_paged_mla_kv_cache(pool.tensor, to_device(rows, device).tensor, at.tensor)
    values[np.arange(4), slots] = rows
    ops.copy_single_page_mla(pool.tensor, int(PAGES[3]), int(PAGES[1]), 11)
    values[1, :11] = values[3, :11]
    np.testing.assert_array_equal(pool.read(), values)
    out = poisoned((1, 4, WIDTH), "float16", device)
    ops.debug_get_kv_mla(pool.tensor, at.tensor, out.tensor, 0)
    np.testing.assert_array_equal(out.numpy()[0], rows)

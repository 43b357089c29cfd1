"""Batches of attention requests on the host, with the page tables that describe them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
import pytest
from device_tensors import numpy_dtype

CUDA_HEAD_DIMS = (64, 128, 256)
DTYPES = ("float32", "float16", "bfloat16")


def _each_kernel(*kernels: str) -> pytest.MarkDecorator:
    on_cuda = [pytest.param(f"cuda-{kernel}", marks=pytest.mark.cuda) for kernel in kernels]
    return pytest.mark.parametrize("device", ["cpu", *on_cuda], indirect=True)


#: Runs a test of planned prefill on CPU, and on CUDA with FA2 and, on Hopper, with FA3.
each_prefill_kernel = _each_kernel("fa2", "fa3")

#: The same of pages, also with FA3 over a copy of them.
each_paged_kernel = _each_kernel("fa2", "fa3", "fa3_copy")


def is_cuda(device: Any) -> bool:
    """Whether `device` is a CUDA device."""
    return device.dlpack_device_type() != 1


def needs_kernel(device: Any, dtype: str, head_dim: int) -> None:
    """Skip what CUDA attention refuses by contract; test_errors checks that it does."""
    if is_cuda(device) and dtype == "float32":
        pytest.skip("CUDA attention has no float32 kernels")
    if is_cuda(device) and head_dim not in CUDA_HEAD_DIMS:
        pytest.skip(f"CUDA attention has no kernels for head_dim {head_dim}")


def indptr_of(lengths: Sequence[int]) -> np.ndarray:
    """Offsets (len + 1), int32, from lengths."""
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, np.int64))]).astype(np.int32)


def normal(rng: np.random.Generator, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Standard normal values, rounded to `dtype`."""
    return rng.standard_normal(tuple(shape), np.float32).astype(numpy_dtype(dtype))


@dataclass(frozen=True)
class Spec:
    """Shape of a batch. `qo_lens` None means one row per request."""

    kv_lens: Sequence[int]
    qo_lens: Sequence[int] | None = None
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    head_dim_vo: int | None = None
    page_size: int = 16
    dtype: str = "float16"
    layout: str = "HND"
    causal: bool = False
    window_left: int = -1
    sm_scale: float | None = None

    @property
    def rows(self) -> list[int]:
        """Query rows of each request."""
        return [1] * len(self.kv_lens) if self.qo_lens is None else list(self.qo_lens)

    @property
    def scale(self) -> float:
        """The softmax scale in use."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale

    @property
    def vo(self) -> int:
        """Head dimension of values and outputs."""
        return self.head_dim_vo or self.head_dim


@dataclass
class Batch:
    """Host arrays of a batch: queries, each request's keys and values, and the page tables."""

    spec: Spec
    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    pool: np.ndarray = field(default_factory=lambda: np.zeros(0))
    page_indptr: np.ndarray = field(default_factory=lambda: np.zeros(1, np.int32))
    page_indices: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))
    last_page_len: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))

    @property
    def requests(self) -> list[oracle.Request]:
        """The requests as the oracle takes them."""
        ptr = indptr_of(self.spec.rows)
        return [
            oracle.Request(slice(int(ptr[b]), int(ptr[b + 1])), k, v)
            for b, (k, v) in enumerate(zip(self.keys, self.values, strict=True))
        ]

    def part(self, b: int) -> Batch:
        """Request `b` as a batch of one over the same pool."""
        spec = self.spec
        rows = self.requests[b].rows
        lo, hi = self.page_indptr[b], self.page_indptr[b + 1]
        one = Spec(**{**spec.__dict__, "kv_lens": [spec.kv_lens[b]], "qo_lens": [spec.rows[b]]})
        return Batch(
            one,
            self.q[rows],
            [self.keys[b]],
            [self.values[b]],
            self.pool,
            np.array([0, hi - lo], np.int32),
            self.page_indices[lo:hi],
            self.last_page_len[b : b + 1],
        )


def make_batch(
    rng: np.random.Generator,
    spec: Spec,
    *,
    q: np.ndarray | None = None,
    keys: Sequence[np.ndarray] | None = None,
    paged: bool = True,
) -> Batch:
    """Random requests; with `paged`, in shuffled pages of a larger pool whose other slots are NaN.

    The pool is (P, 2, Hkv, S, d) in HND and (P, 2, S, Hkv, d) in NHD.
    """
    num_qo_heads, num_kv_heads = spec.heads
    if q is None:
        q = normal(rng, (sum(spec.rows), num_qo_heads, spec.head_dim), spec.dtype)
    if keys is None:
        keys = [normal(rng, (n, num_kv_heads, spec.head_dim), spec.dtype) for n in spec.kv_lens]
    values = [normal(rng, (n, num_kv_heads, spec.vo), spec.dtype) for n in spec.kv_lens]
    batch = Batch(spec, q, list(keys), values)
    if not paged:
        return batch
    size = spec.page_size
    counts = [-(-n // size) for n in spec.kv_lens]
    num_pages = sum(counts) + 5
    batch.page_indptr = indptr_of(counts)
    batch.page_indices = rng.permutation(num_pages)[: sum(counts)].astype(np.int32)
    batch.last_page_len = np.array(
        [n - (c - 1) * size if c else 0 for n, c in zip(spec.kv_lens, counts, strict=True)],
        np.int32,
    )
    dtype = numpy_dtype(spec.dtype)
    pool = np.full((num_pages, 2, size, num_kv_heads, spec.head_dim), np.nan, dtype)
    for b, count in enumerate(counts):
        pages = batch.page_indices[batch.page_indptr[b] : batch.page_indptr[b + 1]]
        for which, tokens in enumerate((keys[b], values[b])):
            slots = np.full((count * size, *tokens.shape[1:]), np.nan, dtype)
            slots[: len(tokens)] = tokens
            pool[pages, which] = slots.reshape(count, size, *tokens.shape[1:])
    batch.pool = np.ascontiguousarray(pool.swapaxes(2, 3)) if spec.layout == "HND" else pool
    return batch

"""Latent attention (MLA) without a plan: a row of the cache is a key, its first part the value."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import DTYPES, indptr_of, is_cuda, normal
from cache_oracle import Extras, assert_request
from device_tensors import numpy_dtype, poisoned, to_device
from refusals import refused

# Query heads, columns of keys, columns of values.
DIMS = [(16, 576, 512), (3, 80, 64), (71, 576, 512), (1, 20, 12)]


def _ints(values: Any, device: Any) -> Any:
    return to_device(np.asarray(values, np.int32), device, byte_offset=4).tensor


def _needs_kernel(device: Any, dtype: str, dims: tuple[int, int, int]) -> None:
    """Skip what CUDA refuses; the last test checks that it does."""
    if is_cuda(device) and dtype == "float32":
        pytest.skip("CUDA attention has no float32 kernels")
    if is_cuda(device) and any(dim % 16 or dim > 256 for dim in dims[1:]):
        pytest.skip(f"CUDA has no kernel without a plan for head dimensions {dims[1:]}")


@pytest.mark.parametrize("page_size", [1, 4, 16, 32])
@pytest.mark.parametrize("dims", DIMS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention(ops, device, rng, dtype, dims, page_size):
    """Decode and prefill rows, requests without keys or rows, unused slots NaN."""
    _needs_kernel(device, dtype, dims)
    heads, d, vo = dims
    kv_lens, rows = [0, 17, 0, 5, 13, 129, 40], [1, 2, 1, 1, 1, 8, 0]
    for causal in (0, 1):
        keys = [normal(rng, (m, 1, d), dtype) for m in kv_lens]
        q = normal(rng, (sum(rows), heads, d), dtype)
        counts = [-(-m // page_size) for m in kv_lens]
        indices = rng.permutation(sum(counts) + 2)[: sum(counts)]
        pool = np.full((sum(counts) + 2, page_size, d), np.nan, numpy_dtype(dtype))
        at = indptr_of(counts)
        for b, tokens in enumerate(keys):
            j = np.arange(len(tokens))
            pool[indices[at[b] : at[b + 1]][j // page_size], j % page_size] = tokens[:, 0]
        last = [m - (c - 1) * page_size if c else 0 for m, c in zip(kv_lens, counts, strict=True)]
        o = poisoned((len(q), heads, vo), dtype, device)
        lse = poisoned((len(q), heads), "float32", device)
        tables = (_ints(x, device) for x in (at, indices, last))
        ops.bind_attention_mla("{}")(
            to_device(q, device).tensor, _ints(indptr_of(rows), device),
            to_device(pool, device, byte_offset=64).tensor, *tables,
            o.tensor, lse.tensor, causal, d**-0.5,
        )  # fmt: skip
        ptr = indptr_of(rows)
        for b, k in enumerate(keys):
            part = slice(ptr[b], ptr[b + 1])
            assert_request(
                o.numpy()[part], lse.numpy()[part], q[part], k, k[..., :vo],
                Extras(causal=bool(causal)), d**-0.5, f"request {b}",
            )  # fmt: skip


def test_no_requests(ops, device):
    """A batch of none reads and writes nothing."""
    q, pages = (to_device(np.zeros((n, 2, 64), np.float16), device).tensor for n in (0, 3))
    o, lse = poisoned((0, 2, 48), "float16", device), poisoned((0, 2), "float32", device)
    zero, nothing = _ints([0], device), _ints([], device)
    ops.bind_attention_mla("{}")(
        q, zero, pages, zero, nothing, nothing, o.tensor, lse.tensor, 1, 0.125
    )
    o.assert_guards_intact("o")
    lse.assert_guards_intact("lse")


def _same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal to the bit: NumPy does not know that a NaN of bfloat16 is one."""
    bits = np.dtype(f"u{expected.dtype.itemsize}")
    np.testing.assert_array_equal(actual.view(bits), np.ascontiguousarray(expected).view(bits))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages(ops, device, rng, dtype):
    """Append, copy and read: values move to the bit, nothing else changes."""
    num_pages, size, d, n = 6, 5, 72, 13
    pool = normal(rng, (num_pages, size, d), dtype)
    kv = normal(rng, (n, d), dtype)
    positions = rng.permutation(num_pages * size)[:n]
    positions[[2, 7]] = -1
    pages = to_device(pool, device, byte_offset=16)
    ops.append_paged_mla_kv_cache(
        pages.tensor, to_device(kv, device).tensor, _ints(positions, device)
    )
    expected = pool.copy().reshape(-1, d)
    expected[positions[positions >= 0]] = kv[positions >= 0]
    _same_bits(pages.numpy().reshape(-1, d), expected)

    ops.copy_single_page_mla(pages.tensor, 1, 4, 3)
    expected = expected.reshape(pool.shape)
    expected[4, :3] = expected[1, :3]
    _same_bits(pages.numpy(), expected)

    out = poisoned((3, n, d), dtype, device)
    before = out.numpy()
    places = np.where(positions < 0, 0, positions)
    ops.debug_get_kv_mla(pages.tensor, _ints(places, device), out.tensor, 1)
    _same_bits(out.numpy()[1], expected.reshape(-1, d)[places])
    _same_bits(out.numpy()[[0, 2]], before[[0, 2]])
    pages.assert_guards_intact("pages")
    out.assert_guards_intact("kv")


def test_refusals(ops, device, rng, monkeypatch):
    """Positions, pages and layers outside, wrong widths."""
    pages = to_device(normal(rng, (4, 16, 24), "float16"), device).tensor
    kv = to_device(normal(rng, (2, 24), "float16"), device).tensor
    wide = to_device(normal(rng, (2, 32), "float16"), device).tensor
    layers = to_device(normal(rng, (1, 2, 24), "float16"), device).tensor
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    with refused(ValueError, "position_map", "64"):
        ops.append_paged_mla_kv_cache(pages, kv, _ints([0, 64], device))
    with refused(ValueError, r"\bkv\b", "24"):
        ops.append_paged_mla_kv_cache(pages, wide, _ints([0, 1], device))
    with refused(ValueError, "tgt_page"):
        ops.copy_single_page_mla(pages, 0, 4, 3)
    with refused(ValueError, "copy_length"):
        ops.copy_single_page_mla(pages, 0, 1, 17)
    with refused(ValueError, "layer_id"):
        ops.debug_get_kv_mla(pages, _ints([0, 1], device), layers, 1)
    with refused(ValueError, "rope_scaling", "logits_soft_cap"):
        ops.bind_attention_mla('{"rope_scaling": {}}')


@pytest.mark.cuda
def test_cuda_has_a_plan_for_large_ones(ops, cuda, rng):
    """576 with values of 512: the refusal names what serves it."""
    q, o = (poisoned((1, 16, d), "float16", cuda) for d in (576, 512))
    pages = to_device(normal(rng, (2, 16, 576), "float16"), cuda)
    lse = poisoned((1, 16), "float32", cuda)
    with refused(ValueError, "576", "batch_mla_plan"):
        ops.bind_attention_mla("{}")(
            q.tensor, _ints([0, 1], cuda), pages.tensor, _ints([0, 1], cuda), _ints([1], cuda),
            _ints([3], cuda), o.tensor, lse.tensor, 0, 0.1,
        )  # fmt: skip

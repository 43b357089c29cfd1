"""`split_qkv_rotary_append` and `token_slots`: projections into pages in one kernel."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, indptr_of, normal
from device_tensors import poisoned, synchronize, to_device
from refusals import refused, unchanged
from test_apply_rope import check, same_numbers
from test_split_qkv_rotary import SCALINGS

from tvm_flashinfer import ops as typed

OUT_OF_ORDER = [17, 3, 40, 5, -1, 63, 12]


def append(
    ops: Any, device: Any, qkv: Any, positions: Any, slots: Any, pages: Any, settings: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Queries and the pages after the call; the inputs and the bytes around outputs are intact."""
    pool = to_device(pages, device, byte_offset=16)
    kv_heads, dim = pages.shape[2], pages.shape[4]
    heads = math.prod(qkv.layout.shape[1:]) // dim - 2 * kv_heads
    q = poisoned((len(qkv.layout), heads, dim), pages.dtype.name, device)
    args = {"qkv": qkv}
    args |= {name: to_device(np.asarray(x, np.int32), device, byte_offset=4)
             for name, x in (("positions", positions), ("slots", slots))}  # fmt: skip
    with unchanged(args):
        ops.split_qkv_rotary_append(
            *(x.tensor for x in args.values()), *settings, pool.tensor, q.tensor
        )
        got = q.numpy()
    for holder in (q, pool):
        holder.assert_guards_intact("output")
    return got, pool.numpy()


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(ops, device, rng, dtype, head_dim, scaling, flat):
    """Queries out, keys and values to their slots, and no other byte of the pages."""
    qkv = normal(rng, (7, 8, head_dim), dtype)
    pages = normal(rng, (4, 2, 2, 16, head_dim), dtype)
    positions = rng.integers(0, 4000, 7)
    held = to_device(qkv.reshape(7, -1) if flat else qkv, device)
    settings = (5e5, 1.0, head_dim, json.dumps(SCALINGS[scaling]))
    q, after = append(ops, device, held, positions, OUT_OF_ORDER, pages, settings)
    kwargs: dict[str, Any] = dict(theta=5e5, rope_scaling=SCALINGS[scaling])
    check(q, qkv[:, :4], positions, **kwargs)
    rows = [i for i, slot in enumerate(OUT_OF_ORDER) if slot >= 0]
    k, v = oracle.gathered(after, np.array(OUT_OF_ORDER)[rows])
    check(k, qkv[rows, 4:6], positions[rows], **kwargs)
    np.testing.assert_array_equal(v, qkv[rows, 6:])
    expected = oracle.appended(
        pages, np.zeros_like(qkv[:, 4:6]), qkv[:, 6:], np.array(OUT_OF_ORDER)
    )
    written = oracle.appended(after, np.zeros_like(qkv[:, 4:6]), qkv[:, 6:], np.array(OUT_OF_ORDER))
    np.testing.assert_array_equal(written, expected)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize(("rows", "heads"), [(1, (1, 1)), (300, (6, 2)), (2000, (8, 1))], ids=str)
def test_equals_split_and_append(ops, device, rng, rows, heads, page_size):
    """The bits of the two kernels that it stands for, strided rows included."""
    total = heads[0] + 2 * heads[1]
    wide = normal(rng, (rows, total + 1, 64), "float16")
    num_pages = rows // page_size + 2
    pages = normal(rng, (num_pages, 2, heads[1], page_size, 64), "float16")
    slots = rng.permutation(num_pages * page_size)[:rows].astype(np.int32)
    slots[::7] = -1
    positions = rng.integers(0, 9000, rows).astype(np.int32)
    held = to_device(wide, device, byte_offset=0).view(lambda a: a[:, 1:])
    settings = (1e4, 1.0, 32, "{}")
    q, after = append(ops, device, held, positions, slots, pages, settings)
    outs = [poisoned((rows, h, 64), "float16", device) for h in (heads[0], heads[1], heads[1])]
    where = to_device(positions, device).tensor
    ops.split_qkv_rotary(held.tensor, where, *(x.tensor for x in outs), 1, *settings)
    pool = to_device(pages, device)
    slot_map = to_device(slots, device).tensor
    ops.append_paged_kv_cache(pool.tensor, outs[1].tensor, outs[2].tensor, slot_map)
    same_numbers(q, outs[0].numpy(), device)
    same_numbers(after, pool.numpy(), device)


def test_without_rotation_all_is_copied(ops, device, rng):
    """rotary_dim 0 moves bits."""
    qkv = normal(rng, (7, 8, 64), "bfloat16")
    pages = normal(rng, (4, 2, 2, 16, 64), "bfloat16")
    held = to_device(qkv, device)
    settings = (1e4, 1.0, 0, "{}")
    q, after = append(ops, device, held, np.arange(7), OUT_OF_ORDER, pages, settings)
    np.testing.assert_array_equal(q, qkv[:, :4])
    expected = oracle.appended(pages, qkv[:, 4:6], qkv[:, 6:], np.array(OUT_OF_ORDER))
    np.testing.assert_array_equal(after, expected)


def test_slots_outside_of_the_pool(ops, device, rng, monkeypatch):
    """Refused where the host can read them, or is asked to."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    held = to_device(normal(rng, (2, 3, 64), "float16"), device)
    pages = normal(rng, (1, 2, 1, 16, 64), "float16")
    for bad in (-2, 16):
        with refused(ValueError, r"`slots`\[1\]", "16 slots"):
            append(ops, device, held, [0, 1], [3, bad], pages, (1e4, 1.0, 64, "{}"))


def test_no_rows(ops, device):
    """A batch without tokens writes nothing."""
    pages = np.zeros((1, 2, 1, 16, 64), np.float16)
    held = to_device(np.zeros((0, 3, 64), np.float16), device)
    q, after = append(ops, device, held, [], [], pages, (1e4, 1.0, 64, "{}"))
    assert q.shape == (0, 1, 64)
    np.testing.assert_array_equal(after, pages)


def slots_of(
    qo_lens: Any, kv_lens: Any, tables: Any, page_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Positions and slots of the new tokens, one by one."""
    positions, slots = [], []
    for rows, keys, pages in zip(qo_lens, kv_lens, tables, strict=True):
        for at in range(keys - rows, keys):
            positions.append(at)
            slots.append(pages[at // page_size] * page_size + at % page_size)
    return np.array(positions, np.int32), np.array(slots, np.int32)


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("qo_lens", "kv_lens"),
    [((1,), (1,)), ((3, 1, 0, 17), (3, 33, 5, 40)), ((0, 0), (4, 0)), ((1,) * 300, (9,) * 300)],
    ids=["one", "mixed", "none", "many"],
)
def test_token_slots(ops, device, rng, qo_lens, kv_lens, page_size):
    """The last tokens of each request, whatever the order of its pages."""
    counts = [-(-n // page_size) for n in kv_lens]
    order = rng.permutation(sum(counts) + 3)
    tables = np.split(order[: sum(counts)], np.cumsum(counts)[:-1])
    last = [n - (c - 1) * page_size if n else 0 for n, c in zip(kv_lens, counts, strict=True)]
    index = [
        indptr_of(qo_lens),
        indptr_of(counts),
        order.astype(np.int32),
        np.array(last, np.int32),
    ]
    held = [to_device(x, device, byte_offset=4).tensor for x in index]
    outs = [poisoned((sum(qo_lens),), "int32", device) for _ in range(2)]
    ops.token_slots(*held, page_size, *(x.tensor for x in outs))
    expected = slots_of(qo_lens, kv_lens, tables, page_size)
    for out, values in zip(outs, expected, strict=True):
        np.testing.assert_array_equal(out.numpy(), values)
        out.assert_guards_intact()
    got = typed.token_slots(*held, page_size, sum(qo_lens))
    synchronize(device)
    for out, values in zip(got, expected, strict=True):
        np.testing.assert_array_equal(out.numpy(), values)


def test_more_rows_than_tokens(ops, device, monkeypatch):
    """Pages count the new tokens too."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    index = [np.array(x, np.int32) for x in ([0, 3], [0, 1], [0], [2])]
    outs = [poisoned((3,), "int32", device).tensor for _ in range(2)]
    with refused(ValueError, "request 0 has 3 rows", "2 tokens", "new tokens"):
        ops.token_slots(*(to_device(x, device).tensor for x in index), 16, *outs)


def test_typed(device, rng):
    """Names, defaults and results that are allocated: a step from a page table to pages."""
    qkv = normal(rng, (4, 8, 64), "float16")
    index = [np.array(x, np.int32) for x in ([0, 3, 4], [0, 1, 3], [2, 0, 1], [3, 1])]
    held = [to_device(x, device).tensor for x in index]
    positions, slots = typed.token_slots(*held, 16, 4)
    pages = to_device(np.zeros((3, 2, 2, 16, 64), np.float16), device)
    q = typed.split_qkv_rotary_append(
        to_device(qkv, device).tensor, positions, slots, pages.tensor, 4, rope_theta=500.0
    )
    synchronize(device)
    where, at = np.array([0, 1, 2, 16]), np.array([32, 33, 34, 16])
    check(q.numpy(), qkv[:, :4], where, theta=500.0)
    k, v = oracle.gathered(pages.numpy(), at)
    check(k, qkv[:, 4:6], where, theta=500.0)
    np.testing.assert_array_equal(v, qkv[:, 6:])

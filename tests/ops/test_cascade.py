"""`merge_states`, and attention over levels of keys, against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, indptr_of, normal
from device_tensors import poisoned, synchronize, to_device
from refusals import unchanged

from tvm_flashinfer import ops as typed


def merged(v: np.ndarray, s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The states of each row merged in float64, one after the other."""
    total = np.zeros(v[:, 0].shape), np.full(s[:, 0].shape, -np.inf)
    for i in range(v.shape[1]):
        total = oracle.merge(*total, v[:, i], s[:, i])
    return total


def states(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[Any, Any]:
    """States whose LSEs lie far apart and close together, and empty ones, whose values are NaN."""
    v, s = normal(rng, shape, dtype), (rng.standard_normal(shape[:3]) * 5).astype(np.float32)
    kind = rng.integers(0, 5, shape[:3])
    s[kind == 0] += 200
    s[kind == 1] = -np.inf
    s[::3] = np.where(rng.random(s[::3].shape) < 0.7, -np.inf, s[::3])
    v[np.isneginf(s)] = np.nan
    return v, s


@pytest.mark.parametrize("num_states", [1, 2, 5, 33])
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(1, 1, 64), (9, 4, 80), (130, 8, 128), (3, 2, 7)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_states(ops, device, rng, dtype, rows, heads, dim, num_states):
    """Any number of states, any head dimension; what empty states hold does not matter."""
    v, s = states(rng, (rows, num_states, heads, dim), dtype)
    args = {"v": to_device(v, device), "s": to_device(s, device, byte_offset=4)}
    outs = poisoned((rows, heads, dim), dtype, device), poisoned((rows, heads), "float32", device)
    with unchanged(args):
        ops.merge_states(*(x.tensor for x in (*args.values(), *outs)))
        got_v, got_s = (x.numpy() for x in outs)
    for out in outs:
        out.assert_guards_intact()
    v[np.isneginf(s)] = 0
    exact_v, exact_s = merged(v, s)
    oracle.assert_lse_close(got_s, exact_s, exact_s.astype(np.float32).astype(float), "s")
    assert not got_v[np.isneginf(exact_s)].astype(np.float32).any()
    # Opposite values cancel: the error counts against the largest input.
    scale = np.abs(v.astype(np.float64)).max((1, 3), keepdims=True)[:, 0]
    error = np.abs(got_v.astype(np.float64) - exact_v) / np.maximum(scale, 1e-30)
    assert error.max() <= 2 * oracle.FLOOR[dtype]


def test_two_states_are_merge_state(ops, device, rng):
    """The same within a rounding as `merge_state`."""
    v, s = states(rng, (40, 2, 4, 64), "float32")
    v[np.isneginf(s)] = 0
    pairs = [x for i in range(2) for x in (v[:, i], s[:, i])]
    held = [to_device(np.ascontiguousarray(x), device).tensor for x in pairs]
    expected = typed.merge_state(*held)
    got = typed.merge_states(to_device(v, device).tensor, to_device(s, device).tensor)
    synchronize(device)
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=1e-5, atol=1e-6)


def test_no_states_and_no_rows(ops, device):
    """Rows without states are empty; without rows nothing is written."""
    for rows, count in ((3, 0), (0, 3)):
        v = to_device(np.zeros((rows, count, 2, 64), np.float16), device)
        s = to_device(np.zeros((rows, count, 2), np.float32), device)
        outs = poisoned((rows, 2, 64), "float16", device), poisoned((rows, 2), "float32", device)
        ops.merge_states(v.tensor, s.tensor, *(x.tensor for x in outs))
        assert not outs[0].numpy().any()
        assert np.isneginf(outs[1].numpy()).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)], ids=str)
def test_cascade_attention(device, rng, heads, causal):
    """A prefix of all requests, one of two groups, and what is each request's own."""
    size, dim, rows = 16, 64, (5, 1, 3, 2)
    lengths = [(40,), (17, 3), (9, 1, 30, 2)]  # of the groups of each level
    groups = [(11,), (6, 5), rows]  # their rows
    held = [[rng.standard_normal((2, n, heads[1], dim)).astype(np.float16) for n in level]
            for level in lengths]  # fmt: skip
    counts = [[-(-n // size) for n in level] for level in lengths]
    order = rng.permutation(sum(map(sum, counts))).astype(np.int32)
    pages = np.full((len(order), 2, heads[1], size, dim), np.nan, np.float16)
    levels, start = [], 0
    for level, (keys, count) in enumerate(zip(held, counts, strict=True)):
        first = start
        for kv, n in zip(keys, count, strict=True):
            for j in range(kv.shape[1]):
                pages[order[start + j // size], :, :, j % size] = kv[:, j]
            start += n
        last = [k.shape[1] - (n - 1) * size for k, n in zip(keys, count, strict=True)]
        index = (indptr_of(groups[level]), indptr_of(count), order[first:start], np.array(last))
        levels.append(
            typed.Level(*(to_device(np.asarray(x, np.int32), device).tensor for x in index))
        )
    q = normal(rng, (sum(rows), heads[0], dim), "float16")
    out, lse = typed.cascade_attention(
        to_device(q, device).tensor, to_device(pages, device).tensor, levels, causal=causal
    )
    synchronize(device)
    out, lse = out.numpy(), lse.numpy()
    at = 0
    for b, n in enumerate(rows):
        parts = [held[0][0], held[1][0 if b < 2 else 1], held[2][b]]
        k, v = np.concatenate(parts, axis=1)
        exact = oracle.attention(q[at : at + n], k, v, causal=causal, sm_scale=dim**-0.5)
        np.testing.assert_allclose(out[at : at + n], exact.o, atol=3e-3)
        np.testing.assert_allclose(lse[at : at + n], exact.lse, atol=2e-3)
        at += n


def test_a_cascade_needs_a_level():
    """None is refused by name."""
    with pytest.raises(ValueError, match="`levels` is empty"):
        typed.cascade_attention(np.zeros((1, 1, 64), np.float16), None, [])

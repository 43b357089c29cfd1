"""`merge_state` and `merge_state_in_place` against float64, and against attention over all keys."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, normal
from device_tensors import numpy_dtype, poisoned, to_device

SHAPES = [(1, 1, 64), (5, 3, 80), (33, 8, 128), (7, 71, 64), (300, 4, 256), (2, 1, 512)]


def _states(rng: np.random.Generator, shape: tuple[int, int, int], dtype: str) -> list[np.ndarray]:
    """Two states whose LSEs lie far apart, close together, and at -inf on either side."""
    v_a, v_b = normal(rng, shape, dtype), normal(rng, shape, dtype)
    s_a = (rng.standard_normal(shape[:2]) * 4).astype(np.float32)
    s_b = (s_a + rng.standard_normal(shape[:2]) * 3).astype(np.float32)
    kind = rng.integers(0, 6, shape[:2])
    s_a[kind == 0] = -np.inf
    s_b[kind <= 1] = -np.inf
    s_a[kind == 2] = -np.inf
    s_b[kind == 3] += 300
    return [v_a, s_a, v_b, s_b]


def _merge(ops: Any, device: Any, states: list[np.ndarray], in_place: bool) -> list[np.ndarray]:
    """Merged v and s; the inputs that are not outputs must not change."""
    v_a, s_a, v_b, s_b = (to_device(x, device) for x in states)
    if in_place:
        ops.merge_state_in_place(v_a.tensor, s_a.tensor, v_b.tensor, s_b.tensor)
        out, kept = (v_a, s_a), ((v_b, 2), (s_b, 3))
    else:
        out = (
            poisoned(states[0].shape, states[0].dtype.name, device),
            poisoned(states[1].shape, "float32", device),
        )
        ops.merge_state(*(x.tensor for x in (v_a, s_a, v_b, s_b, *out)))
        kept = ((v_a, 0), (s_a, 1), (v_b, 2), (s_b, 3))
    for holder, index in kept:
        got, given = holder.numpy(), states[index]
        np.testing.assert_array_equal(got.view(np.uint8), given.view(np.uint8))
    for holder in out:
        holder.assert_guards_intact("merged state")
    return [x.numpy() for x in out]


def _check(v: np.ndarray, s: np.ndarray, states: list[np.ndarray]) -> None:
    exact_v, exact_s = oracle.merge(*states)
    plain_v = exact_v.astype(states[0].dtype).astype(np.float64)
    empty = np.isneginf(exact_s)
    assert not v[empty].astype(np.float32).any(), "two empty states give 0"
    # Opposite values cancel: the error counts against the larger input, not against the sum.
    biggest = np.maximum(np.abs(states[0]), np.abs(states[2])).astype(np.float64)
    pad = np.broadcast_to(biggest.max(-1, keepdims=True), (*biggest.shape[:-1], 1))
    widen = [np.concatenate([x.astype(np.float64), pad], axis=-1) for x in (v, exact_v, plain_v)]
    oracle.assert_rows_close(*widen, oracle.FLOOR[states[0].dtype.name], "merged v")
    oracle.assert_lse_close(s, exact_s, exact_s.astype(np.float32).astype(np.float64), "merged s")


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(ops, device, rng, dtype, shape, in_place):
    """Random states, empty ones among them, any head dimension."""
    states = _states(rng, shape, dtype)
    _check(*_merge(ops, device, states, in_place), states)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_empty_states(ops, device, dtype, in_place):
    """(0, -inf) with (0, -inf) gives (0, -inf), never NaN."""
    zero = np.zeros((1, 1, 64), numpy_dtype(dtype))
    none = np.full((1, 1), -np.inf, np.float32)
    v, s = _merge(ops, device, [zero, none, zero, none], in_place)
    assert not v.astype(np.float32).any()
    assert np.isneginf(s).all()


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("first_empty", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_empty_state_is_neutral(ops, device, rng, dtype, first_empty, in_place):
    """Merging with an empty state gives the other one, to the bit, LSE included."""
    v = normal(rng, (9, 4, 128), dtype)
    s = normal(rng, (9, 4), "float32")
    empty = [np.zeros_like(v), np.full_like(s, -np.inf)]
    states = [*empty, v, s] if first_empty else [v, s, *empty]
    got_v, got_s = _merge(ops, device, states, in_place)
    np.testing.assert_array_equal(got_v, v)
    np.testing.assert_array_equal(got_s, s)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("base", [-5e5, -1e4, 1e4, 5e5])
def test_extreme_lse(ops, device, rng, base, in_place):
    """LSEs whose powers of two leave every float: only their difference matters."""
    states = _states(rng, (6, 2, 64), "float16")
    states[1], states[3] = states[1] + np.float32(base), states[3] + np.float32(base)
    _check(*_merge(ops, device, states, in_place), states)


def test_in_place_equals_out_of_place(ops, device, rng):
    """Both functions give the same bits."""
    states = _states(rng, (40, 5, 64), "bfloat16")
    for a, b in zip(
        _merge(ops, device, states, False), _merge(ops, device, states, True), strict=True
    ):
        np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


@pytest.mark.parametrize("in_place", [False, True])
def test_no_rows(ops, device, in_place):
    """A batch without rows writes nothing."""
    states = [np.zeros(x, d) for x, d in (((0, 4, 64), np.float16), ((0, 4), np.float32))] * 2
    v, s = _merge(ops, device, states, in_place)
    assert (v.shape, s.shape) == ((0, 4, 64), (0, 4))


def test_parts_merge_to_the_whole(ops, device, rng):
    """Attention over two halves of the keys, merged, is attention over all of them."""
    q = normal(rng, (12, 4, 64), "float32")
    k, v = normal(rng, (90, 2, 64), "float32"), normal(rng, (90, 2, 64), "float32")
    whole = oracle.attention(q, k, v, sm_scale=0.125)
    states = []
    for part in (slice(0, 37), slice(37, 90)):
        piece = oracle.attention(q, k[part], v[part], sm_scale=0.125)
        states += [np.ascontiguousarray(x, np.float32) for x in piece]
    got_v, got_s = _merge(ops, device, states, True)
    np.testing.assert_allclose(got_v, whole.o, atol=1e-6)
    np.testing.assert_allclose(got_s, whole.lse, rtol=1e-6)

"""The calls of compiled graphs: `attention_dense`, `_masked`, `_biased`, `_ragged` and `_paged`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import DTYPES, indptr_of, normal
from cache_calls import CacheSpec, make_cache_batch, needs_cache_kernel
from cache_oracle import Extras, assert_request, pack_bits
from device_tensors import poisoned, synchronize, to_device
from refusals import refused

HEADS = (4, 2)
SCALE = 0.15


def _inputs(rng: Any, shape: tuple[int, ...], dtype: str = "float16") -> list[np.ndarray]:
    """q, k and v of requests of equal length: (requests, rows, keys, head_dim)."""
    batch, n, m, d = shape
    return [
        normal(rng, (batch, n, HEADS[0], d), dtype),
        normal(rng, (batch, m, HEADS[1], d), dtype),
        normal(rng, (batch, m, HEADS[1], d), dtype),
    ]


def _check(device: Any, o: Any, arrays: list[Any], extras: list[Extras]) -> None:
    synchronize(device)
    o.assert_guards_intact("o")
    for b, (got, q, k, v) in enumerate(zip(o.numpy(), *arrays, strict=True)):
        assert_request(got, None, q, k, v, extras[b], SCALE, f"request {b}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "extras",
    [Extras(), Extras(causal=True), Extras(causal=True, window_left=6), Extras(soft_cap=3.0)],
    ids=["plain", "causal", "window", "cap"],
)
def test_dense(ops, device, rng, dtype, extras):
    """Every number is an argument."""
    needs_cache_kernel(device, dtype, 64)
    arrays = _inputs(rng, (3, 7, 21, 64), dtype)
    tensors = [to_device(x, device).tensor for x in arrays]
    o = poisoned(arrays[0].shape, dtype, device)
    numbers = int(extras.causal), extras.window_left, extras.soft_cap, SCALE
    ops.attention_dense(*tensors, *numbers, o.tensor)
    _check(device, o, arrays, [extras] * 3)


@pytest.mark.parametrize("shape", [(3, 7, 21, 64), (2, 1, 9, 64), (1, 40, 70, 128)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_masked(ops, device, rng, shape, causal):
    """A mask for each request; some rows see no key."""
    arrays = _inputs(rng, shape)
    batch, n, m, _ = shape
    masks = rng.random((batch, n, m)) < 0.5
    masks[:, -1] = False
    indptr, packed = pack_bits(masks)
    tensors = [to_device(x, device).tensor for x in (*arrays, indptr, packed)]
    o = poisoned(arrays[0].shape, "float16", device)
    ops.attention_dense_masked(*tensors, int(causal), -1, 0.0, SCALE, o.tensor)
    _check(device, o, arrays, [Extras(causal=causal, mask=mask) for mask in masks])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stored", ["same", "float32"])
@pytest.mark.parametrize(
    "whole", [(3, 4, 7, 21), (1, 4, 7, 21), (3, 1, 1, 21), (1, 1, 7, 21), (3, 4, 7, 1)], ids=str
)
def test_biased(ops, device, rng, dtype, stored, whole):
    """Sizes of 1 stand for all; some keys are hidden by minus infinity, and all of one row."""
    needs_cache_kernel(device, dtype, 64)
    arrays = _inputs(rng, (3, 7, 21, 64), dtype)
    bias = normal(rng, whole, dtype if stored == "same" else stored)
    bias[rng.random(whole) < 0.2] = -np.inf
    if whole[2] > 1:
        bias[:, :, 3] = -np.inf
    tensors = [to_device(x, device).tensor for x in (*arrays, bias)]
    o = poisoned(arrays[0].shape, dtype, device)
    ops.attention_dense_biased(*tensors, 1, 0, -1, 0.0, SCALE, o.tensor)
    _check(device, o, arrays, _biased(bias))


def _biased(bias: np.ndarray, **others: Any) -> list[Extras]:
    """Three requests of four heads, seven rows and 21 keys."""
    return [Extras(bias=x, **others) for x in np.broadcast_to(bias, (3, 4, 7, 21))]


@pytest.mark.parametrize("shape", [(3, 1, 9, 64), (1, 40, 700, 128), (2, 300, 130, 64)], ids=str)
def test_biased_beside_the_rest(ops, device, rng, shape):
    """Causal, a window, a cap before it, and a bias with gaps between its rows and heads."""
    arrays = _inputs(rng, shape)
    batch, n, m, _ = shape
    bias = normal(rng, (batch, HEADS[0], n, m), "float32")
    # Rows before heads, and keys at a distance of 2.
    step = 2 * m + 3
    strides = [n * HEADS[0] * step, step, HEADS[0] * step, 2]
    view = to_device(bias, device, strides=strides).tensor
    tensors = [to_device(x, device).tensor for x in arrays]
    o = poisoned(arrays[0].shape, "float16", device)
    ops.attention_dense_biased(*tensors, view, 1, 1, 60, 3.0, SCALE, o.tensor)
    extras = [Extras(causal=True, window_left=60, soft_cap=3.0, bias=x) for x in bias]
    _check(device, o, arrays, extras)


@pytest.mark.parametrize("whole", [(2, 4, 7, 21), (1, 4, 7, 21), (2, 1, 1, 21)], ids=str)
def test_biased_heads_as_requests(ops, device, rng, whole):
    """Every four requests are the heads of a sequence."""
    q, k, v = (normal(rng, (8, length, 1, 64), "float16") for length in (7, 21, 21))
    bias = normal(rng, whole, "float32")
    tensors = [to_device(x, device).tensor for x in (q, k, v, bias)]
    o = poisoned(q.shape, "float16", device)
    ops.attention_dense_biased(*tensors, 4, 0, -1, 0.0, SCALE, o.tensor)
    each = np.broadcast_to(bias, (2, 4, 7, 21)).reshape(8, 1, 7, 21)
    _check(device, o, [q, k, v], [Extras(bias=x) for x in each])


def test_biases_that_do_not_fit(ops, device, rng):
    """A size, a dtype, and heads that are no requests."""
    arrays = _inputs(rng, (3, 7, 21, 64))
    tensors = [to_device(x, device).tensor for x in arrays]
    o = poisoned(arrays[0].shape, "float16", device)
    numbers = (0, -1, 0.0, SCALE, o.tensor)
    for shape, dtype, heads, error, says in (
        ((3, 2, 7, 21), "float32", 1, ValueError, "here \\(3, 4, 7, 21\\)"),
        ((4, 7, 21), "float32", 1, ValueError, "4 dimensions"),
        ((3, 4, 7, 21), "bfloat16", 1, TypeError, "float16 as `q` is, or float32"),
        ((1, 1, 7, 21), "float32", 3, ValueError, "`heads_as_requests` is 3"),
        ((1, 1, 7, 21), "float32", 0, ValueError, "`heads_as_requests`"),
    ):
        bias = to_device(normal(rng, shape, dtype), device).tensor
        with refused(error, "attention_dense_biased", says):
            ops.attention_dense_biased(*tensors, bias, heads, *numbers)


@pytest.mark.parametrize("leading", [False, True])
def test_ragged(ops, device, rng, leading):
    """Rows of all requests, with or without a first dimension of 1."""
    rows, keys = [5, 0, 1, 30], [9, 4, 17, 30]
    q = normal(rng, (sum(rows), HEADS[0], 64), "float16")
    k, v = (normal(rng, (sum(keys), HEADS[1], 64), "float16") for _ in range(2))
    arrays = [x[None] if leading else x for x in (q, k, v)]
    indptrs = indptr_of(rows), indptr_of(keys)
    tensors = [to_device(x, device).tensor for x in (*arrays, *indptrs)]
    o = poisoned(arrays[0].shape, "float16", device)
    ops.attention_ragged(*tensors, 1, -1, 0.0, SCALE, o.tensor)
    synchronize(device)
    o.assert_guards_intact("o")
    got = o.numpy().reshape(q.shape)
    for b in range(4):
        at = slice(*indptrs[0][b : b + 2])
        over = slice(*indptrs[1][b : b + 2])
        extras = Extras(causal=True)
        assert_request(got[at], None, q[at], k[over], v[over], extras, SCALE, f"request {b}")


@pytest.mark.parametrize("options", [{}, {"window_left": 6}, {"logits_soft_cap": 3.0}], ids=str)
@pytest.mark.parametrize("slot", ["prefill_paged", "decode_paged"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged(ops, device, rng, slot, options, dtype):
    """Pages in any order, a request without keys among them; the numbers are arguments."""
    needs_cache_kernel(device, dtype, 64)
    rows = None if slot == "decode_paged" else [3, 1, 0, 33]
    causal = int(rows is not None)
    spec = CacheSpec(
        slot, [40, 0, 5, 700], rows, HEADS, dtype=dtype, causal=causal, options=options
    )
    batch = make_cache_batch(rng, device, spec)
    names = ["q", "pages", "qo_indptr", "page_indptr", "page_indices", "length_info"]
    tensors = [batch.args[name].tensor for name in names if name in batch.args]
    numbers = [options.get("window_left", -1), options.get("logits_soft_cap", 0.0), spec.scale]
    function = ops.attention_paged_decode if rows is None else ops.attention_paged
    function(*tensors, *([causal] if rows else []), *numbers, batch.args["o"].tensor)
    synchronize(device)
    batch.args["o"].assert_guards_intact("o")
    o, at = batch.args["o"].numpy(), indptr_of(spec.rows)
    for b, (k, v) in enumerate(zip(batch.keys, batch.values, strict=True)):
        part = slice(at[b], at[b + 1])
        extras = batch.extras(b)
        assert_request(o[part], None, batch.q[part], k, v, extras, spec.scale, f"request {b}")


def test_refusals(ops, device, rng):
    """Numbers and shapes that do not fit are refused by name."""
    arrays = _inputs(rng, (2, 4, 6, 64))
    tensors = [to_device(x, device).tensor for x in arrays]
    o = poisoned(arrays[0].shape, "float16", device)
    for numbers, says in (
        ((2, -1, 0.0, SCALE), "`causal`"),
        ((0, -2, 0.0, SCALE), "`window_left`"),
        ((0, -1, -1.0, SCALE), "`logits_soft_cap`"),
        ((0, -1, float("nan"), SCALE), "`logits_soft_cap`"),
        ((0, -1, 0.0, float("inf")), "`sm_scale`"),
    ):
        with refused(ValueError, "attention_dense", says):
            ops.attention_dense(*tensors, *numbers, o.tensor)
    with refused(ValueError, "attention_ragged", "first dimension of 1"):
        index = to_device(np.array([0, 4, 8], np.int32), device).tensor
        ops.attention_ragged(*tensors, index, index, 0, -1, 0.0, SCALE, o.tensor)


def test_mask_of_wrong_size(ops, device, rng, monkeypatch):
    """A request's bytes are counted where contents are checked."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    arrays = _inputs(rng, (2, 4, 6, 64))
    indptr, packed = np.array([0, 2, 6], np.int32), np.zeros(6, np.uint8)
    tensors = [to_device(x, device).tensor for x in (*arrays, indptr, packed)]
    o = poisoned(arrays[0].shape, "float16", device)
    with refused(ValueError, "attention_dense_masked", "2 bytes", "take 3"):
        ops.attention_dense_masked(*tensors, 0, -1, 0.0, SCALE, o.tensor)

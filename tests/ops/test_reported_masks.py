"""Masks, empty requests and extreme scores that broke other systems.

Each is given to every function that serves it, with and without a plan.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from batches import Spec, indptr_of, make_batch, normal
from device_tensors import numpy_dtype, to_device
from functions import DECODE, PREFILL, RAGGED, Attend, batch_for, each


@each(*PREFILL)
def test_two_rows_three_keys(attend, rng, function):
    """Causal: row 0 sees 2 keys and row 1 sees 3, as the LSE of equal scores shows."""
    spec = Spec((3,), (2,), (1, 1), causal=True)
    batch = batch_for(function, rng, spec, q=np.zeros((2, 1, 64), np.float16))
    _, lse = attend.call(function, batch).plan_run_check()
    assert lse is not None
    np.testing.assert_allclose(lse[:, 0], np.log2([2, 3]), rtol=1e-5)


@each()
@pytest.mark.parametrize("causal", [False, True])
def test_requests_without_keys(attend, rng, function, causal):
    """0, 17, 0 and 5 keys: 0 and -inf on the empty ones, neighbours right."""
    spec = Spec((0, 17, 0, 5), (3, 4, 1, 5), (8, 2), 128, causal=causal)
    attend.check(function, rng, spec)


@each()
def test_no_requests(attend, rng, function):
    """A batch of none launches nothing."""
    attend.check(function, rng, Spec((), ()))


@each(*PREFILL)
@pytest.mark.parametrize("causal", [False, True])
def test_request_without_rows_between_others(attend, rng, function, causal):
    """Its neighbours are right, whether it has keys or not."""
    spec = Spec((40, 30, 9, 0, 12), (5, 0, 9, 0, 1), (8, 2), 128, causal=causal)
    attend.check(function, rng, spec, views=True)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("at", [None, 0, 2, 4])
def test_merge_of_many_empty_states(ops, device, rng, at, in_place):
    """Five states one after the other, all (0, -inf) or all but one: that one, or (0, -inf)."""
    v = np.zeros((5, 1, 1, 64), np.float16)
    s = np.full((5, 1, 1), -np.inf, np.float32)
    if at is not None:
        v[at], s[at] = normal(rng, (1, 1, 64), "float16"), 3.5
    values, sums = [to_device(x, device) for x in v], [to_device(x, device) for x in s]
    merged = values[0], sums[0]
    for value, total in zip(values[1:], sums[1:], strict=True):
        inputs = [x.tensor for x in (*merged, value, total)]
        if in_place:
            ops.merge_state_in_place(*inputs)
            continue
        out = to_device(np.full_like(v[0], np.nan), device), to_device(np.zeros_like(s[0]), device)
        ops.merge_state(*inputs, *(x.tensor for x in out))
        merged = out
    expected = v[at or 0], s[at or 0]
    np.testing.assert_array_equal(merged[0].numpy(), expected[0])
    np.testing.assert_array_equal(merged[1].numpy(), expected[1])


@each()
@pytest.mark.parametrize("level", [0.0, -1e3, -1e4, -5e4, -1e5, -6e5])
def test_scores_far_below_zero(attend, rng, function, level):
    """Raw scores of about `level`, that of key 0 5000 above: the output is v[0], never zero."""
    bf16 = numpy_dtype("bfloat16")
    spec = Spec((64,), (1,), (16, 1), 128, dtype="bfloat16", sm_scale=1.0)
    keys = np.full((64, 1, 128), level / 128, np.float32)
    keys[0] = (level + 5000) / 128
    batch = batch_for(function, rng, spec, q=np.ones((1, 16, 128), bf16), keys=[keys.astype(bf16)])
    o, _ = attend.call(function, batch).plan_run_check()
    np.testing.assert_array_equal(o, np.broadcast_to(batch.values[0][0], o.shape))


@each()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_key_far_below_zero(attend, rng, function, dtype):
    """Exactly one key, and its score is below -5e4: the output is v."""
    spec = Spec((1, 1), (1, 4), (2, 1), dtype=dtype, sm_scale=1.0)
    rows = 2 if function in DECODE else 5
    q = np.full((rows, 2, 64), -100, numpy_dtype(dtype))
    keys = [np.full((1, 1, 64), 10 * (b + 1), numpy_dtype(dtype)) for b in range(2)]
    batch = batch_for(function, rng, spec, q=q, keys=keys)
    o, _ = attend.call(function, batch).plan_run_check()
    for request in batch.requests:
        got = o[request.rows]
        np.testing.assert_array_equal(got, np.broadcast_to(request.v, got.shape))


def dirty_the_device(attend: Attend, function: str, rng: Any, spec: Spec) -> None:
    """The same call over nothing but NaN: shared memory and scratch memory then hold NaN."""
    batch = batch_for(function, rng, spec)
    for array in (batch.q, *batch.keys, *batch.values, batch.pool):
        array[...] = np.nan
    call = attend.call(function, batch)
    call.plan()
    call.run()


@each(*PREFILL)
@pytest.mark.parametrize("causal", [False, True])
def test_dirty_memory(attend, rng, function, causal):
    """Seven requests of odd lengths, 64/16 heads, d 128; all memory in use held NaN before."""
    qo_lens = [int(n) for n in np.diff([0, 33, 44, 55, 66, 77, 88, 100])]
    kv_lens = [int(n) for n in np.diff([0, 17, 29, 44, 48, 66, 100, 128])]
    spec = Spec(kv_lens, qo_lens, (64, 16), 128, causal=causal)
    full = Spec([max(k, q) for k, q in zip(kv_lens, qo_lens, strict=True)], qo_lens, (64, 16), 128)
    dirty_the_device(attend, function, rng, full)
    attend.check(function, rng, spec)


@each(*DECODE)
def test_dirty_memory_in_decode(attend, rng, function):
    """The same in decode, and with keys that are split."""
    spec = Spec((3000, 17, 1, 129), heads=(16, 4), head_dim=128)
    dirty_the_device(attend, function, rng, spec)
    attend.check(function, rng, spec)


@each(*RAGGED)
@pytest.mark.parametrize("causal", [False, True])
def test_merge_of_parts_of_many_lengths(attend, ops, rng, function, causal):
    """Attention over each of three uneven parts, merged in float16, is attention over all keys.

    With a causal mask the last part is the diagonal one, as in a chunked prefill.
    """
    qo_lens = [1, 33, 7, 0, 16]
    lens = [[0, 20, 1, 1, 255], [39, 37, 0, 4, 29], [1, 33, 7, 0, 16]]
    base = Spec(np.sum(lens, 0).tolist(), qo_lens, (8, 2), 128, causal=causal, layout="NHD")
    q = normal(rng, (sum(qo_lens), 8, 128), "float16")
    parts = []
    for index, kv_lens in enumerate(lens):
        spec = replace(base, kv_lens=kv_lens, causal=causal and index == 2)
        call = attend.call(function, make_batch(rng, spec, q=q, paged=False))
        call.plan_run_check()
        parts.append(call)
    o, lse = (parts[0].run_args[name] for name in ("o", "lse"))
    for call in parts[1:]:
        other = [call.run_args[name].tensor for name in ("o", "lse")]
        ops.merge_state_in_place(o.tensor, lse.tensor, *other)
    got_o, got_lse = o.numpy(), lse.numpy()
    rows = indptr_of(qo_lens)
    for b in (0, 1, 2, 4):
        mine = slice(rows[b], rows[b + 1])
        keys, values = (
            np.concatenate([getattr(call.batch, name)[b] for call in parts])
            for name in ("keys", "values")
        )
        exact = oracle.attention(q[mine], keys, values, causal=causal, sm_scale=base.scale)
        plain = None
        for call in parts:
            part = call.batch
            mask = {"causal": part.spec.causal, "sm_scale": base.scale}
            state = oracle.attention_plain(q[mine], part.keys[b], part.values[b], **mask)
            merged = state if plain is None else oracle.Attention(*oracle.merge(*plain, *state))
            plain = oracle.Attention(merged.o.astype(np.float16).astype(float), merged.lse)
        assert plain is not None
        floor = oracle.FLOOR["float16"]
        oracle.assert_rows_close(got_o[mine], exact.o, plain.o, floor, f"request {b}")
        oracle.assert_lse_close(got_lse[mine], exact.lse, plain.lse, f"request {b}")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("function", ["planned-paged", "planned-ragged"])
def test_with_and_without_split(attend, rng, function, causal):
    """Requests of many lengths: keys split or not, the result is right, and nearly the same."""
    spec = Spec((3000, 40, 700, 0), (2, 40, 33, 3), (4, 1), 128, causal=causal)
    call = attend.call(function, batch_for(function, rng, spec))
    results = []
    for settings in ({}, {"disable_split_kv": True}, {"fixed_split_size": 256}):
        call.fresh_outputs()
        call.plan(**settings)
        call.run()
        results.append(call.check())
    for o, lse in results[1:]:
        first_o, first_lse = results[0]
        np.testing.assert_allclose(o.astype(np.float32), first_o.astype(np.float32), atol=2e-3)
        np.testing.assert_allclose(lse, first_lse, rtol=1e-4, atol=1e-4)

"""`apply_attention_sinks` against float64, and after attention (C28)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, Spec, indptr_of, is_cuda, normal
from cache_calls import CacheSpec, make_cache_batch
from cache_oracle import Extras, assert_request
from calls import Args, passed
from device_tensors import to_device
from functions import batch_for, each
from refusals import assert_refused, bad, cut, dtype, other_device, strided_copy, value

SHAPES = [(1, 1, 64), (5, 3, 80), (33, 8, 128), (7, 71, 72), (300, 4, 256), (2, 64, 100)]
SINKS = np.array([-80.0, 0.5, 3.0, 120.0], np.float32)


def _apply(ops: Any, device: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """O and lse after the call; the sinks stay."""
    o, lse, sinks = (to_device(x, device) for x in arrays)
    ops.apply_attention_sinks(o.tensor, lse.tensor, sinks.tensor)
    np.testing.assert_array_equal(sinks.numpy(), arrays[2])
    for holder in (o, lse):
        holder.assert_guards_intact("state")
    return [o.numpy(), lse.numpy()]


def _exact(
    o: np.ndarray, lse: np.ndarray, sinks: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    sink = sinks.astype(np.float64) * oracle.LOG2E
    total = np.logaddexp2(lse.astype(np.float64), sink)
    with np.errstate(invalid="ignore"):
        scale = np.where(np.isneginf(lse), 0, np.exp2(lse - total))
    return o.astype(np.float64) * scale[..., None], total, scale


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(ops, device, rng, dtype, shape):
    """Any head dimension; sinks below, at and above the LSE."""
    o = normal(rng, shape, dtype)
    lse = (rng.standard_normal(shape[:2]) * 8).astype(np.float32)
    sinks = (rng.standard_normal(shape[1]) * 5).astype(np.float32)
    got_o, got_lse = _apply(ops, device, o, lse, sinks)
    exact_o, exact_lse, _ = _exact(o, lse, sinks)
    oracle.assert_rows_close(
        got_o, exact_o, exact_o.astype(o.dtype).astype(np.float64), oracle.FLOOR[dtype], "o"
    )
    oracle.assert_lse_close(got_lse, exact_lse, exact_lse.astype(np.float32).astype(float), "lse")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_keys_and_heads_without_sinks(ops, device, rng, dtype):
    """(0, sink) for a row without keys, whatever its values; without a sink no bit changes."""
    o, lse = normal(rng, (6, 4, 64), dtype), normal(rng, (6, 4), "float32")
    o[2], lse[2] = np.nan, -np.inf
    sinks = np.array([-np.inf, 1.5, -np.inf, -40], np.float32)
    got_o, got_lse = _apply(ops, device, o, lse, sinks)
    for head in (0, 2):
        assert got_o[:, head].tobytes() == o[:, head].tobytes()  # NaN too
        np.testing.assert_array_equal(got_lse[:, head], lse[:, head])
    assert not got_o[2, 1::2].astype(np.float32).any()
    np.testing.assert_allclose(got_lse[2, 1::2], sinks[1::2] * oracle.LOG2E, rtol=1e-6)


@pytest.mark.parametrize("base", [-5e5, -1e4, 1e4, 5e5])
def test_extreme_sums(ops, device, rng, base):
    """LSEs whose powers of two leave every float: only their difference from the sink matters."""
    o = normal(rng, (9, 3, 64), "float32")
    sinks = np.full(3, base, np.float32)
    lse = (sinks * np.float32(oracle.LOG2E) + rng.integers(-3, 4, (9, 3))).astype(np.float32)
    got_o, got_lse = _apply(ops, device, o, lse, sinks)
    # The product with log2(e) is rounded too, by half a unit of its last place.
    spacing = float(np.spacing(np.float32(abs(base) * oracle.LOG2E)))
    exact_o, exact_lse, _ = _exact(o, lse, sinks)
    np.testing.assert_allclose(got_o, exact_o, rtol=2 * spacing + 1e-5)
    np.testing.assert_allclose(got_lse, exact_lse, atol=2 * spacing)


def test_overwhelming_sinks(ops, device, rng):
    """A sink far above all scores leaves nothing of the values, one far below all of them."""
    o, lse = normal(rng, (4, 2, 64), "float16"), np.zeros((4, 2), np.float32)
    got_o, got_lse = _apply(ops, device, o, lse, np.array([1e4, -1e4], np.float32))
    assert not got_o[:, 0].any()
    np.testing.assert_allclose(got_lse[:, 0], 1e4 * oracle.LOG2E, rtol=1e-6)
    np.testing.assert_array_equal(got_o[:, 1], o[:, 1])
    np.testing.assert_array_equal(got_lse[:, 1], lse[:, 1])


def test_no_rows(ops, device):
    """A batch without rows writes nothing."""
    shapes = ((0, 4, 64), np.float16), ((0, 4), np.float32), ((4,), np.float32)
    o, _ = _apply(ops, device, *(np.zeros(*x) for x in shapes))
    assert o.shape == (0, 4, 64)


@each()
def test_after_attention(attend, ops, rng, function):
    """Prefill and decode, with and without a plan, then the sinks: exp(sink) is in the sum."""
    spec = Spec((127, 0, 600, 1), (15, 2, 40, 1), (4, 2), 128)
    call = attend.call(function, batch_for(function, rng, spec))
    call.plan_run_check()
    o, lse = call.run_args["o"], call.run_args["lse"]
    ops.apply_attention_sinks(o.tensor, lse.tensor, to_device(SINKS, attend.device).tensor)
    got_o, got_lse = o.numpy(), lse.numpy()
    for b, request in enumerate(call.batch.requests):
        rows = request.rows
        assert_request(
            got_o[rows], got_lse[rows], call.batch.q[rows], request.k, request.v,
            Extras(sinks=SINKS), call.batch.spec.scale, f"request {b} of {function}",
        )  # fmt: skip


def test_once_after_the_last_merge(ops, device, rng):
    """Two parts of the keys merged, then the sinks: as one call that has them."""
    if is_cuda(device):
        pytest.skip("float32, which the merge does not round, is served on CPU alone")
    kv, qo = [[40, 7, 1], [60, 300, 3]], [5, 17, 1]
    parts = [
        make_cache_batch(rng, device, CacheSpec("prefill_ragged", lens, qo, dtype="float32"))
        for lens in kv
    ]
    for part in parts:
        part.args["q"] = to_device(parts[0].q, device)
        part.call(ops)
    states = [[part.args[name] for name in ("o", "lse")] for part in parts]
    ops.merge_state_in_place(*(x.tensor for x in (*states[0], *states[1])))
    ops.apply_attention_sinks(*(x.tensor for x in states[0]), to_device(SINKS, device).tensor)
    got_o, got_lse = (x.numpy() for x in states[0])
    rows = indptr_of(qo)
    for b in range(len(qo)):
        mine = slice(rows[b], rows[b + 1])
        k, v = (
            np.concatenate([getattr(part, name)[b] for part in parts])
            for name in ("keys", "values")
        )
        assert_request(
            got_o[mine], got_lse[mine], parts[0].q[mine], k, v, Extras(sinks=SINKS),
            1 / math.sqrt(64), f"request {b}",
        )  # fmt: skip


def _args(device: Any, rng: np.random.Generator) -> Args:
    return {
        "o": to_device(normal(rng, (9, 4, 64), "float16"), device),
        "lse": to_device(normal(rng, (9, 4), "float32"), device),
        "sinks": to_device(SINKS, device),
    }


@pytest.mark.parametrize(
    "case",
    [
        bad("int32", "o", dtype("int32"), TypeError),
        bad("rank 2", "o", cut(lambda a: a[:, 0])),
        bad("a row less", "o", cut(lambda a: a[:-1]), ValueError, "lse"),
        bad("strided", "o", strided_copy, ValueError, r"\bo\b", "contiguous|strid"),
        bad("other device", "o", other_device, ValueError, "lse"),
        bad("float16", "lse", dtype("float16"), TypeError),
        bad("none", "lse", value(None), TypeError, "rgument"),
        bad("a head less", "lse", cut(lambda a: a[:, :-1])),
        bad("strided", "lse", strided_copy, ValueError, r"\blse\b", "contiguous|strid"),
        bad("float16", "sinks", dtype("float16"), TypeError),
        bad("a head less", "sinks", cut(lambda a: a[:-1])),
        bad("for each row", "sinks", lambda old, dev: to_device(np.ones((9, 4), np.float32), dev)),
        bad("other device", "sinks", other_device),
    ],
)
def test_wrong_arguments(ops, device, rng, case):
    args = _args(device, rng)
    assert_refused(ops.apply_attention_sinks, args, case, device)
    expected, _, _ = _exact(*(x.numpy() for x in args.values()))
    ops.apply_attention_sinks(*passed(args, {}))
    np.testing.assert_allclose(args["o"].numpy().astype(np.float32), expected, atol=2e-3)


def test_overlaps(ops, device, rng):
    """Sinks that lie where the sums are written."""
    args = _args(device, rng)
    inside = args["lse"].view(lambda a: a[3])
    with pytest.raises(ValueError, match=r"lse.*overlap|overlap.*lse"):
        ops.apply_attention_sinks(args["o"].tensor, args["lse"].tensor, inside.tensor)

"""`batch_decode_plan` + `batch_decode_run`: one row per request, against float64 attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import DTYPES, Spec, make_batch, needs_kernel
from calls import decode, paged_prefill
from device_tensors import numpy_dtype

MIXED_KV = (1, 5, 16, 17, 100, 63)


def _check(ops: Any, device: Any, workspaces: Any, rng: Any, spec: Spec, **kwargs: Any) -> Any:
    needs_kernel(device, spec.dtype, spec.head_dim)
    call = decode(ops, device, workspaces, make_batch(rng, spec), **kwargs)
    call.plan_run_check()
    return call


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_head_dims(ops, device, workspaces, rng, dtype, head_dim):
    """Every dtype and head dimension over strided views of one pool."""
    spec = Spec(MIXED_KV, head_dim=head_dim, dtype=dtype)
    _check(ops, device, workspaces, rng, spec, views=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16, 32, 512])
def test_page_sizes(ops, device, workspaces, rng, page_size, layout):
    """Every page size in both layouts; the unused slots of last pages are NaN."""
    spec = Spec((*MIXED_KV, 700), page_size=page_size, layout=layout)
    _check(ops, device, workspaces, rng, spec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "heads",
    [(3, 3), (4, 2), (9, 3), (8, 2), (20, 4), (6, 1), (28, 4), (16, 2), (16, 1), (32, 1), (71, 1)],
    ids=str,
)
def test_head_groups(ops, device, workspaces, rng, heads, dtype):
    """Groups of 1 to 71 query heads per key head."""
    _check(ops, device, workspaces, rng, Spec((19, 256, 3), heads=heads, dtype=dtype))


@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 100, 5000])
def test_windows(ops, device, workspaces, rng, window_left):
    """The row sees the last window_left + 1 keys."""
    _check(ops, device, workspaces, rng, Spec((300, 17, 64, 2500), window_left=window_left))


def test_requests_without_keys(ops, device, workspaces, rng):
    """kv_len [0, 17, 0, 5]: 0 and -inf on the empty ones, neighbours right."""
    _check(ops, device, workspaces, rng, Spec((0, 17, 0, 5), heads=(8, 2), head_dim=128))


@pytest.mark.parametrize("kv_lens", [(), (0,), (0, 0, 0)], ids=["no requests", "one", "three"])
def test_empty_batches(ops, device, workspaces, rng, kv_lens):
    """No requests, or none with keys."""
    _check(ops, device, workspaces, rng, Spec(kv_lens))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [(2, 2), (4, 1), (7, 1)], ids=str)
def test_long_keys(ops, device, workspaces, rng, heads, dtype):
    """Thousands of keys, so that they are split and the parts merged; short ones beside them."""
    spec = Spec((9001, 1, 4096, 0), heads=heads, head_dim=128, dtype=dtype)
    _check(ops, device, workspaces, rng, spec, views=True)


def test_many_requests(ops, device, workspaces, rng):
    """Two hundred ragged requests."""
    _check(ops, device, workspaces, rng, Spec([int(x) for x in rng.integers(0, 90, 200)]))


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (8, 2), (14, 2)], ids=str)
def test_equals_prefill_of_one_row(ops, device, workspaces, rng, heads, views):
    """Decode and paged prefill of one row per request agree, and both are right."""
    batch = make_batch(rng, Spec((50, 0, 1200, 16), heads=heads, causal=True))
    o, lse = decode(ops, device, workspaces, batch, views=views).plan_run_check()
    other_o, other_lse = paged_prefill(ops, device, workspaces, batch, views=views).plan_run_check()
    np.testing.assert_allclose(o.astype(np.float32), other_o.astype(np.float32), atol=4e-3)
    # The tensor-core kernel sums weights that were rounded to float16, the CUDA-core one does not.
    tolerance = 2e-5 if device.dlpack_device_type() == 1 else 1e-3
    np.testing.assert_allclose(lse, other_lse, rtol=tolerance, atol=tolerance)


def test_batch_equals_single_requests(ops, device, workspaces, rng):
    """A batch of N gives what N batches of one over the same pool give."""
    batch = make_batch(rng, Spec((33, 0, 700, 16)))
    o, lse = decode(ops, device, workspaces, batch).plan_run_check()
    for b in range(4):
        part_o, part_lse = decode(ops, device, workspaces, batch.part(b)).plan_run_check()
        np.testing.assert_allclose(
            part_o.astype(np.float32), o[b : b + 1].astype(np.float32), atol=4e-3
        )
        np.testing.assert_allclose(part_lse, lse[b : b + 1], rtol=2e-5, atol=2e-5)


def test_without_lse(ops, device, workspaces, rng):
    """The output is the same, to the bit, when no LSE is asked for."""
    batch = make_batch(rng, Spec((3000, 0, 40)))
    expected, _ = decode(ops, device, workspaces, batch).plan_run_check()
    got, _ = decode(ops, device, workspaces, batch, with_lse=False).plan_run_check()
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


def test_plan_serves_layers_and_growth_within_a_page(ops, device, workspaces, rng):
    """One plan serves several layers of a step."""
    spec = Spec((40, 0, 1500))
    first = decode(ops, device, workspaces, make_batch(rng, spec))
    first.plan_run_check()
    for _ in range(3):
        layer = decode(ops, device, workspaces, make_batch(rng, spec))
        layer.plan_value = first.plan_value
        layer.run()
        layer.check()


def test_plans_outlive_later_plans(ops, device, workspaces, rng):
    """Plans of several steps, of decode and prefill, made before any of them is run."""
    calls = [
        decode(ops, device, workspaces, make_batch(rng, Spec((40, 0, 1500)))),
        paged_prefill(ops, device, workspaces, make_batch(rng, Spec((900, 7), (4, 7)))),
        decode(ops, device, workspaces, make_batch(rng, Spec((64,) * 40, heads=(7, 1)))),
        decode(ops, device, workspaces, make_batch(rng, Spec((6000,), page_size=5))),
    ]
    for call in calls:
        call.plan()
    for call in (*calls, *calls[::-1]):
        call.fresh_outputs()
        call.run()
        call.check()


def test_repeats_bit_for_bit(ops, device, workspaces, rng):
    """The same call gives the same bits, with the plan made again and with the plan kept."""
    call = decode(ops, device, workspaces, make_batch(rng, Spec((2500, 31), heads=(8, 2))))
    expected, expected_lse = call.plan_run_check()
    for again in (False, True, True):
        if again:
            call.plan()
        call.fresh_outputs()
        call.run()
        got, got_lse = call.outputs()
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))
        np.testing.assert_array_equal(got_lse, expected_lse)


@pytest.mark.parametrize("heads", [(1, 1), (16, 1)], ids=str)
@pytest.mark.parametrize("score", [0.0, -1e3, -1e4, -5e4, -1e5, -6e5])
def test_large_negative_scores(ops, device, workspaces, rng, score, heads):
    """Every raw score is L and that of key 0 is L + 5000: the output is v[0], never zero."""
    bf16 = numpy_dtype("bfloat16")
    spec = Spec((64,), heads=heads, head_dim=128, dtype="bfloat16")
    keys = np.full((64, 1, 128), score / 128, np.float32)
    keys[0] = (score + 5000) / 128
    q = np.ones((1, heads[0], 128), bf16)
    batch = make_batch(rng, spec, q=q, keys=[keys.astype(bf16)])
    o, _ = decode(ops, device, workspaces, batch).plan_run_check()
    np.testing.assert_array_equal(o, np.broadcast_to(batch.values[0][0], o.shape))


def test_one_key_far_below(ops, device, workspaces, rng):
    """Decode with exactly one key, its score below -5e4: the output is v."""
    spec = Spec((1, 1), heads=(2, 1), sm_scale=1.0)
    q = np.full((2, 2, 64), -100, np.float16)
    keys = [np.full((1, 1, 64), 10 * (b + 1), np.float16) for b in range(2)]
    batch = make_batch(rng, spec, q=q, keys=keys)
    o, _ = decode(ops, device, workspaces, batch).plan_run_check()
    for b in range(2):
        np.testing.assert_array_equal(o[b], np.broadcast_to(batch.values[b][0], o[b].shape))

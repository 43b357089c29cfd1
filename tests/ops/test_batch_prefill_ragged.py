"""`batch_prefill_plan` (page size 1) + `batch_prefill_ragged_run` against float64 attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import DTYPES, Spec, each_prefill_kernel, is_cuda, make_batch, needs_kernel
from calls import paged_prefill, ragged_prefill
from device_tensors import numpy_dtype
from refusals import assert_says

pytestmark = each_prefill_kernel


def _check(ops: Any, device: Any, workspaces: Any, rng: Any, spec: Spec, **kwargs: Any) -> Any:
    needs_kernel(device, spec.dtype, spec.head_dim)
    call = ragged_prefill(ops, device, workspaces, make_batch(rng, spec, paged=False), **kwargs)
    call.plan_run_check()
    return call


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_head_dims(ops, device, workspaces, rng, dtype, head_dim, causal):
    """Every dtype, head dimension and mask over slices of fused tensors."""
    spec = Spec(
        (5, 40, 33, 130), (1, 7, 33, 64), (4, 2), head_dim, dtype=dtype, causal=causal,
        layout="NHD",
    )  # fmt: skip
    _check(ops, device, workspaces, rng, spec, views=True)


@pytest.mark.parametrize("views", [False, True])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_layouts(ops, device, workspaces, rng, layout, views):
    """Tokens first or heads first, contiguous or with gaps; several rows each."""
    spec = Spec((31, 80, 1), (31, 20, 1), (6, 3), 128, layout=layout, causal=True)
    _check(ops, device, workspaces, rng, spec, views=views)


@pytest.mark.parametrize("heads", [(3, 3), (9, 3), (28, 4), (7, 1), (16, 2), (71, 1)], ids=str)
def test_head_groups(ops, device, workspaces, rng, heads):
    """Groups of 1, 3, 7, 8 and 71 query heads per key head."""
    _check(ops, device, workspaces, rng, Spec((19, 70), (3, 40), heads, causal=True, layout="NHD"))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [0, 15, 64, 1000])
def test_windows(ops, device, workspaces, rng, window_left, causal):
    """Windows with and without a causal mask; self attention and more keys than rows."""
    spec = Spec((150, 17, 300), (150, 17, 65), causal=causal, window_left=window_left, layout="NHD")
    _check(ops, device, workspaces, rng, spec)


def test_lengths_off_the_tile(ops, device, workspaces, rng):
    """Rows and keys just below, at and above multiples of every tile size in use."""
    lens = (15, 16, 17, 63, 64, 65, 127, 128, 129)
    _check(ops, device, workspaces, rng, Spec(lens, lens, (2, 1), causal=True, layout="NHD"))


@pytest.mark.parametrize("causal", [False, True])
def test_requests_without_keys_or_rows(ops, device, workspaces, rng, causal):
    """Requests without keys give 0 and -inf; those without rows leave others alone."""
    spec = Spec((0, 17, 0, 5, 9), (3, 4, 1, 0, 9), (8, 2), 128, causal=causal, layout="NHD")
    _check(ops, device, workspaces, rng, spec, views=True)


@pytest.mark.parametrize(
    ("kv_lens", "qo_lens"),
    [((), ()), ((0, 0), (0, 0)), ((0, 0, 0), (2, 1, 4)), ((8, 3), (0, 0))],
    ids=["no requests", "nothing", "no keys", "no rows"],
)
def test_empty_batches(ops, device, workspaces, rng, kv_lens, qo_lens):
    """A batch without requests, rows or keys."""
    _check(ops, device, workspaces, rng, Spec(kv_lens, qo_lens, layout="NHD"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_keys(ops, device, workspaces, rng, dtype):
    """With a causal mask rows above the first key see nothing: 0 and -inf."""
    spec = Spec((3, 1, 16), (70, 5, 17), dtype=dtype, causal=True, layout="NHD")
    _check(ops, device, workspaces, rng, spec)


def test_long_sequence(ops, device, workspaces, rng):
    """16384 keys in all, as one request of few rows and some of many."""
    spec = Spec((16000, 384), (40, 384), (4, 1), 128, causal=True, layout="NHD")
    _check(ops, device, workspaces, rng, spec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_one_key_far_below(ops, device, workspaces, rng, dtype):
    """Exactly one key, its score below -5e4: the output is v."""
    needs_kernel(device, dtype, 64)
    spec = Spec((1, 1), (1, 4), (2, 1), 64, dtype=dtype, sm_scale=1.0, layout="NHD")
    q = np.full((5, 2, 64), -100, numpy_dtype(dtype))
    keys = [np.full((1, 1, 64), 10 * (b + 1), numpy_dtype(dtype)) for b in range(2)]
    batch = make_batch(rng, spec, q=q, keys=keys, paged=False)
    o, _ = ragged_prefill(ops, device, workspaces, batch).plan_run_check()
    for request in batch.requests:
        got = o[request.rows]
        np.testing.assert_array_equal(got, np.broadcast_to(request.v, got.shape))


@pytest.mark.parametrize("score", [0.0, -1e4, -1e5, -6e5])
def test_large_negative_scores(ops, device, workspaces, rng, score):
    """Causal mask, ragged keys, one score 5000 above all others: the output is v[0], never zero."""
    spec = Spec((64,), (4,), (16, 1), 128, dtype="bfloat16", causal=True, layout="NHD")
    keys = np.full((64, 1, 128), score / 128, np.float32)
    keys[0] = (score + 5000) / 128
    bf16 = numpy_dtype("bfloat16")
    batch = make_batch(
        rng, spec, q=np.ones((4, 16, 128), bf16), keys=[keys.astype(bf16)], paged=False
    )
    o, _ = ragged_prefill(ops, device, workspaces, batch).plan_run_check()
    np.testing.assert_array_equal(o, np.broadcast_to(batch.values[0][0], o.shape))


@pytest.mark.parametrize(("dqk", "dvo"), [(192, 128), (64, 128), (128, 64), (48, 24)])
@pytest.mark.parametrize("causal", [False, True])
def test_two_head_dims(ops, device, workspaces, rng, dqk, dvo, causal):
    """Values of another head dimension than keys: right, or on CUDA refused with the two named."""
    spec = Spec((33, 90), (33, 5), (4, 2), dqk, dvo, dtype="bfloat16", causal=causal, layout="NHD")
    call = ragged_prefill(ops, device, workspaces, make_batch(rng, spec, paged=False))
    try:
        call.plan()
        call.run()
    except (ValueError, RuntimeError) as error:
        assert is_cuda(device), "CPU serves any head dimensions"
        assert (dqk, dvo) != (192, 128), "CUDA serves these: MLA's new tokens have them"
        assert_says(error, str(dqk), str(dvo))
        return
    call.check()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_new_tokens_of_mla(ops, device, workspaces, rng, dtype, causal):
    """192 for keys and 128 for values, a KV head for each query head; every size of tile."""
    spec = Spec((16, 0, 33, 130, 1, 700), (16, 2, 33, 130, 1, 3), (5, 5), 192, 128, dtype=dtype,
                causal=causal, layout="NHD")  # fmt: skip
    call = ragged_prefill(ops, device, workspaces, make_batch(rng, spec, paged=False))
    call.plan_run_check()


def test_many_requests(ops, device, workspaces, rng):
    """A hundred ragged requests, some without rows or keys."""
    spec = Spec(
        [int(x) for x in rng.integers(0, 60, 100)],
        [int(x) for x in rng.integers(0, 40, 100)],
        causal=True,
        layout="NHD",
    )
    _check(ops, device, workspaces, rng, spec)


def test_plan_reuse_and_repeats(ops, device, workspaces, rng):
    """One plan serves several layers, and the same call gives the same bits."""
    spec = Spec((40, 0, 700), (40, 2, 3), causal=True, layout="NHD")
    first = ragged_prefill(ops, device, workspaces, make_batch(rng, spec, paged=False))
    expected, expected_lse = first.plan_run_check()
    layer = ragged_prefill(ops, device, workspaces, make_batch(rng, spec, paged=False))
    layer.plan_value = first.plan_value
    layer.run()
    layer.check()
    first.fresh_outputs()
    first.run()
    got, got_lse = first.outputs()
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))
    np.testing.assert_array_equal(got_lse, expected_lse)


def test_ragged_and_paged_plans_interleaved(ops, device, workspaces, rng):
    """The ragged plan and the paged plan of a step share workspaces; both stay valid."""
    ragged = ragged_prefill(
        ops, device, workspaces,
        make_batch(rng, Spec((30, 5), (30, 5), causal=True, layout="NHD"), paged=False),
    )  # fmt: skip
    paged = paged_prefill(
        ops, device, workspaces, make_batch(rng, Spec((200, 0), (30, 5))), views=True
    )
    ragged.plan()
    paged.plan()
    for _ in range(2):
        ragged.fresh_outputs()
        paged.fresh_outputs()
        ragged.run()
        paged.run()
        ragged.check()
        paged.check()


def test_without_lse(ops, device, workspaces, rng):
    """No LSE asked for: the output is right all the same."""
    spec = Spec((2000, 40), (3, 40), causal=True, layout="NHD")
    _check(ops, device, workspaces, rng, spec, with_lse=False)

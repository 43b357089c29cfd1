"""`batch_prefill_plan` + `batch_prefill_paged_run` against float64 attention over the pages."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import DTYPES, Spec, each_paged_kernel, is_cuda, make_batch, needs_kernel, normal
from calls import paged_prefill
from device_tensors import numpy_dtype, to_device
from refusals import assert_says

pytestmark = each_paged_kernel

MIXED_Q = (1, 7, 33, 16, 2)
MIXED_KV = (5, 40, 33, 100, 64)


def _check(ops: Any, device: Any, workspaces: Any, rng: Any, spec: Spec, **kwargs: Any) -> Any:
    needs_kernel(device, spec.dtype, spec.head_dim)
    call = paged_prefill(ops, device, workspaces, make_batch(rng, spec), **kwargs)
    call.plan_run_check()
    return call


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_and_head_dims(ops, device, workspaces, rng, dtype, head_dim, causal):
    """Every dtype, head dimension and mask, over strided views in shuffled pages."""
    spec = Spec(MIXED_KV, MIXED_Q, (4, 2), head_dim, dtype=dtype, causal=causal)
    _check(ops, device, workspaces, rng, spec, views=True)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 5, 16, 32, 512])
def test_page_sizes(ops, device, workspaces, rng, page_size, layout):
    """Every page size in both layouts; the unused slots of last pages are NaN."""
    spec = Spec((1, 31, 600, 32), (1, 9, 20, 32), page_size=page_size, layout=layout, causal=True)
    _check(ops, device, workspaces, rng, spec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    "heads", [(3, 3), (9, 3), (28, 4), (7, 1), (16, 2), (16, 1), (71, 1)], ids=str
)
def test_head_groups(ops, device, workspaces, rng, heads, dtype):
    """Groups of 1, 3, 7, 8, 16 and 71 query heads per key head."""
    spec = Spec((19, 70), (3, 40), heads, 64, dtype=dtype, causal=True)
    _check(ops, device, workspaces, rng, spec)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window_left", [0, 1, 15, 16, 100, 5000])
def test_windows(ops, device, workspaces, rng, window_left, causal):
    """Windows shorter and longer than a page, a tile and the keys, with and without causal mask."""
    spec = Spec((300, 17, 64), (65, 17, 1), dtype="float16", causal=causal, window_left=window_left)
    _check(ops, device, workspaces, rng, spec)


def test_long_window_without_causal(ops, device, workspaces, rng):
    """300 rows, 4096 keys, window_left 333, not causal."""
    spec = Spec((4096,), (300,), (4, 1), 128, page_size=16, window_left=333)
    _check(ops, device, workspaces, rng, spec, views=True)


@pytest.mark.parametrize("window_left", [-1, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_more_rows_than_keys(ops, device, workspaces, rng, dtype, window_left):
    """With a causal mask the first qo_len - kv_len rows see no key: 0 and -inf."""
    spec = Spec((3, 1, 16, 33), (70, 5, 17, 40), dtype=dtype, causal=True, window_left=window_left)
    _check(ops, device, workspaces, rng, spec)


def test_diagonal_is_bottom_right(ops, device, workspaces, rng):
    """With 2 rows and 3 keys row 0 sees 2 keys and row 1 sees 3, seen in the LSE."""
    spec = Spec((3,), (2,), (1, 1), 64, causal=True)
    zeros = np.zeros((2, 1, 64), np.float16)
    call = paged_prefill(ops, device, workspaces, make_batch(rng, spec, q=zeros))
    _, lse = call.plan_run_check()
    np.testing.assert_allclose(lse[:, 0], np.log2([2, 3]), rtol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_requests_without_keys(ops, device, workspaces, rng, causal):
    """kv_len [0, 17, 0, 5]: 0 and -inf where nothing is seen, neighbours right."""
    spec = Spec((0, 17, 0, 5), (3, 4, 1, 5), (8, 2), 128, causal=causal)
    _check(ops, device, workspaces, rng, spec, views=True)


@pytest.mark.parametrize("causal", [False, True])
def test_requests_without_rows(ops, device, workspaces, rng, causal):
    """Requests of 0 rows first, last, between others, and with no keys either."""
    spec = Spec((9, 40, 12, 30, 0, 7), (0, 5, 0, 20, 0, 0), causal=causal)
    _check(ops, device, workspaces, rng, spec)


@pytest.mark.parametrize(
    ("kv_lens", "qo_lens"),
    [((), ()), ((0, 0), (0, 0)), ((0, 0, 0), (2, 1, 4)), ((8, 3), (0, 0))],
    ids=["no requests", "nothing", "no keys", "no rows"],
)
def test_empty_batches(ops, device, workspaces, rng, kv_lens, qo_lens):
    """A batch without requests, rows or keys launches nothing or writes 0 and -inf."""
    _check(ops, device, workspaces, rng, Spec(kv_lens, qo_lens))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [1, 5, 80])
def test_long_keys(ops, device, workspaces, rng, rows, causal):
    """Thousands of keys and few rows, so that the keys are split and the parts merged."""
    spec = Spec((5001, 3), (rows, 2), (4, 1), 128, dtype="bfloat16", causal=causal)
    _check(ops, device, workspaces, rng, spec, views=True)


def test_many_requests(ops, device, workspaces, rng):
    """A hundred ragged requests, some without rows or keys."""
    kv_lens = rng.integers(0, 60, 100)
    qo_lens = rng.integers(0, 6, 100)
    _check(ops, device, workspaces, rng, Spec(list(kv_lens), list(qo_lens), causal=True))


@pytest.mark.parametrize("seed", range(6))
def test_random_batches(ops, device, workspaces, rng, seed):
    """Random shapes, layouts, masks, groups and placements."""
    draw = np.random.default_rng(seed)
    size = int(draw.integers(1, 9))
    kv_heads, group = int(draw.integers(1, 4)), int(draw.integers(1, 9))
    spec = Spec(
        [int(x) for x in draw.integers(0, 300, size)],
        [int(x) for x in draw.integers(0, 90, size)],
        (kv_heads * group, kv_heads),
        int(draw.choice([64, 128])),
        page_size=int(draw.choice([1, 3, 16, 64])),
        dtype=str(draw.choice(["float16", "bfloat16"])),
        layout=str(draw.choice(["NHD", "HND"])),
        causal=bool(draw.integers(2)),
        window_left=int(draw.choice([-1, 20])),
    )
    _check(ops, device, workspaces, rng, spec, views=bool(draw.integers(2)))


def test_dirty_workspaces_many_heads(ops, device, workspaces, rng):
    """7 requests, 64/16 heads, d 128, workspaces full of NaN."""
    qo = tuple(np.diff([0, 33, 44, 55, 66, 77, 88, 100]))
    kv = tuple(np.diff([0, 17, 29, 44, 48, 66, 100, 128]))
    spec = Spec([int(x) for x in kv], [int(x) for x in qo], (64, 16), 128)
    _check(ops, device, workspaces, rng, spec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_unaligned_views(ops, device, workspaces, rng, dtype):
    """Queries that start at an odd element: right, or refused with the alignment in the text."""
    batch = make_batch(rng, Spec((20, 40), (3, 9), dtype=dtype, causal=True))
    call = paged_prefill(ops, device, workspaces, batch)
    wide = np.full((12, 4, 65), np.nan, numpy_dtype(dtype))
    wide[..., 1:] = batch.q
    call.run_args["q"] = to_device(wide, device).view(lambda a: a[..., 1:])
    call.plan()
    try:
        call.run()
    except ValueError as error:
        assert is_cuda(device), "CPU tensors may start at any element"
        assert_says(error, "align|strid")
        return
    call.check()


def test_without_lse(ops, device, workspaces, rng):
    """The output is the same, to the bit, when no LSE is asked for."""
    batch = make_batch(rng, Spec((2000, 0, 40), (3, 2, 9), causal=True))
    with_lse = paged_prefill(ops, device, workspaces, batch)
    without = paged_prefill(ops, device, workspaces, batch, with_lse=False)
    expected, _ = with_lse.plan_run_check()
    got, _ = without.plan_run_check()
    np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))


def test_plan_serves_several_runs(ops, device, workspaces, rng):
    """One plan, several layers: other queries, keys and values each time."""
    spec = Spec((40, 0, 1500), (5, 2, 3), causal=True)
    first = paged_prefill(ops, device, workspaces, make_batch(rng, spec))
    first.plan_run_check()
    for _ in range(3):
        layer = paged_prefill(ops, device, workspaces, make_batch(rng, spec))
        layer.plan_value = first.plan_value
        layer.run()
        layer.check()


def test_plans_outlive_later_plans(ops, device, workspaces, rng):
    """Plans of several steps made into the same workspaces before any of them is run."""
    specs = [
        Spec((40, 0, 1500), (5, 2, 3), causal=True),
        Spec((7,), (7,), (8, 1), 128),
        Spec((3000, 9, 12, 4), (1, 1, 1, 1), page_size=5, dtype="bfloat16"),
        Spec((64,) * 30, (16,) * 30, causal=True, window_left=9),
    ]
    calls = [paged_prefill(ops, device, workspaces, make_batch(rng, spec)) for spec in specs]
    for call in calls:
        call.plan()
    for call in (*calls, *calls[::-1]):
        call.fresh_outputs()
        call.run()
        call.check()


def test_repeats_bit_for_bit(ops, device, workspaces, rng):
    """The same call gives the same bits, with the plan made again and with the plan kept."""
    batch = make_batch(rng, Spec((2500, 31), (4, 31), (8, 2), 128, causal=True))
    call = paged_prefill(ops, device, workspaces, batch)
    expected, expected_lse = call.plan_run_check()
    for again in (False, True, True):
        if again:
            call.plan()
        call.fresh_outputs()
        call.run()
        got, got_lse = call.outputs()
        np.testing.assert_array_equal(got.view(np.uint16), expected.view(np.uint16))
        np.testing.assert_array_equal(got_lse, expected_lse)


def test_batch_equals_single_requests(ops, device, workspaces, rng):
    """A batch of N gives what N batches of one over the same pool give."""
    batch = make_batch(rng, Spec((33, 0, 700, 16), (5, 2, 20, 16), causal=True))
    whole = paged_prefill(ops, device, workspaces, batch)
    o, lse = whole.plan_run_check()
    for b, request in enumerate(batch.requests):
        one = paged_prefill(ops, device, workspaces, batch.part(b))
        part_o, part_lse = one.plan_run_check()
        np.testing.assert_allclose(
            part_o.astype(np.float32), o[request.rows].astype(np.float32), atol=4e-3
        )
        np.testing.assert_allclose(part_lse, lse[request.rows], rtol=2e-5, atol=2e-5)


def test_shared_pages(ops, device, workspaces, rng):
    """Two requests that hold the same pages, as after a fork, both read them."""
    batch = make_batch(rng, Spec((48, 32), (4, 4), causal=True))
    batch.page_indices[3:5] = batch.page_indices[:2]
    batch.keys[1], batch.values[1] = batch.keys[0][:32], batch.values[0][:32]
    paged_prefill(ops, device, workspaces, batch).plan_run_check()


@pytest.mark.parametrize("sm_scale", [0.0, -0.1, 0.02, 1.0])
def test_scales(ops, device, workspaces, rng, sm_scale):
    """Any finite scale: 0 (a plain mean), negative, small and large; CUDA needs a positive one."""
    spec = Spec((90, 33), (4, 33), causal=True, sm_scale=sm_scale)
    if sm_scale <= 0 and device.dlpack_device_type() != 1:
        with pytest.raises(ValueError, match="sm_scale"):
            _check(ops, device, workspaces, rng, spec)
        return
    _check(ops, device, workspaces, rng, spec)


@pytest.mark.parametrize("split", [{"disable_split_kv": True}, {"fixed_split_size": 512}], ids=str)
def test_split_settings(ops, device, workspaces, rng, split):
    """Whatever the split settings of the plan, the result is right."""
    batch = make_batch(rng, Spec((3000, 40), (2, 40), (4, 1), 128, causal=True))
    call = paged_prefill(ops, device, workspaces, batch)
    call.plan(**split)
    call.run()
    call.check()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("score", [0.0, -1e3, -1e4, -5e4, -1e5, -6e5])
def test_large_negative_scores(ops, device, workspaces, rng, score, dtype):
    """Every raw score is L and that of key 0 is L + 5000: the output is v[0], never zero."""
    spec = Spec((64,), (3,), (16, 1), 128, dtype=dtype)
    keys = np.full((64, 1, 128), score / 128, np.float32)
    keys[0] = (score + 5000) / 128
    q = np.ones((3, 16, 128), numpy_dtype(dtype))
    batch = make_batch(rng, spec, q=q, keys=[keys.astype(numpy_dtype(dtype))])
    needs_kernel(device, dtype, 128)
    o, _ = paged_prefill(ops, device, workspaces, batch).plan_run_check()
    np.testing.assert_array_equal(o, np.broadcast_to(batch.values[0][0], o.shape))


@pytest.mark.parametrize("magnitude", [6.0, 30.0])
def test_peaked_scores(ops, device, workspaces, rng, magnitude):
    """Queries large enough that one key takes nearly all weight."""
    spec = Spec((500, 40), (20, 40), causal=True)
    q = (normal(rng, (60, 4, 64), "float32") * magnitude).astype(np.float16)
    paged_prefill(ops, device, workspaces, make_batch(rng, spec, q=q)).plan_run_check()

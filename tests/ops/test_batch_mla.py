"""Latent attention (MLA) with a plan: a slot of the pages is a key, its first part the value."""

from __future__ import annotations

import numpy as np
import pytest
from batches import DTYPES
from mla_calls import MLASpec, mla_call, needs_mla_kernel

SMALL = (24, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_step_of_a_request_with_13_tokens(ops, device, workspaces, rng, dtype):
    """16 heads, 512+64, pages of 16."""
    spec = MLASpec((13,), dtype=dtype)
    needs_mla_kernel(device, dtype, spec.dims)
    mla_call(ops, device, workspaces, rng, spec).plan_run_check()


@pytest.mark.parametrize("page_size", [1, 16, 33])
@pytest.mark.parametrize("heads", [1, 16, 20, 64, 71, 128, 130])
def test_decode(ops, device, workspaces, rng, heads, page_size):
    """Heads that fill tiles of rows and that do not, keys that are split and that are not."""
    spec = MLASpec((13, 1, 700, 64, 65, 129, 33), heads=heads, page_size=page_size)
    needs_mla_kernel(device, spec.dtype, spec.dims)
    mla_call(ops, device, workspaces, rng, spec).plan_run_check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [(512, 64), SMALL], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_several_rows(ops, device, workspaces, rng, causal, dims, dtype):
    """Requests with more rows than keys, as many, fewer, none."""
    needs_mla_kernel(device, dtype, dims)
    for heads in (3, 16):
        spec = MLASpec(
            (5, 0, 40, 17, 200, 64), (9, 2, 40, 0, 70, 3), heads, dims, 16, dtype, causal
        )
        mla_call(ops, device, workspaces, rng, spec).plan_run_check()


@pytest.mark.parametrize("heads", [1, 5, 20, 64, 71, 128])
def test_causal_rows_at_the_edges_of_tiles(ops, device, workspaces, rng, heads):
    """The last key of each row counts, whatever part of a tile its heads fill."""
    spec = MLASpec((64, 65, 128, 300), (64, 3, 33, 300), heads, causal=True)
    if heads > 20:
        spec = MLASpec((64, 65, 128, 68), (2, 1, 5, 70), heads, causal=True)
    needs_mla_kernel(device, spec.dtype, spec.dims)
    mla_call(ops, device, workspaces, rng, spec).plan_run_check()


@pytest.mark.parametrize("heads", [16, 128])
def test_requests_without_keys(ops, device, workspaces, rng, heads):
    """Lengths 0, 17, 0, 5: 0 and -inf where there are none, the neighbours right."""
    spec = MLASpec((0, 17, 0, 5), heads=heads)
    call = mla_call(ops, device, workspaces, rng, spec)
    o, lse = call.plan_run_check()
    assert (o[[0, 2]].astype(np.float32) == 0).all()
    assert np.isneginf(lse[[0, 2]]).all()
    empty = mla_call(ops, device, workspaces, rng, MLASpec((0, 0), (2, 1), heads))
    o, lse = empty.plan_run_check()
    assert (o.astype(np.float32) == 0).all()
    assert np.isneginf(lse).all()


def test_no_rows_at_all(ops, device, workspaces, rng):
    """A batch of nothing, and requests that only hold keys."""
    for lens, rows in (((), ()), ((5, 20), (0, 0))):
        spec = MLASpec((*lens, 3), (*rows, 0), dtype="bfloat16")
        mla_call(ops, device, workspaces, rng, spec).plan_run_check()


def test_slices_give_what_contiguous_tensors_give(ops, device, workspaces, rng):
    """Queries as slices of [n, H, 576], pages as slices of [pages, ps, 576]."""
    spec = MLASpec((40, 3, 129), (2, 1, 5))
    state = rng.bit_generator.state
    whole = mla_call(ops, device, workspaces, rng, spec, views=True).plan_run_check()
    rng.bit_generator.state = state
    parts = mla_call(ops, device, workspaces, rng, spec, views=False).plan_run_check()
    for a, b in zip(whole, parts, strict=True):
        np.testing.assert_array_equal(a, b)


def test_unused_slots_are_never_read(ops, device, workspaces, rng):
    """Pages of 4, 13 tokens: NaN in the other slots changes nothing."""
    spec = MLASpec((13, 6), (1, 3), page_size=4)
    state = rng.bit_generator.state
    dirty = mla_call(ops, device, workspaces, rng, spec, fill=np.nan).plan_run_check()
    rng.bit_generator.state = state
    clean = mla_call(ops, device, workspaces, rng, spec, fill=0).plan_run_check()
    for a, b in zip(dirty, clean, strict=True):
        assert np.isfinite(a.astype(np.float32)).all()
        np.testing.assert_array_equal(a, b)


def test_plans_of_several_batches_live_side_by_side(ops, device, workspaces, rng):
    """A later plan in the same workspaces does not disturb the run of an earlier one."""
    specs = [MLASpec((40, 3)), MLASpec((7, 90, 12), (3, 1, 2)), MLASpec((300,), heads=128)]
    calls = [mla_call(ops, device, workspaces, rng, spec) for spec in specs]
    for call in calls:
        call.plan()
    for call in calls:
        call.run()
        call.check()


def test_without_lse(ops, device, workspaces, rng):
    """LSE may be left out; the output is the same."""
    call = mla_call(ops, device, workspaces, rng, MLASpec((40, 300), (2, 1)))
    expected, _ = call.plan_run_check()
    call.run_args["o"].tensor.copyfrom(np.zeros_like(expected))
    call.run(lse=None)
    np.testing.assert_array_equal(call.run_args["o"].numpy(), expected)


@pytest.mark.cuda
@pytest.mark.parametrize("kernel", ["fa2", "sm90"])
def test_both_cuda_kernels(ops, cuda, cuda_workspaces, rng, monkeypatch, kernel):
    """The one that is not the default of this GPU computes the same."""
    monkeypatch.setenv("TVM_FLASHINFER_MLA_KERNEL", kernel)
    for dtype in ("float16", "bfloat16"):
        for heads, causal in ((16, True), (128, False), (20, True)):
            spec = MLASpec((5, 0, 700, 129), (9, 2, 3, 1), heads=heads, dtype=dtype, causal=causal)
            mla_call(ops, cuda, cuda_workspaces, rng, spec).plan_run_check()

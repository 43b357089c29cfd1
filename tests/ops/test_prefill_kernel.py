"""Which kernel a prefill plan is for, and what must not depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tvm
from batches import Spec, each_paged_kernel, each_prefill_kernel, is_cuda, make_batch
from calls import Call, paged_prefill, ragged_prefill
from device_tensors import to_device

VARIABLE = "TVM_FLASHINFER_PREFILL_KERNEL"
PROMPTS = Spec((700, 300), (700, 300), (32, 8), 128, causal=True)
STEP = Spec((700, 300), (1, 1), (8, 2), 128, causal=True)


def _call(ops: Any, device: Any, workspaces: Any, rng: Any, spec: Spec, ragged: bool) -> Call:
    spec = replace(spec, layout="NHD" if ragged else "HND")
    make = ragged_prefill if ragged else paged_prefill
    return make(ops, device, workspaces, make_batch(rng, spec, paged=not ragged))


def kernel_of(plan: Any) -> str:
    """The kernel of a plan, by the first value of its part."""
    return {1: "fa2", 2: "cuda_core", 4: "fa3", 5: "batch_attention", 6: "fa3_copy"}[plan[17]]


def is_hopper() -> bool:
    """Whether the GPU has FA3."""
    return tvm.cuda(0).compute_version == "9.0"


@pytest.mark.cuda
@pytest.mark.parametrize("ragged", [False, True])
def test_choice(ops, cuda, cuda_workspaces, rng, monkeypatch, ragged):
    """Prompts run on FA3 where there is one, steps of one token on FA2; both are right."""
    monkeypatch.delenv(VARIABLE, raising=False)
    for spec, kernel in ((PROMPTS, "fa3" if is_hopper() else "fa2"), (STEP, "fa2")):
        call = _call(ops, cuda, cuda_workspaces, rng, spec, ragged)
        call.plan_run_check()
        assert kernel_of(call.plan_value) == kernel


@pytest.mark.cuda
def test_variable_overrides_the_choice(ops, cuda, cuda_workspaces, rng, monkeypatch):
    call = _call(ops, cuda, cuda_workspaces, rng, PROMPTS, ragged=True)
    monkeypatch.setenv(VARIABLE, "fa2")
    assert kernel_of(call.plan()) == "fa2"
    monkeypatch.setenv(VARIABLE, "fa3")
    if is_hopper():
        assert kernel_of(call.plan()) == "fa3"
    else:
        with pytest.raises(ValueError, match="no Hopper GPU"):
            call.plan()
    monkeypatch.setenv(VARIABLE, "cutlass")
    with pytest.raises(ValueError, match='is "cutlass", expected fa2, fa3 or fa3_copy'):
        call.plan()


@pytest.mark.cuda
def test_plans_of_both_kernels_outlive_each_other(ops, cuda, cuda_workspaces, rng, monkeypatch):
    """The run follows the plan, whatever the variable says by then."""
    if not is_hopper():
        pytest.skip("FA3 needs a Hopper GPU")
    calls = []
    for spec in (PROMPTS, STEP, replace(PROMPTS, heads=(6, 2))):
        for kernel in ("fa2", "fa3", "fa3_copy"):
            monkeypatch.setenv(VARIABLE, kernel)
            calls.append(_call(ops, cuda, cuda_workspaces, rng, spec, ragged=False))
            assert kernel_of(calls[-1].plan()) == kernel
    for call in (*calls, *calls[::-1]):
        call.fresh_outputs()
        call.run()
        call.check()


@each_prefill_kernel
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_values_of_other_requests_do_not_matter(ops, device, workspaces, rng, head_dim, causal):
    """The keys and values of one ragged request are NaN: its neighbours are right all the same."""
    lens = (150, 40, 200, 7, 129)
    spec = Spec(lens, lens, (4, 2), head_dim, causal=causal, layout="NHD")
    batch = make_batch(rng, spec, paged=False)
    for b in (1, 3):
        batch.keys[b][:] = batch.values[b][:] = np.nan
    call = ragged_prefill(ops, device, workspaces, batch)
    call.plan()
    call.run()
    o, lse = call.outputs()
    for b, request in enumerate(batch.requests):
        if b in (1, 3):
            continue
        one = Spec((lens[b],), (lens[b],), (4, 2), head_dim, causal=causal, layout="NHD")
        alone = make_batch(rng, one, q=batch.q[request.rows], keys=[batch.keys[b]], paged=False)
        alone.values[0][:] = batch.values[b]
        expected = ragged_prefill(ops, device, workspaces, alone)
        expected.plan_run_check()
        expected_o, expected_lse = expected.outputs()
        np.testing.assert_allclose(
            o[request.rows].astype(np.float32), expected_o.astype(np.float32), atol=2e-3
        )
        np.testing.assert_allclose(lse[request.rows], expected_lse, rtol=2e-5, atol=2e-5)


@each_prefill_kernel
def test_tokens_after_the_last_request_do_not_matter(ops, device, workspaces, rng):
    """Keys and values have more tokens than the requests hold, and those are NaN."""
    spec = Spec((100, 30), (100, 30), (4, 2), 128, causal=True, layout="NHD")
    batch = make_batch(rng, spec, paged=False)
    call = ragged_prefill(ops, device, workspaces, batch)
    for name, parts in (("k", batch.keys), ("v", batch.values)):
        longer = np.concatenate([*parts, np.full((50, 2, 128), np.nan, parts[0].dtype)])
        call.run_args[name] = to_device(longer, device)
    call.plan_run_check()


@each_paged_kernel
@pytest.mark.parametrize("page_size", [16, 48, 8])
@pytest.mark.parametrize("window_left", [-1, 70])
def test_long_pages_off_the_tile(ops, device, workspaces, rng, page_size, window_left):
    """Page sizes that do and do not divide a tile of keys, over several tiles."""
    spec = Spec(
        (1000, 257, 96, 1), (300, 257, 130, 1), (6, 2), 128, page_size=page_size, causal=True,
        window_left=window_left,
    )  # fmt: skip
    paged_prefill(ops, device, workspaces, make_batch(rng, spec), views=True).plan_run_check()


@each_prefill_kernel
@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("lens", [((96,), (130,)), ((300, 70, 0), (300, 400, 3)), ((64,), (65,))])
def test_more_rows_than_keys(ops, device, workspaces, rng, lens, ragged):
    """The first rows of a causal request see no key. FA2 has none of it, so another kernel does."""
    spec = Spec(*lens, (6, 2), 128, causal=True)
    call = _call(ops, device, workspaces, rng, spec, ragged)
    call.plan_run_check()
    if is_cuda(device):
        assert kernel_of(call.plan_value) in ("batch_attention", "fa3")


@pytest.mark.cuda
def test_pages_are_copied_where_that_pays(ops, cuda, cuda_workspaces, rng, monkeypatch):
    """Long prompts run over a copy of their pages, where the float workspace has room for it."""
    if not is_hopper():
        pytest.skip("FA3 needs a Hopper GPU")
    monkeypatch.delenv(VARIABLE, raising=False)
    spec = Spec((3000,), (3000,), (32, 8), 128, causal=True)
    call = _call(ops, cuda, cuda_workspaces, rng, spec, ragged=False)
    call.plan_run_check()
    assert kernel_of(call.plan_value) == "fa3_copy"
    need = 3000 * 8 * 128 * 2 * 2
    for size, kernel in ((need, "fa3_copy"), (need - 16, "fa3")):
        call.plan_args["float_workspace"] = tvm.runtime.empty((size,), "uint8", cuda)
        assert kernel_of(call.plan()) == kernel
    monkeypatch.setenv(VARIABLE, "fa3_copy")
    with pytest.raises(ValueError, match=rf"float_workspace is too small: .* needs {need} bytes"):
        call.plan()


@each_paged_kernel
def test_page_table_is_that_of_the_run(ops, device, workspaces, rng):
    """One plan, and pages that moved since: a run reads page_indices anew."""
    spec = Spec((500, 90), (200, 90), (4, 2), 128, causal=True)
    call = paged_prefill(ops, device, workspaces, make_batch(rng, spec))
    call.plan()
    for _ in range(2):
        moved = paged_prefill(ops, device, workspaces, make_batch(rng, spec))
        moved.plan_value = call.plan_value
        moved.run()
        moved.check()

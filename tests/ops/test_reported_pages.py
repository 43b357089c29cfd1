"""Windows, page tables, views and workspaces that broke other systems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import Spec, is_cuda
from cache_calls import CacheSpec, make_cache_batch
from calls import Call
from device_tensors import to_device
from functions import PAGED, PLANNED, PREFILL, batch_for, each
from refusals import assert_says, refused, unchanged


@each("planned-paged", "planned-ragged")
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_window_without_causal(attend, rng, function, dtype):
    """300 rows over 4096 keys, window_left 333, no causal mask, 8/2 heads: every row right."""
    spec = Spec((4096,), (300,), (8, 2), 128, window_left=333, dtype=dtype)
    attend.check(function, rng, spec)


@each(*PLANNED)
@pytest.mark.parametrize(("planned", "run"), [(-1, 20), (20, -1), (20, 19)])
def test_window_of_the_run_is_that_of_the_plan(attend, rng, function, planned, run):
    """A plan without a window and a run with one, and the other way round, are refused."""
    spec = Spec((300,), (40,), (4, 2), causal=True, window_left=planned)
    call = attend.call(function, batch_for(function, rng, spec))
    call.plan()
    with unchanged(call.run_args), refused(ValueError, "window_left", "plan", rf" {run}\b"):
        call.run(window_left=run)
    call.run()
    call.check()


@pytest.mark.parametrize("window", [512, 1024])
def test_chunks_over_a_window_then_decode(ops, device, rng, window):
    """Chunks below, across and longer than the window of a layer, then decode.

    Layers that slide have pages that hold the window alone, the others all pages. The paged
    function gets the keys before the chunk; the ragged one attends to the chunk itself.
    """
    past = 0
    for chunk in (window - 100, 300, window + 77, 5):
        held = min(past, window)
        for options in ({"layer_window": window}, {}):
            keys = held if options else past
            spec = CacheSpec(
                "prefill_paged", [keys, 3], [chunk, 2], (8, 2), options=options,
                sliding=[(past % 16 if options else 0, 0), (0, 0)], causal=int(bool(options)),
            )  # fmt: skip
            make_cache_batch(rng, device, spec).run_check(ops)
        past += chunk
    for step in range(2):
        options = {"layer_window": window}
        sliding = [((past + step) % 16, 0), (0, 0)]
        sizes = [(window, sliding, options), (past + step, None, {})]
        for keys, offsets, settings in sizes:
            spec = CacheSpec(
                "decode_paged", [keys, 3], None, (8, 2), options=settings, sliding=offsets
            )
            make_cache_batch(rng, device, spec).run_check(ops)


def _contents_are_checked(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA contents are only looked at when the user asks for it."""
    if is_cuda(device):
        monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")


def _replaced(call: Call, name: str, at: int, value: int) -> dict[str, Any]:
    """One element of an index tensor changed."""
    array = call.run_args[name].numpy()
    array[at] = value
    return {name: to_device(array, call.device)}


def _last_page_len(function: str) -> str:
    return "length_info" if function.startswith("bound") else "last_page_len"


@each(*PAGED)
@pytest.mark.parametrize("length", [0, 17, -1])
def test_length_of_the_last_page(attend, rng, function, length, monkeypatch):
    """0 for a request that has pages, or more than a page holds: refused with the request."""
    _contents_are_checked(attend.device, monkeypatch)
    spec = Spec((256, 20), (1, 4), (28, 4), 128, dtype="bfloat16")
    call = attend.call(function, batch_for(function, rng, spec))
    call.plan()
    bad = _replaced(call, _last_page_len(function), 0, length)
    with (
        unchanged(call.run_args),
        refused(ValueError, "last_page_len", rf" {length}\b", "1 to 16", "request 0"),
    ):
        call.run(**bad)
    call.run()
    call.check()


@each(*PAGED)
def test_empty_last_page_is_in_bounds_unchecked(attend, rng, function):
    """28/4 heads in bfloat16: last_page_len 0 beside 16 pages of 16 reads the 15 before."""
    if not is_cuda(attend.device):
        pytest.skip("contents are always checked on CPU")
    spec = Spec((256, 20), (1, 4), (28, 4), 128, dtype="bfloat16")
    batch = batch_for(function, rng, spec)
    call = attend.call(function, batch)
    call.plan()
    call.run(**_replaced(call, _last_page_len(function), 0, 0))
    batch.keys[0], batch.values[0] = batch.keys[0][:240], batch.values[0][:240]
    call.check()


@each(*PAGED)
@pytest.mark.parametrize("kv_lens", [(512, 1, 513, 1100), (511, 0, 1024)], ids=str)
def test_pages_of_512(attend, rng, function, kv_lens):
    """Large pages: one that is just full, one slot used, none."""
    spec = Spec(kv_lens, [min(n, 9) for n in kv_lens], (8, 2), 128, page_size=512, causal=True)
    attend.check(function, rng, spec)


@each()
@pytest.mark.parametrize("causal", [False, True])
def test_views(attend, rng, function, causal):
    """Byte offsets in index tensors, slices of fused tensors, strided pages: all rows are right."""
    spec = Spec((31, 80, 1, 17), (31, 20, 1, 16), (6, 2), 128, causal=causal)
    attend.check(function, rng, spec, views=True)


@each(*PLANNED)
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_workspace_too_small(attend, rng, function, fraction):
    """16 bytes, half of the need, and the need itself, which the first error names.

    On CPU no workspace is used, and any size is enough.
    """
    spec = Spec((3000, 40), (9, 40), (4, 2), 128)
    call = attend.call(function, batch_for(function, rng, spec))
    for argument in ("float_workspace", "int_workspace"):
        tiny = to_device(np.zeros(16, np.uint8), attend.device)
        need = 16
        try:
            call.plan(**{argument: tiny})
        except ValueError as error:
            assert_says(error, argument, r"needs \d+ bytes and has 16\b", "pass a larger")
            need = int(str(error).split("needs ")[1].split()[0])
        size = max(16, int(need * fraction))
        sized = to_device(np.full(size, 0xFF, np.uint8), attend.device)
        if size < need:
            with refused(ValueError, argument, str(need), str(size)):
                call.plan(**{argument: sized})
        else:
            call.fresh_outputs()
            call.plan(**{argument: sized})
            call.run(**{argument: sized})
            call.check()
            sized.assert_guards_intact(argument)
        call.fresh_outputs()
        call.plan_run_check()


@each(*PREFILL)
def test_rows_out_of_order(attend, rng, function, monkeypatch):
    """A qo_indptr that falls is refused with the index, by the plan and by the run."""
    _contents_are_checked(attend.device, monkeypatch)
    spec = Spec((40, 17, 5), (5, 17, 2), (4, 2), causal=True)
    call = attend.call(function, batch_for(function, rng, spec))
    says = ("qo_indptr", "falls from 5 to 4", "index 2")
    if function in PLANNED:
        offsets = call.plan_args["qo_indptr"].numpy()
        offsets[2] = 4
        with refused(ValueError, *says):
            call.plan(qo_indptr=to_device(offsets, call.plan_args["qo_indptr"].tensor.device))
    call.plan()
    with unchanged(call.run_args), refused(ValueError, *says):
        call.run(**_replaced(call, "qo_indptr", 2, 4))
    call.run()
    call.check()

"""Page tables, views and workspaces that broke other systems."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import Spec, is_cuda
from calls import Call
from device_tensors import to_device
from functions import PAGED, PLANNED, PREFILL, RAGGED, batch_for, each
from refusals import assert_says, refused, unchanged


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


@each(*RAGGED)
@pytest.mark.parametrize("causal", [False, True])
def test_slices_of_one_fused_tensor(attend, rng, function, causal):
    """Queries, keys and values as the heads of one tensor, which is how models project them."""
    spec = Spec((31, 1, 17), (31, 1, 17), (6, 2), 128, causal=causal)
    batch = batch_for(function, rng, spec)
    call = attend.call(function, batch)
    fused = np.concatenate([batch.q, *(np.concatenate(x) for x in (batch.keys, batch.values))], 1)
    held = to_device(fused, attend.device, byte_offset=32)
    for name, heads in {"q": slice(0, 6), "k": slice(6, 8), "v": slice(8, 10)}.items():
        call.run_args[name] = held.view(lambda a, heads=heads: a[:, heads])
    call.plan_run_check()


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

"""The bound on the memory that attention takes for itself, TVM_FLASHINFER_MAX_WORKSPACE_BYTES."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batches import Spec, is_cuda
from cache_calls import CacheBatch, CacheSpec, make_cache_batch
from functions import batch_for, each
from refusals import refused, unchanged

BOUND = "TVM_FLASHINFER_MAX_WORKSPACE_BYTES"

#: Their keys are split, so that parts are merged.
SPLIT = [
    CacheSpec("decode_paged", [5000, 1]),
    CacheSpec("prefill_paged", [4000, 70], [3, 40], causal=1),
    CacheSpec("prefill_ragged", [900], [900], causal=1),
]


@pytest.fixture
def need(monkeypatch) -> Callable[[Callable[[], None]], int]:
    """Return the bytes that a call says it needs when none are allowed."""

    def ask(call: Callable[[], None]) -> int:
        monkeypatch.setenv(BOUND, "0")
        with pytest.raises(ValueError, match=rf"needs \d+ bytes .*{BOUND} allows 0;") as caught:
            call()
        return int(re.search(r"needs (\d+)", str(caught.value))[1])

    return ask


def asked_of(batch: CacheBatch, ops: Any) -> Callable[[], None]:
    return lambda: batch.call(ops)


@pytest.mark.parametrize("spec", SPLIT, ids=lambda spec: spec.slot)
def test_what_is_needed_is_enough(ops, device, rng, need, monkeypatch, spec):
    """Exactly that gives the same bits as no bound, and one byte less writes nothing."""
    batch = make_cache_batch(rng, device, spec)
    free = batch.run_check(ops)
    bytes_needed = need(asked_of(batch, ops))
    monkeypatch.setenv(BOUND, str(bytes_needed - 1))
    with (
        unchanged(batch.args),
        refused(ValueError, rf"needs {bytes_needed} bytes", rf"allows {bytes_needed - 1}\b"),
    ):
        batch.call(ops)
    monkeypatch.setenv(BOUND, str(bytes_needed))
    for got, expected in zip(batch.run_check(ops), free, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.cuda
def test_need_follows_the_problem_on_cuda(ops, cuda, rng, need):
    """Short requests need less than long ones, and a batch that fills the GPU next to nothing."""

    def of(*args: Any, **kwargs: Any) -> int:
        return need(asked_of(make_cache_batch(rng, cuda, CacheSpec(*args, **kwargs)), ops))

    long, short = of("decode_paged", [5000]), of("decode_paged", [20])
    assert short < 20_000 < long
    assert of("decode_paged", [20, 20]) <= 2 * short
    assert of("prefill_ragged", [1500], [1500], (64, 8), causal=1) < 100


@each()
def test_functions_with_and_without_a_plan(attend, device, rng, monkeypatch, function):
    """On CUDA runs with a plan take the caller's tensors and nothing else."""
    call = attend.call(function, batch_for(function, rng, Spec((300, 9), (300, 9), causal=True)))
    call.plan()
    monkeypatch.setenv(BOUND, "7")
    if is_cuda(device) and function.startswith("planned"):
        call.run()
        call.check()
        return
    with unchanged(call.run_args), refused(ValueError, BOUND, "allows 7", "split the batch"):
        call.run()
    monkeypatch.setenv(BOUND, "")
    call.run()
    call.check()


@pytest.mark.parametrize("text", ["64 MB", "1e9", "-1", "99999999999999999999"])
def test_a_bound_that_is_no_number_of_bytes(ops, device, rng, monkeypatch, text):
    batch = make_cache_batch(rng, device, CacheSpec("decode_paged", [50]))
    monkeypatch.setenv(BOUND, text)
    with unchanged(batch.args), refused(ValueError, rf'{BOUND} is "{text}"', "number of bytes"):
        batch.call(ops)

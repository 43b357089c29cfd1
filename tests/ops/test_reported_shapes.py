"""Shapes that broke other systems: head ratios, head dimensions, long ragged batches.

Each is given to every function that serves it, with and without a plan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import tvm_ffi
from batches import Spec, indptr_of
from functions import DECODE, PLANNED, PREFILL, RAGGED, Attend, batch_for, each, served
from refusals import refused, unchanged


@each()
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [
        ((28, 4), 128),
        ((24, 8), 128),
        ((9, 3), 64),
        ((64, 4), 128),
        ((32, 1), 64),
        ((64, 1), 64),
        ((71, 1), 64),
    ],
    ids=lambda x: "/".join(map(str, x)) if isinstance(x, tuple) else f"d{x}",
)
def test_heads(attend, rng, function, heads, head_dim):
    """Groups of 3, 7, 16, 32, 64 and 71 query heads per KV head; prefill and decode."""
    spec = Spec((40, 7, 260), (40, 1, 9), heads, head_dim, causal=True)
    attend.check(function, rng, spec)


@each(*PREFILL)
def test_one_prompt(attend, rng, function):
    """16 tokens, 32/8 heads, d 128, one full page of 16."""
    attend.check(function, rng, Spec((16,), (16,), (32, 8), 128, causal=True))


@each(*DECODE)
def test_decode_of_whole_pages(attend, rng, function):
    """28/4 heads in bfloat16, 256 keys in pages of 16: the last page is full."""
    attend.check(function, rng, Spec((256,), heads=(28, 4), head_dim=128, dtype="bfloat16"))


def check_or_refused(attend: Attend, function: str, rng: Any, spec: Spec) -> None:
    """Right where docs/ops.md says so; else refused, with nothing built, loaded or written."""
    call = attend.call(function, batch_for(function, rng, spec))
    if served(attend.device, function, spec):
        call.plan_run_check()
        return
    loaded = tvm_ffi.get_global_func("flashinfer.loaded_kernels")
    before = list(loaded())
    numbers = r"64, 128 and 256" if function in PLANNED else "multiples of 16 up to 256"
    with unchanged(call.run_args), refused(ValueError, rf"\b{spec.head_dim}\b", numbers):
        call.plan()
        call.run()
    assert list(loaded()) == before


@each(*RAGGED)
@pytest.mark.parametrize("head_dim", [72, 80, 96, 100, 112])
def test_odd_head_dims(attend, rng, function, head_dim):
    """128 rows over 256 keys, 8 heads, causal, with a head_dim that is no power of two."""
    spec = Spec((256,), (128,), (8, 8), head_dim, causal=True)
    check_or_refused(attend, function, rng, spec)


@each()
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 128, 192, 256, 512])
def test_head_dims(attend, rng, function, head_dim, dtype):
    """Large head dimensions: those that a GPU has no kernel for are refused with those it has."""
    spec = Spec((33, 5), (9, 5), (4, 2), head_dim, dtype=dtype, causal=True)
    check_or_refused(attend, function, rng, spec)


@each(*RAGGED)
def test_many_ragged_rows(attend, rng, function):
    """16863 rows in all, 32/4 heads, d 128: every row is written, those past 16384 rightly."""
    lens = [33] * 511
    spec = Spec(lens, lens, (32, 4), 128, causal=True)
    batch = batch_for(function, rng, spec)
    call = attend.call(function, batch)
    call.plan()
    call.run()
    o, lse = call.outputs()
    assert np.isfinite(lse).all()
    ends = indptr_of(lens)
    for b in (0, 255, int(np.searchsorted(ends, 16384)) - 1, 500, 510):
        rows = slice(int(ends[b]), int(ends[b + 1]))
        one = oracle.Request(slice(0, 33), batch.keys[b], batch.values[b])
        oracle.assert_attention(
            o[rows], lse[rows], batch.q[rows], [one], causal=True, sm_scale=spec.scale
        )


@each(*RAGGED)
def test_long_ragged_keys(attend, rng, function):
    """16384 keys and more in one request, beside a short one."""
    attend.check(function, rng, Spec((16500, 7), (5, 7), (32, 4), 128, causal=True))

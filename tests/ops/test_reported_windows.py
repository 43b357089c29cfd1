"""Windows that broke other systems: without a causal mask, of a plan, of single layers."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from batches import Spec, indptr_of
from cache_calls import CacheSpec, make_cache_batch
from device_tensors import synchronize
from functions import PLANNED, batch_for, each
from refusals import refused, unchanged


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


@pytest.mark.parametrize("window", [512, 1024])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_merged_chunks_have_the_window_of_their_layer(ops, device, rng, dtype, window):
    """Pages, new tokens and their merge give every row its last W keys: before, across, past W.

    TVM's cache makes the layers of a window of these three calls, for chunks up to the window.
    """
    lens = [(0, 40), (window - 100, 300), (window, window), (window, 5), (window, 1)]
    past, chunks = ([pair[i] for pair in lens] for i in range(2))
    shape = {"heads": (4, 1), "head_dim": 64, "dtype": dtype, "causal": 1}
    paged = make_cache_batch(rng, device, CacheSpec(
        "prefill_paged", past, chunks, **shape,
        options={"layer_window": window}, sliding=[(n % 13, 0) for n in past],
    ))  # fmt: skip
    ragged = make_cache_batch(rng, device, CacheSpec("prefill_ragged", chunks, chunks, **shape))
    ragged.q, ragged.args["q"] = paged.q, paged.args["q"]
    paged.run_check(ops)
    ragged.run_check(ops)
    states = [batch.args[name].tensor for batch in (ragged, paged) for name in ("o", "lse")]
    ops.merge_state_in_place(*states)
    synchronize(device)
    o, lse = (ragged.args[name].numpy() for name in ("o", "lse"))
    ends, what = indptr_of(chunks), {"causal": True, "window_left": window - 1}
    for b, pair in enumerate(lens):
        rows = slice(int(ends[b]), int(ends[b + 1]))
        k, v = (
            np.concatenate([getattr(batch, name)[b] for batch in (paged, ragged)])
            for name in ("keys", "values")
        )
        args = {**what, "sm_scale": paged.spec.scale}
        exact = oracle.attention(paged.q[rows], k, v, **args)
        plain = oracle.attention_plain(paged.q[rows], k, v, **args)
        # Each part is rounded before the merge.
        floor = 2 * oracle.FLOOR[dtype]
        oracle.assert_rows_close(o[rows], exact.o, plain.o, floor, f"{pair} keys before and new")
        oracle.assert_lse_close(lse[rows], exact.lse, plain.lse, f"{pair} keys before and new")

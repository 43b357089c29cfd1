"""Slots without a plan over pages: sliding windows with sinks, windows of layers, plain calls."""

from __future__ import annotations

import numpy as np
import pytest
from batches import DTYPES
from cache_calls import CacheSpec, make_cache_batch, needs_cache_kernel
from device_tensors import to_device

KV = [37, 0, 1, 129, 600, 64]
QO = [5, 3, 1, 129, 40, 0]
# (window offset, sink size) of each request above.
SLIDING = [(21, 4), (0, 0), (3, 1), (0, 0), (77, 33), (17, 17)]


@pytest.mark.parametrize("page_size", [1, 5, 16, 32])
@pytest.mark.parametrize("slot", ["prefill_paged", "decode_paged"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sliding_pages(ops, device, rng, dtype, slot, page_size):
    """Sinks, then the window from its offset on; slots in between are NaN and are not read."""
    needs_cache_kernel(device, dtype, 64)
    qo = QO if slot == "prefill_paged" else None
    spec = CacheSpec(slot, KV, qo, dtype=dtype, page_size=page_size, sliding=SLIDING)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (8, 2), (14, 2), (16, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("sliding", [False, True])
def test_groups(ops, device, rng, sliding, heads, causal):
    """Every number of query heads per KV head, with and without a sliding window."""
    spec = CacheSpec(
        "prefill_paged", KV, QO, heads=heads, causal=causal, sliding=SLIDING if sliding else None
    )
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("head_dim", [16, 48, 80, 100, 112, 128, 256])
@pytest.mark.parametrize("slot", ["prefill_paged", "decode_paged", "prefill_ragged"])
def test_head_dims(ops, device, rng, slot, head_dim):
    """Also such as are no multiple of a vector."""
    needs_cache_kernel(device, "float16", head_dim)
    qo = QO if slot != "decode_paged" else None
    make_cache_batch(rng, device, CacheSpec(slot, KV, qo, head_dim=head_dim)).run_check(ops)


@pytest.mark.parametrize("window", [1, 2, 16, 100, 1024])
@pytest.mark.parametrize("page_size", [1, 16])
def test_layer_window(ops, device, rng, page_size, window):
    """Row r sees the last max(W - r - 1, 0) keys: chunks shorter and longer than the window."""
    spec = CacheSpec(
        "prefill_paged",
        [1, 15, 99, 513, 0],
        [3, 1, 130, 40, 2],
        page_size=page_size,
        sliding=[(0, 0), (2, 0), (15, 0), (0, 0), (0, 0)],
        causal=1,
        options={"layer_window": window},
    )
    make_cache_batch(rng, device, spec).run_check(ops)


def test_layer_window_without_causal_is_no_window(ops, device, rng):
    """TVM says so when the rows are in the pages already, which then hold the window alone."""
    options = {"layer_window": 4}
    for slot, qo in (("prefill_paged", [1, 3]), ("decode_paged", None)):
        spec = CacheSpec(slot, [30, 50], qo, sliding=[(2, 0), (0, 0)], options=options)
        make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_value_dim(ops, device, rng, dtype):
    """Values narrower than keys, as in latent attention; causal."""
    needs_cache_kernel(device, dtype, 192)
    spec = CacheSpec(
        "prefill_ragged", [9, 70, 0], [9, 33, 1], heads=(4, 4), head_dim=192, head_dim_vo=128,
        dtype=dtype, causal=1,
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("slot", ["prefill_paged", "prefill_ragged", "decode_paged"])
def test_no_requests(ops, device, rng, slot):
    """A batch of none does nothing."""
    spec = CacheSpec(slot, [0], [0] if slot != "decode_paged" else None)
    batch = make_cache_batch(rng, device, spec)
    batch.run_check(ops)


def test_values_that_are_not_finite_stay_where_they_are_seen(ops, device, rng):
    """NaN in a value that the window hides from a row does not reach it."""
    if device.dlpack_device_type() != 1:
        pytest.skip("a tensor core multiplies hidden values by a weight of 0, and 0 * NaN is NaN")
    spec = CacheSpec("prefill_paged", [40], [6], causal=1, options={"layer_window": 8})
    batch = make_cache_batch(rng, device, spec)
    pool = batch.args["pages"].numpy()
    # Key 34 is the last but five: rows 0 and 1, which see 7 and 6 keys, see it.
    hit = (pool[:, 0].swapaxes(1, 2) == batch.keys[0][34]).all((-1, -2))
    assert hit.sum() == 1
    pool[:, 1].swapaxes(1, 2)[hit] = np.nan
    batch.args["pages"] = to_device(pool, device)
    batch.call(ops)
    o, _ = batch.outputs()
    assert np.isnan(o[:2].astype(np.float32)).all()
    assert np.isfinite(o[2:].astype(np.float32)).all()

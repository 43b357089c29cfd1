"""Soft caps, slopes and sinks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import DTYPES
from cache_calls import CacheSpec, make_cache_batch, needs_cache_kernel
from cache_oracle import random_tree
from refusals import refused

SLOTS = ("prefill_paged", "decode_paged", "prefill_ragged", "tree_paged")


def _spec(rng: np.random.Generator, slot: str, **changes: Any) -> CacheSpec:
    kv, qo = [127, 0, 600, 1], [15, 2, 40, 1]
    if slot.startswith("tree"):
        changes["trees"] = [random_tree(rng, n) for n in (20, 0, 40, 1)]
    elif slot.startswith("prefill"):
        changes["causal"] = 1
    return CacheSpec(slot, kv, None if slot == "decode_paged" else qo, **changes)


@pytest.mark.parametrize("cap", [8, 30, 50, 0.5])
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_soft_cap(ops, device, rng, dtype, slot, cap):
    """Scores are cap * tanh(s / cap), with scores large enough to feel it."""
    needs_cache_kernel(device, dtype, 128)
    spec = _spec(
        rng, slot, heads=(8, 4), head_dim=128, dtype=dtype, sm_scale=1.0,
        options={"logits_soft_cap": cap},
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("heads", [(4, 2), (14, 2)], ids=str)
def test_slopes(ops, device, rng, slot, heads):
    """A slope per query head times the distance from the diagonal."""
    slopes = 2.0 ** -np.arange(1, heads[0] + 1)
    spec = _spec(rng, slot, heads=heads, alibi_slopes=slopes)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("rotary_mode", [0, 1])
@pytest.mark.parametrize("slot", ["prefill_paged", "decode_paged", "prefill_ragged", "mask_paged"])
def test_slopes_by_position(ops, device, rng, slot, rotary_mode):
    """A slope times the position of the key less that of the row, wherever the two lie."""
    changes: dict[str, Any] = {"options": {"alibi_by_position": True}, "rotary_mode": rotary_mode}
    if slot == "mask_paged":
        lens = zip([15, 2, 40, 1], [127, 0, 600, 1], strict=True)
        changes["masks"] = [rng.random(shape) < 0.5 for shape in lens]
    elif slot != "prefill_ragged":
        changes["sliding"] = [(21, 4), (0, 0), (77, 33), (0, 0)]
    slopes = np.array([0.02, 0.125, 0.0, -0.01])
    make_cache_batch(rng, device, _spec(rng, slot, alibi_slopes=slopes, **changes)).run_check(ops)


@pytest.mark.parametrize("lens", [[3, 1, 0, 2], [40, 130, 0, 1]], ids=str)
def test_slopes_by_position_in_a_tree(ops, device, rng, lens):
    """Every key is a row of the tree and has its position."""
    spec = CacheSpec(
        "tree_ragged", lens, lens, trees=[random_tree(rng, n) for n in lens],
        alibi_slopes=np.array([0.02, 0.125, 0.0, -0.01]), options={"alibi_by_position": True},
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


def test_slopes_by_position_need_positions(ops, device, rng):
    """Nodes of earlier steps have none; and the setting is nothing without slopes."""
    by_position = {"options": {"alibi_by_position": True}, "alibi_slopes": np.ones(4)}
    batch = make_cache_batch(rng, device, _spec(rng, "tree_paged", **by_position))
    with refused(ValueError, "tree", "positions", "one step"):
        batch.call(ops)
    with refused(ValueError, "alibi_by_position", "alibi_slopes"):
        ops.bind_attention_prefill_paged('{"alibi_by_position": true}')
    with refused(ValueError, "alibi_by_position", "true nor false"):
        ops.bind_attention_prefill_paged('{"alibi_by_position": 1}')


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks(ops, device, rng, dtype, slot):
    """exp(sink) is in the denominator and in the LSE; small, usual and overwhelming sinks."""
    needs_cache_kernel(device, dtype, 64)
    sinks = np.array([-80.0, 0.5, 3.0, 120.0])
    make_cache_batch(rng, device, _spec(rng, slot, dtype=dtype, sinks=sinks)).run_check(ops)


def test_no_sink(ops, device, rng):
    """A sink of -inf is none: a row without keys is (0, -inf)."""
    spec = CacheSpec("prefill_paged", [0, 20], [2, 2], sinks=np.full(4, -np.inf))
    _, lse = make_cache_batch(rng, device, spec).run_check(ops)
    assert np.isneginf(lse[:2]).all()


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("rotary_mode", [0, 1])
def test_all_at_once(ops, device, rng, slot, rotary_mode):
    """Cap, slopes, sinks and positions together."""
    spec = _spec(
        rng, slot, sm_scale=0.4, rotary_mode=rotary_mode, options={"logits_soft_cap": 30},
        alibi_slopes=np.array([0.5, 0.25, 0.1, 0.0]), sinks=np.array([0.0, 1.0, -2.0, 4.0]),
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("sm_scale", [0.0, -0.3])
@pytest.mark.parametrize("cap", [0, 8])
def test_scales_that_are_not_positive(ops, rng, sm_scale, cap):
    """On CPU every finite scale is served."""
    import tvm

    spec = _spec(rng, "prefill_paged", sm_scale=sm_scale, options={"logits_soft_cap": cap})
    make_cache_batch(rng, tvm.cpu(0), spec).run_check(ops)

"""Rotary embedding inside attention, as a cache that slides globally asks for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import DTYPES
from cache_calls import CacheSpec, make_cache_batch, needs_cache_kernel
from cache_oracle import random_tree
from test_split_qkv_rotary import LLAMA3

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
SCALINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "gptj": {"rope_type": "gptj"},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 4.0},
}
SLOTS = ("prefill_paged", "decode_paged", "prefill_ragged", "tree_paged", "tree_ragged")


def _spec(rng: np.random.Generator, slot: str, **changes: Any) -> CacheSpec:
    kv, qo = [1, 30, 0, 200], [1, 30, 2, 9]
    if slot.startswith("tree"):
        qo = [1, 30, 0, 33]
        changes["trees"] = [random_tree(rng, n) for n in qo]
    if slot == "tree_ragged":
        kv = qo
    if slot == "prefill_paged":
        changes["sliding"] = [(0, 0), (9, 3), (0, 0), (64, 1)]
    rows = None if slot == "decode_paged" else qo
    return CacheSpec(slot, kv, rows, rotary_mode=1, **changes)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_slot(ops, device, rng, dtype, slot, scaling):
    """Key j of a request has its offset + j; in a tree over ragged keys the position of its row."""
    needs_cache_kernel(device, dtype, 64)
    rope = {"theta": 500000.0}
    options = {"rope_scaling": SCALINGS[scaling]}
    make_cache_batch(
        rng, device, _spec(rng, slot, dtype=dtype, rope=rope, options=options)
    ).run_check(ops)


@pytest.mark.parametrize("head_dim", [16, 80, 96, 128, 256])
@pytest.mark.parametrize("slot", ["prefill_ragged", "decode_paged"])
@pytest.mark.parametrize("scaling", ["none", "gptj"])
def test_head_dims(ops, device, rng, slot, scaling, head_dim):
    """Pairs that fill no whole vector."""
    needs_cache_kernel(device, "float16", head_dim)
    options = {"rope_scaling": SCALINGS[scaling]}
    make_cache_batch(rng, device, _spec(rng, slot, head_dim=head_dim, options=options)).run_check(
        ops
    )


@pytest.mark.parametrize("rotary_dim", [2, 6, 32, 40, 64])
@pytest.mark.parametrize("scaling", ["none", "gptj"])
@pytest.mark.parametrize("slot", ["prefill_ragged", "decode_paged"])
def test_partial_rotary(ops, device, rng, slot, scaling, rotary_dim):
    """Dimensions from rotary_dim on are not rotated."""
    options = {"rope_scaling": SCALINGS[scaling], "rotary_dim": rotary_dim}
    make_cache_batch(rng, device, _spec(rng, slot, options=options)).run_check(ops)


@pytest.mark.parametrize(("theta", "scale"), [(1e4, 1.0), (1e6, 0.25), (150.0, 2.0)])
def test_theta_and_scale_come_with_the_call(ops, device, rng, theta, scale):
    """One bound function serves calls of several bases, as a cache with sliding layers makes."""
    rope = {"theta": theta, "scale": scale}
    make_cache_batch(rng, device, _spec(rng, "prefill_paged", rope=rope)).run_check(ops)


def test_one_function_many_bases(ops, device, rng):
    """The frequencies of one call do not stay for the next."""
    bound = ops.bind_attention_prefill_ragged("{}")
    for theta in (1e4, 1e6, 1e4):
        batch = make_cache_batch(rng, device, _spec(rng, "prefill_ragged", rope={"theta": theta}))
        bound(*(getattr(x, "tensor", x) for x in batch.args.values()))
        batch.check()


@pytest.mark.parametrize("slot", SLOTS)
def test_yarn(ops, device, rng, slot):
    """TVM's yarn, whose pairs have two frequencies."""
    batch = make_cache_batch(rng, device, _spec(rng, slot, options={"rope_scaling": YARN}))
    batch.run_check(ops)


def test_longrope_is_refused_inside_attention(ops, device, rng):
    """TVM has no factors there: the slot can be bound, and the call that would rotate raises."""
    scaling = {
        "rope_type": "longrope",
        "max_position_embeddings": 131072,
        "original_max_position_embeddings": 4096,
    }
    spec = _spec(rng, "prefill_ragged", options={"rope_scaling": scaling})
    batch = make_cache_batch(rng, device, spec)
    with pytest.raises(ValueError, match="longrope"):
        batch.call(ops)
    batch.spec.rotary_mode = 0
    batch.call(ops, rotary_mode=0)
    batch.check()

"""What the functions of `bind_attention*` refuse: nothing is written, and the message helps."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import tvm
from batches import is_cuda
from cache_calls import CacheBatch, CacheSpec, make_cache_batch
from cache_oracle import random_tree
from device_tensors import to_device
from refusals import assert_refused, bad, cut, dtype, edit, other_device, refused, unchanged, value

SHAPES = [
    bad("rank", "q", cut(lambda a: a[0])),
    bad("float64", "q", dtype("float64"), TypeError),
    bad("other dtype", "pages", dtype("bfloat16"), TypeError),
    bad("device", "page_indices", other_device),
    bad("rank", "pages", cut(lambda a: a[0])),
    bad("head_dim", "pages", cut(lambda a: a[..., :32])),
    bad("int64", "page_indptr", dtype("int64"), TypeError),
    bad("short", "page_indptr", cut(lambda a: a[:-1])),
    bad("short", "length_info", cut(lambda a: a[:, :-1])),
    bad("two rows", "length_info", cut(lambda a: a[:2])),
    bad("short", "q_rope_position", cut(lambda a: a[:-1])),
    bad("short", "k_rope_pos_offset", cut(lambda a: a[:-1])),
    bad("short", "lse", cut(lambda a: a[:-1])),
    bad("float16", "lse", dtype("float16"), TypeError),
    bad("heads", "o", cut(lambda a: a[:, :2])),
    bad("nan", "sm_scale", value(float("nan"))),
    bad("2", "causal", value(2)),
    bad("2", "rotary_mode", value(2)),
]
CONTENTS = [
    bad("falls", "qo_indptr", edit(1, 9)),
    bad("ends early", "qo_indptr", edit(3, 5)),
    bad("falls", "page_indptr", edit(1, 90)),
    bad("outside", "page_indices", edit(0, 1000)),
    bad("negative", "page_indices", edit(1, -1)),
    bad("last page", "length_info", edit((0, 0), 17), ValueError, "last_page_len"),
    bad("sink past offset", "length_info", edit((2, 0), 22)),
    bad("offset past the slots", "length_info", edit((1, 0), 1000)),
    bad("negative sink", "length_info", edit((2, 1), -1)),
]


def _sliding(rng: np.random.Generator, device: Any) -> CacheBatch:
    spec = CacheSpec("prefill_paged", [37, 60, 5], [4, 2, 1], sliding=[(21, 4), (3, 0), (0, 0)])
    return make_cache_batch(rng, device, spec)


def _bound(ops: Any, batch: CacheBatch) -> Any:
    return getattr(ops, f"bind_attention_{batch.spec.slot}")(json.dumps(batch.spec.options))


@pytest.mark.parametrize("case", SHAPES)
def test_shapes(ops, device, rng, case):
    """Wrong dtypes, ranks, sizes, devices and numbers."""
    batch = _sliding(rng, device)
    assert_refused(_bound(ops, batch), batch.args, case, device)


@pytest.mark.parametrize("case", CONTENTS)
def test_contents(ops, device, rng, case, monkeypatch):
    """Contents of index arrays: on CPU always, on CUDA when asked."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    batch = _sliding(rng, device)
    assert_refused(_bound(ops, batch), batch.args, case, device)


TREES = [
    bad("odd", "tree_mask", lambda old, dev: to_device(old.numpy().reshape(-1)[:-1], dev)),
    bad("columns", "tree_mask", lambda old, dev: to_device(np.repeat(old.numpy(), 2, 1), dev)),
    bad("short", "tree_mask", cut(lambda a: a[:-1]), ValueError, "tree_mask", "tree_indptr"),
    bad("empty interval", "tree_mask", edit((1, 1), 0)),
    bad("short", "tree_indptr", cut(lambda a: a[:-1])),
    bad("fewer nodes than rows", "tree_indptr", edit(1, 6)),
]


@pytest.mark.parametrize("slot", ["tree_paged", "tree_ragged"])
@pytest.mark.parametrize("case", TREES)
def test_trees(ops, device, rng, slot, case, monkeypatch):
    """Masks of the wrong size, and trees that do not fit their rows."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    nodes = [7, 13]
    trees = [random_tree(rng, n, "chain") for n in nodes]
    batch = make_cache_batch(rng, device, CacheSpec(slot, nodes, nodes, trees=trees))
    assert_refused(_bound(ops, batch), batch.args, case, device)


@pytest.mark.parametrize(
    ("slot", "options", "says"),
    [
        ("prefill_paged", "{cap", "JSON"),
        ("prefill_paged", "[]", "JSON"),
        ("prefill_paged", '{"window": 3}', "layer_window"),
        ("prefill_paged", '{"layer_window": 0}', "layer_window"),
        ("prefill_paged", '{"layer_window": 1.5}', "layer_window"),
        ("mask_ragged", '{"layer_window": 8}', "layer_window"),
        ("tree_ragged", '{"layer_window": 0}', "layer_window"),
        ("decode_paged", '{"rotary_dim": 7}', "rotary_dim"),
        ("decode_paged", '{"logits_soft_cap": -1}', "logits_soft_cap"),
        ("decode_paged", '{"logits_soft_cap": true}', "logits_soft_cap"),
        ("decode_paged", '{"rope_scaling": "yarn"}', "rope_scaling"),
        ("decode_paged", '{"rope_scaling": {"rope_type": "x1"}}', "x1"),
        ("decode_paged", '{"rope_scaling": {"rope_type": "yarn", "factor": 2}}', "original_max"),
    ],
)
def test_options(ops, slot, options, says):
    """What cannot be bound is refused where the cache is made."""
    with refused(ValueError, says):
        getattr(ops, f"bind_attention_{slot}")(options)


def test_slot_names(ops):
    """An unknown slot names the known ones."""
    with refused(ValueError, "prefill_paged", "tree_ragged", "mla"):
        ops.bind_attention("prefill", "{}", None, None)


def test_sinks_of_the_wrong_shape(ops, device, rng):
    """Sinks are one float32 per query head."""
    batch = _sliding(rng, device)
    three = to_device(np.zeros(3, np.float32), device).tensor
    bound = ops.bind_attention("prefill_paged", "{}", three, None)
    with unchanged(batch.args), refused(ValueError, "sinks"):
        bound(*(getattr(x, "tensor", x) for x in batch.args.values()))


@pytest.mark.parametrize("cap", [1e300, 1e-300])
def test_caps_that_float32_does_not_hold(ops, cap):
    """Scores over an infinite cap, or over 0, would be NaN."""
    with refused(ValueError, "logits_soft_cap", "float32"):
        ops.bind_attention_decode_paged(json.dumps({"logits_soft_cap": cap}))


def test_rotary_dim_above_head_dim(ops, rng):
    """Known only when a call comes."""
    spec = CacheSpec("decode_paged", [9], rotary_mode=1, options={"rotary_dim": 66})
    batch = make_cache_batch(rng, tvm.cpu(0), spec)
    with unchanged(batch.args), refused(ValueError, "rotary_dim", "64"):
        batch.call(ops)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float32"}, "float32"),
        ({"head_dim": 72}, "multiples of 16"),
        ({"head_dim": 272}, "256"),
        ({"sm_scale": 0.0}, "sm_scale"),
    ],
)
def test_what_cuda_does_not_serve(ops, device, rng, changes, says):
    """Refused with the reason, before anything is built; CPU serves it."""
    batch = make_cache_batch(rng, device, CacheSpec("prefill_paged", [20], [3], **changes))
    if not is_cuda(device):
        batch.run_check(ops)
        return
    with unchanged(batch.args), refused(ValueError, says):
        batch.call(ops)

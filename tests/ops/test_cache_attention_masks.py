"""Packed masks (C29): a bit for every row and key, in whole bytes for each request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from batches import DTYPES, indptr_of, is_cuda, normal
from cache_calls import CacheSpec, make_cache_batch, needs_cache_kernel
from cache_oracle import Extras, assert_request, pack_bits, random_tree, seen_by
from calls import passed
from device_tensors import poisoned, to_device
from refusals import assert_refused, bad, cut, dtype, edit, other_device, refused

SLOTS = ("mask_paged", "mask_ragged")
# Products that are no multiple of 8, requests without rows, without keys, and with one of each.
KV = [20, 0, 1, 129, 600, 64, 17]
QO = [10, 3, 1, 131, 40, 0, 9]
SLIDING = [(21, 4), (0, 0), (3, 1), (0, 0), (77, 33), (17, 17), (0, 0)]


def _masks(
    rng: np.random.Generator, qo: Any = QO, kv: Any = KV, density: float = 0.6
) -> list[np.ndarray]:
    """Random masks in which every fifth row sees nothing."""
    masks = [rng.random((n, m)) < density for n, m in zip(qo, kv, strict=True)]
    for mask in masks:
        mask[::5] = False
    return masks


def _spec(rng: np.random.Generator, slot: str, **changes: Any) -> CacheSpec:
    return CacheSpec(slot, KV, QO, masks=_masks(rng), **changes)


@pytest.mark.parametrize("page_size", [1, 5, 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged(ops, device, rng, dtype, page_size):
    """Few rows and many, and rows that see nothing."""
    needs_cache_kernel(device, dtype, 64)
    spec = _spec(rng, "mask_paged", dtype=dtype, page_size=page_size)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("head_dims", [(64, 64), (80, 80), (192, 128)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged(ops, device, rng, dtype, head_dims):
    """Values may be narrower than keys."""
    needs_cache_kernel(device, dtype, head_dims[0])
    spec = _spec(rng, "mask_ragged", dtype=dtype, head_dim=head_dims[0], head_dim_vo=head_dims[1])
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (14, 2), (16, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("slot", SLOTS)
def test_groups(ops, device, rng, slot, heads):
    """Every number of query heads per KV head; all of them have the mask of their row."""
    kv, qo = [20, 129, 70], [10, 33, 1]
    spec = CacheSpec(slot, kv, qo, heads=heads, masks=_masks(rng, qo, kv))
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("rotary_mode", [0, 1])
@pytest.mark.parametrize("window", [None, 0, 30])
@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("slot", SLOTS)
def test_with_everything_else(ops, device, rng, slot, causal, window, rotary_mode):
    """The causal mask and a window hide more; caps, sinks and positions are as without a mask."""
    options: dict[str, Any] = {"logits_soft_cap": 8}
    if window is not None:
        options["window_left"] = window
    spec = _spec(
        rng, slot, causal=causal, rotary_mode=rotary_mode, options=options, sm_scale=0.4,
        sinks=np.array([0.5, -3.0, 2.0, -np.inf]),
        sliding=SLIDING if slot == "mask_paged" else None,
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("slot", ["prefill_paged", "prefill_ragged", "decode_paged"])
def test_window_without_a_mask(ops, device, rng, slot):
    """`window_left` is a setting of the slots without a mask too, beside a soft cap."""
    qo = None if slot == "decode_paged" else [10, 3, 1, 131, 40, 0, 9]
    spec = CacheSpec(
        slot, KV, qo, causal=1, options={"window_left": 37, "logits_soft_cap": 30}, sm_scale=0.3
    )
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("seed", range(12))
def test_random_sizes(ops, device, seed):
    """Tiles, chunks and bytes that end anywhere; some masks full, some empty."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    qo, kv = rng.integers(0, 150, count).tolist(), rng.integers(0, 1300, count).tolist()
    density = float(rng.choice([0.0, 0.05, 0.5, 0.97, 1.0]))
    masks = _masks(rng, qo, kv, density)
    spec = CacheSpec(SLOTS[seed % 2], kv, qo, masks=masks, heads=(6, 2), page_size=5)
    make_cache_batch(rng, device, spec).run_check(ops)


def test_a_tree_as_a_mask(ops, device, rng):
    """The mask of a tree gives what the tree gives, to the bit."""
    nodes, kv = [13, 1, 70], [50, 1, 150]
    trees = [random_tree(rng, n) for n in nodes]
    by_tree = make_cache_batch(rng, device, CacheSpec("tree_paged", kv, nodes, trees=trees))
    o, lse = by_tree.run_check(ops)
    masks = [seen_by(Extras(tree=t), len(t), m) for t, m in zip(trees, kv, strict=True)]
    indptr, packed = (to_device(x, device) for x in pack_bits(masks))
    args = {k: v for k, v in by_tree.args.items() if not k.startswith("tree")}
    at = list(args).index("rotary_mode")
    args = dict([*list(args.items())[:at], ("causal", 0), *list(args.items())[at:]])
    args["o"], args["lse"] = (
        poisoned(o.shape, o.dtype.name, device),
        poisoned(lse.shape, "float32", device),
    )
    ops.bind_attention_mask_paged("{}")(*passed(args, {}), indptr.tensor, packed.tensor)
    np.testing.assert_array_equal(args["o"].numpy(), o)
    np.testing.assert_array_equal(args["lse"].numpy(), lse)


def test_more_bits_than_32_bits_count(ops, device, rng):
    """A request of 46,400 rows and as many keys, of which a window lets each row see few."""
    n, window, last = 46_400, 63, 100
    assert n * n > 2**31
    small = rng.random((5, 7)) < 0.5
    tail = rng.random((last, n)) < 0.5
    packed = np.full(5 + n * n // 8, 0xFF, np.uint8)
    packed[:5] = pack_bits([small])[1]
    packed[len(packed) - last * n // 8 :] = np.packbits(tail.reshape(-1), bitorder="little")
    q, k, v = (normal(rng, (m, 1, 64), "float16") for m in (5 + n, 7 + n, 7 + n))
    o, lse = poisoned(q.shape, "float16", device), poisoned(q.shape[:2], "float32", device)
    at_q, at_k = indptr_of([5, n]), indptr_of([7, n])
    ints = [at_q, at_k, np.zeros(5 + n), np.zeros(2), [0, 5, len(packed)]]
    qo, kv, pos_q, pos_k, mask_indptr = (
        to_device(np.asarray(x, np.int32), device).tensor for x in ints
    )
    ops.bind_attention_mask_ragged(f'{{"window_left": {window}}}')(
        to_device(q, device).tensor, qo, to_device(k, device).tensor, to_device(v, device).tensor,
        kv, pos_q, pos_k, o.tensor, lse.tensor, 1, 0, 1.0, 1e4, 0.125, mask_indptr,
        tvm.runtime.tensor(packed, device),
    )  # fmt: skip
    got_o, got_lse = o.numpy(), lse.numpy()
    first = Extras(causal=True, window_left=window, mask=small)
    assert_request(got_o[:5], got_lse[:5], q[:5], k[:7], v[:7], first, 0.125, "the first request")
    seen = last + window
    extras = Extras(causal=True, window_left=window, mask=tail[:, n - seen :])
    assert_request(
        got_o[-last:], got_lse[-last:], q[-last:], k[-seen:], v[-seen:], extras, 0.125, "the end"
    )


@pytest.mark.parametrize("rows", [3, 30])
def test_values_that_are_not_finite_stay_where_they_are_seen(ops, device, rng, rows):
    """NaN in a value that the mask hides from a row does not reach it."""
    if is_cuda(device):
        pytest.skip("a tensor core multiplies hidden values by a weight of 0, and 0 * NaN is NaN")
    mask = rng.random((rows, 40)) < 0.5
    mask[:, 0] = True
    batch = make_cache_batch(rng, device, CacheSpec("mask_ragged", [40], [rows], masks=[mask]))
    values = batch.args["v"].numpy()
    values[17] = np.nan
    batch.args["v"] = to_device(values, device)
    batch.call(ops)
    o, _ = batch.outputs()
    assert (np.isnan(o.astype(np.float32)).any((1, 2)) == mask[:, 17]).all()


def test_bits_outside_the_tensor_are_hidden(ops, cuda, rng, monkeypatch):
    """Without checks a mask that ends early, or offsets that run over, hide what is missing."""
    monkeypatch.delenv("TVM_FLASHINFER_CHECK", raising=False)
    batch = make_cache_batch(
        rng, cuda, CacheSpec("mask_ragged", [20], [10], masks=[np.ones((10, 20), bool)])
    )
    full = batch.args["packed_mask"]
    for size, indptr in ((13, [0, 25]), (25, [0, 13]), (13, [0, 2**31 - 1]), (0, [0, 25])):
        batch.args["packed_mask"] = full.view(lambda a, n=size: a[:n])
        batch.args["mask_indptr"] = to_device(np.array(indptr, np.int32), cuda)
        there = min(size, indptr[1]) * 8
        batch.spec.masks = [np.arange(200).reshape(10, 20) < there]
        batch.args["o"] = poisoned((10, 4, 64), "float16", cuda)
        batch.run_check(ops)


def _one(rng: np.random.Generator, device: Any, slot: str) -> Any:
    masks = [rng.random((n, m)) < 0.5 for n, m in ((10, 20), (3, 9))]
    return make_cache_batch(rng, device, CacheSpec(slot, [20, 9], [10, 3], masks=masks))


SHAPES = [
    bad("int8", "packed_mask", dtype("int8"), TypeError),
    bad("rank", "packed_mask", lambda old, dev: to_device(old.numpy()[None], dev)),
    bad("gaps", "packed_mask", lambda old, dev: to_device(old.numpy(), dev, strides=[2])),
    bad("device", "packed_mask", other_device),
    bad("int64", "mask_indptr", dtype("int64"), TypeError),
    bad("short", "mask_indptr", cut(lambda a: a[:-1])),
    bad("device", "mask_indptr", other_device),
]
CONTENTS = [
    bad("byte short", "mask_indptr", edit(1, 24), ValueError, "request 0 24 bytes", "take 25"),
    bad("byte long", "mask_indptr", edit(1, 26), ValueError, "request 0 26 bytes", "take 25"),
    bad("last short", "mask_indptr", edit(2, 28), ValueError, "request 1 3 bytes", "take 4"),
    bad("start", "mask_indptr", edit(0, 1)),
    bad("falls", "mask_indptr", edit(1, 90)),
    bad("ends early", "packed_mask", cut(lambda a: a[:-1]), ValueError, "mask_indptr.*packed_mask"),
]


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("case", SHAPES)
def test_wrong_tensors(ops, device, rng, slot, case):
    batch = _one(rng, device, slot)
    assert_refused(getattr(ops, f"bind_attention_{slot}")("{}"), batch.args, case, device)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("case", CONTENTS)
def test_wrong_sizes(ops, device, rng, slot, case, monkeypatch):
    """10 rows and 20 keys take 25 bytes: on CPU always, on CUDA when checks are asked for."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    batch = _one(rng, device, slot)
    assert_refused(getattr(ops, f"bind_attention_{slot}")("{}"), batch.args, case, device)


@pytest.mark.parametrize(
    ("slot", "options", "says"),
    [
        ("mask_paged", '{"window_left": -1}', "window_left"),
        ("mask_paged", '{"window_left": 1.5}', "window_left"),
        ("mask_paged", '{"layer_window": 8}', "layer_window"),
        ("tree_paged", '{"window_left": 8}', "window_left"),
        ("tree_ragged", '{"window_left": 8}', "window_left"),
        ("mla", '{"window_left": 8}', "window_left"),
        ("prefill_paged", '{"window_left": 8, "layer_window": 8}', "one window"),
    ],
)
def test_options(ops, slot, options, says):
    with refused(ValueError, says):
        getattr(ops, f"bind_attention_{slot}")(options)

"""Tree slots: forests over the last keys of paged and of ragged requests."""

from __future__ import annotations

import numpy as np
import pytest
from batches import DTYPES
from cache_calls import CacheSpec, make_cache_batch, needs_cache_kernel
from cache_oracle import random_tree
from device_tensors import to_device

KINDS = ("chain", "star", "forest")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 5, 16, 32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged(ops, device, rng, dtype, page_size, kind):
    """Trees of 1, odd and many nodes after a past, and requests without a tree or without rows."""
    needs_cache_kernel(device, dtype, 64)
    nodes = [1, 7, 130, 0, 33, 0]
    spec = CacheSpec(
        "tree_paged", [1, 50, 700, 45, 33, 9], [1, 7, 130, 3, 33, 0], dtype=dtype,
        page_size=page_size, trees=[random_tree(rng, n, kind) for n in nodes],
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged(ops, device, rng, dtype, kind):
    """Keys and rows are the nodes themselves."""
    needs_cache_kernel(device, dtype, 64)
    nodes = [1, 9, 0, 70, 256, 2]
    trees = [random_tree(rng, n, kind) for n in nodes]
    spec = CacheSpec("tree_ragged", nodes, nodes, dtype=dtype, trees=trees)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (8, 2), (14, 2), (16, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("slot", ["tree_paged", "tree_ragged"])
def test_groups(ops, device, rng, slot, heads):
    """Every number of query heads per KV head."""
    nodes = [13, 1, 21]
    past = 0 if slot == "tree_ragged" else 37
    trees = [random_tree(rng, n) for n in nodes]
    spec = CacheSpec(slot, [n + past for n in nodes], nodes, heads=heads, trees=trees)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("slot", ["tree_paged", "tree_ragged"])
def test_no_requests(ops, device, rng, slot):
    """A batch of none launches nothing."""
    make_cache_batch(rng, device, CacheSpec(slot, [], [], trees=[])).run_check(ops)


@pytest.mark.parametrize("slot", ["tree_paged", "tree_ragged"])
def test_requests_without_keys(ops, device, rng, slot):
    """0, 17, 0 and 5 keys, which are the nodes: neighbours of the empty ones are right."""
    nodes = [0, 17, 0, 5]
    trees = [random_tree(rng, n) for n in nodes]
    rows = nodes if slot == "tree_ragged" else [3, 17, 1, 5]
    spec = CacheSpec(slot, nodes, rows, (8, 2), 128, trees=trees)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_last_nodes_as_rows(ops, device, rng, rows):
    """A tree that grew over several steps: the rows are its last nodes alone."""
    trees = [random_tree(rng, 20), random_tree(rng, 31)]
    spec = CacheSpec("tree_paged", [60, 31], [rows, rows], trees=trees)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("seed", range(12))
def test_random_forests(ops, device, seed):
    """Sizes, pasts and shapes of trees at random."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 6))
    nodes = rng.integers(1, 80, count).tolist()
    kv = [n + int(rng.integers(0, 300)) for n in nodes]
    trees = [random_tree(rng, n, KINDS[int(rng.integers(3))]) for n in nodes]
    rows = [int(rng.integers(1, n + 1)) for n in nodes]
    spec = CacheSpec("tree_paged", kv, rows, trees=trees, heads=(6, 2), page_size=5)
    make_cache_batch(rng, device, spec).run_check(ops)


def test_flat_mask(ops, device, rng):
    """The mask may be flat."""
    spec = CacheSpec("tree_ragged", [11, 4], [11, 4], trees=[random_tree(rng, n) for n in (11, 4)])
    batch = make_cache_batch(rng, device, spec)
    mask = batch.args["tree_mask"].numpy()
    batch.args["tree_mask"] = to_device(mask.reshape(-1), device)
    batch.run_check(ops)


@pytest.mark.parametrize("rows", [3, 30])
def test_values_that_are_not_finite_stay_in_their_branch(ops, device, rng, rows):
    """NaN in the value of a node reaches its subtree and nothing else."""
    if device.dlpack_device_type() != 1:
        pytest.skip("a tensor core multiplies hidden values by a weight of 0, and 0 * NaN is NaN")
    tree = random_tree(rng, 30)
    spec = CacheSpec("tree_ragged", [30], [30], heads=(2, 1), trees=[tree])
    batch = make_cache_batch(rng, device, spec)
    node = 4
    values = batch.args["v"].numpy()
    values[node] = np.nan
    batch.args["v"] = to_device(values, device)
    batch.call(ops)
    o, _ = batch.outputs()
    below = (tree[:, 0] >= tree[node, 0]) & (tree[:, 0] < tree[node, 1])
    assert 1 <= below.sum() < 30
    assert np.isnan(o[below].astype(np.float32)).all()
    assert np.isfinite(o[~below].astype(np.float32)).all()

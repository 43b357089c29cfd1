"""Methods of TVM's paged KV cache that decoding alone does not call, on our cache."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm_ffi
from cache_models import NUM_LAYERS
from sequences import SM_SCALE
from tvm_ffi import Shape

from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW

ONLY_027 = pytest.mark.skipif(not HAS_LAYER_WINDOW, reason="TVM 0.26 has no such method")

#: float32 on CPU, and where CUDA has kernels with plans and without.
MODELS = ["group1", "head64", "head64_group4"]


def builtin(name: str) -> Callable:
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")


def begin(driver, seqs: Sequence[int], lens: Sequence[int], *tree: Shape) -> None:
    builtin("kv_state_begin_forward")(driver.cache, Shape(seqs), Shape(lens), *tree)


def softmax_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Attention in float64 that is causal for the last rows: (n, h, d), (m, g, d) -> (n, h, d)."""
    n, m, group = len(q), len(k), q.shape[1] // k.shape[1]
    scores = np.einsum("nhd,mhd->hnm", q.astype(np.float64), k.repeat(group, 1)) * SM_SCALE
    seen = np.arange(m)[None] <= np.arange(n)[:, None] + m - n
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hnm,mhd->nhd", weights, v.repeat(group, 1))


@pytest.mark.parametrize("model", ["no_rope", "no_rope_head64"])
def test_self_cross_and_merge(model: str, drive_on) -> None:
    """A model may attend in two parts and merge them, for which TVM's cache wants two functions."""
    driver = drive_on(model)
    h, d = driver.model.num_qo_heads, driver.model.head_dim
    driver.add(0, 1)
    driver.step([0, 1], [20, 33])
    lens = [5, 2]
    qkv = driver.random(sum(lens), 3 * h, d)
    expected = driver.oracle.attend(0, [0, 1], lens, qkv)
    begin(driver, [0, 1], lens)
    q, k, v = (driver.given(part) for part in np.split(qkv, 3, axis=1))
    parts = []
    for name, inputs in (("self_attention", (q, k, v)), ("cross_attention", (q,))):
        o, lse = driver.empty((7, h, d)), driver.empty((7, h), "float32")
        builtin(f"attention_kv_cache_{name}")(driver.cache, 0, SM_SCALE, *inputs, o, lse)
        parts += [o, lse]
    builtin("attention_kv_cache_merge_attn_output_inplace")(driver.cache, *parts)
    driver.check(parts[0].numpy(), expected)
    assert driver.error <= driver.tolerance


@ONLY_027
@pytest.mark.parametrize("model", ["no_rope", "no_rope_head64", *MODELS])
def test_shared_keys_and_values(model: str, drive_on) -> None:
    """A layer may attend to the tokens of an earlier one: first tokens, chunks on top, decode.

    Its queries come rotated, as the keys in the pages are.
    """
    driver = drive_on(model)
    config, oracle = driver.model, driver.oracle
    h, g, d = config.num_qo_heads, config.num_kv_heads, config.head_dim
    driver.add(0, 1)
    for seqs, lens in (([0, 1], [20, 3]), ([1, 0], [18, 5]), ([0, 1], [1, 1])):
        total, ends = sum(lens), np.cumsum(lens)
        begin(driver, seqs, lens)
        for layer in range(NUM_LAYERS):
            qkv = driver.random(total, h + 2 * g, d)
            out = driver.empty((total, h, d))
            fused = builtin("attention_kv_cache_attention_with_fused_qkv")
            fused(driver.cache, layer, SM_SCALE, driver.given(qkv), out)
            driver.check(out.numpy(), oracle.attend(layer, seqs, lens, qkv))
            new = [
                np.concatenate([held[seq, layer][-n:] for seq, n in zip(seqs, lens, strict=True)])
                for held in (oracle.keys, oracle.values)
            ]
            q = driver.random(total, h, d)
            k, v = (driver.given(x.astype(q.dtype)) for x in new)
            shared = builtin("attention_kv_cache_attention_with_shared_kv")
            shared(driver.cache, layer, SM_SCALE, driver.given(q), k, v, out)
            for seq, rows in zip(seqs, np.split(np.arange(total), ends[:-1]), strict=True):
                expected = softmax_attention(
                    q[rows], oracle.keys[seq, layer], oracle.values[seq, layer]
                )
                driver.check(out.numpy()[rows], expected)
        builtin("kv_state_end_forward")(driver.cache)
    for seq in (0, 1):
        driver.check_contents(seq)  # nothing was appended
    assert driver.error <= driver.tolerance


def test_query_positions(drive_on) -> None:
    """Of prompts, of chunks on a past, of decode and of the nodes of a tree."""
    driver = drive_on("group1")
    positions = lambda: builtin("attention_kv_cache_get_query_positions")(driver.cache)  # noqa: E731
    driver.add(0, 1)
    for seqs, lens, tree, expected in (
        ([0, 1], [3, 18], None, [*range(3), *range(18)]),
        ([1, 0], [2, 4], None, [18, 19, 3, 4, 5, 6]),
        ([0, 1], [1, 1], None, [7, 20]),
        ([1, 0], [4, 2], [-1, 0, 0, 1, -1, -1], [21, 22, 22, 23, 8, 8]),
    ):
        begin(driver, seqs, lens, *([] if tree is None else [Shape(tree)]))
        np.testing.assert_array_equal(positions().numpy(), expected)
        builtin("kv_state_end_forward")(driver.cache)


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("model", MODELS)
def test_forks_at_any_depth(model: str, page_size: int, drive_on) -> None:
    """From each length of a sequence, of a fork and of a fork of a fork, and on from there."""
    driver = drive_on(model, page_size=page_size, batch=32)
    driver.add(0)
    driver.step([0], [36])
    driver.fork(0, 1, 17)
    driver.step([1], [12])
    driver.fork(1, 2, 21)
    driver.step([2, 0], [9, 2])
    for parent, length in ((0, 38), (1, 29), (2, 30)):
        depths = range(1, length + 1)
        for start in range(0, length, 16):
            children = {10 + i: depth for i, depth in enumerate(depths[start : start + 16])}
            for child, depth in children.items():
                driver.fork(parent, child, depth)
            driver.step([*children, parent], [1] * len(children) + [1])
            driver.step([*children], [1 + i % 3 for i in range(len(children))])
            for child in children:
                driver.check_contents(child)
                driver.remove(child)
            driver.pop(parent, 1)
        driver.check_contents(parent)
    assert driver.error <= driver.tolerance


@pytest.mark.parametrize("model", MODELS)
def test_pop_of_any_number(model: str, drive_on) -> None:
    """Of nothing, over pages, into what other sequences share, and of all tokens."""
    driver = drive_on(model)
    driver.add(0)
    driver.step([0], [40])
    driver.fork(0, 1, 37)
    driver.fork(1, 2, 20)
    driver.step([1, 2], [5, 30])
    for seq, count in ((1, 0), (1, 6), (2, 40), (0, 17), (1, 20), (2, 10), (0, 23)):
        driver.pop(seq, count)
        driver.step([seq], [3])
        driver.check_contents(seq)
    driver.step([0, 1, 2], [1, 1, 1])
    with pytest.raises(Exception, match="exceeds the whole sequence length"):
        builtin("kv_state_popn")(driver.cache, 0, 100)
    assert driver.error <= driver.tolerance


@pytest.mark.parametrize("model", MODELS)
def test_commit_of_trees_in_a_batch(model: str, drive_on) -> None:
    """Ways through trees that move tokens, ways that do not, and none of the nodes."""
    driver = drive_on(model)
    driver.add(0, 1, 2)
    driver.step([0, 1, 2], [14, 31, 3])
    trees = [[-1, 0, 1, 2], [-1, -1, 0], [-1, 0, 0, 2, 2]]
    driver.step([0, 1, 2], [len(tree) for tree in trees], trees)
    driver.commit_all([0, 1, 2], [2, -1, 4], trees)
    for seq in (0, 1, 2):
        driver.check_contents(seq)
    driver.step([2, 1, 0], [1, 1, 1])
    driver.step([0, 1], [5, 20])
    assert driver.error <= driver.tolerance


def test_sliding_is_enabled_once_and_only_where_it_can_be(drive_on) -> None:
    """TVM's cache refuses the rest, and goes on to work."""
    fixed = drive_on("group1")
    fixed.add(0)
    with pytest.raises(Exception, match="does not support sliding window"):
        fixed.slide(0, 8, 0)
    driver = drive_on("group1", support_sliding_window=1)
    driver.add(0)
    enable = builtin("attention_kv_cache_enable_sliding_window_for_seq")
    for window, sink, message in ((0, 0, "positive"), (8, 8, "less than"), (8, -1, "non negative")):
        with pytest.raises(Exception, match=message):
            enable(driver.cache, 0, window, sink)
    driver.slide(0, 20, 4)
    with pytest.raises(Exception, match="cannot be enabled twice"):
        enable(driver.cache, 0, 20, 4)
    for n in (15, 9, 1, 1):
        driver.step([0], [n])
    driver.check_contents(0)
    assert driver.error <= driver.tolerance


def test_clear_and_what_the_cache_counts(drive_on) -> None:
    """Pages, tokens, and whether there are any."""
    driver = drive_on("group1")
    free = driver.pages
    empty, total = (
        builtin(f"attention_kv_cache_{name}") for name in ("empty", "get_total_sequence_length")
    )
    assert empty(driver.cache)
    driver.add(0, 1)
    driver.step([0, 1], [40, 3])
    assert not empty(driver.cache)
    assert total(driver.cache) == 43
    if HAS_LAYER_WINDOW:
        assert builtin("attention_kv_cache_get_sequence_length")(driver.cache, 0) == 40
    builtin("kv_state_clear")(driver.cache)
    assert (empty(driver.cache), total(driver.cache), driver.pages) == (True, 0, free)
    for layer in range(NUM_LAYERS):
        for seq in (0, 1):
            driver.oracle.keys.pop((seq, layer))
            driver.oracle.values.pop((seq, layer))
    driver.add(0)
    driver.step([0], [21])
    driver.step([0], [1])
    driver.check_contents(0)
    assert driver.error <= driver.tolerance


@ONLY_027
@pytest.mark.parametrize("model", MODELS)
def test_export_and_import_of_pages(model: str, drive_on) -> None:
    """A sequence is taken out of one cache and goes on in another one, which is cleared for it."""
    source, target = drive_on(model), drive_on(model)
    config = source.model
    source.add(1, 0)
    source.step([1, 0], [5, 37])  # so that its pages are not the first ones
    metadata = builtin("attention_kv_cache_get_checkpoint_metadata")(source.cache, 0)
    num_pages = len(json.loads(metadata)["logical_pages"])
    assert num_pages == 3
    target.add(3)
    target.step([3], [20])
    builtin("attention_kv_cache_prepare_import")(target.cache, 0, metadata)
    for layer in range(NUM_LAYERS):
        pages = source.empty((1, num_pages, 2, config.num_kv_heads, 16, config.head_dim))
        builtin("attention_kv_cache_export_page_group")(source.cache, 0, layer, pages)
        builtin("attention_kv_cache_import_page_group")(target.cache, 0, layer, pages)
        for held in ("keys", "values"):
            getattr(target.oracle, held)[0, layer] = getattr(source.oracle, held)[0, layer]
    builtin("attention_kv_cache_finish_import")(target.cache, 0)
    target.check_contents(0)
    target.add(1)
    target.step([1, 0], [20, 1])
    target.step([0], [9])
    target.check_contents(0)
    assert target.error <= target.tolerance

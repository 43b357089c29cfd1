"""Our paged KV cache, against float64 NumPy and, on CPU, against TVM's own cache."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from tvm_ffi import Shape

from tvm_flashinfer.relax import read_report


def serve(driver) -> None:
    """Prefill, chunks on top, decode, and every way to edit sequences."""
    driver.add(0, 1, 2)
    driver.step([0], [7])  # inside the first page
    driver.step([1, 2], [33, 16])  # over pages; exactly one page
    driver.step([0, 1, 2], [1, 1, 1])  # decode
    driver.step([0, 1], [5, 20])  # chunks on what is there
    driver.step([2, 0], [1, 9])  # decode and prefill in one step, in another order
    for _ in range(6):
        driver.step([0, 1, 2], [1, 1, 1])
    driver.fork(1, 3)  # at the end, inside a page
    driver.fork(1, 4, 16)  # at the end of a page
    driver.fork(1, 5, 21)  # inside a page
    driver.step([3, 4, 5, 1], [1, 1, 1, 1])
    driver.step([5, 4], [17, 3])
    driver.pop(1, 4)
    driver.pop(0, 25)  # back over the end of a page
    driver.step([0, 1], [2, 1])
    driver.remove(2)
    driver.add(2)
    driver.step([2, 3], [18, 1])
    for seq in (0, 1, 2, 3, 4, 5):
        driver.check_contents(seq)


@pytest.mark.parametrize(
    "model",
    ["group1", "group1_half", "group3", "group4", "group8", "head64", "head64_group4", "head80"],
)
def test_serving(model: str, compare) -> None:
    compare(model, serve)


@pytest.mark.parametrize("page_size", [1, 4, 32])
@pytest.mark.parametrize("model", ["group1", "group8"])
def test_other_page_sizes(model: str, page_size: int, compare) -> None:
    """TVM's kernels take pages of 16 tokens only."""
    compare(model, serve, tvms=False, page_size=page_size)


def rotating(driver) -> None:
    driver.add(0, 1)
    driver.step([0, 1], [40, 3])
    driver.step([0, 1], [1, 1])
    driver.step([1], [30])
    driver.step([1], [1])
    driver.check_contents(0)
    driver.check_contents(1)


@pytest.mark.parametrize(
    "model",
    ["no_rope", "partial_rope", "gptj_rope", "linear_rope", "llama3_rope", "yarn_rope", "longrope"],
)
def test_rope(model: str, compare) -> None:
    """TVM's own function of longrope does not parse."""
    compare(model, rotating, tvms=model != "longrope")


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize(
    "model", ["inline_rope", "inline_llama3_rope", "inline_gptj_rope", "inline_partial_rope"]
)
def test_rope_inside_attention(model: str, page_size: int, compare) -> None:
    """TVM's kernels rotate all dimensions and half-split pairs, and take pages of 16 tokens."""
    tvms = page_size == 16 and model in ("inline_rope", "inline_llama3_rope")
    compare(model, rotating, tvms=tvms, page_size=page_size)


def test_sequence_without_tokens(compare) -> None:
    """A sequence may be added and not used, and be in its first step beside others in theirs."""

    def steps(driver) -> None:
        driver.add(0, 1)
        driver.step([1], [3])
        driver.step([0, 1], [1, 1])

    compare("group1", steps)


@pytest.mark.parametrize("page_size", [16, 6])
@pytest.mark.parametrize("model", ["group1", "group8"])
def test_token_tree(model: str, page_size: int, compare) -> None:
    """Both tree slots, and the compaction of pages when a branch is accepted.

    TVM's own cache on CPU has the two tree functions in each other's slot and cannot do this.
    """

    def steps(driver) -> None:
        driver.add(0)
        driver.step([0], [14])
        #   0 - 1 - 3 - 5
        #     \ 2 - 4
        driver.step([0], [6], [[-1, 0, 0, 1, 2, 3]])
        driver.commit(0, 4, [0, 2, 4], 6)
        driver.step([0], [1])
        driver.step([0], [3], [[-1, 0, 0]])
        driver.commit(0, 2, [0, 2], 3)
        driver.step([0], [20])
        driver.check_contents(0)

    compare(model, steps, tvms=False, page_size=page_size)


def test_tree_that_grows(drive_on) -> None:
    """A tree on an uncommitted tree attends through the slot of paged trees."""
    driver = drive_on("group1")
    driver.add(0)
    driver.step([0], [20])
    driver.step([0], [3], [[-1, 0, 0]])
    assert driver.error <= driver.tolerance
    tokens, model = 2, driver.model
    qkv = driver.random(tokens, 12, model.head_dim)
    # The two new tokens hang below nodes 1 and 2 of the tree in the cache.
    begin = tvm_ffi.get_global_func("vm.builtin.kv_state_begin_forward")
    begin(driver.cache, Shape([0]), Shape([2]), Shape([1, 2]))
    out = driver.empty((tokens, 4, model.head_dim))
    fused = tvm_ffi.get_global_func("vm.builtin.attention_kv_cache_attention_with_fused_qkv")
    fused(driver.cache, 0, 0.25, driver.given(qkv), out)
    oracle = driver.oracle
    past = len(oracle.keys[0, 0])
    k, v = oracle.keys[0, 0], oracle.values[0, 0]
    x = qkv.astype(np.float64)
    depth = np.full(2, past - 3 + 2)
    q, new_k = oracle.rotate(x[:, :4], depth, tokens), oracle.rotate(x[:, 4:8], depth, tokens)
    new_v = x[:, 8:]
    for row, parent in enumerate((1, 2)):
        seen = [*range(past - 3), past - 3, past - 3 + parent]
        keys = np.concatenate([k[seen], new_k[row : row + 1]])
        values = np.concatenate([v[seen], new_v[row : row + 1]])
        scores = np.einsum("hd,mhd->hm", q[row], keys) * 0.25
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        expected = np.einsum("hm,mhd->hd", weights, values)
        driver.check(out.numpy()[row], expected)
    assert driver.error <= driver.tolerance


def test_report_of_the_library(compile_model) -> None:
    """It is read without a cache."""
    report = read_report(compile_model("group4"))
    assert report.fallbacks == []
    kernels = {row.slot: row.kernel for row in report.rows}
    # Without plans TVM decodes through the slot of decode, whatever the head ratio is.
    assert kernels["decode_paged"] == "flashinfer.bind_attention_decode_paged"

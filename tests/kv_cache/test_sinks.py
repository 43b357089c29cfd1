"""Attention sinks of each layer through TVM's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm_ffi
from cache_models import NUM_LAYERS
from sequences import SM_SCALE
from tvm_ffi import Shape

from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW

#: float32 on CPU, and where CUDA has kernels with plans and without; soft caps; ALiBi.
PLAIN = ["group1", "group3", "head64", "head64_group4", "no_rope", "inline_rope", "capped", "alibi"]


def with_sinks(driver: Any) -> Any:
    """Sinks of all heads and layers, one of them far below all scores and one far above."""
    rng = np.random.default_rng(1)
    shape = (NUM_LAYERS, driver.model.num_qo_heads)
    driver.sinks = (rng.standard_normal(shape) * 2).astype(np.float32)
    driver.sinks[0, 0], driver.sinks[1, -1] = -np.inf, 6
    return driver


def serve(driver: Any) -> None:
    """New tokens alone, on a past, single ones, and forks whose parts are merged."""
    driver.add(0, 1)
    driver.step([0], [7])
    driver.step([0, 1], [5, 20])
    driver.step([0, 1], [1, 1])
    driver.step([1, 0], [1, 9])
    driver.fork(1, 2, 16)
    driver.fork(1, 3)
    driver.step([2, 3, 1], [17, 1, 1])
    for _ in range(2):
        driver.step([0, 1, 2, 3], [1, 1, 1, 1])


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("model", PLAIN)
def test_serving(model: str, page_size: int, drive_on: Callable[..., Any]) -> None:
    driver = with_sinks(drive_on(model, page_size=page_size))
    serve(driver)
    assert driver.error <= driver.tolerance


@pytest.mark.parametrize("model", ["group1", "head64"])
def test_a_step_with_sinks_leaves_the_next_one_without(
    model: str, drive_on: Callable[..., Any]
) -> None:
    driver = with_sinks(drive_on(model))
    driver.add(0)
    driver.step([0], [20])
    driver.sinks = None
    driver.step([0], [5])
    driver.step([0], [1])
    assert driver.error <= driver.tolerance


def test_trees(drive_on: Callable[..., Any]) -> None:
    driver = with_sinks(drive_on("group1"))
    driver.add(0)
    driver.step([0], [14])
    driver.step([0], [6], [[-1, 0, 0, 1, 2, 3]])
    driver.commit(0, 4, [0, 2, 4], 6)
    driver.step([0], [1])
    assert driver.error <= driver.tolerance


def test_a_cache_that_slides_as_a_whole(drive_on: Callable[..., Any]) -> None:
    """Its own sinks are tokens that stay; these are numbers in the softmax."""
    driver = with_sinks(drive_on("group1", support_sliding_window=1))
    driver.add(0)
    driver.slide(0, 20, 4)
    for n in (15, 9, 1, 1, 30, 1):
        driver.step([0], [n])
    assert driver.error <= driver.tolerance


@pytest.mark.skipif(not HAS_LAYER_WINDOW, reason="TVM 0.26 fixes the window of layers at 1024")
@pytest.mark.parametrize("model", ["window24", "window24_head64"])
def test_beside_windows_of_layers(model: str, drive_on: Callable[..., Any]) -> None:
    """As in GPT-OSS, with requests beyond the window."""
    driver = with_sinks(drive_on(model))
    driver.add(0, 1)
    driver.step([0, 1], [70, 3])
    driver.step([0, 1], [1, 1])
    driver.step([1, 0], [60, 5])
    driver.step([0, 1], [1, 1])
    assert driver.error <= driver.tolerance


@pytest.mark.parametrize("model", ["group1", "head64"])
def test_sinks_matter(model: str, drive_on: Callable[..., Any]) -> None:
    """Without them, and with those of the other layer, the cache is far from the oracle."""
    for change in (lambda sinks: sinks[::-1].copy(), lambda sinks: np.full_like(sinks, -np.inf)):
        driver = with_sinks(drive_on(model))
        expected = driver.oracle.attend
        changed = change(driver.sinks)
        driver.oracle.attend = lambda layer, *args, sinks, run=expected, other=changed: run(
            layer, *args, sinks=other[layer]
        )
        driver.add(0)
        driver.step([0], [20])
        assert driver.error > 10 * driver.tolerance


def begin(driver: Any, seqs: list[int], lens: list[int], rows: int) -> tuple[Any, Any]:
    """Start a step of new sequences; QKV and the output, with so many rows."""
    config = driver.model
    driver.add(*seqs)
    tvm_ffi.get_global_func("vm.builtin.kv_state_begin_forward")(
        driver.cache, Shape(seqs), Shape(lens)
    )
    heads = config.num_qo_heads + 2 * config.num_kv_heads
    qkv = driver.random(rows, heads, config.head_dim)
    return qkv, driver.given(driver.random(rows, config.num_qo_heads, config.head_dim))


def test_rows_that_pad_a_step_stay(drive_on: Callable[..., Any]) -> None:
    """TVM's cache takes tensors with more rows than the step has tokens."""
    driver = with_sinks(drive_on("group1"))
    qkv, out = begin(driver, [0, 1], [5, 4], 12)
    before = out.numpy()[9:]
    driver.attend(1, driver.given(qkv), out)
    expected = driver.oracle.attend(1, [0, 1], [5, 4], qkv[:9], sinks=driver.sinks[1])
    driver.check(out.numpy()[:9], expected)
    np.testing.assert_array_equal(out.numpy()[9:], before)
    assert driver.error <= driver.tolerance


def test_caches_of_tvms_kernels_are_refused(drive: Callable[..., Any]) -> None:
    """Their LSE is out of reach, and what is not applied must not go unseen."""
    driver = with_sinks(drive("group1", "tir"))
    # A state that ours wrote before is none of this call.
    other = with_sinks(drive("group1"))
    other.add(0)
    other.step([0], [5])
    qkv, out = begin(driver, [0], [5], 5)
    with pytest.raises(RuntimeError, match=r"no function of tvm_flashinfer wrote `o`.*TVM's own"):
        driver.attend(0, driver.given(qkv), out)


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (np.zeros(3, np.float32), "sinks.*num_qo_heads"),
        (np.zeros((5, 4), np.float32), "sinks.*num_qo_heads"),
        (np.zeros(4, np.float16), "sinks.*float16"),
    ],
)
def test_wrong_sinks(sinks: np.ndarray, message: str, drive_on: Callable[..., Any]) -> None:
    """They are refused before anything is written, and the step goes on."""
    driver = with_sinks(drive_on("group1"))
    qkv, out = begin(driver, [0], [5], 5)
    attend = tvm_ffi.get_global_func("flashinfer.cache_attention_with_sinks")
    before = out.numpy()
    with pytest.raises((ValueError, TypeError), match=message):
        attend(driver.cache, 0, SM_SCALE, driver.given(qkv), driver.given(sinks), out)
    np.testing.assert_array_equal(out.numpy(), before)
    driver.attend(0, driver.given(qkv), out)
    driver.check(out.numpy(), driver.oracle.attend(0, [0], [5], qkv, sinks=driver.sinks[0]))
    assert driver.error <= driver.tolerance


@pytest.mark.parametrize(
    ("name", "tensors"),
    [
        ("cache_attention_in_window", ["qkv", "o"]),
        ("cache_self_attention_in_window", ["q", "k", "v", "o", "lse"]),
        ("cache_shared_attention_in_window", ["q", "k", "v", "o"]),
        ("cache_attention_with_sinks", ["qkv", "sinks", "o"]),
        ("cache_attention_with_sinks_in_window", ["qkv", "sinks", "o"]),
    ],
)
def test_nothing_in_the_place_of_something(
    name: str, tensors: list[str], drive: Callable[..., Any]
) -> None:
    """TVM's functions end the process when they are given None."""
    driver = drive("group1")
    call = tvm_ffi.get_global_func(f"flashinfer.{name}")
    numbers = [0, SM_SCALE] + [-1] * name.endswith("in_window")
    given = [driver.empty((4,), "float32") for _ in tensors]
    for cache in (None, 3, "text"):
        with pytest.raises(TypeError, match=rf"flashinfer\.{name}: `cache` is a "):
            call(cache, *numbers, *given)
    for i, tensor in enumerate(tensors):
        with pytest.raises((TypeError, ValueError), match=rf"`{tensor}` is"):
            call(driver.cache, *numbers, *given[:i], None, *given[i + 1 :])

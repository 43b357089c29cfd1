"""Caches whose scores are capped or sloped: soft caps (C27), and ALiBi by true positions."""

from __future__ import annotations

import numpy as np
import pytest
import tvm_ffi
from cache_models import MODELS
from sequences import SM_SCALE
from tvm_ffi import Shape

from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW, HAS_LAYER_WINDOW

SCORES = [name for name, model in MODELS.items() if not model.is_generic]


def serve(driver) -> None:
    """Prefill, chunks on a past, decode, forks whose parts are attended to one by one."""
    driver.add(0, 1)
    driver.step([0], [7])
    driver.step([0, 1], [5, 20])
    driver.step([0, 1], [1, 1])
    driver.step([1, 0], [1, 9])
    if "mha_sliding" in driver.model.attn_kind:
        driver.step([0, 1], [20, 23])
    else:
        driver.fork(1, 2, 16)
        driver.fork(1, 3)
        driver.step([2, 3, 1], [17, 1, 1])
    for _ in range(3):
        driver.step([0, 1], [1, 1])


@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("model", SCORES)
def test_serving(model: str, page_size: int, compare) -> None:
    """TVM's own cache has neither."""
    if MODELS[model].layer_window != DEFAULT_LAYER_WINDOW and not HAS_LAYER_WINDOW:
        pytest.skip("this TVM fixes the window of layers")
    compare(model, serve, tvms=False, page_size=page_size)


@pytest.mark.parametrize("model", ["capped", "alibi", "alibi_head64", "alibi_capped_rope"])
def test_windows_of_the_whole_cache(model: str, compare) -> None:
    """The positions are those in the cache, as for RoPE."""

    def steps(driver) -> None:
        driver.add(0)
        driver.slide(0, 30, 4)
        for n in (17, 22, 1, 1, 9):
            driver.step([0], [n])

    compare(model, steps, tvms=False, support_sliding_window=1)


@pytest.mark.parametrize("model", ["capped", "alibi", "alibi_head64"])
def test_token_tree(model: str, compare) -> None:
    """A node is as far from its parents as it is deep."""

    def steps(driver) -> None:
        driver.add(0)
        driver.step([0], [14])
        driver.step([0], [6], [[-1, 0, 0, 1, 2, 3]])
        driver.commit(0, 4, [0, 2, 4], 6)
        driver.step([0], [1])

    compare(model, steps, tvms=False)


def test_tree_that_grows_is_refused_with_slopes(drive_on) -> None:
    """TVM does not pass the depths of the nodes that are in the pages."""
    driver = drive_on("alibi")
    driver.add(0)
    driver.step([0], [3], [[-1, 0, 0]])
    begin = tvm_ffi.get_global_func("vm.builtin.kv_state_begin_forward")
    begin(driver.cache, Shape([0]), Shape([2]), Shape([1, 2]))
    qkv = driver.given(driver.random(2, 12, driver.model.head_dim))
    out = driver.empty((2, 4, driver.model.head_dim))
    fused = tvm_ffi.get_global_func("vm.builtin.attention_kv_cache_attention_with_fused_qkv")
    with pytest.raises(ValueError, match=r"positions.*alibi_by_position.*one step"):
        fused(driver.cache, 0, SM_SCALE, qkv, out)


@pytest.mark.parametrize("model", ["capped", "alibi"])
def test_what_is_asked_for_matters(model: str, drive_on) -> None:
    """The oracle without it is far from the cache: the tests above can fail."""
    driver = drive_on(model)
    driver.oracle.model = MODELS["group1" if model == "capped" else "no_rope"]
    driver.add(0)
    driver.step([0], [20])
    assert driver.error > 10 * driver.tolerance
    assert np.isfinite(driver.error)

"""More new tokens than the window of a layer, in calls that name the window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from cache_models import NUM_LAYERS, creation_module
from sequences import SM_SCALE
from tvm import relax as rx
from tvm_ffi import Shape

from tvm_flashinfer import call_counts, reset_call_counts
from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW

ONLY_027 = pytest.mark.skipif(
    not HAS_LAYER_WINDOW, reason="TVM 0.26 fixes the window of layers at 1024"
)

WINDOWS = ["window24", "window7_group4", "window24_head64"]


def builtin(name: str) -> Callable[..., Any]:
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")


def long_chunks(driver: Any) -> None:
    """First tokens and tokens on a past, in requests far beyond the window, at it and below."""
    window = driver.model.layer_window
    driver.add(0, 1, 2)
    driver.step([0, 1], [3 * window, window + 1])
    driver.step([0], [1])
    driver.step([1, 0, 2], [2 * window, 5, 3 * window + 2])
    for _ in range(3):
        driver.step([0, 1, 2], [1, 1, 1])
    driver.step([2, 1], [window, window + 1])
    driver.step([2], [window])


@ONLY_027
@pytest.mark.parametrize("page_size", [16, 5])
@pytest.mark.parametrize("model", [*WINDOWS, "capped_window24", "alibi_window24"])
def test_chunks_of_three_windows(model: str, page_size: int, compare: Callable[..., None]) -> None:
    """Layers with a window and without; TVM's own kernels would see too much."""
    compare(model, long_chunks, tvms=False, page_size=page_size)


@ONLY_027
@pytest.mark.parametrize("model", ["window24_head64", "window7_group4"])
def test_plans(model: str, drive: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots with a plan, as CUDA has them, on CPU: there the plan has the longest request."""
    monkeypatch.setattr("tvm_flashinfer.relax.kv_cache.unplanned_reasons", lambda *_: [])
    driver, target = drive(model), tvm.target.Target("llvm")
    module = tvm.compile(creation_module(driver.model, target, "shared"), target)
    create = rx.VirtualMachine(module, tvm.cpu())["create"]
    sizes = [Shape([size]) for size in (8, 1024, 256, 16, 0)]
    driver.cache = create(*sizes)
    reset_call_counts()
    long_chunks(driver)
    counts = call_counts()["cpu"]
    assert counts["batch_prefill_ragged_run"] > 0  # of full layers
    assert counts["attention_prefill_ragged"] > 0  # of sliding ones
    assert driver.error <= driver.tolerance
    driver.cache = create(*sizes)
    window = driver.model.layer_window
    qkv, out = begin(driver, [window, window + 1, 1])
    fused = builtin("attention_kv_cache_attention_with_fused_qkv")
    with pytest.raises(ValueError, match=f"a request has {window + 1} new tokens"):
        fused(driver.cache, 0, SM_SCALE, qkv, out)
    driver = drive(model)
    driver.cache, driver.tells_windows = create(*sizes), False
    driver.add(0, 1)
    driver.step([0, 1], [window, window])  # in all more than the window
    assert driver.error <= driver.tolerance


def test_chunk_over_the_default_window(drive_on: Callable[..., Any]) -> None:
    """Also with 0.26, where the window is 1024 for all models."""
    driver = drive_on("sliding_layer_no_rope", total=4096, chunk=2048)
    driver.add(0)
    driver.step([0], [1900])
    driver.step([0], [1])
    assert driver.error <= driver.tolerance


@ONLY_027
def test_the_window_matters(drive_on: Callable[..., Any]) -> None:
    """The oracle of a wider window is far from the cache, so the tests above can fail."""
    driver = drive_on("window24")
    driver.oracle.model = drive_on("group1").model
    driver.add(0)
    driver.step([0], [60])
    assert driver.error > 10 * driver.tolerance


def begin(driver: Any, lens: list[int], *tree: Any) -> tuple[Any, Any]:
    """Start a step of new sequences; QKV and the output."""
    config, rows = driver.model, sum(lens)
    driver.add(*range(len(lens)))
    builtin("kv_state_begin_forward")(driver.cache, Shape(range(len(lens))), Shape(lens), *tree)
    heads = config.num_qo_heads + 2 * config.num_kv_heads
    qkv = driver.given(driver.random(rows, heads, config.head_dim))
    return qkv, driver.empty((rows, config.num_qo_heads, config.head_dim))


@ONLY_027
@pytest.mark.parametrize("model", WINDOWS)
def test_calls_that_name_no_window(model: str, drive_on: Callable[..., Any], device: Any) -> None:
    """A request beyond the window is refused with what to do; up to the window nothing changes."""
    driver = drive_on(model)
    window = driver.model.layer_window
    fused = builtin("attention_kv_cache_attention_with_fused_qkv")
    qkv, out = begin(driver, [window + 1, 2])
    with pytest.raises(ValueError, match=f"new tokens.*window.* is {window}.*BindLayerWindows"):
        fused(driver.cache, 0, SM_SCALE, qkv, out)
    driver = drive_on(model)
    on_cpu = device.dlpack_device_type() == tvm.cpu().dlpack_device_type()
    driver.tells_windows = False
    driver.add(0, 1)
    if on_cpu or model == "window24_head64":
        driver.step([0, 1], [window, 2])  # its plan, or the host, knows the longest request
    else:
        driver.step([0], [window])
        driver.step([1], [2])
    driver.step([0, 1], [1, 1])
    assert driver.error <= driver.tolerance


@ONLY_027
def test_without_a_plan_the_gpu_knows_only_the_rows_of_a_step(
    drive_on: Callable[..., Any], device: Any
) -> None:
    """Requests that are short one by one are refused where nobody named the window."""
    if device.dlpack_device_type() == tvm.cpu().dlpack_device_type():
        pytest.skip("on CPU the lengths are read")
    driver = drive_on("window24")
    qkv, out = begin(driver, [20, 20])
    fused = builtin("attention_kv_cache_attention_with_fused_qkv")
    with pytest.raises(ValueError, match=r"together have 40 new tokens.*device alone"):
        fused(driver.cache, 0, SM_SCALE, qkv, out)


@ONLY_027
def test_deep_trees_are_refused(drive: Callable[..., Any]) -> None:
    """There is no window inside a tree: a full layer may have a deep one, a sliding one may not."""
    driver = drive("window24")
    qkv, out = begin(driver, [3, 26], Shape([-1, 0, 0, -1, -1, *range(1, 25)]))
    driver.attend(0, qkv, out)
    with pytest.raises(ValueError, match=r"request 1 has a way of 25 nodes.*at most 24"):
        driver.attend(1, qkv, out)


@ONLY_027
def test_wide_trees(drive_on: Callable[..., Any]) -> None:
    """More nodes than the window, and no way that is longer."""
    driver = drive_on("window24")
    driver.add(0)
    driver.step([0], [30])
    driver.step([0], [40], [[-1, *[i // 2 for i in range(39)]]])
    assert driver.error <= driver.tolerance


@ONLY_027
def test_grown_trees(drive_on: Callable[..., Any]) -> None:
    """Nodes in the pages and new ones, in calls that name the window."""
    driver = drive_on("window24")
    driver.add(0)
    driver.step([0], [40])
    driver.step([0], [6], [[-1, 0, 0, 1, 2, 3]])
    driver.commit(0, 4, [0, 2, 4], 6)
    driver.step([0], [50])
    driver.step([0], [1])
    assert driver.error <= driver.tolerance


def softmax_attention(q: Any, k: Any, v: Any, window: int) -> np.ndarray:
    """Causal attention of all rows in float64, (n, h, d); a row sees `window` tokens at most."""
    n = len(q)
    scores = np.einsum("nhd,mhd->hnm", q.astype(np.float64), k) * SM_SCALE
    distance = np.arange(n)[:, None] - np.arange(n)
    seen = (distance >= 0) & ((window < 0) | (distance < window))
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hnm,mhd->nhd", weights / weights.sum(-1, keepdims=True), v)


@ONLY_027
@pytest.mark.parametrize("method", ["self", "shared"])
def test_other_methods(method: str, drive_on: Callable[..., Any]) -> None:
    """Self-attention, and attention to the tokens of another layer; unnamed they are refused."""
    driver = drive_on("window24")
    config = driver.model
    h, d, window = config.num_qo_heads, config.head_dim, config.layer_window
    lens = [3 * window, 4]
    _, out = begin(driver, lens)
    arrays = [driver.random(sum(lens), h, d) for _ in range(3)]
    q, k, v = map(driver.given, arrays)
    outs = [out, driver.empty((sum(lens), h), "float32")] if method == "self" else [out]
    tvms = {"self": "self_attention", "shared": "attention_with_shared_kv"}[method]
    with pytest.raises(ValueError, match="BindLayerWindows"):
        builtin(f"attention_kv_cache_{tvms}")(driver.cache, 1, SM_SCALE, q, k, v, *outs)
    ours = tvm_ffi.get_global_func(f"flashinfer.cache_{method}_attention_in_window")
    for layer in range(NUM_LAYERS):
        told = config.window_of(layer)
        ours(driver.cache, layer, SM_SCALE, told, q, k, v, *outs)
        rows = np.split(np.arange(sum(lens)), [lens[0]])
        expected = [softmax_attention(*(x[r] for x in arrays), told) for r in rows]
        driver.check(out.numpy(), np.concatenate(expected))
    assert driver.error <= driver.tolerance


@ONLY_027
@pytest.mark.parametrize(
    ("window", "message"),
    [
        (0, "`window` is 0, expected"),
        (-2, "`window` is -2, expected"),
        (23, "a window of 23, but the cache was created with one of 24"),
    ],
)
def test_wrong_windows(window: int, message: str, drive_on: Callable[..., Any]) -> None:
    """A window that no layer has, and one that this cache has not."""
    driver = drive_on("window24")
    qkv, out = begin(driver, [5])
    ours = tvm_ffi.get_global_func("flashinfer.cache_attention_in_window")
    with pytest.raises(ValueError, match=message):
        ours(driver.cache, 1, SM_SCALE, window, qkv, out)
    ours(driver.cache, 1, SM_SCALE, 24, qkv, out)  # an error leaves nothing behind


@ONLY_027
def test_wrong_layers(drive_on: Callable[..., Any]) -> None:
    """A sliding layer that is called a full one, and a cache without sliding layers."""
    driver = drive_on("window24")
    driver.add(0)
    driver.step([0], [30])
    builtin("kv_state_begin_forward")(driver.cache, Shape([0]), Shape([1]))
    config = driver.model
    qkv = driver.given(driver.random(1, 3 * config.num_qo_heads, config.head_dim))
    out = driver.empty((1, config.num_qo_heads, config.head_dim))
    ours = tvm_ffi.get_global_func("flashinfer.cache_attention_in_window")
    with pytest.raises(ValueError, match="no window, but the cache was created with one of 24"):
        ours(driver.cache, 1, SM_SCALE, -1, qkv, out)
    for lens in ([5], [1]):
        full = drive_on("group1")
        qkv, out = begin(full, lens)
        with pytest.raises(ValueError, match="no layers with a window"):
            ours(full.cache, 1, SM_SCALE, 24, qkv, out)
        ours(full.cache, 1, SM_SCALE, -1, qkv, out)


def test_a_cache_of_tvms_kernels_goes_on_as_it_is(drive: Callable[..., Any]) -> None:
    """A model with windows in its calls may be given TVM's cache."""
    driver = drive("sliding_layer", "tir")
    driver.tells_windows = True
    driver.add(0)
    for n in (20, 3, 1):
        driver.step([0], [n])
    assert driver.error <= driver.tolerance

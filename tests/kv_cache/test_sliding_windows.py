"""Windows over the whole cache, with attention sinks, and windows of single layers."""

from __future__ import annotations

import pytest

from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW

ONLY_027 = pytest.mark.skipif(
    not HAS_LAYER_WINDOW, reason="TVM 0.26 fixes the window of layers at 1024"
)


def slide_over(driver) -> None:
    """Fill windows and slide: by decode, by chunks, over the ends of pages, and not at all."""
    driver.add(0, 1, 2, 3)
    driver.slide(0, 20, 4)
    driver.slide(1, 33, 0)
    driver.slide(2, 18, 17)
    # Sequence 3 keeps everything.
    driver.step([0, 1, 2, 3], [3, 30, 1, 21])
    for _ in range(5):
        driver.step([0, 1, 2, 3], [1, 1, 1, 1])
    driver.step([0, 3], [15, 2])  # past the window
    driver.step([1, 2], [50, 40])  # chunks that are longer than the window
    for _ in range(20):
        driver.step([3, 2, 1, 0], [1, 1, 1, 1])
    driver.step([0, 2], [2, 5])
    for seq in range(4):
        driver.check_contents(seq)


@pytest.mark.parametrize("page_size", [16, 1, 7])
@pytest.mark.parametrize("model", ["group1", "group3", "group4", "group8", "no_rope"])
def test_whole_cache(model: str, page_size: int, compare) -> None:
    """TVM's kernels take pages of 16 tokens only."""
    tvms = page_size == 16
    compare(model, slide_over, tvms=tvms, page_size=page_size, support_sliding_window=1)


@pytest.mark.parametrize(
    "model", ["partial_rope", "gptj_rope", "linear_rope", "llama3_rope", "yarn_rope", "inline_rope"]
)
def test_whole_cache_rotates_inside(model: str, compare) -> None:
    """Positions count in the cache. TVM's kernels rotate whole heads, and no pairs (2i, 2i + 1)."""
    tvms = model not in ("partial_rope", "gptj_rope")
    compare(model, slide_over, tvms=tvms, support_sliding_window=1)


def test_sequence_of_sinks(compare) -> None:
    """A fork inside of the sink of its parent starts from tokens that never slide."""

    def steps(driver) -> None:
        driver.add(0)
        driver.slide(0, 24, 16)
        driver.step([0], [20])
        driver.fork(0, 1, 16)
        driver.slide(1, 20, 16)
        driver.step([1], [3])
        for _ in range(6):
            driver.step([0, 1], [1, 1])

    compare("group1", steps, support_sliding_window=1)


def test_trees_do_not_slide(drive_on) -> None:
    driver = drive_on("group1", support_sliding_window=1)
    driver.add(0)
    with pytest.raises(Exception, match="Tree attention does not support sliding window"):
        driver.step([0], [3], [[-1, 0, 0]])


def layers_slide(driver) -> None:
    """Steps on sequences that are longer than the window, in chunks that are not."""
    window = driver.model.layer_window
    driver.add(0, 1, 2)
    driver.step([0, 1], [window, 3])
    driver.step([0], [1])  # the window is full
    driver.step([0, 1], [window // 2, window])
    for _ in range(5):
        driver.step([0, 1], [1, 1])
    driver.step([0, 1, 2], [window, window - 1, 2])
    driver.step([2, 0], [1, 5])
    for _ in range(window):
        driver.step([0, 1, 2], [1, 1, 1])


@ONLY_027
@pytest.mark.parametrize("page_size", [16, 4])
@pytest.mark.parametrize("model", ["window24", "window7_group4"])
def test_layers(model: str, page_size: int, compare) -> None:
    """Layers with a window beside layers without one."""
    compare(model, layers_slide, tvms=page_size == 16, page_size=page_size)


@ONLY_027
def test_tree_on_layers_that_slide(drive_on) -> None:
    """The window before the tree, and the path of a node in it."""
    driver = drive_on("window24")
    driver.add(0)
    driver.step([0], [20])
    driver.step([0], [18])
    driver.step([0], [6], [[-1, 0, 0, 1, 2, 3]])
    driver.commit(0, 4, [0, 2, 4], 6)
    driver.step([0], [1])
    assert driver.error <= driver.tolerance


def test_layers_before_their_window(compare) -> None:
    """No sequence reaches the window of 1024."""

    def steps(driver) -> None:
        driver.add(0)
        driver.step([0], [40])
        driver.step([0], [10])
        for _ in range(3):
            driver.step([0], [1])

    compare("sliding_layer", steps)


@pytest.mark.skipif(not HAS_LAYER_WINDOW, reason="in TVM 0.26 all rows of a chunk see one window")
def test_layers_at_the_default_window(compare) -> None:
    """Chunks that cross a window of 1024, and decode behind it."""

    def steps(driver) -> None:
        driver.add(0, 1)
        driver.step([0], [700])
        driver.step([0, 1], [600, 90])
        driver.step([1, 0], [690, 1])
        for _ in range(3):
            driver.step([0, 1], [1, 1])
        driver.step([1], [500])

    compare("sliding_layer_no_rope", steps, total=4096, chunk=1024)


def test_a_cache_with_layer_windows_does_not_slide_as_a_whole() -> None:
    """TVM would rotate its pages and its new tokens by different angles."""
    import tvm_ffi

    slot = tvm_ffi.get_global_func("flashinfer.cache_slot")
    slot("prefill_paged", '{"layer_window": 8}', False, 0)
    with pytest.raises(ValueError, match="support_sliding_window 0"):
        slot("prefill_paged", '{"layer_window": 8}', False, 1)

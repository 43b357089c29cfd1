"""Caches that need the kernels without a plan, on a GPU, against the same on CPU in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import spec
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache, RopeMode
from tvm_ffi import Shape

from examples.llama.compile import default_target
from tvm_flashinfer import call_counts, reset_call_counts
from tvm_flashinfer.relax import FlashInferPagedKVCache

pytestmark = pytest.mark.cuda

HEADS, KV_HEADS, LAYERS = 8, 2, 2


def build(
    target: tvm.target.Target,
    dtype: str,
    head_dim: int,
    rope_mode: RopeMode,
    folder: Path,
    ship: str | None = None,
) -> Any:
    """Compile a module that is nothing but attention through the cache."""

    class Attention(nn.Module):
        def attend(self, qkv: nn.Tensor, cache: PagedKVCache) -> nn.Tensor:
            # All layers are in the result: a call whose output nobody reads is dead code.
            outs = [
                cache.attention_with_fused_qkv(layer, qkv, HEADS, sm_scale=head_dim**-0.5)
                for layer in range(LAYERS)
            ]
            return sum(outs[1:], outs[0]) * (1 / LAYERS)

        def create(
            self,
            max_batch_size: Any,
            max_total_seq_len: Any,
            prefill_chunk_size: Any,
            page_size: Any,
            support_sliding_window: Any,
        ) -> PagedKVCache:
            cache = FlashInferPagedKVCache(
                "mha", max_batch_size, max_total_seq_len, prefill_chunk_size, page_size,
                support_sliding_window, relax.ShapeExpr([0, LAYERS]), LAYERS, HEADS, KV_HEADS,
                head_dim, head_dim, 0, 0, rope_mode, 1.0, 10000.0, {}, relax.prim_value(0),
                head_dim, False, dtype, target, ship=ship,
            )  # fmt: skip
            self.extern_mods = cache.extern_mods
            return cache

    model = Attention()
    none = {"param_mode": "none", "effect_mode": "none"}
    sizes = ("max_batch_size", "max_total_seq_len", "prefill_chunk_size", "page_size")
    with target:
        mod, _, _ = model.export_tvm(
            spec={
                "attend": {
                    "qkv": spec.Tensor([1, "n", HEADS + 2 * KV_HEADS, head_dim], dtype),
                    "cache": spec.Object(object_type=PagedKVCache),
                    "$": none,
                },
                "create": {name: int for name in (*sizes, "support_sliding_window")} | {"$": none},
            },
            allow_extern=True,
        )
        mod = mod.with_attr("external_mods", list(model.extern_mods))
        tvm.compile(mod, target=target).export_library(str(folder / f"{target.kind.name}.so"))
    return tvm.runtime.load_module(str(folder / f"{target.kind.name}.so"))


class Steps:
    """Steps of a cache on one device, from the rows of `qkv` in turn, and what they give."""

    def __init__(
        self, module: Any, device: Any, dtype: str, qkv: np.ndarray, *, slides: int = 0, total: int
    ) -> None:
        self._vm, self._device, self._dtype = relax.VirtualMachine(module, device), device, dtype
        self._cache = self._vm["create"](*(Shape([n]) for n in (4, total, 256, 16, slides)))
        self._rows, self._at = qkv, 0
        self.outputs: list[np.ndarray] = []
        self.free_pages: list[int] = []

    def call(self, name: str, *args: Any) -> Any:
        """Call one of TVM's functions of the cache."""
        return tvm.get_global_func("vm.builtin." + name)(self._cache, *args)

    def pages(self) -> int:
        """Pages that are free."""
        return int(self.call("attention_kv_cache_get_num_available_pages"))

    def step(self, seqs: list[int], lens: list[int]) -> None:
        """Append the next rows to sequences, and keep the output and the number of free pages."""
        count = sum(lens)
        self.call("kv_state_begin_forward", Shape(seqs), Shape(lens))
        rows = self._rows[None, self._at : self._at + count].astype(self._dtype)
        assert rows.shape[1] == count, "more rows are needed"
        out = self._vm["attend"](tvm.runtime.tensor(rows, self._device), self._cache)
        self.outputs.append(out.numpy()[0].astype(np.float32))
        self.call("kv_state_end_forward")
        self._device.sync()
        self._at += count
        self.free_pages.append(self.pages())


def prefill_and_decode(steps: Steps, slides: bool) -> None:
    """Prefill in chunks and decode; with a window of 40 tokens and 4 sinks when it slides."""
    steps.call("kv_state_add_sequence", 0)
    if slides:
        steps.call("attention_kv_cache_enable_sliding_window_for_seq", 0, 40, 4)
    for count in (37, 21, 1, 1, 30, 1):
        steps.step([0], [count])


def edit_sequences(steps: Steps) -> None:
    """Forks, whole pages popped, parents removed before children, and every page filled, twice."""
    free = steps.pages()
    for order in ((0, 2, 1), (1, 0, 2)):
        steps.call("kv_state_add_sequence", 0)
        steps.step([0], [40])
        steps.call("kv_state_fork_sequence", 0, 1, 16)
        steps.call("kv_state_fork_sequence", 0, 2, 21)
        steps.step([1, 2, 0], [18, 3, 1])
        steps.call("kv_state_popn", 1, 18)  # all that it has of its own
        steps.step([1, 0], [16, 1])
        steps.call("kv_state_popn", 1, 16)
        steps.step([2, 1], [1, 2])
        while steps.pages() > 0:
            steps.step([2], [16])
        steps.step([1, 0], [1, 1])
        for left, seq in enumerate(order, 1):
            steps.call("kv_state_remove_sequence", seq)
            if order[left:]:
                steps.step(list(order[left:]), [1] * len(order[left:]))
        assert steps.pages() == free


def build_both(head_dim: int, rope_mode: RopeMode, folder: Path) -> dict[str, Any]:
    """The module in float16 for the GPU, and in float32 for the CPU."""
    return {
        "cuda": build(default_target("cuda"), "float16", head_dim, rope_mode, folder),
        "cpu": build(tvm.target.Target("llvm"), "float32", head_dim, rope_mode, folder),
    }


def compare(
    modules: dict[str, Any],
    cuda: Any,
    head_dim: int,
    rows: int,
    serve: Callable[[Steps], None],
    **sizes: int,
) -> None:
    """Serve from both, and compare outputs and pages."""
    rng = np.random.default_rng(head_dim)
    qkv = rng.standard_normal((rows, HEADS + 2 * KV_HEADS, head_dim)).astype(np.float16)
    got = Steps(modules["cuda"], cuda, "float16", qkv, **sizes)
    expected = Steps(modules["cpu"], tvm.cpu(), "float32", qkv, **sizes)
    reset_call_counts(modules["cuda"])
    serve(got)
    # The library is self-contained, and has a counter of its own.
    calls = call_counts(modules["cuda"])["cuda"]
    steps = LAYERS * len(got.outputs)
    assert calls["append_paged_kv_cache"] == calls["split_qkv_rotary"] == steps
    serve(expected)
    for a, b in zip(got.outputs, expected.outputs, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=6e-3)
    assert got.free_pages == expected.free_pages


@pytest.mark.parametrize("slides", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rope_mode"), [(64, RopeMode.NORMAL), (80, RopeMode.NORMAL), (64, RopeMode.INLINE)]
)
def test_equals_the_cache_on_cpu(cuda, tmp_path, head_dim, rope_mode, slides) -> None:
    """Sliding as a whole, a head_dim without a planned kernel, RoPE inside attention."""
    modules = build_both(head_dim, rope_mode, tmp_path)
    sizes = {"slides": int(slides), "total": 1024}
    compare(modules, cuda, head_dim, 91, lambda steps: prefill_and_decode(steps, slides), **sizes)


@pytest.mark.parametrize("head_dim", [64, 80])
def test_edited_sequences(cuda, tmp_path, head_dim) -> None:
    """With plans and without: no page is lost, and the last one can be filled."""
    modules = build_both(head_dim, RopeMode.NORMAL, tmp_path)
    compare(modules, cuda, head_dim, 400, edit_sequences, total=160)

"""Caches that need the kernels without a plan, on a GPU, against the same on CPU in float32."""

from __future__ import annotations

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
from tvm_flashinfer.relax import FlashInferPagedKVCache

pytestmark = pytest.mark.cuda

HEADS, KV_HEADS, LAYERS = 8, 2, 2


def build(
    target: tvm.target.Target, dtype: str, head_dim: int, rope_mode: RopeMode, folder: Path
) -> Any:
    """Compile a module that is nothing but attention through the cache."""

    class Attention(nn.Module):
        def attend(self, qkv: nn.Tensor, cache: PagedKVCache) -> nn.Tensor:
            for layer in range(LAYERS):
                out = cache.attention_with_fused_qkv(layer, qkv, HEADS, sm_scale=head_dim**-0.5)
            return out

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
                head_dim, False, dtype, target,
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


def run(module: Any, device: Any, dtype: str, qkv: np.ndarray, slides: bool) -> list[np.ndarray]:
    """Prefill in chunks, fork, decode; with a window of 40 tokens and 4 sinks when it slides."""
    vm = relax.VirtualMachine(module, device)
    cache = vm["create"](*(Shape([n]) for n in (4, 1024, 256, 16, int(slides))))
    call = lambda name: tvm.get_global_func("vm.builtin." + name)  # noqa: E731
    call("kv_state_add_sequence")(cache, 0)
    if slides:
        call("attention_kv_cache_enable_sliding_window_for_seq")(cache, 0, 40, 4)
    outputs, at = [], 0
    for count in (37, 21, 1, 1, 30, 1):
        call("kv_state_begin_forward")(cache, Shape([0]), Shape([count]))
        part = tvm.runtime.tensor(qkv[None, at : at + count].astype(dtype), device)
        outputs.append(vm["attend"](part, cache).numpy()[0].astype(np.float32))
        call("kv_state_end_forward")(cache)
        device.sync()
        at += count
    return outputs


@pytest.mark.parametrize("slides", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rope_mode"), [(64, RopeMode.NORMAL), (80, RopeMode.NORMAL), (64, RopeMode.INLINE)]
)
def test_equals_the_cache_on_cpu(cuda, tmp_path, head_dim, rope_mode, slides) -> None:
    """Sliding as a whole, a head_dim without a planned kernel, RoPE inside attention."""
    rng = np.random.default_rng(head_dim)
    qkv = rng.standard_normal((91, HEADS + 2 * KV_HEADS, head_dim)).astype(np.float16)
    modules = {
        "cuda": build(default_target("cuda"), "float16", head_dim, rope_mode, tmp_path),
        "cpu": build(tvm.target.Target("llvm"), "float32", head_dim, rope_mode, tmp_path),
    }
    got = run(modules["cuda"], cuda, "float16", qkv, slides)
    expected = run(modules["cpu"], tvm.cpu(), "float32", qkv, slides)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=6e-3)

"""A compiled model that calls `attention_with_sinks`, in layers with a window and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
import tvm_ffi
from cache_models import NUM_LAYERS, Model, add_generic_creation, cuda_target
from sequences import SM_SCALE
from tvm import relax as rx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache
from tvm_ffi import Shape

from tvm_flashinfer.relax import DispatchKVCacheCreation, attention_with_sinks, read_report
from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW


def builtin(name: str) -> Callable[..., Any]:
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")


class Attention(nn.Module):
    """The attention of all layers: a parameter each with its sinks."""

    def __init__(self, model: Model) -> None:
        self.num_heads = model.num_qo_heads
        self.sinks = nn.ParameterList(
            [nn.Parameter((model.num_qo_heads,), "float32") for _ in range(NUM_LAYERS)]
        )

    def forward(self, first: nn.Tensor, second: nn.Tensor, cache: PagedKVCache) -> Any:
        """Attend in the first layer, then in the second one."""
        return tuple(
            attention_with_sinks(cache, layer, qkv, self.num_heads, SM_SCALE, self.sinks[layer])
            for layer, qkv in enumerate((first, second))
        )


def compiled(model: Model, target: tvm.target.Target, device: Any) -> rx.VirtualMachine:
    """The model as a virtual machine, with our cache and TVM's."""
    qkv = nn.spec.Tensor(
        ["b", "s", model.num_qo_heads + 2 * model.num_kv_heads, model.head_dim], model.dtype
    )
    spec = {
        "forward": {
            "first": qkv,
            "second": qkv,
            "cache": nn.spec.Object(object_type=PagedKVCache),
            "$": {"param_mode": "packed", "effect_mode": "none"},
        }
    }
    mod, _ = Attention(model).export_tvm(spec)
    builder = rx.BlockBuilder(mod)
    add_generic_creation(builder, "paged", model)
    dispatch = DispatchKVCacheCreation(target, layer_sliding_window_size=model.layer_window)
    return rx.VirtualMachine(tvm.compile(dispatch(builder.get()), target), device)


def step(driver: Any, vm: rx.VirtualMachine, cache: Any, n: int) -> None:
    """Append tokens to the only sequence, in both layers."""
    model = driver.model
    builtin("kv_state_begin_forward")(cache, Shape([0]), Shape([n]))
    heads = model.num_qo_heads + 2 * model.num_kv_heads
    qkvs = [driver.random(1, n, heads, model.head_dim) for _ in range(NUM_LAYERS)]
    outs = vm["forward"](*map(driver.given, qkvs), cache, [*map(driver.given, driver.sinks)])
    for layer, (out, qkv) in enumerate(zip(outs, qkvs, strict=True)):
        sinks = driver.sinks[layer]
        driver.check(out.numpy()[0], driver.oracle.attend(layer, [0], [n], qkv[0], sinks=sinks))
    builtin("kv_state_end_forward")(cache)


def test_model_with_sinks(drive_on: Callable[..., Any], device: Any) -> None:
    """As GPT-OSS: other sinks in each layer, and requests longer than the window of one of them."""
    driver = drive_on("window24" if HAS_LAYER_WINDOW else "sliding_layer_no_rope")
    model = driver.model
    on_cpu = device.dlpack_device_type() == tvm.cpu().dlpack_device_type()
    vm = compiled(model, tvm.target.Target("llvm") if on_cpu else cuda_target(), device)
    (row,) = (row for row in read_report(vm).rows if row.slot == "prefill_ragged")
    assert "2 calls of the module name the window of their layer" in row.reasons
    driver.sinks = driver.rng.standard_normal((NUM_LAYERS, model.num_qo_heads)).astype("float32")
    sizes = [Shape([size]) for size in (4, 4096, 2048, 16, 0)]
    cache = vm["create_flashinfer_paged_cache"](*sizes)
    builtin("kv_state_add_sequence")(cache, 0)
    # With 0.26 all rows of a chunk on a past see one window.
    for n in (72, 5, 1, 1) if HAS_LAYER_WINDOW else (1100, 1, 1):
        step(driver, vm, cache, n)
    assert driver.error <= driver.tolerance
    theirs = vm["create_tir_paged_cache"](*sizes)
    builtin("kv_state_add_sequence")(theirs, 0)
    with pytest.raises(RuntimeError, match="no function of tvm_flashinfer wrote `o`"):
        step(driver, vm, theirs, 1)

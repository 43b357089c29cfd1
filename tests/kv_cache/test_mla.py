"""Multi-head latent attention, as DeepSeek's models call the cache: TVM has none on CPU."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tvm
import tvm_ffi
from cache_models import MODELS, Model, creation_module, cuda_target
from latent import Latent, planned_cache
from tvm import relax as rx
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm_ffi import Shape

from tvm_flashinfer.relax import read_report

#: Largest error that rounding explains.
TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}


def deepseek(dtype: str) -> Model:
    """The head dimensions of DeepSeek's models."""
    return Model(16, 1, 576, dtype, int(RopeMode.NONE), attn_kind="mla", v_head_dim=512,
                 mla_head_dims=(192, 128))  # fmt: skip


def check(latent: Latent) -> None:
    """Run the steps; the error must be what rounding explains."""
    latent.run()
    assert latent.error < TOLERANCE[latent.model.dtype]


@pytest.mark.parametrize("page_size", [16, 3])
def test_mla(page_size: int, drive_on) -> None:
    """Head dimensions for which CUDA has no kernels with a plan."""
    driver = drive_on("mla", page_size=page_size)
    check(Latent(driver.cache, driver.model, driver.device))


@pytest.mark.parametrize("page_size", [16, 3])
def test_planned_cache(page_size: int) -> None:
    """What the slots hold on CUDA, on CPU and in small."""
    check(Latent(planned_cache(MODELS["mla"], page_size, tvm.cpu()), MODELS["mla"], tvm.cpu()))


@pytest.mark.parametrize("page_size", [16, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_planned_cache_of_deepseek(device, dtype, page_size) -> None:
    """The slots that a CUDA model has, made without a model."""
    model = deepseek(dtype)
    check(Latent(planned_cache(model, page_size, device), model, device))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_compiled_cache_of_deepseek(device, dtype, tmp_path) -> None:
    """A compiled model; on CUDA its library has the kernels in it."""
    on_cuda = device.dlpack_device_type() != tvm.cpu().dlpack_device_type()
    target = cuda_target() if on_cuda else tvm.target.Target("llvm")
    model = deepseek(dtype)
    module = creation_module(model, target, "self-contained" if on_cuda else "shared")
    path = tmp_path / "cache.so"
    tvm.compile(module, target=target).export_library(str(path))
    vm = rx.VirtualMachine(tvm.runtime.load_module(str(path)), device)
    cache = vm["create"](*(Shape([n]) for n in (8, 1024, 256, 16, 0)))
    check(Latent(cache, model, device))


def test_report(compile_model) -> None:
    report = read_report(compile_model("mla"))
    rows = {row.slot: row for row in report.rows if "mla" in row.site}
    assert rows["mla"].kernel == "flashinfer.bind_attention_mla"
    assert rows["append"].kernel == "flashinfer.append_paged_mla_kv_cache"
    assert report.fallbacks == []


def test_tvm_has_no_cache_of_mla_on_cpu(compile_model) -> None:
    with pytest.raises(Exception, match="create_tir_mla_cache"):
        compile_model("mla")["create_tir_mla_cache"]


@pytest.mark.parametrize("given", [{"head_dim_qk": 24}, {"head_dim_vo": 16}])
def test_head_dims_of_new_tokens_come_together(given: dict[str, int]) -> None:
    make = tvm_ffi.get_global_func("flashinfer.cache_slot")
    with pytest.raises(ValueError, match=r"`head_dim_qk` and `head_dim_vo`; give both"):
        make("prefill_ragged", json.dumps(given), True, 0)


def test_head_dims_are_for_new_tokens() -> None:
    make = tvm_ffi.get_global_func("flashinfer.cache_slot")
    with pytest.raises(ValueError, match="for prefill_ragged alone"):
        make("prefill_paged", '{"head_dim_qk": 32, "head_dim_vo": 16}', True, 0)


def test_a_step_that_was_not_planned() -> None:
    """A run without a plan serves one row of each request, and says so of others."""
    options = json.dumps({"head_dim_qk": 32, "head_dim_vo": 16})
    slot = tvm_ffi.get_global_func("flashinfer.cache_slot")("prefill_ragged", options, True, 0)
    assert list(slot[3:]) == [32, 16]
    q, v = (tvm.runtime.tensor(np.zeros((3, 2, d), np.float16)) for d in (32, 16))
    lse = tvm.runtime.empty((3, 2), "float32")
    offsets = tvm.runtime.tensor(np.array([0, 1, 3], np.int32))
    with pytest.raises(ValueError, match="`plan` is None"):
        slot[1](None, None, None, q, q, v, offsets, offsets, v, lse, 1, 0, -1, False, 0.2, 1.0, 1.0)

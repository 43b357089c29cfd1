"""Modules with the generic creation of a paged KV cache, as MLC LLM emits it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from tvm_flashinfer.relax._compat import StringImm

_KV_CACHE_TESTS = str(Path(__file__).parent.parent / "kv_cache")
if _KV_CACHE_TESTS not in sys.path:
    sys.path.insert(0, _KV_CACHE_TESTS)
from parsed_once import kernels_parsed_once  # noqa: E402

SIZES = (
    "max_batch_size",
    "max_total_seq_len",
    "prefill_chunk_size",
    "page_size",
    "support_sliding_window",
)

#: Llama-3-8B.
LLAMA: dict[str, Any] = {
    "attn_kind": "mha",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "qk_head_dim": 128,
    "v_head_dim": 128,
    "mla_original_qk_head_dim": 0,
    "mla_original_v_head_dim": 0,
    "rope_mode": int(RopeMode.NORMAL),
    "rope_scale": 1,
    "rope_theta": 500000.0,
    "rope_scaling": {},
    "rope_ext_factors": None,
    "rotary_dim": 128,
    "enable_disaggregation": False,
    "dtype": "float16",
}


def dtype_imm(dtype: str) -> Any:
    """A constant that holds a dtype."""
    if hasattr(rx, "DataTypeImm"):
        return rx.DataTypeImm(dtype)
    return tvm.ir.GenericConst(tvm.DataType(dtype), rx.AnyType())


def generic_arguments(sizes: list[tirx.Var], changes: dict[str, Any]) -> list[Any]:
    """The 18 arguments of the generic call for Llama-3-8B with changes."""
    model = {**LLAMA, **changes}
    kind, ext = model["attn_kind"], model["rope_ext_factors"]
    return [
        StringImm(kind) if isinstance(kind, str) else [StringImm(one) for one in kind],
        rx.ShapeExpr(sizes),
        rx.ShapeExpr([0, model["num_hidden_layers"]]),
        *(
            rx.prim_value(model[name])
            for name in (
                "num_hidden_layers",
                "num_attention_heads",
                "num_key_value_heads",
                "qk_head_dim",
                "v_head_dim",
                "mla_original_qk_head_dim",
                "mla_original_v_head_dim",
                "rope_mode",
                "rope_scale",
                "rope_theta",
            )
        ),
        StringImm(json.dumps(model["rope_scaling"])),
        rx.prim_value(0) if ext is None else rx.const(np.array(ext, "float32")),
        rx.prim_value(model["rotary_dim"]),
        rx.prim_value(int(model["enable_disaggregation"])),
        dtype_imm(model["dtype"]),
    ]


def add_generic_creation(
    builder: rx.BlockBuilder,
    name: str = "create_paged_kv_cache",
    edit: Callable[[list[Any]], list[Any]] = lambda args: args,
    observer: str = "",
    **changes: Any,
) -> None:
    """Add the function of an exported model; an observer is called with the cache after it."""
    sizes = [tirx.Var(size, "int64") for size in SIZES]
    params = [rx.Var(f"{var.name}_", rx.ShapeType([var])) for var in sizes]
    with builder.function(name, params, attrs={"num_input": 5}):
        with builder.dataflow():
            cache = rx.call_pure_packed(
                "mlc.create_paged_kv_cache_generic",
                *edit(generic_arguments(sizes, changes)),
                ty_args=rx.AnyType(),
            )
            output = builder.emit_output(cache)
        if observer:
            output = builder.emit(rx.call_pure_packed(observer, output, ty_args=rx.AnyType()))
        builder.emit_func_output(output)


def add_other_functions(builder: rx.BlockBuilder) -> None:
    """Add a function that has nothing to do with caches."""
    x = rx.Var("x", rx.TensorType([tirx.Var("n", "int64"), 4], "float32"))
    with builder.function("embed", [x]):
        with builder.dataflow():
            output = builder.emit_output(rx.op.add(x, x))
        builder.emit_func_output(output)


def make_generic_module(
    edit: Callable[[list[Any]], list[Any]] = lambda args: args, **changes: Any
) -> tvm.IRModule:
    """A module with a generic creation function and another one."""
    builder = rx.BlockBuilder()
    add_other_functions(builder)
    add_generic_creation(builder, edit=edit, **changes)
    return builder.get()


@pytest.fixture(autouse=True, scope="session")
def fast_kernels() -> Iterator[None]:
    """`kernels_parsed_once`."""
    with kernels_parsed_once():
        yield


@pytest.fixture
def generic_module() -> Callable[..., tvm.IRModule]:
    """`make_generic_module`."""
    return make_generic_module


@pytest.fixture(scope="session")
def module_builder() -> tuple[Callable[..., None], Callable[..., None]]:
    """`add_generic_creation` and `add_other_functions`."""
    return add_generic_creation, add_other_functions


@pytest.fixture
def cuda() -> tvm.target.Target:
    """Hopper, on a machine that may have no GPU."""
    return tvm.target.Target(
        {
            "kind": "cuda",
            "arch": "sm_90a",
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        }
    )


@pytest.fixture(scope="session")
def llvm() -> tvm.target.Target:
    """The machine that runs the tests."""
    return tvm.target.Target("llvm")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No choice of the user's shell reaches a test."""
    for name in ("MLC_MULTI_ARCH", "TVM_FLASHINFER_SHIP", "TVM_FLASHINFER_STRICT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name."""
    return np.random.default_rng(list(request.node.name.encode()))


@pytest.fixture(scope="session")
def library(module_builder, llvm, tmp_path_factory) -> Path:
    """A model that is shipped shared: its functions are looked up when it is loaded."""
    builder = rx.BlockBuilder()
    module_builder[0](
        builder, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        qk_head_dim=16, v_head_dim=16, rotary_dim=16, dtype="float32",
    )  # fmt: skip
    from tvm_flashinfer.relax import DispatchKVCacheCreation

    mod = DispatchKVCacheCreation(llvm)(builder.get())
    path = tmp_path_factory.mktemp("load") / "model.so"
    tvm.compile(mod, llvm).export_library(str(path))
    return path

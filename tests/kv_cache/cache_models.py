"""The models whose caches are tested, and the libraries with their caches in them."""

from __future__ import annotations

import functools
import importlib
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
from parsed_once import kernels_parsed_once
from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

NUM_LAYERS = 2

Library = tuple[int, int, int, str, int]


@dataclass(frozen=True)
class Model:
    """What a cache is compiled for."""

    num_qo_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    dtype: str = "float32"
    rope_mode: int = int(RopeMode.NORMAL)
    rope_theta: float = 10000.0
    rope_scale: float = 1.0
    rotary_dim: int = 32
    rope_scaling: str = "{}"
    ext_factors: tuple[float, ...] = ()
    attn_kind: tuple[str, ...] | str = "mha"
    layer_window: int = 1024
    v_head_dim: int = 0
    mla_head_dims: tuple[int, int] = (0, 0)
    soft_cap: float = 0.0
    alibi_slopes: tuple[float, ...] = ()
    beside_tvms: bool = True

    @property
    def is_generic(self) -> bool:
        """Whether the generic call for a cache carries all of it; TVM's cache does then too."""
        return self.beside_tvms and not self.soft_cap and not self.alibi_slopes

    def window_of(self, layer: int) -> int:
        """Tokens of the window of a layer, or -1."""
        kind = self.attn_kind if isinstance(self.attn_kind, str) else self.attn_kind[layer]
        return self.layer_window if kind == "mha_sliding" else -1

    @property
    def library(self) -> Library:
        """Models of one value are compiled together, since they share TVM's kernels."""
        shape = self.num_qo_heads, self.num_kv_heads, self.head_dim
        return *shape, self.dtype, self.layer_window


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "max_position_embeddings": 128,
    "original_max_position_embeddings": 32,
}

#: Of long inputs, then of short ones.
LONGROPE_FACTORS = tuple(1 + 0.25 * i for i in range(16)) + tuple(1 + 0.05 * i for i in range(16))

#: ALiBi of four heads, of which one has none.
SLOPES = (0.25, 0.03125, 0.0, 0.5)

_INLINE = int(RopeMode.INLINE)

#: Every model of the tests. The number in a name is the query heads per KV head.
MODELS = {
    "group1": Model(),
    "group1_half": Model(dtype="float16"),
    "group3": Model(6, 2, head_dim=24, rotary_dim=24),
    "group4": Model(8, 2, dtype="bfloat16"),
    "group8": Model(8, 1, dtype="float16"),
    # CUDA has kernels with plans for these two.
    "head64": Model(2, 2, head_dim=64, rotary_dim=64, dtype="float16"),
    "head64_group4": Model(4, 1, head_dim=64, rotary_dim=64, dtype="bfloat16"),
    "head80": Model(2, 1, head_dim=80, rotary_dim=80, dtype="float16"),
    # Models without RoPE leave values that mean nothing.
    "no_rope": Model(rope_mode=int(RopeMode.NONE), rope_theta=-1.0, rope_scale=-1.0),
    "no_rope_head64": Model(
        2, 2, head_dim=64, dtype="float16", rope_mode=int(RopeMode.NONE), rope_theta=-1.0
    ),
    "partial_rope": Model(rotary_dim=16, rope_scale=0.5, rope_theta=500000.0),
    "gptj_rope": Model(rope_scaling='{"rope_type": "gptj"}'),
    "linear_rope": Model(rope_scaling='{"rope_type": "linear", "factor": 4.0}'),
    "llama3_rope": Model(rope_scaling=json.dumps(LLAMA3)),
    "yarn_rope": Model(rope_scaling=json.dumps(YARN)),
    "longrope": Model(rope_scaling=json.dumps(LONGROPE), ext_factors=LONGROPE_FACTORS),
    "inline_rope": Model(rope_mode=_INLINE, rope_theta=500000.0, rope_scale=0.5),
    "inline_partial_rope": Model(rope_mode=_INLINE, rotary_dim=16),
    "inline_gptj_rope": Model(rope_mode=_INLINE, rope_scaling='{"rope_type": "gptj"}'),
    "inline_llama3_rope": Model(rope_mode=_INLINE, rope_scaling=json.dumps(LLAMA3)),
    "sliding_layer": Model(attn_kind=("mha", "mha_sliding")),
    "sliding_layer_no_rope": Model(
        attn_kind=("mha", "mha_sliding"), rope_mode=int(RopeMode.NONE), rope_theta=-1.0
    ),
    "window24": Model(attn_kind=("mha", "mha_sliding"), layer_window=24),
    "window7_group4": Model(8, 2, attn_kind=("mha_sliding", "mha"), layer_window=7),
    # On CUDA this one has plans.
    "window24_head64": Model(
        2,
        2,
        head_dim=64,
        rotary_dim=64,
        dtype="float16",
        attn_kind=("mha", "mha_sliding"),
        layer_window=24,
        beside_tvms=False,
    ),
    "capped_window24": Model(soft_cap=1.5, attn_kind=("mha_sliding", "mha"), layer_window=24),
    "capped": Model(soft_cap=1.5),
    "capped_head64_group4": Model(4, 1, head_dim=64, rotary_dim=64, dtype="float16", soft_cap=1.5),
    "alibi": Model(rope_mode=int(RopeMode.NONE), alibi_slopes=SLOPES),
    "alibi_head64": Model(
        4, 2, head_dim=64, dtype="float16", rope_mode=int(RopeMode.NONE), alibi_slopes=SLOPES
    ),
    "alibi_capped_rope": Model(soft_cap=1.5, alibi_slopes=SLOPES),
    "alibi_window24": Model(attn_kind=("mha", "mha_sliding"), layer_window=24, alibi_slopes=SLOPES),
    "mla": Model(
        num_kv_heads=1,
        head_dim=48,
        rope_mode=int(RopeMode.NONE),
        attn_kind="mla",
        v_head_dim=32,
        mla_head_dims=(32, 16),
    ),
}


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def add_generic_creation(builder: rx.BlockBuilder, name: str, model: Model) -> None:
    """Add what MLC LLM exports for a model, without the model."""
    from tvm_flashinfer.relax._compat import StringImm

    sizes = [tirx.Var(size, "int64") for size in ("batch", "total", "chunk", "page", "slide")]
    kinds, ext = model.attn_kind, model.ext_factors
    dtype: Any = (
        rx.DataTypeImm(model.dtype)
        if hasattr(rx, "DataTypeImm")
        else tvm.ir.GenericConst(tvm.DataType(model.dtype), rx.AnyType())
    )
    numbers = [
        NUM_LAYERS,
        model.num_qo_heads,
        model.num_kv_heads,
        model.head_dim,
        model.v_head_dim or model.head_dim,
        *model.mla_head_dims,
        model.rope_mode,
    ]
    params = [rx.Var(f"{var.name}_", rx.ShapeType([var])) for var in sizes]
    with builder.function(f"create_{name}_cache", params):
        cache = rx.call_pure_packed(
            "mlc.create_paged_kv_cache_generic",
            StringImm(kinds) if isinstance(kinds, str) else [StringImm(kind) for kind in kinds],
            rx.ShapeExpr(sizes),
            rx.ShapeExpr([0, NUM_LAYERS]),
            *(rx.prim_value(number) for number in numbers),
            rx.prim_value(model.rope_scale),
            rx.prim_value(model.rope_theta),
            StringImm(model.rope_scaling),
            rx.const(np.array(ext, "float32")) if ext else rx.prim_value(0),
            rx.prim_value(model.rotary_dim),
            rx.prim_value(0),
            dtype,
            ty_args=rx.AnyType(),
        )
        builder.emit_func_output(cache)


@functools.cache
def compiled(library: Library) -> rx.VirtualMachine:
    """A library, loaded from disk, with our cache and TVM's for each of its models."""
    importlib.import_module("tvm_flashinfer")
    from tvm_flashinfer.relax import DispatchKVCacheCreation

    builder = rx.BlockBuilder()
    for name, model in MODELS.items():
        if model.library == library and model.is_generic:
            add_generic_creation(builder, name, model)
    dispatch = DispatchKVCacheCreation(
        tvm.target.Target("llvm"), layer_sliding_window_size=library[-1]
    )
    with kernels_parsed_once():
        mod = dispatch(builder.get())
    path = Path(folder().name) / f"{compiled.cache_info().misses}.so"
    rx.build(mod, "llvm").export_library(str(path))
    return rx.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())


def creation_module(model: Model, target: tvm.target.Target, ship: str) -> tvm.IRModule:
    """A function that creates our cache, and nothing else."""
    importlib.import_module("tvm_flashinfer")
    from tvm_flashinfer.relax import FlashInferPagedKVCache

    ext, kinds = model.ext_factors, model.attn_kind
    sizes = [tirx.Var(size, "int64") for size in ("batch", "total", "chunk", "page", "slide")]
    builder = rx.BlockBuilder()
    with builder.function("create", [rx.Var(f"{var.name}_", rx.ShapeType([var])) for var in sizes]):
        cache = FlashInferPagedKVCache(
            kinds if isinstance(kinds, str) else list(kinds), *sizes,
            rx.ShapeExpr([0, NUM_LAYERS]), NUM_LAYERS, model.num_qo_heads, model.num_kv_heads,
            model.head_dim, model.v_head_dim or model.head_dim, *model.mla_head_dims,
            RopeMode(model.rope_mode), model.rope_scale, model.rope_theta,
            json.loads(model.rope_scaling), rx.const(np.array(ext, "float32")) if ext else None,
            model.rotary_dim, False, model.dtype, target, ship=ship,
            layer_sliding_window_size=model.layer_window, logits_soft_cap=model.soft_cap,
            alibi_slopes=model.alibi_slopes,
        )  # fmt: skip
        builder.emit_func_output(cache._expr)
    return builder.get().with_attr("external_mods", cache.extern_mods)


def cuda_target() -> tvm.target.Target:
    """The GPU of this machine."""
    arch = "sm_" + tvm.cuda(0).compute_version.replace(".", "")
    return tvm.target.Target({"kind": "cuda", "arch": arch}, host="llvm")


@functools.cache
def compiled_alone(model: Model, on_cpu: bool) -> rx.VirtualMachine:
    """A library with our cache alone, whose CUDA kernels are those of this machine."""
    target = tvm.target.Target("llvm") if on_cpu else cuda_target()
    module = tvm.compile(creation_module(model, target, "shared"), target)
    return rx.VirtualMachine(module, tvm.cpu() if on_cpu else tvm.cuda(0))


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder until the process ends: a loaded library must not lose its inode to another."""
    return tempfile.TemporaryDirectory(prefix="tvm-flashinfer-tests-")

"""The paged KV cache whose slots hold the packed functions ``flashinfer.*``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind, PagedKVCache, RopeMode
from tvm.target import Target

from tvm_flashinfer.relax import slots
from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW, HAS_LAYER_WINDOW, StringImm
from tvm_flashinfer.relax.config import PagedKVCacheConfig
from tvm_flashinfer.relax.report import CompileReport
from tvm_flashinfer.relax.ship import external_modules, resolve_ship
from tvm_flashinfer.relax.support import UnsupportedConfigError, unsupported_reasons

#: TVM's function that makes the cache object.
CREATE_SYMBOL = "vm.builtin.paged_attention_kv_cache_create"


class FlashInferPagedKVCache(PagedKVCache):
    """A paged KV cache of multi-head attention that runs on ``flashinfer.*``, on CUDA and on CPU.

    It takes the arguments of TVM's class of the same name and stands where that one does. It is
    made while a `relax.BlockBuilder` builds the function that creates the cache.

    Parameters
    ----------
    attn_kind, max_batch_size, ..., dtype, layer_sliding_window_size
        See `PagedKVCacheConfig`.
    target : tvm.target.Target
        What the model is compiled for; its kind is ``cuda`` or ``llvm``.
    name : str
        Name hint of the cache.
    ship : str, optional
        ``"self-contained"``: `extern_mods` holds the kernels, to be linked into the model's
        library. ``"shared"``: the library looks the functions up when it is loaded. Left out,
        self-contained on CUDA.

    Attributes
    ----------
    extern_mods : list of tvm.runtime.Module
        What must be attached to the module as ``external_mods``.
    config : PagedKVCacheConfig
    report : CompileReport
        A row for each slot. Its site is ``name``.

    Raises
    ------
    UnsupportedConfigError
        When no kernel serves the configuration. It carries the reasons.
    ValueError
        At the creation of the cache, when the run-time size ``support_sliding_window`` is not 0:
        such a cache applies RoPE inside attention, and these kernels take keys that have it.
    """

    def __init__(
        self,
        attn_kind: str | Sequence[str],
        max_batch_size: tirx.Var,
        max_total_seq_len: tirx.Var,
        prefill_chunk_size: tirx.Var,
        page_size: tirx.Var,
        support_sliding_window: tirx.Var,
        layer_partition: rx.ShapeExpr,
        num_hidden_layers: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        qk_head_dim: int,
        v_head_dim: int,
        mla_original_qk_head_dim: int,
        mla_original_v_head_dim: int,
        rope_mode: RopeMode,
        rope_scale: float,
        rope_theta: float,
        rope_scaling: Mapping[str, Any],
        rope_ext_factors: rx.Expr,
        rotary_dim: int,
        enable_disaggregation: bool,
        dtype: str,
        target: Target,
        name: str = "paged_kv_cache",
        *,
        layer_sliding_window_size: int = DEFAULT_LAYER_WINDOW,
        ship: str | None = None,
    ) -> None:
        self.config = PagedKVCacheConfig(
            attn_kind=attn_kind,
            max_batch_size=max_batch_size,
            max_total_seq_len=max_total_seq_len,
            prefill_chunk_size=prefill_chunk_size,
            page_size=page_size,
            support_sliding_window=support_sliding_window,
            layer_partition=layer_partition,
            num_hidden_layers=num_hidden_layers,
            num_attention_heads=num_attention_heads,
            num_key_value_heads=num_key_value_heads,
            qk_head_dim=qk_head_dim,
            v_head_dim=v_head_dim,
            mla_original_qk_head_dim=mla_original_qk_head_dim,
            mla_original_v_head_dim=mla_original_v_head_dim,
            rope_mode=rope_mode,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
            rope_scaling=rope_scaling,
            rope_ext_factors=rope_ext_factors,
            rotary_dim=rotary_dim,
            enable_disaggregation=enable_disaggregation,
            dtype=dtype,
            layer_sliding_window_size=layer_sliding_window_size,
        )
        reasons = unsupported_reasons(self.config, target)
        if reasons:
            raise UnsupportedConfigError(reasons)
        ship = resolve_ship(ship, target)
        self.extern_mods = external_modules([self.config], target, ship)
        rows = slots.native_rows(self.config, target, name)
        self.report = CompileReport(target.kind.name, ship, rows)
        super().__init__(_expr=creation_call(self.config, target), _name=name)


def creation_call(config: PagedKVCacheConfig, target: Target) -> rx.Call:
    """Return the call that makes our cache, for the function that a `BlockBuilder` is building.

    Bindings that it needs are emitted there, and TVM's kernels for the slots that have none of ours
    are added to the module. Support is not checked, and no kernel is built.

    Parameters
    ----------
    config : PagedKVCacheConfig
        One without `unsupported_reasons`.
    target : tvm.target.Target

    Raises
    ------
    RuntimeError
        When no function is being built.
    """
    builder = rx.BlockBuilder.current()
    if builder is None:
        raise RuntimeError(
            "no relax.BlockBuilder is building a function; make the cache inside "
            "`with builder.function(...)` or in a method of an nn.Module that is being exported"
        )
    window = [config.layer_sliding_window_size] if HAS_LAYER_WINDOW else []
    return rx.call_pure_packed(
        CREATE_SYMBOL,
        rx.ShapeExpr(
            [
                config.max_batch_size,
                config.max_total_seq_len,
                config.prefill_chunk_size,
                config.page_size,
                config.support_sliding_window,
                *window,
            ]
        ),
        config.layer_partition,
        rx.prim_value(config.num_attention_heads),
        rx.prim_value(config.num_key_value_heads),
        rx.prim_value(config.qk_head_dim),
        rx.prim_value(config.v_head_dim),
        rx.ShapeExpr([int(AttnKind[kind.upper()]) for kind in config.layer_kinds]),
        rx.prim_value(config.enable_disaggregation),
        rx.prim_value(config.rope_mode),
        rx.prim_value(config.rope_scale),
        rx.prim_value(config.rope_theta),
        rx.prim_value(0) if config.rope_ext_factors is None else config.rope_ext_factors,
        rx.op.zeros((), config.dtype),
        _function(slots.APPEND),
        # The runtime takes anything that is not a function for "no MLA cache".
        rx.prim_value(0),
        _planned(slots.PREFILL_RAGGED),
        _planned(slots.PREFILL_PAGED),
        _planned(slots.DECODE_PAGED),
        *_tir_slots(builder, config, target),
        rx.Tuple([]),
        # The second one merges what a model computed with `self_attention` and `cross_attention`.
        rx.Tuple([_function(slots.MERGE_STATE), _function(slots.MERGE_STATE)]),
        builder.emit(_bound_rotary(config), "split_rotary"),
        _function(slots.COPY_PAGE),
        _function(slots.DEBUG_GET_KV),
        _function(slots.COMPACT_COPY),
        ty_args=rx.AnyType(),
    )


def _function(slot: slots.Slot) -> rx.ExternFunc:
    return rx.ExternFunc(f"flashinfer.{slot.run}")


def _planned(slot: slots.Slot) -> rx.Tuple:
    plan = rx.ExternFunc(f"flashinfer.{slot.plan}")
    return rx.Tuple([StringImm("flashinfer"), _function(slot), plan])


def _bound_rotary(config: PagedKVCacheConfig) -> rx.Call:
    """Return the call that gives the split-and-rotate function of this model.

    The cache passes neither theta nor scale to it, so they are bound when the cache is made. The
    same call refuses a cache that may slide: what it returns is a slot of the cache, which keeps
    the check from being removed as dead code.
    """
    theta, scale = float(config.rope_theta), float(config.rope_scale)
    rotary_dim = config.rotary_dim
    scaling = {} if config.rope_type == "default" else dict(config.rope_scaling)
    if config.rope_mode == RopeMode.NONE:
        # Never applied, and models without RoPE leave values here that mean nothing, such as -1.
        theta, scale, rotary_dim, scaling = 10000.0, 1.0, config.qk_head_dim, {}
    return rx.call_pure_packed(
        f"flashinfer.{slots.SPLIT_ROTARY.run}",
        rx.prim_value(theta),
        rx.prim_value(scale),
        rx.prim_value(rotary_dim),
        StringImm(json.dumps(scaling, sort_keys=True)),
        rx.prim_value(config.support_sliding_window),
        ty_args=rx.AnyType(),
    )


def _tir_slots(
    builder: rx.BlockBuilder, config: PagedKVCacheConfig, target: Target
) -> list[rx.Tuple]:
    """Return the four slots that TVM's own kernels fill: windows and token trees.

    TVM's builder for CPU gives the two tree functions in the wrong order; the runtime wants the
    paged one first, as here.
    """
    shape = (config.num_key_value_heads, config.num_attention_heads, config.qk_head_dim)
    # These kernels can apply RoPE themselves, which our cache never asks of them. They get the
    # scaling all the same: so they equal those of TVM's cache, and the module has them once.
    scaling = config.tvm_rope_scaling
    window = {"sliding_window_size": config.layer_sliding_window_size} if HAS_LAYER_WINDOW else {}
    if target.kind.name == "llvm":
        suffix, on_target = "_cpu", ()
    else:
        suffix, on_target = "", (target,)

    def kernel(factory: str, *args: Any, **kwargs: Any) -> tirx.PrimFunc:
        make = getattr(tvm_kv_cache, factory + suffix)
        return make(*shape, config.dtype, *args, scaling, *on_target, **kwargs)

    kernels = {
        slots.PREFILL_WINDOW: kernel("_attention_prefill", True, **window),
        slots.DECODE_WINDOW: kernel("_attention_decode", True),
        slots.TREE_PAGED: kernel("tree_attn_with_paged_kv_cache"),
        slots.TREE_RAGGED: kernel("tree_attn"),
    }
    return [
        rx.Tuple([StringImm("tirx"), builder.add_func(function, slot.tir + suffix)])
        for slot, function in kernels.items()
    ]

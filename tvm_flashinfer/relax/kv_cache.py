"""The paged KV cache whose slots hold the packed functions ``flashinfer.*``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind, PagedKVCache, RopeMode
from tvm.target import Target

from tvm_flashinfer.relax import slots
from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW, HAS_LAYER_WINDOW, StringImm
from tvm_flashinfer.relax.config import PagedKVCacheConfig
from tvm_flashinfer.relax.report import CompileReport
from tvm_flashinfer.relax.ship import external_modules, resolve_ship
from tvm_flashinfer.relax.support import (
    UnsupportedConfigError,
    attention_head_dims,
    target_archs,
    unplanned_reasons,
    unsupported_reasons,
)
from tvm_flashinfer.tuning import tuning_to_carry

#: TVM's function that makes the cache object.
CREATE_SYMBOL = "vm.builtin.paged_attention_kv_cache_create"


class FlashInferPagedKVCache(PagedKVCache):
    """A paged KV cache that runs on ``flashinfer.*``, on CUDA and on CPU.

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
    logits_soft_cap, alibi_slopes, attention_sinks
        See `PagedKVCacheConfig`. TVM's class does not take them.
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
        logits_soft_cap: float = 0.0,
        alibi_slopes: Sequence[float] = (),
        attention_sinks: Any = None,
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
            logits_soft_cap=logits_soft_cap,
            alibi_slopes=alibi_slopes,
            attention_sinks=attention_sinks,
        )
        reasons = unsupported_reasons(self.config, target)
        if reasons:
            raise UnsupportedConfigError(reasons)
        ship = resolve_ship(ship, target)
        self.extern_mods = external_modules([self.config], target, ship)
        rows = slots.native_rows(self.config, target, name)
        self.report = CompileReport(target.kind.name, ship, rows, carried_description(target))
        super().__init__(_expr=creation_call(self.config, target), _name=name)


def creation_call(config: PagedKVCacheConfig, target: Target) -> rx.Call:
    """Return the call that makes our cache, for the function that a `BlockBuilder` is building.

    Bindings that it needs are emitted there. Support is not checked, and no kernel is built.

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
    # TVM takes factors in normal mode only, and those of a model without RoPE mean nothing.
    has_factors = config.rotates and config.rope_ext_factors is not None
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
        config.rope_ext_factors if has_factors else rx.prim_value(0),
        rx.op.zeros((), config.dtype),
        *_appends(config),
        *_attention_slots(builder, config, target),
        # The second one merges what a model computed with `self_attention` and `cross_attention`.
        rx.Tuple([_function(slots.MERGE_STATE), _function(slots.MERGE_STATE)]),
        builder.emit(_bound_rotary(config), "split_rotary"),
        _function(slots.COPY_PAGE_MLA if config.is_mla else slots.COPY_PAGE),
        _function(slots.DEBUG_GET_KV_MLA if config.is_mla else slots.DEBUG_GET_KV),
        _function(slots.COMPACT_COPY),
        ty_args=rx.AnyType(),
    )


def carried_description(target: Target) -> str:
    """Return what a report says of the file of tuning that a model carries; empty without one."""
    carried = tuning_to_carry(target_archs(target))
    return carried.description if carried else ""


def _function(slot: slots.Slot) -> rx.ExternFunc:
    return rx.ExternFunc(f"flashinfer.{slot.function}")


def _appends(config: PagedKVCacheConfig) -> tuple[rx.Expr, rx.Expr]:
    """Return the functions that append, of MHA and of MLA."""
    # The runtime takes anything that is not a function for "there is none".
    if config.is_mla:
        return rx.prim_value(0), _function(slots.APPEND_MLA)
    return _function(slots.APPEND), rx.prim_value(0)


def _rope_settings(config: PagedKVCacheConfig) -> dict[str, Any]:
    """Return what TVM does not pass to functions that rotate, but for theta and scale."""
    if not config.rotates:
        return {}
    scaling = {} if config.rope_type == "default" else dict(config.rope_scaling)
    return {"rotary_dim": config.rotary_dim, "rope_scaling": scaling}


def _score_settings(config: PagedKVCacheConfig) -> dict[str, Any]:
    """Return what happens to scores between the product and the softmax."""
    settings: dict[str, Any] = {}
    if config.logits_soft_cap:
        settings["logits_soft_cap"] = config.logits_soft_cap
    if config.alibi_slopes:
        # TVM attends to parts of a sequence: only positions tell how far a key is from a row.
        settings["alibi_by_position"] = True
    return settings


def _attention_slots(
    builder: rx.BlockBuilder, config: PagedKVCacheConfig, target: Target
) -> list[rx.Expr]:
    """Emit the calls that give the attention slots, and return the slots in TVM's order.

    Whether sequences may slide is known when the cache is created, and TVM then rotates inside
    attention, which it does not tell functions that have a plan. So the native library chooses
    there. TVM never plans for the slots of windows, nor for those of trees.
    """
    common = {**_rope_settings(config), **_score_settings(config)}
    window = {}
    if config.has_sliding_layers:
        window["layer_window"] = config.layer_sliding_window_size
    carried = tuning_to_carry(target_archs(target))
    tuning = [carried] if carried else []
    slopes = rx.const(np.array(config.alibi_slopes, "float32")) if config.alibi_slopes else None

    def made(slot: slots.Slot, **latent: int) -> rx.Var:
        options = {**common, **latent, **(window if slot in slots.LAYER_WINDOW_SLOTS else {})}
        name_and_options = StringImm(slot.attention), StringImm(json.dumps(options, sort_keys=True))
        if slopes is not None:
            function = slots.CACHE_SLOT_WITH_SLOPES
            arguments = (rx.prim_value(config.support_sliding_window), slopes)
        else:
            function = slots.CACHE_SLOT
            planned = slot.planned and not unplanned_reasons(config, target, slot.attention)
            arguments = (rx.prim_value(bool(planned)), rx.prim_value(config.support_sliding_window))
            if planned and tuning:
                # Once: what one slot brings is used by the plans of all.
                function = slots.CACHE_SLOT_WITH_TUNING
                arguments = (*arguments, StringImm(tuning.pop().text))
        call = rx.call_pure_packed(
            f"flashinfer.{function}", *name_and_options, *arguments, ty_args=rx.AnyType()
        )
        return builder.emit(call, slot.name)

    empty = rx.Tuple([])
    if config.is_mla:
        # Ragged queries, keys and values are those before compression, which a plan must know.
        qk, vo = attention_head_dims(config, slots.PREFILL_RAGGED.attention)
        ragged = made(slots.PREFILL_RAGGED, head_dim_qk=qk, head_dim_vo=vo)
        return [ragged, *[empty] * (len(slots.ATTENTION_SLOTS) - 1), made(slots.MLA)]
    return [*(made(slot) for slot in slots.ATTENTION_SLOTS), empty]


def _bound_rotary(config: PagedKVCacheConfig) -> rx.Call:
    """Return the call that gives the split-and-rotate function of this model.

    The cache passes neither theta nor scale to it, so they are bound when the cache is made.
    """
    theta, scale = float(config.rope_theta), float(config.rope_scale)
    rope = _rope_settings(config)
    if not rope:
        # Never applied, and models without RoPE leave values here that mean nothing, such as -1.
        theta, scale, rope = 10000.0, 1.0, {"rotary_dim": 2, "rope_scaling": {}}
    return rx.call_pure_packed(
        f"flashinfer.{slots.SPLIT_ROTARY.function}",
        rx.prim_value(theta),
        rx.prim_value(scale),
        rx.prim_value(rope["rotary_dim"]),
        StringImm(json.dumps(rope["rope_scaling"], sort_keys=True)),
        ty_args=rx.AnyType(),
    )

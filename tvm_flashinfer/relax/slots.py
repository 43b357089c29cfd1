"""The slots of TVM's paged KV cache: which function each one holds, in TVM's order."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target

from tvm_flashinfer.relax.config import PagedKVCacheConfig
from tvm_flashinfer.relax.report import FALLBACK, NATIVE, ReportRow
from tvm_flashinfer.relax.support import (
    DECODE_BY_PREFILL_RATIO,
    decodes_by_prefill,
    target_archs,
    unplanned_reasons,
)


@dataclass(frozen=True)
class Slot:
    """One function of the cache.

    Parameters
    ----------
    name : str
        What it computes.
    function : str
        The packed function, without the ``flashinfer.`` in front. Of attention, the one that
        returns the function that is called without a plan.
    attention : str
        What ``flashinfer.cache_slot`` calls the slot; empty where there is no attention.
    planned : str
        The packed function that TVM calls after a plan on the host, if there is one.
    """

    name: str
    function: str
    attention: str = ""
    planned: str = ""


def _attention(name: str, attention: str, planned: str = "") -> Slot:
    return Slot(name, f"bind_attention_{attention}", attention, planned)


#: Gives TVM the functions of an attention slot when the cache is created.
CACHE_SLOT = "cache_slot"

#: The same, with a file of tuning that the model carries.
CACHE_SLOT_WITH_TUNING = "cache_slot_with_tuning"

#: The same for a cache with ALiBi, whose slopes are on the device.
CACHE_SLOT_WITH_SLOPES = "cache_slot_with_slopes"

APPEND = Slot("append", "append_paged_kv_cache")
APPEND_MLA = Slot("append", "append_paged_mla_kv_cache")
PREFILL_RAGGED = _attention("prefill_ragged", "prefill_ragged", "batch_prefill_ragged_run")
PREFILL_PAGED = _attention("prefill_paged", "prefill_paged", "batch_prefill_paged_run")
DECODE_PAGED = _attention("decode_paged", "decode_paged", "batch_decode_run")
PREFILL_WINDOW = _attention("prefill_sliding_window", "prefill_paged")
DECODE_WINDOW = _attention("decode_sliding_window", "decode_paged")
TREE_PAGED = _attention("tree_paged", "tree_paged")
TREE_RAGGED = _attention("tree_ragged", "tree_ragged")
MLA = _attention("mla", "mla", "batch_mla_run")
MERGE_STATE = Slot("merge_state", "merge_state_in_place")
SPLIT_ROTARY = Slot("split_rotary", "bind_split_qkv_rotary")
COPY_PAGE = Slot("copy_page", "copy_single_page")
COPY_PAGE_MLA = Slot("copy_page", "copy_single_page_mla")
DEBUG_GET_KV = Slot("debug_get_kv", "debug_get_kv")
DEBUG_GET_KV_MLA = Slot("debug_get_kv", "debug_get_kv_mla")
COMPACT_COPY = Slot("compact_copy", "compact_kv_copy")

#: Attention slots of multi-head attention, in the order of TVM's arguments.
ATTENTION_SLOTS = (
    PREFILL_RAGGED,
    PREFILL_PAGED,
    DECODE_PAGED,
    PREFILL_WINDOW,
    DECODE_WINDOW,
    TREE_PAGED,
    TREE_RAGGED,
)

#: The two of them whose pages are a window: of the layers that slide, or of the whole cache.
WINDOW_SLOTS = (PREFILL_WINDOW, DECODE_WINDOW)

#: Those that serve layers with a window, alone or besides others: in a cache with such layers they
#: are told the window.
LAYER_WINDOW_SLOTS = (PREFILL_RAGGED, *WINDOW_SLOTS, TREE_PAGED, TREE_RAGGED)

#: All slots that a cache of multi-head attention fills, in the order of TVM's arguments.
SLOTS = (
    APPEND,
    *ATTENTION_SLOTS,
    MERGE_STATE,
    SPLIT_ROTARY,
    COPY_PAGE,
    DEBUG_GET_KV,
    COMPACT_COPY,
)

#: All slots that a model with MLA reaches.
MLA_SLOTS = (APPEND_MLA, PREFILL_RAGGED, MLA, MERGE_STATE, COPY_PAGE_MLA, DEBUG_GET_KV_MLA)


def arch_text(target: Target) -> str:
    """Return what the kernels of a target are compiled for, such as ``"sm_80,sm_90a"``."""
    if target.kind.name == "llvm":
        return "cpu"
    return ",".join(f"sm_{arch}" for arch in target_archs(target)) or target.kind.name


def native_rows(config: PagedKVCacheConfig, target: Target, site: str) -> list[ReportRow]:
    """Return the report of a cache that is ours: a row for each slot that the model can reach."""
    arch = arch_text(target)
    rows = []
    for slot in MLA_SLOTS if config.is_mla else SLOTS:
        kernel, notes = slot.function, ()
        unplanned = unplanned_reasons(config, target, slot.attention) if slot.planned else []
        if slot.planned and not unplanned:
            kernel, notes = _planned(config, slot)
        elif slot.planned and target.kind.name == "cuda":
            notes = tuple(unplanned)
        if slot.attention:
            notes += _score_notes(config, slot)
        rows.append(ReportRow(site, slot.name, NATIVE, f"flashinfer.{kernel}", arch, notes))
    return rows


def _planned(config: PagedKVCacheConfig, slot: Slot) -> tuple[str, tuple[str, ...]]:
    """Return the function of a slot that has a plan, and what there is to know about it."""
    if config.is_mla:  # which TVM lets no cache slide with
        if slot is MLA:
            return slot.planned, ()
        return slot.planned, (f"steps of one token of each sequence: flashinfer.{slot.function}",)
    sliding = f"flashinfer.{slot.function}"
    if config.has_sliding_layers:
        sliding = "refused, since single layers have windows"
    notes = (f"created with support_sliding_window 1: {sliding}",)
    if slot is not DECODE_PAGED or not decodes_by_prefill(config):
        return slot.planned, notes
    notes += (
        f"there are {config.head_ratio} query heads per KV head; from {DECODE_BY_PREFILL_RATIO} on "
        "TVM decodes through the paged prefill slot",
    )
    return PREFILL_PAGED.planned, notes


def _score_notes(config: PagedKVCacheConfig, slot: Slot) -> tuple[str, ...]:
    """Return what an attention slot does to scores."""
    notes: tuple[str, ...] = ()
    if config.logits_soft_cap:
        notes += (f"scores are capped at {config.logits_soft_cap}",)
    if config.alibi_slopes:
        notes += ("ALiBi by positions",)
        if slot is TREE_PAGED:
            notes += ("with ALiBi a token tree that grows over several steps is refused",)
    return notes


def fallback_rows(reasons: list[str], target: Target, site: str) -> list[ReportRow]:
    """Return the report of a cache that is TVM's: one row, as all slots have the same reasons."""
    return [
        ReportRow(site, "all", FALLBACK, "tir_paged_kv_cache", arch_text(target), tuple(reasons))
    ]

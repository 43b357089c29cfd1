"""The slots of TVM's paged KV cache: which function each one holds, in TVM's order."""

from __future__ import annotations

from dataclasses import dataclass

from tvm.target import Target

from tvm_flashinfer.relax.config import PagedKVCacheConfig
from tvm_flashinfer.relax.report import FALLBACK, NATIVE, ReportRow
from tvm_flashinfer.relax.support import target_archs

#: Query heads per KV head from which TVM decodes through the paged prefill slot.
DECODE_BY_PREFILL_RATIO = 4


@dataclass(frozen=True)
class Slot:
    """One function of the cache.

    Parameters
    ----------
    name : str
        What it computes.
    run : str
        The packed function, without the ``flashinfer.`` in front; empty when there is none of ours.
    plan : str
        The packed function that plans on the host before it, if there is one.
    tir : str
        TVM's function that stands in for a missing one of ours.
    reason : str
        Why there is none of ours.
    """

    name: str
    run: str = ""
    plan: str = ""
    tir: str = ""
    reason: str = ""


_NO_WINDOW = "sliding windows of single layers have no native kernel yet"
_NO_TREE = "token trees (speculative decoding) have no native kernel yet"

APPEND = Slot("append", "append_paged_kv_cache")
PREFILL_RAGGED = Slot("prefill_ragged", "batch_prefill_ragged_run", "batch_prefill_plan")
PREFILL_PAGED = Slot("prefill_paged", "batch_prefill_paged_run", "batch_prefill_plan")
DECODE_PAGED = Slot("decode_paged", "batch_decode_run", "batch_decode_plan")
PREFILL_WINDOW = Slot(
    "prefill_sliding_window", tir="tir_attention_prefill_sliding_window", reason=_NO_WINDOW
)
DECODE_WINDOW = Slot(
    "decode_sliding_window", tir="tir_attention_decode_sliding_window", reason=_NO_WINDOW
)
TREE_PAGED = Slot(
    "tree_paged",
    tir="tir_attention_prefill_with_tree_mask_with_paged_kv_cache",
    reason=_NO_TREE,
)
TREE_RAGGED = Slot("tree_ragged", tir="tir_attention_prefill_with_tree_mask", reason=_NO_TREE)
MERGE_STATE = Slot("merge_state", "merge_state_in_place")
SPLIT_ROTARY = Slot("split_rotary", "bind_split_qkv_rotary")
COPY_PAGE = Slot("copy_page", "copy_single_page")
DEBUG_GET_KV = Slot("debug_get_kv", "debug_get_kv")
COMPACT_COPY = Slot("compact_copy", "compact_kv_copy")

#: All slots that a cache of multi-head attention fills, in the order of TVM's arguments.
SLOTS = (
    APPEND,
    PREFILL_RAGGED,
    PREFILL_PAGED,
    DECODE_PAGED,
    PREFILL_WINDOW,
    DECODE_WINDOW,
    TREE_PAGED,
    TREE_RAGGED,
    MERGE_STATE,
    SPLIT_ROTARY,
    COPY_PAGE,
    DEBUG_GET_KV,
    COMPACT_COPY,
)

#: Slots that only layers of kind ``mha_sliding`` reach.
WINDOW_SLOTS = (PREFILL_WINDOW, DECODE_WINDOW)


def arch_text(target: Target) -> str:
    """Return what the kernels of a target are compiled for, such as ``"sm_80,sm_90a"``."""
    if target.kind.name == "llvm":
        return "cpu"
    return ",".join(f"sm_{arch}" for arch in target_archs(target)) or target.kind.name


def native_rows(config: PagedKVCacheConfig, target: Target, site: str) -> list[ReportRow]:
    """Return the report of a cache that is ours: a row for each slot that the model can reach."""
    arch = arch_text(target)
    rows = []
    for slot in SLOTS:
        if slot in WINDOW_SLOTS and "mha_sliding" not in config.layer_kinds:
            continue
        if not slot.run:
            tir = slot.tir + ("_cpu" if target.kind.name == "llvm" else "")
            rows.append(ReportRow(site, slot.name, FALLBACK, tir, arch, (slot.reason,)))
            continue
        kernel, notes = slot.run, ()
        if slot is DECODE_PAGED and config.head_ratio >= DECODE_BY_PREFILL_RATIO:
            kernel = PREFILL_PAGED.run
            notes = (
                f"there are {config.head_ratio} query heads per KV head; from "
                f"{DECODE_BY_PREFILL_RATIO} on TVM decodes through the paged prefill slot",
            )
        rows.append(ReportRow(site, slot.name, NATIVE, f"flashinfer.{kernel}", arch, notes))
    return rows


def fallback_rows(reasons: list[str], target: Target, site: str) -> list[ReportRow]:
    """Return the report of a cache that is TVM's: one row, as all slots have the same reasons."""
    return [
        ReportRow(site, "all", FALLBACK, "tir_paged_kv_cache", arch_text(target), tuple(reasons))
    ]

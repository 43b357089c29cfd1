"""The packed functions with names, types and defaults.

They take what speaks DLPack. Results are allocated where they are not given, for NumPy arrays and
tensors of TVM. `docs/ops.md` has the packed functions themselves, which have more options.
"""

from __future__ import annotations

from tvm_flashinfer.ops.attention import (
    attention,
    attention_paged,
    attention_ragged,
    decode_paged,
    pack_mask,
    single_decode,
    single_prefill,
)
from tvm_flashinfer.ops.cache import (
    append_paged_kv_cache,
    apply_attention_sinks,
    copy_single_page,
    merge_state,
    merge_state_in_place,
    split_qkv_rotary,
)
from tvm_flashinfer.ops.plans import BatchDecode, BatchPrefill, Workspaces
from tvm_flashinfer.ops.sampling import sample_from_probs

__all__ = [
    "BatchDecode",
    "BatchPrefill",
    "Workspaces",
    "append_paged_kv_cache",
    "apply_attention_sinks",
    "attention",
    "attention_paged",
    "attention_ragged",
    "copy_single_page",
    "decode_paged",
    "merge_state",
    "merge_state_in_place",
    "pack_mask",
    "sample_from_probs",
    "single_decode",
    "single_prefill",
    "split_qkv_rotary",
]

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
from tvm_flashinfer.ops.cascade import Level, cascade_attention, merge_states
from tvm_flashinfer.ops.norm import (
    fused_add_rmsnorm,
    gelu_and_mul,
    gelu_tanh_and_mul,
    gemma_fused_add_rmsnorm,
    gemma_rmsnorm,
    rmsnorm,
    silu_and_mul,
)
from tvm_flashinfer.ops.plans import BatchDecode, BatchPrefill, Workspaces
from tvm_flashinfer.ops.rope import (
    apply_rope,
    apply_rope_cos_sin_cache,
    split_qkv_rotary_append,
    token_slots,
)
from tvm_flashinfer.ops.sampling import (
    chain_speculative,
    min_p_from_probs,
    renorm_from_sorted,
    sample_from_probs,
    sample_from_sorted,
    softmax,
    top_k_from_probs,
    top_k_renorm_probs,
    top_k_top_p_from_probs,
    top_k_top_p_renorm_probs,
    top_p_from_probs,
    top_p_renorm_probs,
)

__all__ = [
    "BatchDecode",
    "BatchPrefill",
    "Level",
    "Workspaces",
    "append_paged_kv_cache",
    "apply_attention_sinks",
    "apply_rope",
    "apply_rope_cos_sin_cache",
    "attention",
    "attention_paged",
    "attention_ragged",
    "cascade_attention",
    "chain_speculative",
    "copy_single_page",
    "decode_paged",
    "fused_add_rmsnorm",
    "gelu_and_mul",
    "gelu_tanh_and_mul",
    "gemma_fused_add_rmsnorm",
    "gemma_rmsnorm",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "min_p_from_probs",
    "pack_mask",
    "renorm_from_sorted",
    "rmsnorm",
    "sample_from_probs",
    "sample_from_sorted",
    "silu_and_mul",
    "single_decode",
    "single_prefill",
    "softmax",
    "split_qkv_rotary",
    "split_qkv_rotary_append",
    "token_slots",
    "top_k_from_probs",
    "top_k_renorm_probs",
    "top_k_top_p_from_probs",
    "top_k_top_p_renorm_probs",
    "top_p_from_probs",
    "top_p_renorm_probs",
]

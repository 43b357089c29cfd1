// Attention without a plan, as TVM's cache calls it and with packed masks. Each function binds what
// TVM does not pass and returns the function with TVM's arguments, in TVM's order.
#include <memory>

#include "cache_call.h"
#include "dense_attention.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

using Bound = std::shared_ptr<const BoundAttention>;

Function PrefillPaged(Bound bound) {
  return Named(
      bound->op(),
      [bound](TensorView q, TensorView qo_indptr, TensorView pages, TensorView page_indptr,
              TensorView page_indices, TensorView length_info, TensorView k_rope_pos_offset,
              TensorView q_rope_position, TensorView o, TensorView lse, int64_t causal,
              int64_t rotary_mode, double rope_scale, double rope_theta, double sm_scale) {
        CacheCall call(*bound, q, o, lse, sm_scale);
        call.SetRows(qo_indptr);
        call.SetCausal(causal);
        call.SetPages(pages, page_indptr, page_indices, length_info);
        call.SetRotary({rotary_mode, rope_scale, rope_theta, q_rope_position, k_rope_pos_offset});
        call.Run();
      });
}

Function DecodePaged(Bound bound) {
  return Named(bound->op(), [bound](TensorView q, TensorView pages, TensorView page_indptr,
                                    TensorView page_indices, TensorView length_info,
                                    TensorView k_rope_pos_offset, TensorView q_rope_position,
                                    TensorView o, TensorView lse, int64_t rotary_mode,
                                    double rope_scale, double rope_theta, double sm_scale) {
    CacheCall call(*bound, q, o, lse, sm_scale);
    call.SetPages(pages, page_indptr, page_indices, length_info);
    call.SetRotary({rotary_mode, rope_scale, rope_theta, q_rope_position, k_rope_pos_offset});
    call.Run();
  });
}

Function PrefillRagged(Bound bound) {
  return Named(bound->op(), [bound](TensorView q, TensorView qo_indptr, TensorView k, TensorView v,
                                    TensorView kv_indptr, TensorView q_rope_position,
                                    TensorView k_rope_pos_offset, TensorView o, TensorView lse,
                                    int64_t causal, int64_t rotary_mode, double rope_scale,
                                    double rope_theta, double sm_scale) {
    CacheCall call(*bound, q, o, lse, sm_scale);
    call.SetRows(qo_indptr);
    call.SetCausal(causal);
    call.SetNewTokensWindow();
    call.SetRaggedKeys(k, v, kv_indptr);
    call.SetRotary({rotary_mode, rope_scale, rope_theta, q_rope_position, k_rope_pos_offset});
    call.Run();
  });
}

Function TreePaged(Bound bound) {
  return Named(bound->op(), [bound](TensorView q, TensorView qo_indptr, TensorView pages,
                                    TensorView page_indptr, TensorView page_indices,
                                    TensorView length_info, TensorView k_rope_pos_offset,
                                    TensorView q_rope_position, TensorView o, TensorView lse,
                                    int64_t rotary_mode, double rope_scale, double rope_theta,
                                    double sm_scale, TensorView tree_indptr, TensorView tree_mask) {
    CacheCall call(*bound, q, o, lse, sm_scale);
    call.SetRows(qo_indptr);
    call.SetPages(pages, page_indptr, page_indices, length_info);
    call.SetTree(tree_indptr, tree_mask);
    call.SetRotary({rotary_mode, rope_scale, rope_theta, q_rope_position, k_rope_pos_offset});
    call.Run();
  });
}

Function TreeRagged(Bound bound) {
  return Named(
      bound->op(), [bound](TensorView q, TensorView qo_indptr, TensorView k, TensorView v,
                           TensorView kv_indptr, TensorView q_rope_position, TensorView tree_indptr,
                           TensorView tree_mask, TensorView o, TensorView lse, int64_t rotary_mode,
                           double rope_scale, double rope_theta, double sm_scale) {
        CacheCall call(*bound, q, o, lse, sm_scale);
        call.SetRows(qo_indptr);
        call.SetRaggedKeys(k, v, kv_indptr);
        call.SetTree(tree_indptr, tree_mask);
        call.SetRotary({rotary_mode, rope_scale, rope_theta, q_rope_position, std::nullopt});
        call.Run();
      });
}

// The functions with a packed mask take the arguments of the prefill functions, then the mask.

Function MaskPaged(Bound bound) {
  return Named(
      bound->op(),
      [bound](TensorView q, TensorView qo_indptr, TensorView pages, TensorView page_indptr,
              TensorView page_indices, TensorView length_info, TensorView k_rope_pos_offset,
              TensorView q_rope_position, TensorView o, TensorView lse, int64_t causal,
              int64_t rotary_mode, double rope_scale, double rope_theta, double sm_scale,
              TensorView mask_indptr, TensorView packed_mask) {
        CacheCall call(*bound, q, o, lse, sm_scale);
        call.SetRows(qo_indptr);
        call.SetCausal(causal);
        call.SetPages(pages, page_indptr, page_indices, length_info);
        call.SetPackedMask(mask_indptr, packed_mask);
        call.SetRotary({rotary_mode, rope_scale, rope_theta, q_rope_position, k_rope_pos_offset});
        call.Run();
      });
}

Function MaskRagged(Bound bound) {
  return Named(
      bound->op(),
      [bound](TensorView q, TensorView qo_indptr, TensorView k, TensorView v, TensorView kv_indptr,
              TensorView q_rope_position, TensorView k_rope_pos_offset, TensorView o,
              TensorView lse, int64_t causal, int64_t rotary_mode, double rope_scale,
              double rope_theta, double sm_scale, TensorView mask_indptr, TensorView packed_mask) {
        CacheCall call(*bound, q, o, lse, sm_scale);
        call.SetRows(qo_indptr);
        call.SetCausal(causal);
        call.SetRaggedKeys(k, v, kv_indptr);
        call.SetPackedMask(mask_indptr, packed_mask);
        call.SetRotary({rotary_mode, rope_scale, rope_theta, q_rope_position, k_rope_pos_offset});
        call.Run();
      });
}

Function MLA(Bound bound) {
  return Named(bound->op(),
               [bound](TensorView q, TensorView qo_indptr, TensorView pages, TensorView page_indptr,
                       TensorView page_indices, TensorView length_info, TensorView o,
                       TensorView lse, int64_t causal, double sm_scale) {
                 const Checker check(bound->op());
                 check.Rank("pages", pages, 3, "(num_pages, page_size, head_dim)");
                 CacheCall call(*bound, q, o, lse, sm_scale);
                 call.SetRows(qo_indptr);
                 call.SetCausal(causal);
                 call.SetPages(pages, page_indptr, page_indices, length_info);
                 call.Run();
               });
}

/*! \brief Requests of equal length in tensors of four dimensions, without index arrays. */
Function Dense(Bound bound) {
  return Named(bound->op(), [bound](TensorView q, TensorView k, TensorView v, TensorView o,
                                    Optional<TensorView> lse, int64_t causal, double sm_scale) {
    RunDense(*bound, {q, k, v, o, lse, causal, sm_scale, std::nullopt, std::nullopt});
  });
}

struct SlotEntry {
  const char* name;  // of the slot
  const char* op;    // in errors
  CacheSlot slot;
  Function (*make)(Bound bound);
};

constexpr SlotEntry kSlots[] = {
    {"prefill_paged", "attention_prefill_paged", CacheSlot::kPrefillPaged, PrefillPaged},
    {"decode_paged", "attention_decode_paged", CacheSlot::kDecodePaged, DecodePaged},
    {"prefill_ragged", "attention_prefill_ragged", CacheSlot::kPrefillRagged, PrefillRagged},
    {"tree_paged", "attention_tree_paged", CacheSlot::kTreePaged, TreePaged},
    {"tree_ragged", "attention_tree_ragged", CacheSlot::kTreeRagged, TreeRagged},
    {"mask_paged", "attention_mask_paged", CacheSlot::kMaskPaged, MaskPaged},
    {"mask_ragged", "attention_mask_ragged", CacheSlot::kMaskRagged, MaskRagged},
    {"dense", "attention_dense", CacheSlot::kDense, Dense},
    {"mla", "attention_mla", CacheSlot::kMLA, MLA},
};

}  // namespace

Function BindAttention(String slot, String options, Optional<Tensor> sinks,
                       Optional<Tensor> alibi_slopes) {
  std::string names;
  for (const SlotEntry& entry : kSlots) {
    if (slot == entry.name) {
      return entry.make(std::make_shared<const BoundAttention>(
          entry.op, entry.slot, options, std::move(sinks), std::move(alibi_slopes)));
    }
    names += (names.empty() ? "" : ", ") + std::string(entry.name);
  }
  Checker("bind_attention")
      .FailValue("`slot` is \"" + std::string(slot) + "\", expected one of " + names);
}

Function BindAttentionPrefillPaged(String options) {
  return BindAttention("prefill_paged", options, std::nullopt, std::nullopt);
}
Function BindAttentionDecodePaged(String options) {
  return BindAttention("decode_paged", options, std::nullopt, std::nullopt);
}
Function BindAttentionPrefillRagged(String options) {
  return BindAttention("prefill_ragged", options, std::nullopt, std::nullopt);
}
Function BindAttentionTreePaged(String options) {
  return BindAttention("tree_paged", options, std::nullopt, std::nullopt);
}
Function BindAttentionTreeRagged(String options) {
  return BindAttention("tree_ragged", options, std::nullopt, std::nullopt);
}
Function BindAttentionMaskPaged(String options) {
  return BindAttention("mask_paged", options, std::nullopt, std::nullopt);
}
Function BindAttentionMaskRagged(String options) {
  return BindAttention("mask_ragged", options, std::nullopt, std::nullopt);
}
Function BindAttentionDense(String options) {
  return BindAttention("dense", options, std::nullopt, std::nullopt);
}
Function BindAttentionMLA(String options) {
  return BindAttention("mla", options, std::nullopt, std::nullopt);
}

}  // namespace ops
}  // namespace tvm_flashinfer

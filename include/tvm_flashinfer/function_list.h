// Every packed function of the library, once: the registration, the exported symbols and the names
// of functions.h are made from this list. X(name, function).
#ifndef TVM_FLASHINFER_FUNCTION_LIST_H_
#define TVM_FLASHINFER_FUNCTION_LIST_H_

#define TVM_FLASHINFER_FUNCTIONS(X)                                        \
  X(batch_prefill_plan, BatchPrefillPlan)                                  \
  X(batch_prefill_paged_run, BatchPrefillPagedRun)                         \
  X(batch_prefill_ragged_run, BatchPrefillRaggedRun)                       \
  X(batch_decode_plan, BatchDecodePlan)                                    \
  X(batch_decode_run, BatchDecodeRun)                                      \
  X(batch_mla_plan, BatchMLAPlan)                                          \
  X(batch_mla_run, BatchMLARun)                                            \
  X(attention_dense, AttentionDense)                                       \
  X(attention_dense_masked, AttentionDenseMasked)                          \
  X(attention_ragged, AttentionRagged)                                     \
  X(bind_attention, BindAttention)                                         \
  X(bind_attention_prefill_paged, BindAttentionPrefillPaged)               \
  X(bind_attention_decode_paged, BindAttentionDecodePaged)                 \
  X(bind_attention_prefill_ragged, BindAttentionPrefillRagged)             \
  X(bind_attention_tree_paged, BindAttentionTreePaged)                     \
  X(bind_attention_tree_ragged, BindAttentionTreeRagged)                   \
  X(bind_attention_mask_paged, BindAttentionMaskPaged)                     \
  X(bind_attention_mask_ragged, BindAttentionMaskRagged)                   \
  X(bind_attention_dense, BindAttentionDense)                              \
  X(single_prefill, SinglePrefill)                                         \
  X(single_decode, SingleDecode)                                           \
  X(bind_attention_mla, BindAttentionMLA)                                  \
  X(cache_slot, MakeCacheSlot)                                             \
  X(cache_slot_with_slopes, MakeCacheSlotWithSlopes)                       \
  X(cache_slot_with_tuning, MakeCacheSlotWithTuning)                       \
  X(kernel_choice, KernelChoice)                                           \
  X(measured_archs, MeasuredArchs)                                         \
  X(load_tuning, LoadTuning)                                               \
  X(clear_tuning, ClearTuning)                                             \
  X(tuning_files, TuningFiles)                                             \
  X(merge_state, MergeState)                                               \
  X(merge_state_in_place, MergeStateInPlace)                               \
  X(merge_states, MergeStates)                                             \
  X(apply_attention_sinks, ApplyAttentionSinks)                            \
  X(cache_attention_in_window, CacheAttentionInWindow)                     \
  X(cache_self_attention_in_window, CacheSelfAttentionInWindow)            \
  X(cache_shared_attention_in_window, CacheSharedAttentionInWindow)        \
  X(cache_attention_with_sinks, CacheAttentionWithSinks)                   \
  X(cache_attention_with_sinks_in_window, CacheAttentionWithSinksInWindow) \
  X(split_qkv_rotary, SplitQKVRotary)                                      \
  X(bind_split_qkv_rotary, BindSplitQKVRotary)                             \
  X(apply_rope, ApplyRope)                                                 \
  X(apply_rope_cos_sin_cache, ApplyRopeCosSinCache)                        \
  X(batch_qk_apply_rotary_in_place, BatchQKApplyRotaryInPlace)             \
  X(split_qkv_rotary_append, SplitQKVRotaryAppend)                         \
  X(token_slots, FindTokenSlots)                                           \
  X(rmsnorm, RMSNorm)                                                      \
  X(gemma_rmsnorm, GemmaRMSNorm)                                           \
  X(fused_add_rmsnorm, FusedAddRMSNorm)                                    \
  X(gemma_fused_add_rmsnorm, GemmaFusedAddRMSNorm)                         \
  X(silu_and_mul, SiluAndMul)                                              \
  X(gelu_and_mul, GeluAndMul)                                              \
  X(gelu_tanh_and_mul, GeluTanhAndMul)                                     \
  X(append_paged_kv_cache, AppendPagedKVCache)                             \
  X(bind_append_paged_kv_cache, BindAppendPagedKVCache)                    \
  X(copy_single_page, CopySinglePage)                                      \
  X(compact_kv_copy, CompactKVCopy)                                        \
  X(debug_get_kv, DebugGetKV)                                              \
  X(append_paged_mla_kv_cache, AppendPagedMLAKVCache)                      \
  X(bind_append_paged_mla_kv_cache, BindAppendPagedMLAKVCache)             \
  X(copy_single_page_mla, CopySinglePageMLA)                               \
  X(debug_get_kv_mla, DebugGetKVMLA)                                       \
  X(sampling.parallel_sampling_from_prob, ParallelSamplingFromProb)        \
  X(call_counts, CallCounts)                                               \
  X(reset_call_counts, ResetCallCounts)

#endif  // TVM_FLASHINFER_FUNCTION_LIST_H_

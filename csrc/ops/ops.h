// The functions behind the `flashinfer.*` globals; docs/ops.md is their reference. Each checks its
// arguments, chooses the kernel by the device of its tensors, and launches it.
#ifndef TVM_FLASHINFER_OPS_OPS_H_
#define TVM_FLASHINFER_OPS_OPS_H_

#include <tvm/ffi/any.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>
#include <tvm/ffi/string.h>

#include <cstdint>
#include <string>
#include <utility>

namespace tvm_flashinfer {
namespace ops {

using tvm::ffi::Any;
using tvm::ffi::AnyView;
using tvm::ffi::Array;
using tvm::ffi::Function;
using tvm::ffi::Map;
using tvm::ffi::Optional;
using tvm::ffi::String;
using tvm::ffi::Tensor;
using tvm::ffi::TensorView;

/*! \brief A function with the name that errors about the types of its arguments have. */
template <typename Callable>
Function Named(const char* op, Callable callable) {
  return Function::FromTyped(std::move(callable), std::string("flashinfer.") + op);
}

Array<int64_t> BatchPrefillPlan(TensorView float_workspace, TensorView int_workspace,
                                TensorView pinned_int_workspace, TensorView qo_indptr,
                                TensorView kv_indptr, TensorView kv_len, int64_t total_num_rows,
                                int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                                int64_t page_size, bool enable_cuda_graph, int64_t head_dim_qk,
                                int64_t head_dim_vo, bool causal, int64_t window_left,
                                int64_t fixed_split_size, bool disable_split_kv,
                                int64_t num_colocated_ctas);

void BatchPrefillPagedRun(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                          TensorView q, TensorView k_pages, TensorView v_pages,
                          TensorView qo_indptr, TensorView page_indptr, TensorView page_indices,
                          TensorView last_page_len, TensorView o, Optional<TensorView> lse,
                          int64_t mask_mode, int64_t layout, int64_t window_left, bool enable_pdl,
                          double sm_scale, double rope_rcp_scale, double rope_rcp_theta);

void BatchPrefillRaggedRun(TensorView float_workspace, TensorView int_workspace,
                           Array<int64_t> plan, TensorView q, TensorView k, TensorView v,
                           TensorView qo_indptr, TensorView kv_indptr, TensorView o,
                           Optional<TensorView> lse, int64_t mask_mode, int64_t layout,
                           int64_t window_left, bool enable_pdl, double sm_scale,
                           double rope_rcp_scale, double rope_rcp_theta);

Array<int64_t> BatchDecodePlan(TensorView float_workspace, TensorView int_workspace,
                               TensorView pinned_int_workspace, TensorView page_indptr,
                               int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                               int64_t page_size, bool enable_cuda_graph, int64_t window_left,
                               double logits_soft_cap, int64_t head_dim_qk, int64_t head_dim_vo,
                               TensorView empty_q, TensorView empty_kv);

void BatchDecodeRun(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                    TensorView q, TensorView k_pages, TensorView v_pages, TensorView page_indptr,
                    TensorView page_indices, TensorView last_page_len, TensorView o,
                    Optional<TensorView> lse, int64_t layout, int64_t window_left, bool enable_pdl,
                    double sm_scale, double rope_rcp_scale, double rope_rcp_theta);

Array<int64_t> BatchMLAPlan(TensorView float_workspace, TensorView int_workspace,
                            TensorView pinned_int_workspace, TensorView qo_indptr,
                            TensorView kv_indptr, TensorView kv_len, int64_t num_heads,
                            int64_t head_dim_ckv, bool causal);

void BatchMLARun(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                 TensorView q_nope, TensorView q_pe, TensorView ckv, TensorView kpe,
                 TensorView page_indices, TensorView o, Optional<TensorView> lse, int64_t mask_mode,
                 int64_t num_heads, int64_t page_size, double sm_scale, bool return_lse_base_on_e);

Function BindAttention(String slot, String options, Optional<Tensor> sinks,
                       Optional<Tensor> alibi_slopes);
Function BindAttentionPrefillPaged(String options);
Function BindAttentionDecodePaged(String options);
Function BindAttentionPrefillRagged(String options);
Function BindAttentionTreePaged(String options);
Function BindAttentionTreeRagged(String options);
Function BindAttentionMaskPaged(String options);
Function BindAttentionMaskRagged(String options);
Function BindAttentionDense(String options);
Function BindAttentionMLA(String options);

// Calls of a compiled graph: the output comes last.
void AttentionDense(TensorView q, TensorView k, TensorView v, int64_t causal, int64_t window_left,
                    double logits_soft_cap, double sm_scale, TensorView o);
void AttentionDenseMasked(TensorView q, TensorView k, TensorView v, TensorView mask_indptr,
                          TensorView packed_mask, int64_t causal, int64_t window_left,
                          double logits_soft_cap, double sm_scale, TensorView o);
void AttentionDenseBiased(TensorView q, TensorView k, TensorView v, TensorView bias,
                          int64_t heads_as_requests, int64_t causal, int64_t window_left,
                          double logits_soft_cap, double sm_scale, TensorView o);
void AttentionRagged(TensorView q, TensorView k, TensorView v, TensorView qo_indptr,
                     TensorView kv_indptr, int64_t causal, int64_t window_left,
                     double logits_soft_cap, double sm_scale, TensorView o);
void AttentionPaged(TensorView q, TensorView pages, TensorView qo_indptr, TensorView page_indptr,
                    TensorView page_indices, TensorView length_info, int64_t causal,
                    int64_t window_left, double logits_soft_cap, double sm_scale, TensorView o);
void AttentionPagedDecode(TensorView q, TensorView pages, TensorView page_indptr,
                          TensorView page_indices, TensorView length_info, int64_t window_left,
                          double logits_soft_cap, double sm_scale, TensorView o);

/*! \brief What TVM's cache is given for one attention slot: a kind, and the functions of that kind.
 */
Array<Any> MakeCacheSlot(String slot, String options, bool planned, int64_t support_sliding_window);
Array<Any> MakeCacheSlotWithSlopes(String slot, String options, int64_t support_sliding_window,
                                   Tensor alibi_slopes);
Array<Any> MakeCacheSlotWithTuning(String slot, String options, bool planned,
                                   int64_t support_sliding_window, String tuning);

void MergeState(TensorView v_a, TensorView s_a, TensorView v_b, TensorView s_b, TensorView v_merged,
                TensorView s_merged);
void MergeStateInPlace(TensorView v, TensorView s, TensorView v_other, TensorView s_other);

void MergeStates(TensorView v, TensorView s, TensorView v_merged, TensorView s_merged);

void ApplyAttentionSinks(TensorView o, TensorView lse, TensorView sinks);

// Methods of TVM's cache with what they have no argument for. They keep TVM's order, and `o` last.
void CacheAttentionInWindow(AnyView cache, int64_t layer_id, double sm_scale, int64_t window,
                            Tensor qkv, Tensor o);
void CacheSelfAttentionInWindow(AnyView cache, int64_t layer_id, double sm_scale, int64_t window,
                                Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse);
void CacheSharedAttentionInWindow(AnyView cache, int64_t source_layer_id, double sm_scale,
                                  int64_t window, Tensor q, Tensor k, Tensor v, Tensor o);
void CacheAttentionWithSinks(AnyView cache, int64_t layer_id, double sm_scale, Tensor qkv,
                             Tensor sinks, Tensor o);
void CacheAttentionWithSinksInWindow(AnyView cache, int64_t layer_id, double sm_scale,
                                     int64_t window, Tensor qkv, Tensor sinks, Tensor o);

void SplitQKVRotary(TensorView qkv, TensorView position_map, TensorView q, TensorView k,
                    TensorView v, int64_t apply_rope, double rope_theta, double rope_scale,
                    int64_t rotary_dim, String rope_scaling);
Function BindSplitQKVRotary(double rope_theta, double rope_scale, int64_t rotary_dim,
                            String rope_scaling);

void ApplyRope(TensorView q, TensorView k, TensorView positions, double rope_theta,
               double rope_scale, int64_t rotary_dim, String rope_scaling, TensorView q_out,
               TensorView k_out);
void ApplyRopeCosSinCache(TensorView q, TensorView k, TensorView positions,
                          TensorView cos_sin_cache, int64_t interleaved, TensorView q_out,
                          TensorView k_out);
void BatchQKApplyRotaryInPlace(TensorView q, TensorView k, TensorView indptr, TensorView offsets,
                               int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                               int64_t head_dim, double rope_scale, double rope_theta);
void SplitQKVRotaryAppend(TensorView qkv, TensorView positions, TensorView slots, double rope_theta,
                          double rope_scale, int64_t rotary_dim, String rope_scaling,
                          TensorView pages, TensorView q);
void FindTokenSlots(TensorView qo_indptr, TensorView page_indptr, TensorView page_indices,
                    TensorView last_page_len, int64_t page_size, TensorView positions,
                    TensorView slots);

void RMSNorm(TensorView x, TensorView weight, double eps, TensorView out);
void GemmaRMSNorm(TensorView x, TensorView weight, double eps, TensorView out);
void FusedAddRMSNorm(TensorView x, TensorView residual, TensorView weight, double eps,
                     TensorView out, TensorView sum);
void GemmaFusedAddRMSNorm(TensorView x, TensorView residual, TensorView weight, double eps,
                          TensorView out, TensorView sum);
void SiluAndMul(TensorView x, TensorView out);
void GeluAndMul(TensorView x, TensorView out);
void GeluTanhAndMul(TensorView x, TensorView out);

void AppendPagedKVCache(TensorView pages, TensorView k, TensorView v, TensorView position_map);
Function BindAppendPagedKVCache(String options);
void CopySinglePage(TensorView pages, int64_t src_page, int64_t tgt_page, int64_t copy_length);
void CompactKVCopy(TensorView pages, TensorView copy_length_indptr, TensorView src_dst_pos,
                   int64_t batch_size);
void DebugGetKV(TensorView pages, TensorView position_map, TensorView k, TensorView v,
                int64_t layer_id);

void AppendPagedMLAKVCache(TensorView pages, TensorView kv, TensorView position_map);
Function BindAppendPagedMLAKVCache(String options);
void CopySinglePageMLA(TensorView pages, int64_t src_page, int64_t tgt_page, int64_t copy_length);
void DebugGetKVMLA(TensorView pages, TensorView position_map, TensorView kv, int64_t layer_id);

// What MLC's dense attention calls: the scratch, allow_fp16_qk and the rope numbers are part of its
// convention and are not read.
void SinglePrefill(TensorView q, TensorView k, TensorView v, TensorView scratch, int64_t causal,
                   int64_t layout, int64_t rotary_mode, bool allow_fp16_qk, double rope_scale,
                   double rope_theta, TensorView o);

void SingleDecode(TensorView q, TensorView k, TensorView v, TensorView scratch, int64_t layout,
                  int64_t rotary_mode, double rope_scale, double rope_theta, TensorView o);

// Which kernels planned calls run on, and the files of tuning that decide it.
Map<String, Any> KernelChoice(String slot, String gpu_name, int64_t arch, int64_t num_sm,
                              int64_t num_qo_heads, int64_t num_kv_heads, int64_t head_dim_qk,
                              int64_t head_dim_vo, bool causal, int64_t window_left,
                              Array<int64_t> qo_lens, Array<int64_t> kv_lens);
Array<String> MeasuredArchs();
Map<String, Any> CheckTuning(String text, String source);
void LoadTuning(String text, String source);
void ClearTuning();
Array<Map<String, Any>> TuningFiles();

Tensor ParallelSamplingFromProb(TensorView probs, TensorView uniform, TensorView sample_indices,
                                Tensor out_ids);

// Filters of tokens, by the numbers that a call brings.
void TopKFromProbs(TensorView probs, TensorView uniform, TensorView sample_indices,
                   TensorView top_k, TensorView out_ids);
void TopPFromProbs(TensorView probs, TensorView uniform, TensorView sample_indices,
                   TensorView top_p, TensorView out_ids);
void TopKTopPFromProbs(TensorView probs, TensorView uniform, TensorView sample_indices,
                       TensorView top_k, TensorView top_p, int64_t joint, TensorView out_ids);
void MinPFromProbs(TensorView probs, TensorView uniform, TensorView sample_indices,
                   TensorView min_p, TensorView out_ids);
void TopKRenormProbs(TensorView probs, TensorView top_k, TensorView out);
void TopPRenormProbs(TensorView probs, TensorView top_p, TensorView out);
void TopKTopPRenormProbs(TensorView probs, TensorView top_k, TensorView top_p, int64_t joint,
                         TensorView out);
void SampleFromSorted(TensorView sorted_probs, TensorView sorted_indices, TensorView top_p,
                      TensorView top_k, TensorView uniform, TensorView sample_indices,
                      TensorView out_ids);
void RenormFromSorted(TensorView probs, TensorView sorted_probs, TensorView top_p, TensorView top_k,
                      TensorView out);
void SoftmaxWithTemperature(TensorView logits, TensorView temperature, int64_t active_vocab_size,
                            TensorView out);
void ChainSpeculative(TensorView draft_probs, TensorView draft_ids, TensorView target_probs,
                      TensorView uniform, TensorView out_ids, TensorView num_accepted);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_OPS_H_

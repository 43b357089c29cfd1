// Attention as calls of a compiled graph: all that a call needs is among its arguments, and the
// output, which the graph has allocated, is the last one.
#include "cache_call.h"
#include "dense_attention.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief The rows of a tensor that may have a first dimension of 1. */
class FlatRows {
 public:
  FlatRows(const Checker& check, const char* name, const TensorView& x) {
    const int ndim = x.ndim();
    if ((ndim != 3 && ndim != 4) || (ndim == 4 && x.size(0) != 1)) {
      check.FailValue(Text("`", name, "` has shape ", ShapeText(x),
                           "; expected the rows of all requests, (length, num_heads, head_dim), "
                           "with or without a first dimension of 1"));
    }
    for (int i = 0; i < 3; ++i) {
      shape_[i] = x.size(ndim - 3 + i);
      strides_[i] = StrideOf(x, ndim - 3 + i);
    }
    tensor_.data = x.data_ptr();
    tensor_.device = x.device();
    tensor_.ndim = 3;
    tensor_.dtype = x.dtype();
    tensor_.shape = shape_;
    tensor_.strides = strides_;
    tensor_.byte_offset = x.byte_offset();
  }
  FlatRows(const FlatRows&) = delete;
  FlatRows& operator=(const FlatRows&) = delete;
  TensorView view() { return TensorView(&tensor_); }

 private:
  int64_t shape_[3];
  int64_t strides_[3];
  DLTensor tensor_{};
};

}  // namespace

void AttentionDense(TensorView q, TensorView k, TensorView v, int64_t causal, int64_t window_left,
                    double logits_soft_cap, double sm_scale, TensorView o) {
  const BoundAttention bound("attention_dense", CacheSlot::kDense, window_left, logits_soft_cap);
  RunDense(bound,
           {q, k, v, o, std::nullopt, causal, sm_scale, std::nullopt, std::nullopt, std::nullopt});
}

void AttentionDenseMasked(TensorView q, TensorView k, TensorView v, TensorView mask_indptr,
                          TensorView packed_mask, int64_t causal, int64_t window_left,
                          double logits_soft_cap, double sm_scale, TensorView o) {
  const BoundAttention bound("attention_dense_masked", CacheSlot::kDense, window_left,
                             logits_soft_cap);
  RunDense(bound,
           {q, k, v, o, std::nullopt, causal, sm_scale, mask_indptr, packed_mask, std::nullopt});
}

void AttentionDenseBiased(TensorView q, TensorView k, TensorView v, TensorView bias,
                          int64_t heads_as_requests, int64_t causal, int64_t window_left,
                          double logits_soft_cap, double sm_scale, TensorView o) {
  const BoundAttention bound("attention_dense_biased", CacheSlot::kDense, window_left,
                             logits_soft_cap);
  RunDense(bound, {q, k, v, o, std::nullopt, causal, sm_scale, std::nullopt, std::nullopt, bias,
                   heads_as_requests});
}

void AttentionRagged(TensorView q, TensorView k, TensorView v, TensorView qo_indptr,
                     TensorView kv_indptr, int64_t causal, int64_t window_left,
                     double logits_soft_cap, double sm_scale, TensorView o) {
  const BoundAttention bound("attention_ragged", CacheSlot::kPrefillRagged, window_left,
                             logits_soft_cap);
  const Checker check(bound.op());
  FlatRows q_rows(check, "q", q), k_rows(check, "k", k), v_rows(check, "v", v);
  check.Contiguous("o", o);
  FlatRows o_rows(check, "o", o);
  CacheCall call(bound, q_rows.view(), o_rows.view(), std::nullopt, sm_scale);
  call.SetRows(qo_indptr);
  call.SetCausal(causal);
  call.SetRaggedKeys(k_rows.view(), v_rows.view(), kv_indptr);
  call.Run();
}

void AttentionPaged(TensorView q, TensorView pages, TensorView qo_indptr, TensorView page_indptr,
                    TensorView page_indices, TensorView length_info, int64_t causal,
                    int64_t window_left, double logits_soft_cap, double sm_scale, TensorView o) {
  const BoundAttention bound("attention_paged", CacheSlot::kPrefillPaged, window_left,
                             logits_soft_cap);
  CacheCall call(bound, q, o, std::nullopt, sm_scale);
  call.SetRows(qo_indptr);
  call.SetCausal(causal);
  call.SetPages(pages, page_indptr, page_indices, length_info);
  call.Run();
}

void AttentionPagedDecode(TensorView q, TensorView pages, TensorView page_indptr,
                          TensorView page_indices, TensorView length_info, int64_t window_left,
                          double logits_soft_cap, double sm_scale, TensorView o) {
  const BoundAttention bound("attention_paged_decode", CacheSlot::kDecodePaged, window_left,
                             logits_soft_cap);
  CacheCall call(bound, q, o, std::nullopt, sm_scale);
  call.SetPages(pages, page_indptr, page_indices, length_info);
  call.Run();
}

}  // namespace ops
}  // namespace tvm_flashinfer

// Attention over requests of equal length: tensors of four dimensions and no index arrays.
#ifndef TVM_FLASHINFER_OPS_DENSE_ATTENTION_H_
#define TVM_FLASHINFER_OPS_DENSE_ATTENTION_H_

#include "cache_call.h"

namespace tvm_flashinfer {
namespace ops {

/*!
 * \brief q (B, n, Hq, dqk), k (B, m, Hkv, dqk), v (B, m, Hkv, dvo), o (B, n, Hq, dvo), lse (B, n,
 * Hq).
 */
struct DenseInputs {
  TensorView q;
  TensorView k;
  TensorView v;
  TensorView o;
  Optional<TensorView> lse;
  int64_t causal;
  double sm_scale;
  // A packed mask, as in CacheCall::SetPackedMask; both or neither.
  Optional<TensorView> mask_indptr;
  Optional<TensorView> packed_mask;
  // As in CacheCall::SetBias.
  Optional<TensorView> bias;
  int64_t heads_as_requests = 1;
};

void RunDense(const BoundAttention& bound, const DenseInputs& in);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_DENSE_ATTENTION_H_

// Numbers that are added to the scores of a call.
#include "cache_call.h"

namespace tvm_flashinfer {
namespace ops {

void CacheCall::SetBias(const TensorView& bias, int64_t heads_as_requests) {
  const char* meaning = "(sequences, num_qo_heads, n, m)";
  check_.Positive("heads_as_requests", heads_as_requests);
  if (args_.batch_size % heads_as_requests != 0 ||
      (heads_as_requests > 1 && args_.num_qo_heads != 1)) {
    check_.FailValue(Text("`heads_as_requests` is ", heads_as_requests, " with ", args_.batch_size,
                          " requests of ", args_.num_qo_heads,
                          " query heads; expected 1, or a divisor of the number of requests, each "
                          "of which has one head"));
  }
  check_.Rank("bias", bias, 4, meaning);
  const kernels::DType dtype = check_.FloatDType("bias", bias);
  if (dtype != args_.dtype && dtype != kernels::DType::kFloat32) {
    check_.FailType(Text("`bias` is ", DTypeText(bias.dtype()), ", expected ",
                         DTypeText(q_.dtype()), " as `q` is, or float32"));
  }
  check_.OnDevice("bias", bias, device_);
  KeepFromOutputs("bias", bias);
  const int64_t batch_size = args_.batch_size;
  const int64_t keys = batch_size == 0 ? 0 : num_kv_tokens_ / batch_size;
  const int64_t whole[4] = {batch_size / heads_as_requests, heads_as_requests * args_.num_qo_heads,
                            batch_size == 0 ? 0 : args_.num_rows / batch_size, keys};
  int64_t strides[4];
  for (int dim = 0; dim < 4; ++dim) {
    if (bias.size(dim) != 1 && bias.size(dim) != whole[dim]) {
      check_.FailValue(Text("`bias` has shape ", ShapeText(bias), "; expected ", meaning,
                            ", here (", whole[0], ", ", whole[1], ", ", whole[2], ", ", whole[3],
                            "), or 1 in the place of a size"));
    }
    strides[dim] = bias.size(dim) == 1 ? 0 : StrideOf(bias, dim);
    if (strides[dim] < 0) {
      check_.FailValue(Text("`bias` of shape ", ShapeText(bias), " has stride ", strides[dim],
                            " in dimension ", dim, "; strides may not be negative"));
    }
  }
  extras_.bias = {DataOf(bias), dtype,      static_cast<int32_t>(heads_as_requests),
                  strides[0],   strides[1], strides[2],
                  strides[3]};
}

}  // namespace ops
}  // namespace tvm_flashinfer

// Merge of many attention states of a row, for cascades of any depth.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_MERGE_MANY_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_MERGE_MANY_CUH_

#include <cmath>

#include "../row_types.h"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief The threads of one y merge one head of one row. */
template <typename T, int kVec>
__global__ void MergeManyKernel(MergeStatesArgs args) {
  using Vec = Vector<T, kVec>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  if (index >= args.num_rows * args.num_heads) return;
  const int64_t heads = args.num_heads;
  const int64_t first = index / heads * args.num_states * heads + index % heads;
  const float* s = args.s + first;
  const T* v = static_cast<const T*>(args.v) + first * args.head_dim;
  float top = -INFINITY, total = 0.f;
  for (int64_t j = 0; j < args.num_states; ++j) {
    const float log = s[j * heads];
    top = log > top || isnan(log) ? log : top;
  }
  // An empty state (-inf) has no weight, and the largest has 1 even if it is infinite.
  auto weight = [&](int64_t j) {
    const float log = s[j * heads];
    return log == -INFINITY ? 0.f : log == top ? 1.f : exp2f(log - top);
  };
  for (int64_t j = 0; j < args.num_states; ++j) total += weight(j);
  for (int d = threadIdx.x * kVec; d < args.head_dim; d += blockDim.x * kVec) {
    float sum[kVec] = {};
#pragma unroll 4
    for (int64_t j = 0; j < args.num_states; ++j) {
      const float w = weight(j);
      const Vec part = *reinterpret_cast<const Vec*>(v + j * heads * args.head_dim + d);
      // Values of an empty state may be anything, NaN included.
#pragma unroll
      for (int i = 0; i < kVec; ++i) sum[i] += w == 0.f ? 0.f : w * ToFloat(part.data[i]);
    }
    Vec merged;
#pragma unroll
    for (int i = 0; i < kVec; ++i) {
      merged.data[i] = FromFloat<T>(top == -INFINITY ? 0.f : sum[i] / total);
    }
    *reinterpret_cast<Vec*>(static_cast<T*>(args.v_merged) + index * args.head_dim + d) = merged;
  }
  if (threadIdx.x == 0) args.s_merged[index] = top == -INFINITY ? -INFINITY : top + log2f(total);
}

inline int MergeManyStates(const MergeStatesArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchDType(args.dtype, [&](auto element) {
      using T = decltype(element);
      const int64_t count = args.num_rows * args.num_heads;
      if (count == 0) return cudaSuccess;
      const bool wide = CanVectorize(args.head_dim * sizeof(T), {args.v, args.v_merged});
      int lanes = 1;
      while (lanes < 32 && lanes * (wide ? kWide<T> : 1) < args.head_dim) lanes *= 2;
      const int rows = 256 / lanes;
      auto kernel = wide ? MergeManyKernel<T, kWide<T>> : MergeManyKernel<T, 1>;
      return LaunchKernel(kernel, static_cast<unsigned>(CeilDiv(count, rows)), dim3(lanes, rows), 0,
                          handle, args);
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_MERGE_MANY_CUH_

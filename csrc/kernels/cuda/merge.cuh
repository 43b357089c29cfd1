// Merge of attention states. FlashInfer's kernel yields NaN for two empty states and supports four
// head dimensions; TVM's cache merges empty states whenever a sequence has no past.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_MERGE_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_MERGE_CUH_

#include <cmath>

#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*!
 * The threads of one y, all in one warp, merge one head of one row: all of them read both LSEs
 * before one of them writes the merged one, which may be the first of the two.
 */
template <typename T, int kVec>
__global__ void MergeStateKernel(int64_t num_states, int head_dim, const T* v_a, const float* s_a,
                                 const T* v_b, const float* s_b, T* v_merged, float* s_merged) {
  const int64_t state = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int lane = threadIdx.x, lanes = blockDim.x;
  const bool active = state < num_states;
  using Vec = Vector<T, kVec>;
  const T* const row_a = v_a + state * head_dim;
  const T* const row_b = v_b + state * head_dim;
  float log_a = 0.f, log_b = 0.f;
  // The first values do not wait for the LSEs.
  Vec a, b;
  if (active) {
    log_a = s_a[state];
    log_b = s_b[state];
    if (lane * kVec < head_dim) {
      a = *reinterpret_cast<const Vec*>(row_a + lane * kVec);
      b = *reinterpret_cast<const Vec*>(row_b + lane * kVec);
    }
  }
  __syncwarp();
  if (!active) return;
  const float log_max = fmaxf(log_a, log_b);
  // An empty state (-inf) has no weight, and its values are not read into the result.
  const bool use_a = log_a != -INFINITY, use_b = log_b != -INFINITY;
  const float weight_a = use_a ? exp2f(log_a - log_max) : 0.f;
  const float weight_b = use_b ? exp2f(log_b - log_max) : 0.f;
  const float total = weight_a + weight_b;
  const float scale_a = use_a ? weight_a / total : 0.f;
  const float scale_b = use_b ? weight_b / total : 0.f;
  for (int i = lane * kVec; i < head_dim;) {
    Vec merged;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float part_a = use_a ? scale_a * ToFloat(a.data[j]) : 0.f;
      const float part_b = use_b ? scale_b * ToFloat(b.data[j]) : 0.f;
      merged.data[j] = FromFloat<T>(part_a + part_b);
    }
    *reinterpret_cast<Vec*>(v_merged + state * head_dim + i) = merged;
    i += lanes * kVec;
    if (i >= head_dim) break;
    a = *reinterpret_cast<const Vec*>(row_a + i);
    b = *reinterpret_cast<const Vec*>(row_b + i);
  }
  if (lane == 0) s_merged[state] = use_a || use_b ? log_max + log2f(total) : -INFINITY;
}

inline int MergeState(const MergeStateArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchDType(args.dtype, [&](auto element) {
      using T = decltype(element);
      const int64_t num_states = args.num_rows * args.num_heads;
      if (num_states == 0) return cudaSuccess;
      const bool wide =
          CanVectorize(args.head_dim * sizeof(T), {args.v_a, args.v_b, args.v_merged});
      const int vec = wide ? kWide<T> : 1;
      int lanes = 1;
      while (lanes < 32 && lanes * vec < args.head_dim) lanes *= 2;
      constexpr int kThreads = 256;
      const auto blocks = static_cast<unsigned>(CeilDiv(num_states * lanes, kThreads));
      const dim3 threads(lanes, kThreads / lanes);
      auto kernel = wide ? MergeStateKernel<T, kWide<T>> : MergeStateKernel<T, 1>;
      return LaunchKernel(kernel, blocks, threads, 0, handle, num_states, args.head_dim,
                          static_cast<const T*>(args.v_a), args.s_a,
                          static_cast<const T*>(args.v_b), args.s_b, static_cast<T*>(args.v_merged),
                          args.s_merged);
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_MERGE_CUH_

// Attention sinks, applied to finished states.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_SINKS_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_SINKS_CUH_

#include <cmath>

#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! The threads of one y, all in one warp, scale one head of one row, after all have read its LSE.
 */
template <typename T, int kVec>
__global__ void ApplySinksKernel(int64_t num_states, int num_heads, int head_dim, T* o, float* lse,
                                 const float* sinks) {
  const int64_t state = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const int lane = threadIdx.x, lanes = blockDim.x;
  const bool active = state < num_states;
  float own_lse = 0.f, sink = 0.f;
  if (active) {
    own_lse = lse[state];
    sink = sinks[state % num_heads] * 1.4426950408889634f;
  }
  __syncwarp();
  // Without a sink nothing changes, to the bit.
  if (!active || sink == -INFINITY) return;
  // Without keys the sink is all there is, and the values are not read.
  const bool is_empty = own_lse == -INFINITY;
  const float top = fmaxf(own_lse, sink);
  const float own = is_empty ? 0.f : exp2f(own_lse - top);
  const float total = own + exp2f(sink - top);
  const float scale = own / total;
  for (int i = lane * kVec; i < head_dim; i += lanes * kVec) {
    auto* place = reinterpret_cast<Vector<T, kVec>*>(o + state * head_dim + i);
    Vector<T, kVec> values = *place;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      values.data[j] = FromFloat<T>(is_empty ? 0.f : scale * ToFloat(values.data[j]));
    }
    *place = values;
  }
  if (lane == 0) lse[state] = is_empty ? sink : top + log2f(total);
}

inline int ApplySinks(const ApplySinksArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchDType(args.dtype, [&](auto element) {
      using T = decltype(element);
      const int64_t num_states = args.num_rows * args.num_heads;
      if (num_states == 0) return cudaSuccess;
      const bool wide = CanVectorize(args.head_dim * sizeof(T), {args.o});
      const int vec = wide ? kWide<T> : 1;
      int lanes = 1;
      while (lanes < 32 && lanes * vec < args.head_dim) lanes *= 2;
      constexpr int kThreads = 256;
      const auto blocks = static_cast<unsigned>(CeilDiv(num_states * lanes, kThreads));
      const dim3 threads(lanes, kThreads / lanes);
      auto kernel = wide ? ApplySinksKernel<T, kWide<T>> : ApplySinksKernel<T, 1>;
      return LaunchKernel(kernel, blocks, threads, 0, handle, num_states, args.num_heads,
                          args.head_dim, static_cast<T*>(args.o), args.lse, args.sinks);
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_SINKS_CUH_

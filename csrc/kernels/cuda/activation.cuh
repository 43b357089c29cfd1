// Gated activations.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ACTIVATION_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ACTIVATION_CUH_

#include <algorithm>

#include "../row_types.h"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

template <Activation kActivation>
__device__ __forceinline__ float Activate(float x) {
  if constexpr (kActivation == Activation::kSilu) return x / (1.f + __expf(-x));
  if constexpr (kActivation == Activation::kGelu) return x * normcdff(x);
  // x / 2 * (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
  return x / (1.f + __expf(-1.59576912160573071f * x * (1.f + 0.044715f * x * x)));
}

/*! \brief Rows are blockIdx.x, pieces of a row the threads of all blockIdx.y. */
template <typename T, int kVec, Activation kActivation>
__global__ void GateKernel(GatedArgs args) {
  using Vec = Vector<T, kVec>;
  const int64_t row = blockIdx.x;
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride_row;
  T* out = static_cast<T*>(args.out) + row * args.dim;
  const int step = gridDim.y * blockDim.x * kVec;
  for (int d = (blockIdx.y * blockDim.x + threadIdx.x) * kVec; d < args.dim; d += step) {
    const Vec gate = *reinterpret_cast<const Vec*>(x + d);
    const Vec up = *reinterpret_cast<const Vec*>(x + args.dim + d);
    Vec result;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      result.data[j] =
          FromFloat<T>(Activate<kActivation>(ToFloat(gate.data[j])) * ToFloat(up.data[j]));
    }
    *reinterpret_cast<Vec*>(out + d) = result;
  }
}

template <typename T, Activation kActivation>
cudaError_t Gate(const GatedArgs& args, cudaStream_t stream) {
  if (args.num_rows * args.dim == 0) return cudaSuccess;
  const bool wide =
      CanVectorize(args.dim * sizeof(T), {args.x, args.out}) && args.x_stride_row % kWide<T> == 0;
  const int64_t pieces = CeilDiv(args.dim, wide ? kWide<T> : 1);
  const int threads = static_cast<int>(std::min<int64_t>(CeilDiv(pieces, 32) * 32, 256));
  const dim3 blocks(static_cast<unsigned>(args.num_rows),
                    static_cast<unsigned>(std::min<int64_t>(CeilDiv(pieces, threads), 65535)));
  auto kernel = wide ? GateKernel<T, kWide<T>, kActivation> : GateKernel<T, 1, kActivation>;
  return LaunchKernel(kernel, blocks, threads, 0, stream, args);
}

inline int GateRows(const GatedArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchDType(args.dtype, [&](auto element) {
      using T = decltype(element);
      switch (args.activation) {
        case Activation::kSilu:
          return Gate<T, Activation::kSilu>(args, handle);
        case Activation::kGelu:
          return Gate<T, Activation::kGelu>(args, handle);
        case Activation::kGeluTanh:
          return Gate<T, Activation::kGeluTanh>(args, handle);
      }
      return cudaErrorInvalidValue;
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ACTIVATION_CUH_

// Root mean square norms. FlashInfer's kernels take neither float32 nor heads that lie apart, and
// norm a sum before it is rounded, where a model norms what it stores.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_NORM_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_NORM_CUH_

#include <algorithm>

#include "../row_types.h"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Vectors of a row that a thread keeps in registers between the two passes. */
constexpr int kNormHeld = 4;

/*! \brief The sum over the threads of one y, which fill whole warps; all threads of a block call.
 */
__device__ __forceinline__ float SumOfRow(float x) {
  __shared__ float warp_sums[32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  if (blockDim.x == 32) return x;
  const int warps = blockDim.x / 32, first = threadIdx.y * warps;
  if (threadIdx.x % 32 == 0) warp_sums[first + threadIdx.x / 32] = x;
  __syncthreads();
  float sum = 0.f;
  for (int i = 0; i < warps; ++i) sum += warp_sums[first + i];
  return sum;
}

/*! \brief The threads of one y norm one head of one row. */
template <typename T, int kVec>
__global__ void NormKernel(NormArgs args) {
  using Vec = Vector<T, kVec>;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
  const bool active = index < args.num_rows * args.num_heads;
  const int64_t row = active ? index / args.num_heads : 0,
                head = active ? index % args.num_heads : 0;
  auto at = [&](const HeadRows& rows) {
    return static_cast<T*>(rows.data) + row * rows.stride_row + head * rows.stride_head;
  };
  const T* x = at(args.x);
  const bool adds = args.residual.data != nullptr;
  const T* residual = adds ? at(args.residual) : nullptr;
  T* sum = adds ? at(args.sum) : nullptr;
  const int step = blockDim.x * kVec, first = threadIdx.x * kVec, dim = active ? args.dim : 0;
  float squares = 0.f;
  // The first pass: what is normed, written where it is a sum.
  auto read = [&](int d) {
    Vec y = *reinterpret_cast<const Vec*>(x + d);
    if (adds) {
      const Vec r = *reinterpret_cast<const Vec*>(residual + d);
#pragma unroll
      for (int j = 0; j < kVec; ++j)
        y.data[j] = FromFloat<T>(ToFloat(y.data[j]) + ToFloat(r.data[j]));
      *reinterpret_cast<Vec*>(sum + d) = y;
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) squares += ToFloat(y.data[j]) * ToFloat(y.data[j]);
    return y;
  };
  Vec held[kNormHeld];
#pragma unroll
  for (int i = 0; i < kNormHeld; ++i) {
    if (first + i * step < dim) held[i] = read(first + i * step);
  }
  for (int d = first + kNormHeld * step; d < dim; d += step) read(d);
  const float scale = rsqrtf(SumOfRow(squares) / args.dim + args.eps);

  const T* weight = static_cast<const T*>(args.weight);
  T* out = at(args.out);
  auto write = [&](int d, const Vec& y) {
    const Vec w = *reinterpret_cast<const Vec*>(weight + d);
    Vec result;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      const float factor = ToFloat(w.data[j]) + args.weight_bias;
      result.data[j] = FromFloat<T>(ToFloat(y.data[j]) * scale * factor);
    }
    *reinterpret_cast<Vec*>(out + d) = result;
  };
#pragma unroll
  for (int i = 0; i < kNormHeld; ++i) {
    if (first + i * step < dim) write(first + i * step, held[i]);
  }
  const T* y = adds ? sum : x;
  for (int d = first + kNormHeld * step; d < dim; d += step) {
    write(d, *reinterpret_cast<const Vec*>(y + d));
  }
}

/*! \brief Whether heads can move in pieces of 16 bytes. */
template <typename T>
bool HeadsVectorize(int64_t dim, const HeadRows& rows) {
  return CanVectorize(dim * sizeof(T), {rows.data}) && rows.stride_row % kWide<T> == 0 &&
         rows.stride_head % kWide<T> == 0;
}

inline int NormRows(const NormArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchDType(args.dtype, [&](auto element) {
      using T = decltype(element);
      const int64_t count = args.num_rows * args.num_heads;
      if (count == 0) return cudaSuccess;
      bool wide = CanVectorize(args.dim * sizeof(T), {args.weight});
      for (const HeadRows* rows : {&args.x, &args.residual, &args.out, &args.sum}) {
        wide = wide && (rows->data == nullptr || HeadsVectorize<T>(args.dim, *rows));
      }
      // Few rows: a thread has one piece. Many: it has two, and more of its loads under way.
      const int64_t pieces = CeilDiv(args.dim, wide ? kWide<T> : 1);
      const int64_t wanted = count <= 256 ? pieces : CeilDiv(pieces, 2);
      int lanes = 32;
      while (lanes < 1024 && lanes < wanted) lanes *= 2;
      const int rows = std::max(1, 256 / lanes);
      auto kernel = wide ? NormKernel<T, kWide<T>> : NormKernel<T, 1>;
      return LaunchKernel(kernel, static_cast<unsigned>(CeilDiv(count, rows)), dim3(lanes, rows), 0,
                          handle, args);
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_NORM_CUH_

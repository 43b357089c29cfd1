// Draws from rows of probabilities by given uniform numbers; FlashInfer's kernels draw their own.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_SAMPLING_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_SAMPLING_CUH_

#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

constexpr int kSampleThreads = 1024;
constexpr int kSampleItems = 16;  // neighbours that a thread adds up before the block does

/*! \brief One block draws one sample: it adds up its row piece by piece until the sum is passed. */
template <bool kAligned>
__global__ void __launch_bounds__(kSampleThreads) SampleFromProbsKernel(SampleArgs args) {
  __shared__ float warp_sums[kSampleThreads / 32];
  __shared__ int first_thread, last_positive;
  const int row = args.row_indices[blockIdx.x];
  if (row < 0 || row >= args.num_rows) {
    if (threadIdx.x == 0) args.ids[blockIdx.x] = -1;
    return;
  }
  const float* probs = args.probs + static_cast<int64_t>(row) * args.vocab_size;
  const double uniform = args.uniform[blockIdx.x];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    first_thread = kSampleThreads;
    last_positive = -1;
  }
  double before = 0;  // the sum of the pieces so far
  constexpr int kPiece = kSampleThreads * kSampleItems;
  for (int base = 0; base < args.vocab_size; base += kPiece) {
    const int own = base + static_cast<int>(threadIdx.x) * kSampleItems;
    float p[kSampleItems], sum = 0.f;
    int positive = -1;
#pragma unroll
    for (int i = 0; i < kSampleItems; i += 4) {
      if (kAligned && own + i < args.vocab_size) {
        const float4 four = *reinterpret_cast<const float4*>(probs + own + i);
        p[i] = four.x, p[i + 1] = four.y, p[i + 2] = four.z, p[i + 3] = four.w;
      } else {
#pragma unroll
        for (int j = i; j < i + 4; ++j) p[j] = own + j < args.vocab_size ? probs[own + j] : 0.f;
      }
    }
#pragma unroll
    for (int i = 0; i < kSampleItems; ++i) {
      if (!(p[i] > 0.f)) p[i] = 0.f;  // NaN too
      if (p[i] > 0.f) positive = own + i;
      sum += p[i];
    }
    float up_to = sum;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(0xffffffffu, up_to, step);
      if (lane >= step) up_to += other;
    }
    if (lane == 31) warp_sums[warp] = up_to;
    __syncthreads();
    double start = before, total = 0;
    for (int w = 0; w < kSampleThreads / 32; ++w) {
      if (w < warp) start += warp_sums[w];
      total += warp_sums[w];
    }
    if (positive >= 0) {
      atomicMax(&last_positive, positive);
      if (start + up_to > uniform) atomicMin(&first_thread, static_cast<int>(threadIdx.x));
    }
    __syncthreads();
    if (first_thread < kSampleThreads) {
      if (threadIdx.x != first_thread) return;
      double here = start + (up_to - sum);
      int id = positive;
#pragma unroll
      for (int i = 0; i < kSampleItems; ++i) {
        here += p[i];
        // `id` is the last one with a probability until one passes.
        if (p[i] > 0.f && here > uniform && own + i < id) id = own + i;
      }
      args.ids[blockIdx.x] = id;
      return;
    }
    before += total;
  }
  if (threadIdx.x == 0) args.ids[blockIdx.x] = last_positive;
}

inline int SampleFromProbs(const SampleArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    if (args.num_samples == 0) return cudaSuccess;
    const bool aligned = args.vocab_size % 4 == 0 && CanVectorize(sizeof(float4), {args.probs});
    auto kernel = aligned ? SampleFromProbsKernel<true> : SampleFromProbsKernel<false>;
    kernel<<<static_cast<unsigned>(args.num_samples), kSampleThreads, 0, handle>>>(args);
    return cudaGetLastError();
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_SAMPLING_CUH_

// Draws from what filters leave of rows of probabilities, by given numbers. FlashInfer's kernels
// draw numbers of their own, and reject until a token is kept.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_TOKEN_FILTER_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_TOKEN_FILTER_CUH_

#include <cfloat>
#include <cmath>

#include "../sampling_types.h"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

constexpr int kFilterThreads = 1024;
constexpr int kFilterWarps = kFilterThreads / 32;

/*! \brief Sums over all threads of a block, always added up in one order. */
template <int kCount>
__device__ __forceinline__ void SumOfBlock(float (&values)[kCount]) {
  __shared__ float parts[kCount][kFilterWarps];
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
    }
    if (threadIdx.x % 32 == 0) parts[i][threadIdx.x / 32] = values[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    values[i] = parts[i][threadIdx.x % 32];
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      values[i] += __shfl_xor_sync(0xffffffffu, values[i], step);
    }
  }
  __syncthreads();
}

__device__ __forceinline__ float LargestOfBlock(float x) {
  __shared__ float parts[kFilterWarps];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
  __syncthreads();
  x = parts[threadIdx.x % 32];
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  __syncthreads();
  return x;
}

/*! \brief Call body(value) for the elements of a row that are this thread's. */
template <typename Body>
__device__ __forceinline__ void ForRow(const float* row, int size, const Body& body) {
  if (size % 4 == 0 && reinterpret_cast<uintptr_t>(row) % 16 == 0) {
#pragma unroll 4
    for (int i = threadIdx.x; i < size / 4; i += kFilterThreads) {
      const float4 four = reinterpret_cast<const float4*>(row)[i];
      body(four.x), body(four.y), body(four.z), body(four.w);
    }
  } else {
#pragma unroll 4
    for (int i = threadIdx.x; i < size; i += kFilterThreads) body(row[i]);
  }
}

/*! \brief The sum of what is at least t, which is positive. */
__device__ __forceinline__ float SumFrom(const float* row, int size, float t) {
  float sum[1] = {};
  ForRow(row, size, [&](float p) { sum[0] += p >= t ? p : 0.f; });
  SumOfBlock(sum);
  return sum[0];
}

/*!
 * \brief The largest t from `low` to `high` for which the sum of weight(p) over all p >= t is
 * `wanted` at least, `low` if it is for none. Three of them are tried in a pass.
 */
template <typename Weight>
__device__ float LargestThat(const float* row, int size, float low, float high, float wanted,
                             const Weight& weight) {
  // Positive floats are ordered as their bits are; the answer is in [first, last].
  unsigned first = __float_as_uint(low), last = __float_as_uint(high);
  while (first < last) {
    const unsigned step = (last - first + 3) / 4;
    float t[3], sums[3] = {};
#pragma unroll
    for (int i = 0; i < 3; ++i) t[i] = __uint_as_float(min(first + (i + 1) * step, last));
    ForRow(row, size, [&](float p) {
#pragma unroll
      for (int i = 0; i < 3; ++i) sums[i] += p >= t[i] ? weight(p) : 0.f;
    });
    SumOfBlock(sums);
    // All threads have the same sums. One that is not reached bounds the answer from above.
    unsigned next_first = first, next_last = last;
#pragma unroll
    for (int i = 2; i >= 0; --i) {
      if (!(sums[i] >= wanted)) next_last = __float_as_uint(t[i]) - 1;
    }
#pragma unroll
    for (int i = 0; i < 3; ++i) {
      if (sums[i] >= wanted) next_first = max(next_first, __float_as_uint(t[i]));
    }
    first = next_first;
    last = max(next_last, next_first);
  }
  return __uint_as_float(first);
}

/*! \brief The least probability that is kept of a row; infinite where none is positive. */
__device__ __forceinline__ float ThresholdOf(const TokenFilter& filter, const float* row, int size,
                                             int64_t index) {
  float largest = 0.f;
  ForRow(row, size, [&](float p) { largest = fmaxf(largest, p); });
  largest = LargestOfBlock(largest);
  if (!(largest >= FLT_MIN)) return INFINITY;
  float t = FLT_MIN;
  if (filter.top_k != nullptr && filter.top_k[index] > 0 && filter.top_k[index] < size) {
    // Counts are exact in float32 up to 2^24 tokens.
    const float k = static_cast<float>(filter.top_k[index]);
    t = LargestThat(row, size, t, largest, k, [](float) { return 1.f; });
  }
  if (filter.top_p != nullptr) {
    float wanted = filter.top_p[index];
    if (!filter.joint) wanted *= SumFrom(row, size, t);
    t = LargestThat(row, size, t, largest, wanted, [](float p) { return p; });
  }
  if (filter.min_p != nullptr) t = fmaxf(t, filter.min_p[index] * largest);
  return fminf(t, largest);
}

/*! \brief Where a running sum ends: its last index, and the sum with it. */
struct RunningSum {
  int index;
  double sum;
};

/*!
 * \brief The first index at which the running sum of value(i), none of them negative, is above a
 * number, or with kFromNumber at least the number; where none is, the last index with a positive
 * value, -1 without one. All threads of the block call, and get the same.
 */
template <bool kFromNumber, typename Value>
__device__ RunningSum FirstAbove(int size, double number, const Value& value) {
  constexpr int kItems = 8;
  __shared__ float warp_sums[kFilterWarps];
  __shared__ int first_thread, last_positive;
  __shared__ RunningSum found;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  if (threadIdx.x == 0) {
    first_thread = kFilterThreads;
    last_positive = -1;
  }
  auto passes = [&](double sum) { return kFromNumber ? sum >= number : sum > number; };
  double before = 0;  // the sum of the pieces so far
  for (int base = 0; base < size; base += kFilterThreads * kItems) {
    const int own = base + static_cast<int>(threadIdx.x) * kItems;
    float p[kItems], sum = 0.f;
    int positive = -1;
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      p[i] = own + i < size ? value(own + i) : 0.f;
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
    for (int w = 0; w < kFilterWarps; ++w) {
      if (w < warp) start += warp_sums[w];
      total += warp_sums[w];
    }
    if (positive >= 0) {
      atomicMax(&last_positive, positive);
      if (passes(start + up_to)) atomicMin(&first_thread, static_cast<int>(threadIdx.x));
    }
    __syncthreads();
    if (first_thread < kFilterThreads) {
      if (threadIdx.x == first_thread) {
        RunningSum here{-1, start + (up_to - sum)};
#pragma unroll
        for (int i = 0; i < kItems; ++i) {
          if (p[i] > 0.f && (here.index < 0 || !passes(here.sum))) {
            here.sum += p[i];
            here.index = own + i;
          }
        }
        found = here;
      }
      break;
    }
    before += total;
  }
  __syncthreads();
  const bool any = first_thread < kFilterThreads;
  const RunningSum result = any ? found : RunningSum{last_positive, before};
  __syncthreads();
  return result;
}

__device__ __forceinline__ bool RowOfSample(const Draws& draws, int64_t num_rows, int* row) {
  *row = draws.row_indices[blockIdx.x];
  if (*row >= 0 && *row < num_rows) return true;
  if (threadIdx.x == 0) draws.ids[blockIdx.x] = -1;
  return false;
}

static __global__ void __launch_bounds__(kFilterThreads) DrawFilteredKernel(FilterDrawArgs args) {
  int row;
  if (!RowOfSample(args.draws, args.num_rows, &row)) return;
  const float* probs = args.probs + static_cast<int64_t>(row) * args.vocab_size;
  const float t = ThresholdOf(args.filter, probs, args.vocab_size, row);
  const double number =
      args.draws.uniform[blockIdx.x] * static_cast<double>(SumFrom(probs, args.vocab_size, t));
  const RunningSum drawn = FirstAbove<false>(args.vocab_size, number,
                                             [&](int i) { return probs[i] >= t ? probs[i] : 0.f; });
  if (threadIdx.x == 0) args.draws.ids[blockIdx.x] = drawn.index;
}

/*! \brief Write what is at least t of a row over its sum. */
__device__ __forceinline__ void WriteRenormed(const float* probs, int size, float t, float* out) {
  const float sum = SumFrom(probs, size, t);
  const float scale = sum > 0.f ? 1.f / sum : 0.f;
#pragma unroll 4
  for (int i = threadIdx.x; i < size; i += kFilterThreads) {
    out[i] = probs[i] >= t ? probs[i] * scale : 0.f;
  }
}

static __global__ void __launch_bounds__(kFilterThreads)
    RenormFilteredKernel(FilterRenormArgs args) {
  const int64_t row = blockIdx.x, start = row * args.vocab_size;
  const float t = ThresholdOf(args.filter, args.probs + start, args.vocab_size, row);
  WriteRenormed(args.probs + start, args.vocab_size, t, args.out + start);
}

/*! \brief The last token that is kept of a sorted row, and the sum up to it. */
__device__ __forceinline__ RunningSum LastKept(const SortedArgs& args, int64_t row) {
  const float* probs = args.sorted_probs + row * args.vocab_size;
  const int most = max(1, min(args.top_k[row], args.vocab_size));
  RunningSum kept = FirstAbove<true>(most, args.top_p[row], [&](int i) { return probs[i]; });
  // Tokens without a probability change no sum; without a positive one the first is kept.
  kept.index = max(kept.index, 0);
  return kept;
}

static __global__ void __launch_bounds__(kFilterThreads) DrawSortedKernel(SortedArgs args) {
  int row;
  if (!RowOfSample(args.draws, args.num_rows, &row)) return;
  const RunningSum kept = LastKept(args, row);
  const int64_t start = static_cast<int64_t>(row) * args.vocab_size;
  const RunningSum drawn =
      FirstAbove<false>(kept.index + 1, args.draws.uniform[blockIdx.x] * kept.sum,
                        [&](int i) { return args.sorted_probs[start + i]; });
  if (threadIdx.x != 0) return;
  args.draws.ids[blockIdx.x] = drawn.index < 0 ? -1 : args.sorted_indices[start + drawn.index];
}

static __global__ void __launch_bounds__(kFilterThreads) RenormSortedKernel(SortedArgs args) {
  const int64_t row = blockIdx.x, start = row * args.vocab_size;
  const float last = args.sorted_probs[start + LastKept(args, row).index];
  const float t = fmaxf(last, FLT_MIN);
  WriteRenormed(args.probs + start, args.vocab_size, t, args.out + start);
}

static __global__ void __launch_bounds__(kFilterThreads) SoftmaxKernel(SoftmaxArgs args) {
  const int64_t start = static_cast<int64_t>(blockIdx.x) * args.vocab_size;
  const float* logits = args.logits + start;
  float* out = args.out + start;
  const float temperature = args.temperature[blockIdx.x];
  const bool is_greedy = !(temperature > 1e-5f);
  float largest = -INFINITY;
  ForRow(logits, args.active_size, [&](float x) { largest = fmaxf(largest, x); });
  largest = LargestOfBlock(largest);
  auto weight = [&](float x) {
    return is_greedy ? (x == largest ? 1.f : 0.f) : __expf((x - largest) / temperature);
  };
  float sum[1] = {};
  ForRow(logits, args.active_size, [&](float x) { sum[0] += weight(x); });
  SumOfBlock(sum);
  const float scale = 1.f / sum[0];
#pragma unroll 4
  for (int i = threadIdx.x; i < args.vocab_size; i += kFilterThreads) {
    out[i] = i < args.active_size ? weight(logits[i]) * scale : 0.f;
  }
}

static __global__ void __launch_bounds__(kFilterThreads) VerifyDraftsKernel(SpeculativeArgs args) {
  const int64_t b = blockIdx.x, size = args.vocab_size, drafts = args.num_drafts;
  const float* draft = args.draft_probs + b * drafts * size;
  const float* target = args.target_probs + b * (drafts + 1) * size;
  const float* uniform = args.uniform + b * (drafts + 1);
  int32_t* ids = args.ids + b * (drafts + 1);
  // All threads go by the same numbers.
  int64_t at = 0;
  for (; at < drafts; ++at, draft += size, target += size) {
    const int id = args.draft_ids[b * drafts + at];
    if (id < 0 || id >= size || !(uniform[at] * draft[id] < target[id])) break;
    if (threadIdx.x == 0) ids[at] = id;
  }
  const bool all = at == drafts;
  auto rest = [&](int i) { return fmaxf(all ? target[i] : target[i] - draft[i], 0.f); };
  float sums[2] = {};
#pragma unroll 4
  for (int i = threadIdx.x; i < size; i += kFilterThreads) {
    sums[0] += rest(i);
    sums[1] += fmaxf(target[i], 0.f);
  }
  SumOfBlock(sums);
  const bool has_rest = sums[0] > 0.f;
  const double number = uniform[drafts] * static_cast<double>(has_rest ? sums[0] : sums[1]);
  const RunningSum drawn = FirstAbove<false>(args.vocab_size, number,
                                             [&](int i) { return has_rest ? rest(i) : target[i]; });
  if (threadIdx.x != 0) return;
  args.num_accepted[b] = static_cast<int32_t>(at);
  ids[at] = drawn.index;
  for (int64_t i = at + 1; i <= drafts; ++i) ids[i] = -1;
}

template <typename Args>
int LaunchOverRows(void (*kernel)(Args), const Args& args, int64_t rows, CudaStream stream,
                   char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    if (rows == 0) return cudaSuccess;
    return LaunchKernel(kernel, static_cast<unsigned>(rows), kFilterThreads, 0, handle, args);
  });
}

inline int DrawFiltered(const FilterDrawArgs& args, CudaStream stream, char* error) {
  return LaunchOverRows(DrawFilteredKernel, args, args.draws.num_samples, stream, error);
}
inline int RenormFiltered(const FilterRenormArgs& args, CudaStream stream, char* error) {
  return LaunchOverRows(RenormFilteredKernel, args, args.num_rows, stream, error);
}
inline int DrawSorted(const SortedArgs& args, CudaStream stream, char* error) {
  return LaunchOverRows(DrawSortedKernel, args, args.draws.num_samples, stream, error);
}
inline int RenormSorted(const SortedArgs& args, CudaStream stream, char* error) {
  return LaunchOverRows(RenormSortedKernel, args, args.num_rows, stream, error);
}
inline int SoftmaxRows(const SoftmaxArgs& args, CudaStream stream, char* error) {
  return LaunchOverRows(SoftmaxKernel, args, args.num_rows, stream, error);
}
inline int VerifyDrafts(const SpeculativeArgs& args, CudaStream stream, char* error) {
  return LaunchOverRows(VerifyDraftsKernel, args, args.batch_size, stream, error);
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_TOKEN_FILTER_CUH_

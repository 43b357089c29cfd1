// Rotary embedding of heads that lie anywhere, to where they belong: in place, into other tensors,
// or into pages.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ROTARY_MOVE_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ROTARY_MOVE_CUH_

#include <algorithm>

#include "../row_types.h"
#include "angle.cuh"
#include "frequencies.cuh"
#include "token_slots.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Heads whose pieces a thread loads before it knows the angles. */
constexpr int kHeadsAhead = 2;

/*! \brief Cosines and sines of the pairs of a row, and then of their second elements. */
template <int kCount>
__device__ __forceinline__ void FindAngles(const RotaryMoveArgs& args, int64_t row,
                                           const InverseFrequencies<kCount>& inv_freq,
                                           float2* cos_sin) {
  const int pairs = args.rotary_dim / 2;
  int position;
  if (args.indptr != nullptr) {
    const int b = RequestOfRow(args.indptr, args.batch_size, row);
    position = args.offsets[b] + static_cast<int>(row - args.indptr[b]);
  } else {
    position = args.positions[row];
  }
  if (args.cos_sin != nullptr) {
    const int64_t last = args.num_positions - 1, at = min(max(int64_t{position}, int64_t{0}), last);
    const float* table = args.cos_sin + at * args.rotary_dim;
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
      cos_sin[i] = make_float2(table[i], table[pairs + i]);
    }
    return;
  }
  // Through a generic address: parameters that lanes index apart are read one after the other.
  const float* frequencies = inv_freq.values;
  asm("" : "+l"(frequencies));
  const int count = args.inv_freq_second != nullptr ? 2 * pairs : pairs;
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    const float2 angle = CosineAndSine(static_cast<float>(position) * frequencies[i]);
    cos_sin[i] = make_float2(args.magnitude * angle.x, args.magnitude * angle.y);
  }
}

/*! \brief Where the heads of one row come from and go to; a null target is not written. */
template <typename T>
struct RowMoves {
  __device__ __forceinline__ RowMoves(const RotaryMoveArgs& args, int64_t row) : args(args) {
    auto row_of = [&](const HeadRows& rows) {
      return static_cast<T*>(rows.data) + row * rows.stride_row;
    };
    q_source = row_of(args.q.source), k_source = row_of(args.k.source);
    v_source = row_of(args.v.source);
    q_target = row_of(args.q.target);
    if (args.slots == nullptr) {
      k_target = row_of(args.k.target), v_target = row_of(args.v.target);
      return;
    }
    const int32_t slot = args.slots[row];
    if (slot < 0 || slot >= args.num_slots) return;
    const unsigned page = static_cast<unsigned>(slot) / static_cast<unsigned>(args.page_size);
    const unsigned in_page = static_cast<unsigned>(slot) % static_cast<unsigned>(args.page_size);
    const int64_t offset =
        int64_t{page} * args.k.target.stride_row + int64_t{in_page} * args.head_dim;
    k_target = static_cast<T*>(args.k.target.data) + offset;
    v_target = static_cast<T*>(args.v.target.data) + offset;
  }

  __device__ __forceinline__ const T* Source(int head) const {
    const int rotated = args.q.num_heads + args.k.num_heads;
    if (head < args.q.num_heads) return q_source + head * args.q.source.stride_head;
    if (head < rotated) return k_source + (head - args.q.num_heads) * args.k.source.stride_head;
    return v_source + (head - rotated) * args.v.source.stride_head;
  }
  __device__ __forceinline__ T* Target(int head) const {
    const int rotated = args.q.num_heads + args.k.num_heads;
    if (head < args.q.num_heads) return q_target + head * args.q.target.stride_head;
    T* target = head < rotated ? k_target : v_target;
    if (target == nullptr) return nullptr;
    return head < rotated ? target + (head - args.q.num_heads) * args.k.target.stride_head
                          : target + (head - rotated) * args.v.target.stride_head;
  }

  const RotaryMoveArgs& args;
  const T *q_source, *k_source, *v_source;
  T *q_target, *k_target = nullptr, *v_target = nullptr;
};

/*! \brief kVec pairs, in two vectors: side by side, or half of the rotated dimensions apart. */
template <typename T, int kVec>
struct PairVectors {
  Vector<T, kVec> low, high;

  __device__ __forceinline__ void Rotate(bool interleaved, const float2 (&angle)[kVec],
                                         const float2 (&second)[kVec]) {
    float a[2 * kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      a[j] = ToFloat(low.data[j]);
      a[kVec + j] = ToFloat(high.data[j]);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      float& first = interleaved ? a[2 * j] : a[j];
      float& other = interleaved ? a[2 * j + 1] : a[kVec + j];
      const float x = first, y = other;
      first = x * angle[j].x - y * angle[j].y;
      other = y * second[j].x + x * second[j].y;
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      low.data[j] = FromFloat<T>(a[j]);
      high.data[j] = FromFloat<T>(a[kVec + j]);
    }
  }
};

/*!
 * \brief One block a row. A thread has kVec pairs of one head after the other; what it needs of the
 * first ones comes from memory while the angles are computed.
 */
template <typename T, int kVec, bool kInterleaved, int kCount>
__global__ void RotaryMoveKernel(RotaryMoveArgs args,
                                 const __grid_constant__ InverseFrequencies<kCount> inv_freq) {
  using Vec = Vector<T, kVec>;
  using Pairs = PairVectors<T, kVec>;
  extern __shared__ float2 cos_sin[];
  const RowMoves<T> moves(args, blockIdx.x);
  const int pairs = args.rotary_dim / 2, units = max(pairs / kVec, 1);
  const int rotated_heads = args.q.num_heads + args.k.num_heads;
  const int heads_at_once = blockDim.x / units, unit = threadIdx.x % units;
  const bool rotates = pairs > 0 && static_cast<int>(threadIdx.x) / units < heads_at_once;
  const int first_head = rotates ? threadIdx.x / units : rotated_heads;
  const int low = kInterleaved ? 2 * unit * kVec : unit * kVec;
  const int high = kInterleaved ? low + kVec : low + pairs;
  auto load = [&](int head) {
    const T* source = moves.Source(head);
    return Pairs{*reinterpret_cast<const Vec*>(source + low),
                 *reinterpret_cast<const Vec*>(source + high)};
  };
  Pairs ahead[kHeadsAhead];
#pragma unroll
  for (int i = 0; i < kHeadsAhead; ++i) {
    const int head = first_head + i * heads_at_once;
    if (head < rotated_heads) ahead[i] = load(head);
  }

  if (pairs > 0) FindAngles(args, blockIdx.x, inv_freq, cos_sin);
  // What is not rotated: values, and the dimensions behind rotary_dim.
  const int pieces_of_v = args.head_dim / kVec;
  const int pieces_behind = (args.head_dim - args.rotary_dim) / kVec;
  const int num_v = args.v.num_heads * pieces_of_v;
  for (int i = threadIdx.x; i < num_v + rotated_heads * pieces_behind; i += blockDim.x) {
    const bool is_v = i < num_v;
    const int j = is_v ? i : i - num_v, pieces = is_v ? pieces_of_v : pieces_behind;
    const int head = j / pieces + (is_v ? rotated_heads : 0);
    const int d = j % pieces * kVec + (is_v ? 0 : args.rotary_dim);
    const T* source = moves.Source(head);
    T* target = moves.Target(head);
    if (target == nullptr || target == source) continue;
    *reinterpret_cast<Vec*>(target + d) = *reinterpret_cast<const Vec*>(source + d);
  }
  __syncthreads();
  if (!rotates) return;

  float2 angle[kVec], second[kVec];  // of the first elements of the pairs, and of the second
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    angle[j] = cos_sin[unit * kVec + j];
    second[j] = args.inv_freq_second != nullptr ? cos_sin[pairs + unit * kVec + j] : angle[j];
  }
  auto finish = [&](int head, Pairs x) {
    x.Rotate(kInterleaved, angle, second);
    T* target = moves.Target(head);
    if (target == nullptr) return;
    *reinterpret_cast<Vec*>(target + low) = x.low;
    *reinterpret_cast<Vec*>(target + high) = x.high;
  };
#pragma unroll
  for (int i = 0; i < kHeadsAhead; ++i) {
    const int head = first_head + i * heads_at_once;
    if (head < rotated_heads) finish(head, ahead[i]);
  }
#pragma unroll 2
  for (int head = first_head + kHeadsAhead * heads_at_once; head < rotated_heads;
       head += heads_at_once) {
    finish(head, load(head));
  }
}

template <typename T>
bool MovesVectorize(const RotaryMoveArgs& args) {
  // A wide piece must lie on one side of the boundary between the halves and of rotary_dim.
  bool wide = args.rotary_dim % (2 * kWide<T>) == 0;
  for (const HeadMove* move : {&args.q, &args.k, &args.v}) {
    if (move->num_heads == 0) continue;
    for (const HeadRows* rows : {&move->source, &move->target}) {
      wide = wide && CanVectorize(args.head_dim * sizeof(T), {rows->data}) &&
             rows->stride_row % kWide<T> == 0 && rows->stride_head % kWide<T> == 0;
    }
  }
  return wide;
}

template <typename T, int kVec, int kCount>
cudaError_t LaunchRotaryMove(const RotaryMoveArgs& args, cudaStream_t stream) {
  const int pairs = args.rotary_dim / 2;
  InverseFrequencies<kCount> inv_freq;
  if (args.cos_sin == nullptr) {
    std::copy_n(args.inv_freq, pairs, inv_freq.values);
    if (args.inv_freq_second != nullptr) {
      std::copy_n(args.inv_freq_second, pairs, inv_freq.values + pairs);
    }
  }
  // Few rows: each thread has one head. Many: it has several, for which it reads angles once.
  const int units = std::max(pairs / kVec, 1), least = args.num_rows <= 256 ? 512 : 128;
  const int threads = std::max<int>(least, CeilDiv(units, 32) * 32);
  auto kernel = args.interleaved ? RotaryMoveKernel<T, kVec, true, kCount>
                                 : RotaryMoveKernel<T, kVec, false, kCount>;
  return LaunchKernel(kernel, static_cast<unsigned>(args.num_rows), threads,
                      2 * pairs * sizeof(float2), stream, args, inv_freq);
}

inline int MoveRotated(const RotaryMoveArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    const bool few = args.cos_sin != nullptr ||
                     (args.inv_freq_second == nullptr && args.rotary_dim <= 2 * kFewFrequencies);
    if (!few && args.inv_freq_second != nullptr && args.rotary_dim > kMaxRotaryPairs) {
      throw std::invalid_argument("rotary_dim is " + std::to_string(args.rotary_dim) +
                                  ", with this RoPE scaling it can be 512 at most");
    }
    return DispatchDType(args.dtype, [&](auto element) {
      using T = decltype(element);
      if (args.num_rows == 0) return cudaSuccess;
      const bool wide = MovesVectorize<T>(args);
      if (few) {
        return wide ? LaunchRotaryMove<T, kWide<T>, kFewFrequencies>(args, handle)
                    : LaunchRotaryMove<T, 1, kFewFrequencies>(args, handle);
      }
      return wide ? LaunchRotaryMove<T, kWide<T>, kMaxRotaryPairs>(args, handle)
                  : LaunchRotaryMove<T, 1, kMaxRotaryPairs>(args, handle);
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ROTARY_MOVE_CUH_

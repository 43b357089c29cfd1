// Pieces of our own attention kernel: how tiles come into shared memory, and how the rows of a tile
// leave.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_

#include "attention_rotary.cuh"
#include "attention_schedule.cuh"
#include "float8.cuh"
#include "mma.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Softmax state and output of the rows of a warp: of each block of 16, two rows a thread.
 */
template <int DVO, int kBlocksQ>
struct RowState {
  float max[kBlocksQ][2];
  float sum[kBlocksQ][2];
  float o[kBlocksQ][DVO / 8][4];
};

/*!
 * \brief Take the scores of one block of rows into its state: online softmax of scale * s, in units
 * of log2; the maximum is kept without the scale. A row is spread over four lanes. The weights come
 * packed as the next product takes them.
 */
template <typename T, int DVO, int kBlocksQ, int kTilesS>
__device__ __forceinline__ void UpdateState(const float (&s)[kTilesS][4], float scale, int m,
                                            RowState<DVO, kBlocksQ>* state,
                                            uint32_t (&weights)[kTilesS][2]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float top = state->max[m][i];
#pragma unroll
    for (int t = 0; t < kTilesS; ++t) top = fmaxf(top, fmaxf(s[t][2 * i], s[t][2 * i + 1]));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    // A row without keys so far has no maximum to subtract: -inf less -inf is NaN.
    const float base = top == -INFINITY ? 0.f : top;
    const float rescale = Exp2((state->max[m][i] - base) * scale);
    state->max[m][i] = top;
    float sum = 0.f;
#pragma unroll
    for (int t = 0; t < kTilesS; ++t) {
      // The difference first: it is exactly 0 for the maximum, however large that is.
      const float a = Exp2((s[t][2 * i] - base) * scale);
      const float b = Exp2((s[t][2 * i + 1] - base) * scale);
      sum += a + b;
      weights[t][i] = Pack<T>(a, b);
    }
    state->sum[m][i] = state->sum[m][i] * rescale + sum;
    // After the first tiles of a row its maximum seldom changes.
    if (__any_sync(0xffffffffu, rescale != 1.f)) {
#pragma unroll
      for (int t = 0; t < DVO / 8; ++t) {
        state->o[m][t][2 * i] *= rescale;
        state->o[m][t][2 * i + 1] *= rescale;
      }
    }
  }
}

template <typename T, int D, int kRows, int kStride, int kThreads, bool kRotates>
__device__ __forceinline__ void LoadQueries(const AttentionParams<T>& p, const RequestInfo& r,
                                            int kv_head, int first_row, int packed_rows, T* tile) {
  auto source = [&](int packed) {
    const int row = packed / p.group_size, head = kv_head * p.group_size + packed % p.group_size;
    return p.q + static_cast<int64_t>(r.row_begin + row) * p.q_stride_row + head * p.q_stride_head;
  };
  constexpr int kPieces = D / 8;
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
    const int row = i / kPieces, d = i % kPieces * 8;
    uint4 piece = make_uint4(0, 0, 0, 0);
    if (first_row + row < packed_rows) {
      piece = *reinterpret_cast<const uint4*>(source(first_row + row) + d);
    }
    *reinterpret_cast<uint4*>(tile + row * kStride + d) = piece;
  }
  if constexpr (kRotates) {
    if (p.rotary_dim == 0) return;
    __syncthreads();
    const int pairs = p.rotary_dim / 2;
    for (int i = threadIdx.x; i < kRows * pairs; i += kThreads) {
      const int row = i / pairs, pair = i % pairs, packed = first_row + row;
      if (packed >= packed_rows) continue;
      const int position = p.q_positions[r.row_begin + packed / p.group_size];
      RotatePair(p, position, pair, tile + row * kStride);
    }
  }
}

/*!
 * \brief Start the copy of one tile of keys and values as they are stored, each row followed by
 * kPadding bytes; keys that do not exist become 0.
 */
template <typename KV, int DQK, int DVO, int kKeys, int kThreads, int kPadding>
__device__ __forceinline__ void LoadKeys(const KeyAddress* addresses, const int* exists,
                                         char* k_tile, char* v_tile) {
  auto load = [&](auto head_dim, auto loads_k, auto loads_v) {
    constexpr int kRowBytes = decltype(head_dim)::value * sizeof(KV);
    constexpr unsigned kPieces = kRowBytes / 16, kCount = kKeys * kPieces;
#pragma unroll
    for (unsigned i = 0; i < (kCount + kThreads - 1) / kThreads; ++i) {
      // A thread has the same columns of each of its keys where the numbers allow it; spelled out,
      // since the compiler does not see it.
      unsigned key, d;
      if constexpr (kThreads % kPieces == 0) {
        key = threadIdx.x / kPieces + i * (kThreads / kPieces);
        d = threadIdx.x % kPieces * 16;
      } else {
        key = (i * kThreads + threadIdx.x) / kPieces;
        d = (i * kThreads + threadIdx.x) % kPieces * 16;
      }
      if (kCount % kThreads != 0 && key >= kKeys) break;
      // As one load: a field at a time the compiler makes four of them.
      const ulonglong2 raw = *reinterpret_cast<const ulonglong2*>(&addresses[key]);
      const KeyAddress at{reinterpret_cast<const char*>(raw.x),
                          reinterpret_cast<const char*>(raw.y)};
      if constexpr (decltype(loads_k)::value) {
        CopyAsync16(k_tile + key * (kRowBytes + kPadding) + d, at.k + d, exists[key]);
      }
      if constexpr (decltype(loads_v)::value) {
        CopyAsync16(v_tile + key * (kRowBytes + kPadding) + d, at.v + d, exists[key]);
      }
    }
  };
  using std::integral_constant;
  if constexpr (DQK == DVO) {
    load(integral_constant<int, DQK>(), std::true_type(), std::true_type());
  } else {
    load(integral_constant<int, DQK>(), std::true_type(), std::false_type());
    load(integral_constant<int, DVO>(), std::false_type(), std::true_type());
  }
}

/*! \brief Output address of one packed row. */
template <typename T>
struct OutputRow {
  int64_t state;  // index into lse
  int head;
};

template <typename T>
__device__ __forceinline__ OutputRow<T> LocateRow(const AttentionParams<T>& p, const RequestInfo& r,
                                                  int kv_head, int packed) {
  const int row = packed / p.group_size, head = kv_head * p.group_size + packed % p.group_size;
  return {static_cast<int64_t>(r.row_begin + row) * p.num_qo_heads + head, head};
}

/*! \brief The sum with the sink of the head, if it has one, and the factor that normalises o. */
template <typename T, typename KV>
__device__ __forceinline__ float FinishRow(const AttentionParams<T>& p, const OutputRow<T>& row,
                                           float top, float sum, bool writes_lse) {
  float scale = 1.f;
  if (p.sinks != nullptr) {
    const float sink = p.sinks[row.head] * 1.4426950408889634f;
    const float larger = fmaxf(top, sink);
    scale = Exp2(top - larger);
    sum = sum * scale + Exp2(sink - larger);
    top = larger;
  }
  const bool empty = !(sum > 0.f);
  if (writes_lse && p.lse != nullptr) p.lse[row.state] = empty ? -INFINITY : top + log2f(sum);
  if constexpr (sizeof(KV) < sizeof(T)) scale *= p.v_scale;
  return empty ? 0.f : scale / sum;
}

/*!
 * \brief Merge the parts of a tile into the output. All threads of the block call it, for which the
 * parts are written. `tops` is shared memory for the maximum and the sum of each row.
 */
template <typename T, typename KV, int DVO, int kRows, int kThreads>
__device__ __forceinline__ void MergeParts(const AttentionParams<T>& p, const RequestInfo& r,
                                           const WorkItem& item, int kv_head, int first_row,
                                           int valid_rows, int num_chunks, long long first_slot,
                                           float2* tops) {
  auto slot_of = [&](int chunk) {
    return first_slot + static_cast<long long>(chunk) * p.num_kv_heads;
  };
  // Lanes read the states of other chunks at once, and later the outputs of several in turn: one at
  // a time would wait for the memory as often as there are chunks.
  const int lane = threadIdx.x % 32;
  for (int row = threadIdx.x / 32; row < valid_rows; row += kThreads / 32) {
    float top = -INFINITY, sum = 0.f;
    for (int c = lane; c < num_chunks; c += 32) {
      const float2 other = __ldcg(p.partial_state + slot_of(c) * kRows + row);
      const float larger = fmaxf(top, other.x), base = larger == -INFINITY ? 0.f : larger;
      sum = sum * Exp2(top - base) + other.y * Exp2(other.x - base);
      top = larger;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
      const float other_top = __shfl_xor_sync(0xffffffffu, top, step);
      const float other_sum = __shfl_xor_sync(0xffffffffu, sum, step);
      const float larger = fmaxf(top, other_top), base = larger == -INFINITY ? 0.f : larger;
      sum = sum * Exp2(top - base) + other_sum * Exp2(other_top - base);
      top = larger;
    }
    if (lane == 0) tops[row] = make_float2(top, sum);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < valid_rows * (DVO / 2); i += kThreads) {
    const int row = i / (DVO / 2), d = i % (DVO / 2) * 2;
    const float base = tops[row].x == -INFINITY ? 0.f : tops[row].x;
    float2 value = make_float2(0.f, 0.f);
#pragma unroll 8
    for (int c = 0; c < num_chunks; ++c) {
      const long long at = slot_of(c) * kRows + row;
      const float weight = Exp2(__ldcg(&p.partial_state[at].x) - base);
      const float2 o = __ldcg(reinterpret_cast<const float2*>(p.partial_o + at * DVO + d));
      value.x += weight * o.x;
      value.y += weight * o.y;
    }
    const OutputRow<T> out = LocateRow(p, r, kv_head, first_row + row);
    const float scale = FinishRow<T, KV>(p, out, tops[row].x, tops[row].y, d == 0);
    *reinterpret_cast<uint32_t*>(p.o + out.state * DVO + d) =
        Pack<T>(value.x * scale, value.y * scale);
  }
}

/*!
 * \brief Write the rows of a tile: to the output, or as a part when keys were split. The block
 * whose part is the last of its tile merges them all.
 */
template <typename T, typename KV, int DVO, int kWarpsQ, int kBlocksQ, int kWarpsKV>
__device__ __forceinline__ void StoreRows(const AttentionParams<T>& p, const RequestInfo& r,
                                          const WorkItem& item, int kv_head, int first_row,
                                          int packed_rows, int num_chunks, int index,
                                          RowState<DVO, kBlocksQ>& state, char* memory) {
  static_assert(kWarpsKV == 1 || kBlocksQ == 1, "warps that share rows have few of them");
  constexpr int kRows = 16 * kBlocksQ * kWarpsQ, kThreads = 32 * kWarpsQ * kWarpsKV;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_q = warp % kWarpsQ, warp_kv = warp / kWarpsQ;
  float* merged = reinterpret_cast<float*>(memory);
  float2* states = reinterpret_cast<float2*>(merged + kWarpsKV * kRows * DVO);
  const int valid_rows = min(kRows, packed_rows - first_row);

  if constexpr (kWarpsKV > 1) {
    // Warps that worked on other keys of the same rows bring them together.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp_q * 16 + lane / 4 + 8 * i;
      if (lane % 4 == 0) {
        states[warp_kv * kRows + row] = make_float2(state.max[0][i], state.sum[0][i]);
      }
      float* out = merged + (warp_kv * kRows + row) * DVO + lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < DVO / 8; ++t) {
        *reinterpret_cast<float2*>(out + t * 8) =
            make_float2(state.o[0][t][2 * i], state.o[0][t][2 * i + 1]);
      }
    }
    __syncthreads();
  }
  const long long first_slot = index - static_cast<long long>(item.chunk) * p.num_kv_heads;
  float* part_o = p.partial_o + static_cast<long long>(index) * kRows * DVO;
  float2* part_state = p.partial_state + static_cast<long long>(index) * kRows;

  // Where the columns of one row go, and what they are multiplied by.
  struct Target {
    T* o;         // null for a part
    float* part;  // of this row
    float scale;
  };
  auto target_of = [&](int row, float top, float sum, bool first) {
    Target target{nullptr, part_o + row * DVO, 1.f};
    if (num_chunks == 1) {
      const OutputRow<T> out = LocateRow(p, r, kv_head, first_row + row);
      target.scale = FinishRow<T, KV>(p, out, top, sum, first);
      target.o = p.o + out.state * DVO;
    } else if (first) {
      part_state[row] = make_float2(top, sum);
    }
    return target;
  };
  auto store = [](const Target& target, int d, float2 value) {
    if (target.o != nullptr) {
      *reinterpret_cast<uint32_t*>(target.o + d) =
          Pack<T>(value.x * target.scale, value.y * target.scale);
    } else {
      *reinterpret_cast<float2*>(target.part + d) = value;
    }
  };
  if constexpr (kWarpsKV > 1) {
    for (int i = threadIdx.x; i < valid_rows * (DVO / 2); i += kThreads) {
      const int row = i / (DVO / 2), d = i % (DVO / 2) * 2;
      float top = -INFINITY;
#pragma unroll
      for (int w = 0; w < kWarpsKV; ++w) top = fmaxf(top, states[w * kRows + row].x);
      const float base = top == -INFINITY ? 0.f : top;
      float sum = 0.f;
      float2 value = make_float2(0.f, 0.f);
#pragma unroll
      for (int w = 0; w < kWarpsKV; ++w) {
        const float2 other = states[w * kRows + row];
        const float weight = Exp2(other.x - base);
        const float2 o = *reinterpret_cast<float2*>(merged + (w * kRows + row) * DVO + d);
        sum += weight * other.y;
        value.x += weight * o.x;
        value.y += weight * o.y;
      }
      store(target_of(row, top, sum, d == 0), d, value);
    }
  } else {
#pragma unroll
    for (int m = 0; m < kBlocksQ; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = (warp_q * kBlocksQ + m) * 16 + lane / 4 + 8 * i;
        if (row >= valid_rows) continue;
        const Target target = target_of(row, state.max[m][i], state.sum[m][i], lane % 4 == 0);
#pragma unroll
        for (int t = 0; t < DVO / 8; ++t) {
          store(target, t * 8 + lane % 4 * 2,
                make_float2(state.o[m][t][2 * i], state.o[m][t][2 * i + 1]));
        }
      }
    }
  }
  if (num_chunks == 1) return;

  __shared__ int is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int* arrivals = p.arrivals + item.tile_id * p.num_kv_heads + kv_head;
    is_last = atomicAdd(arrivals, 1) == num_chunks - 1;
    if (is_last) *arrivals = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  MergeParts<T, KV, DVO, kRows, kThreads>(p, r, item, kv_head, first_row, valid_rows, num_chunks,
                                          first_slot, reinterpret_cast<float2*>(memory));
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_

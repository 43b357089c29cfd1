// Pieces of our own attention kernel: how tiles come into shared memory, and how the rows of a tile
// leave.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_

#include "angle.cuh"
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

template <typename T>
__device__ __forceinline__ float2 RotaryAngle(const AttentionParams<T>& p, int position,
                                              float inv_freq) {
  // As in SplitRotaryKernel: a float angle.
  const float2 angle = CosineAndSine(static_cast<float>(position) * inv_freq);
  return make_float2(p.magnitude * angle.x, p.magnitude * angle.y);
}

/*! \brief Dimensions of one rotated pair. */
template <typename T>
__device__ __forceinline__ int2 PairDims(const AttentionParams<T>& p, int pair) {
  return p.interleaved ? make_int2(2 * pair, 2 * pair + 1)
                       : make_int2(pair, pair + p.rotary_dim / 2);
}

/*! \brief Rotate one pair of a row in shared memory. */
template <typename T>
__device__ __forceinline__ void RotatePair(const AttentionParams<T>& p, int position, int pair,
                                           T* x) {
  const float f = p.inv_freq[0][pair], second = p.inv_freq[1][pair];
  const float2 angle = RotaryAngle(p, position, f);
  const float2 other = f == second ? angle : RotaryAngle(p, position, second);
  const int2 d = PairDims(p, pair);
  const float a = ToFloat(x[d.x]), b = ToFloat(x[d.y]);
  x[d.x] = FromFloat<T>(a * angle.x - b * angle.y);
  x[d.y] = FromFloat<T>(b * other.x + a * other.y);
}

template <typename T, int D, int kRows, int kStride, int kThreads, bool kExtras>
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
  if constexpr (kExtras) {
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

/*! \brief Rotate pairs of two elements each that lie side by side: x to (x a.x - y a.y, y a.x + x
 * a.y).
 */
template <typename T>
__device__ __forceinline__ void RotateTwo(T* first, T* second, float2 a, float2 b,
                                          bool interleaved) {
  using Two = Vector<T, 2>;
  Two x = *reinterpret_cast<Two*>(first), y = *reinterpret_cast<Two*>(second);
  const float x0 = ToFloat(x.data[0]), x1 = ToFloat(x.data[1]);
  const float y0 = ToFloat(y.data[0]), y1 = ToFloat(y.data[1]);
  if (interleaved) {  // the pairs are (x0, x1) and (y0, y1)
    x.data[0] = FromFloat<T>(x0 * a.x - x1 * a.y);
    x.data[1] = FromFloat<T>(x1 * a.x + x0 * a.y);
    y.data[0] = FromFloat<T>(y0 * b.x - y1 * b.y);
    y.data[1] = FromFloat<T>(y1 * b.x + y0 * b.y);
  } else {  // (x0, y0) and (x1, y1)
    x.data[0] = FromFloat<T>(x0 * a.x - y0 * a.y);
    y.data[0] = FromFloat<T>(y0 * a.x + x0 * a.y);
    x.data[1] = FromFloat<T>(x1 * b.x - y1 * b.y);
    y.data[1] = FromFloat<T>(y1 * b.x + x1 * b.y);
  }
  *reinterpret_cast<Two*>(first) = x;
  *reinterpret_cast<Two*>(second) = y;
}

__device__ __forceinline__ float2 AddAngles(float2 a, float2 b) {
  return make_float2(a.x * b.x - a.y * b.y, a.y * b.x + a.x * b.y);
}

/*!
 * \brief Rotate keys of consecutive positions. A thread has two pairs of every so-manyth key, and
 * goes from one key to the next by adding angles: two sines a tile and pair, not one a key.
 */
template <typename T, int kKeys, int kStride, int kThreads>
__device__ __forceinline__ void RotateConsecutiveKeys(const AttentionParams<T>& p, int position,
                                                      T* tile) {
  const int columns = p.rotary_dim / 4, rows = kThreads / columns;
  const int row = threadIdx.x / columns, pair = threadIdx.x % columns * 2;
  if (row >= rows) return;
  float2 angle[2], step[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    angle[i] = RotaryAngle(p, position + row, p.inv_freq[0][pair + i]);
    step[i] = CosineAndSine(static_cast<float>(rows) * p.inv_freq[0][pair + i]);
  }
  const int first = p.interleaved ? 2 * pair : pair;
  const int second = p.interleaved ? first + 2 : first + p.rotary_dim / 2;
#pragma unroll 4
  for (int key = row; key < kKeys; key += rows) {
    T* x = tile + key * kStride;
    RotateTwo(x + first, x + second, angle[0], angle[1], p.interleaved);
    angle[0] = AddAngles(angle[0], step[0]);
    angle[1] = AddAngles(angle[1], step[1]);
  }
}

template <typename T, int kKeys, int kStride, int kThreads>
__device__ __forceinline__ void RotateKeys(const AttentionParams<T>& p, const RequestInfo& r,
                                           int request, int tile_begin, int end, T* tile) {
  if (p.k_positions != nullptr && p.same_frequencies && p.rotary_dim % 4 == 0) {
    RotateConsecutiveKeys<T, kKeys, kStride, kThreads>(p, p.k_positions[request] + tile_begin,
                                                       tile);
    return;
  }
  const int pairs = p.rotary_dim / 2;
  for (int i = threadIdx.x; i < kKeys * pairs; i += kThreads) {
    const int key = tile_begin + i / pairs, pair = i % pairs;
    if (key >= end) continue;
    const int position =
        p.k_positions != nullptr ? p.k_positions[request] + key : p.q_positions[r.kv_begin + key];
    RotatePair(p, position, pair, tile + i / pairs * kStride);
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
 * \brief Write the rows of a tile: to the output, or as a part when keys were split. The block
 * whose part is the last of its tile merges them all.
 */
template <typename T, typename KV, int DVO, int kWarpsQ, int kBlocksQ, int kWarpsKV>
__device__ __forceinline__ void StoreRows(const AttentionParams<T>& p, const RequestInfo& r,
                                          const WorkItem& item, int kv_head, int first_row,
                                          int packed_rows, int num_chunks, long long index,
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
  const long long first_slot = (index / p.num_kv_heads - item.chunk) * p.num_kv_heads + kv_head;
  float* part_o = p.partial_o + index * kRows * DVO;
  float2* part_state = p.partial_state + index * kRows;

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
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int i = threadIdx.x; i < valid_rows * (DVO / 2); i += kThreads) {
    const int row = i / (DVO / 2), d = i % (DVO / 2) * 2;
    float top = -INFINITY;
    for (int c = 0; c < num_chunks; ++c) {
      const long long slot = first_slot + static_cast<long long>(c) * p.num_kv_heads;
      top = fmaxf(top, __ldcg(p.partial_state + slot * kRows + row).x);
    }
    const float base = top == -INFINITY ? 0.f : top;
    float sum = 0.f;
    float2 value = make_float2(0.f, 0.f);
    for (int c = 0; c < num_chunks; ++c) {
      const long long slot = first_slot + static_cast<long long>(c) * p.num_kv_heads;
      const float2 other = __ldcg(p.partial_state + slot * kRows + row);
      const float weight = Exp2(other.x - base);
      const float2 o =
          __ldcg(reinterpret_cast<const float2*>(p.partial_o + (slot * kRows + row) * DVO + d));
      sum += weight * other.y;
      value.x += weight * o.x;
      value.y += weight * o.y;
    }
    const OutputRow<T> out = LocateRow(p, r, kv_head, first_row + row);
    const float scale = FinishRow<T, KV>(p, out, top, sum, d == 0);
    *reinterpret_cast<uint32_t*>(p.o + out.state * DVO + d) =
        Pack<T>(value.x * scale, value.y * scale);
  }
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_

// Pieces of our own attention kernel: how tiles come into shared memory, what changes a score, and
// how the rows of a tile leave.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_

#include "attention_schedule.cuh"
#include "mma.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Softmax state and output of the 16 rows of a warp, two rows a thread. */
template <int DVO>
struct RowState {
  float max[2];
  float sum[2];
  float o[DVO / 8][4];
};

template <typename T>
__device__ __forceinline__ float2 RotaryAngle(const AttentionParams<T>& p, int position,
                                              float inv_freq) {
  // As in SplitRotaryKernel: a float angle, reduced to one turn exactly enough for any position.
  const double turns =
      static_cast<double>(static_cast<float>(position) * inv_freq) * 0.15915494309189535;
  float sine, cosine;
  sincospif(static_cast<float>(2.0 * (turns - rint(turns))), &sine, &cosine);
  return make_float2(p.magnitude * cosine, p.magnitude * sine);
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

/*! \brief Start the copy of one tile of K (which 0) or V (which 1); keys without offset become 0.
 */
template <typename T, int D, int kKeys, int kStride, int kThreads>
__device__ __forceinline__ void LoadKeys(const T* base, const KeyOffsets* offsets, int which,
                                         T* tile) {
  constexpr int kPieces = D / 8;
  constexpr int kCount = kKeys * kPieces;
#pragma unroll
  for (int i = 0; i < (kCount + kThreads - 1) / kThreads; ++i) {
    const int index = i * kThreads + threadIdx.x;
    if (kCount % kThreads != 0 && index >= kCount) break;
    const int key = index / kPieces, d = index % kPieces * 8;
    const int64_t offset = which == 0 ? offsets[key].k : offsets[key].v;
    const bool valid = offset >= 0;
    CopyAsync16(tile + key * kStride + d, valid ? base + offset + d : base, valid);
  }
}

template <typename T, int kKeys, int kStride, int kThreads>
__device__ __forceinline__ void RotateKeys(const AttentionParams<T>& p, const RequestInfo& r,
                                           int request, int tile_begin, int end, T* tile) {
  const int pairs = p.rotary_dim / 2;
  for (int i = threadIdx.x; i < kKeys * pairs; i += kThreads) {
    const int key = tile_begin + i / pairs, pair = i % pairs;
    if (key >= end) continue;
    const int position =
        p.k_positions != nullptr ? p.k_positions[request] + key : p.q_positions[r.kv_begin + key];
    RotatePair(p, position, pair, tile + i / pairs * kStride);
  }
}

/*! \brief Nodes of the tree of a request, as far as the index array may be trusted. */
template <typename T>
__device__ __forceinline__ int NumNodes(const AttentionParams<T>& p, int request) {
  const int64_t begin = p.tree_indptr[request], end = p.tree_indptr[request + 1];
  return begin < 0 || end > p.num_tree_nodes ? 0 : max(static_cast<int>(end - begin), 0);
}

/*! \brief The first key that is a node of the tree. */
template <typename T>
__device__ __forceinline__ int TreeStart(const AttentionParams<T>& p, const RequestInfo& r,
                                         int request) {
  return p.tree_indptr == nullptr ? 0x7fffffff : r.num_keys - NumNodes(p, request);
}

template <typename T>
__device__ __forceinline__ int TreeOrderOfRow(const AttentionParams<T>& p, const RequestInfo& r,
                                              int request, int row) {
  if (p.tree_indptr == nullptr) return 0;
  const int nodes = NumNodes(p, request), node = row + nodes - r.num_rows;
  if (node < 0 || node >= nodes) return -1;
  return p.tree_mask[2 * (static_cast<int64_t>(p.tree_indptr[request]) + node)];
}

template <typename T>
__device__ __forceinline__ bool SeesNode(const AttentionParams<T>& p, int request, int node,
                                         int order) {
  if (node < 0 || node >= NumNodes(p, request)) return false;
  const int32_t* interval = p.tree_mask + 2 * (static_cast<int64_t>(p.tree_indptr[request]) + node);
  return order >= interval[0] && order < interval[1];
}

/*! \brief Cap and slopes, on a score in units of log2 (before a cap: of the cap). */
template <typename T>
__device__ __forceinline__ float TransformScore(const AttentionParams<T>& p, const RequestInfo& r,
                                                float x, int kv_head, int packed, int key) {
  if (p.cap_log2 != 0.f) {
    // tanh by exp2: the fast tanh is off by 5e-4, which a cap of 50 makes 0.025.
    const float e = Exp2(2.f * 1.4426950408889634f * x);
    x = p.cap_log2 * (1.f - 2.f / (e + 1.f));
  }
  if (p.alibi_slopes != nullptr) {
    const int row = packed / p.group_size, head = kv_head * p.group_size + packed % p.group_size;
    const float slope = head < p.num_qo_heads ? p.alibi_slopes[head] : 0.f;
    x += slope * 1.4426950408889634f * static_cast<float>(key - row - r.num_keys + r.num_rows);
  }
  return x;
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
template <typename T>
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
  return empty ? 0.f : scale / sum;
}

/*!
 * \brief Write the rows of a tile: to the output, or as a part when keys were split. The block
 * whose part is the last of its tile merges them all.
 */
template <typename T, int DVO, int kWarpsQ, int kWarpsKV>
__device__ __forceinline__ void StoreRows(const AttentionParams<T>& p, const RequestInfo& r,
                                          const WorkItem& item, int kv_head, int first_row,
                                          int packed_rows, int num_chunks, long long index,
                                          RowState<DVO>& state, char* memory) {
  constexpr int kRows = 16 * kWarpsQ, kThreads = 32 * kWarpsQ * kWarpsKV;
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
      if (lane % 4 == 0) states[warp_kv * kRows + row] = make_float2(state.max[i], state.sum[i]);
      float* out = merged + (warp_kv * kRows + row) * DVO + lane % 4 * 2;
#pragma unroll
      for (int t = 0; t < DVO / 8; ++t) {
        *reinterpret_cast<float2*>(out + t * 8) =
            make_float2(state.o[t][2 * i], state.o[t][2 * i + 1]);
      }
    }
    __syncthreads();
  }
  const long long first_slot = (index / p.num_kv_heads - item.chunk) * p.num_kv_heads + kv_head;
  float* part_o = p.partial_o + index * kRows * DVO;
  float2* part_state = p.partial_state + index * kRows;

  // One pair of columns at a time, whoever holds it.
  auto store = [&](int row, int d, float2 value, float top, float sum, bool first) {
    if (num_chunks == 1) {
      const OutputRow<T> out = LocateRow(p, r, kv_head, first_row + row);
      const float scale = FinishRow(p, out, top, sum, first);
      *reinterpret_cast<uint32_t*>(p.o + out.state * DVO + d) =
          Pack<T>(value.x * scale, value.y * scale);
    } else {
      *reinterpret_cast<float2*>(part_o + row * DVO + d) = value;
      if (first) part_state[row] = make_float2(top, sum);
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
      store(row, d, value, top, sum, d == 0);
    }
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = warp_q * 16 + lane / 4 + 8 * i;
      if (row >= valid_rows) continue;
#pragma unroll
      for (int t = 0; t < DVO / 8; ++t) {
        store(row, t * 8 + lane % 4 * 2, make_float2(state.o[t][2 * i], state.o[t][2 * i + 1]),
              state.max[i], state.sum[i], t == 0 && lane % 4 == 0);
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
    const float scale = FinishRow(p, out, top, sum, d == 0);
    *reinterpret_cast<uint32_t*>(p.o + out.state * DVO + d) =
        Pack<T>(value.x * scale, value.y * scale);
  }
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_TILES_CUH_

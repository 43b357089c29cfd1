// Our own attention kernel: scheduled on the device, for every mask, window, tree and position
// encoding that TVM's cache asks for without a plan. FlashAttention-2 on mma.sync: online softmax
// over tiles of keys that cp.async brings to shared memory while the tile before is worked on.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_KERNEL_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_KERNEL_CUH_

#include "attention_schedule.cuh"
#include "attention_tiles.cuh"
#include "mma.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

template <typename T, int DQK, int DVO, int kWarpsQ, int kWarpsKV>
struct AttentionTraits {
  static constexpr int kThreads = 32 * kWarpsQ * kWarpsKV;
  static constexpr int kRows = 16 * kWarpsQ;
  // Large heads take smaller tiles, so that two stages fit the shared memory of one block.
  static constexpr int kKeys = DQK > 128 && kWarpsKV == 1 ? 32 : 64;
  static constexpr int kKeysOfWarp = kKeys / kWarpsKV;
  // 8 elements more than a row shift each row by 4 banks: ldmatrix then has no conflicts.
  static constexpr int kStrideQK = DQK + 8;
  static constexpr int kStrideVO = DVO + 8;
  static constexpr int kStage = kKeys * (kStrideQK + kStrideVO);
  static constexpr size_t kTileBytes = (kRows * kStrideQK + 2 * kStage) * sizeof(T);
  // The warps that share rows merge their outputs through the same memory.
  static constexpr size_t kMergeBytes =
      kWarpsKV == 1 ? 0 : kWarpsKV * kRows * (DVO * sizeof(float) + sizeof(float2));
  static constexpr size_t kSharedBytes = kTileBytes > kMergeBytes ? kTileBytes : kMergeBytes;
};

/*!
 * Warps share a tile of 16 * kWarpsQ rows; with kWarpsKV > 1 several of them work on the same rows
 * and on different keys of a tile, which is for batches with few rows a request.
 */
template <typename T, int DQK, int DVO, int kWarpsQ, int kWarpsKV, bool kExtras>
__global__ void __launch_bounds__(32 * kWarpsQ * kWarpsKV, kWarpsQ == 1 && DVO <= 128 ? 3 : 1)
    AttentionKernel(const __grid_constant__ AttentionParams<T> p) {
  using Traits = AttentionTraits<T, DQK, DVO, kWarpsQ, kWarpsKV>;
  constexpr int kThreads = Traits::kThreads;
  constexpr int kTilesS = Traits::kKeysOfWarp / 8;
  extern __shared__ __align__(16) char memory[];
  __shared__ long long scan[kThreads / 32];
  __shared__ KeyOffsets offsets[2][Traits::kKeys];
  __shared__ int range_begin, range_end;
  T* q_tile = reinterpret_cast<T*>(memory);
  T* stages = q_tile + Traits::kRows * Traits::kStrideQK;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_q = warp % kWarpsQ, warp_kv = warp / kWarpsQ;
  Schedule<T, kThreads> schedule(p, Traits::kRows, scan);

  for (long long index = blockIdx.x;; index += gridDim.x) {
    WorkItem item;
    const int kv_head = static_cast<int>(index % p.num_kv_heads);
    if (!schedule.Find(index / p.num_kv_heads, &item)) return;
    const RequestInfo r = ReadRequest(p, item.request);
    const int packed_rows = r.num_rows * p.group_size;
    const int first_row = item.tile * Traits::kRows;

    // The keys that some row of the tile sees, and this item's share of them.
    if (threadIdx.x == 0) {
      const int last = min(first_row + Traits::kRows, packed_rows) - 1;
      // Bounds rise with the row, so the first row has the lowest begin and the last the highest
      // end.
      range_begin = RangeOfRow(p, r, first_row / p.group_size).begin;
      range_end = RangeOfRow(p, r, last / p.group_size).end;
    }
    __syncthreads();
    const int tile_keys = max(range_end - range_begin, 0);
    const int chunk = schedule.ChunkOf(tile_keys);
    const int num_chunks = max(CeilDivInt(tile_keys, chunk), 1);
    if (item.chunk >= num_chunks) {
      __syncthreads();
      continue;
    }
    const int begin = range_begin + item.chunk * chunk;
    const int end = min(begin + chunk, max(range_end, range_begin));

    LoadQueries<T, DQK, Traits::kRows, Traits::kStrideQK, kThreads, kExtras>(
        p, r, kv_head, first_row, packed_rows, q_tile);
    RowState<DVO> state;
    KeyRange seen[2];
    int tree_order[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.max[i] = -INFINITY;
      state.sum[i] = 0.f;
      const int packed = first_row + warp_q * 16 + lane / 4 + 8 * i;
      const int row = packed / p.group_size;
      // Rows past the end see what the last one sees, so that whole tiles stay without mask checks.
      const int inside = min(row, r.num_rows - 1);
      seen[i] = RangeOfRow(p, r, inside);
      seen[i].end = min(seen[i].end, end);
      tree_order[i] = kExtras ? TreeOrderOfRow(p, r, item.request, inside) : 0;
    }
#pragma unroll
    for (int i = 0; i < DVO / 8; ++i) {
      state.o[i][0] = state.o[i][1] = state.o[i][2] = state.o[i][3] = 0.f;
    }
    const int tree_start = kExtras ? TreeStart(p, r, item.request) : 0x7fffffff;
    // From whole_begin to whole_end every row of the warp sees every key.
    const int whole_begin = __reduce_max_sync(0xffffffffu, max(seen[0].begin, seen[1].begin));
    const int whole_end =
        min(__reduce_min_sync(0xffffffffu, min(seen[0].end, seen[1].end)), tree_start);

    const int num_tiles = CeilDivInt(max(end - begin, 0), Traits::kKeys);
    KeyOffsets next{-1, -1};
    auto locate = [&](int tile) {
      const int key = begin + tile * Traits::kKeys + static_cast<int>(threadIdx.x);
      next = {-1, -1};
      if (threadIdx.x < Traits::kKeys && key < end) next = LocateKey(p, r, key, kv_head);
    };
    auto publish = [&](int tile) {
      if (threadIdx.x < Traits::kKeys) offsets[tile % 2][threadIdx.x] = next;
    };
    auto fetch = [&](int tile) {
      T* stage = stages + (tile % 2) * Traits::kStage;
      LoadKeys<T, DQK, Traits::kKeys, Traits::kStrideQK, kThreads>(p.k, offsets[tile % 2], 0,
                                                                   stage);
      LoadKeys<T, DVO, Traits::kKeys, Traits::kStrideVO, kThreads>(
          p.v, offsets[tile % 2], 1, stage + Traits::kKeys * Traits::kStrideQK);
      CommitCopies();
    };
    if (num_tiles > 0) {
      locate(0);
      publish(0);
      __syncthreads();
      fetch(0);
      locate(1);
    }
    for (int tile = 0; tile < num_tiles; ++tile) {
      if (tile + 1 < num_tiles) {
        publish(tile + 1);
        __syncthreads();
        fetch(tile + 1);
        locate(tile + 2);
        WaitCopies<1>();
      } else {
        WaitCopies<0>();
      }
      __syncthreads();
      T* k_tile = stages + (tile % 2) * Traits::kStage;
      T* v_tile = k_tile + Traits::kKeys * Traits::kStrideQK;
      const int tile_begin = begin + tile * Traits::kKeys;
      if constexpr (kExtras) {
        if (p.rotary_dim > 0) {
          RotateKeys<T, Traits::kKeys, Traits::kStrideQK, kThreads>(p, r, item.request, tile_begin,
                                                                    end, k_tile);
          __syncthreads();
        }
      }
      const int warp_begin = tile_begin + warp_kv * Traits::kKeysOfWarp;

      // s = q k^T for 16 rows and the keys of this warp.
      float s[kTilesS][4];
#pragma unroll
      for (int i = 0; i < kTilesS; ++i) s[i][0] = s[i][1] = s[i][2] = s[i][3] = 0.f;
      const T* q_rows = q_tile + (warp_q * 16 + lane % 16) * Traits::kStrideQK + lane / 16 * 8;
      const T* k_rows =
          k_tile + (warp_kv * Traits::kKeysOfWarp + lane % 8 + lane / 16 * 8) * Traits::kStrideQK +
          lane / 8 % 2 * 8;
#pragma unroll
      for (int d = 0; d < DQK; d += 16) {
        uint32_t a[4];
        LoadMatrices(a, q_rows + d);
#pragma unroll
        for (int i = 0; i < kTilesS; i += 2) {
          uint32_t b[4];
          LoadMatrices(b, k_rows + i * 8 * Traits::kStrideQK + d);
          MultiplyAdd<T>(s[i], a, b[0], b[1]);
          MultiplyAdd<T>(s[i + 1], a, b[2], b[3]);
        }
      }

      // Scores in units of log2, masked.
      const bool whole = warp_begin >= whole_begin && warp_begin + Traits::kKeysOfWarp <= whole_end;
#pragma unroll
      for (int i = 0; i < kTilesS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int key = warp_begin + i * 8 + lane % 4 * 2 + j % 2;
          float x = s[i][j] * p.scale_log2;
          if constexpr (kExtras) {
            const int packed = first_row + warp_q * 16 + lane / 4 + 8 * (j / 2);
            x = TransformScore(p, r, x, kv_head, packed, key);
          }
          if (!whole) {
            const KeyRange& range = seen[j / 2];
            bool visible = key >= range.begin && key < range.end;
            if constexpr (kExtras) {
              if (visible && key >= tree_start) {
                visible = SeesNode(p, item.request, key - tree_start, tree_order[j / 2]);
              }
            }
            if (!visible) x = -INFINITY;
          }
          s[i][j] = x;
        }
      }

      // Online softmax; a row is spread over four lanes.
      uint32_t weights[kTilesS][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float top = state.max[i];
#pragma unroll
        for (int t = 0; t < kTilesS; ++t) top = fmaxf(top, fmaxf(s[t][2 * i], s[t][2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        // A row without keys so far has no maximum to subtract: -inf less -inf is NaN.
        const float base = top == -INFINITY ? 0.f : top;
        const float rescale = Exp2(state.max[i] - base);
        state.max[i] = top;
        float sum = 0.f;
#pragma unroll
        for (int t = 0; t < kTilesS; ++t) {
          const float a = Exp2(s[t][2 * i] - base), b = Exp2(s[t][2 * i + 1] - base);
          sum += a + b;
          weights[t][i] = Pack<T>(a, b);
        }
        state.sum[i] = state.sum[i] * rescale + sum;
#pragma unroll
        for (int t = 0; t < DVO / 8; ++t) {
          state.o[t][2 * i] *= rescale;
          state.o[t][2 * i + 1] *= rescale;
        }
      }

      // o += weights v.
      const T* v_rows =
          v_tile + (warp_kv * Traits::kKeysOfWarp + lane % 16) * Traits::kStrideVO + lane / 16 * 8;
#pragma unroll
      for (int i = 0; i < kTilesS; i += 2) {
        const uint32_t a[4] = {weights[i][0], weights[i][1], weights[i + 1][0], weights[i + 1][1]};
#pragma unroll
        for (int d = 0; d < DVO; d += 16) {
          uint32_t b[4];
          LoadMatricesTransposed(b, v_rows + i * 8 * Traits::kStrideVO + d);
          MultiplyAdd<T>(state.o[d / 8], a, b[0], b[1]);
          MultiplyAdd<T>(state.o[d / 8 + 1], a, b[2], b[3]);
        }
      }
      __syncthreads();
    }

    // The sums of a row lie in four lanes.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      state.sum[i] += __shfl_xor_sync(0xffffffffu, state.sum[i], 1);
      state.sum[i] += __shfl_xor_sync(0xffffffffu, state.sum[i], 2);
    }
    StoreRows<T, DVO, kWarpsQ, kWarpsKV>(p, r, item, kv_head, first_row, packed_rows, num_chunks,
                                         index, state, memory);
    __syncthreads();
  }
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_KERNEL_CUH_

// Our own attention kernel: scheduled on the device, for every mask, window, tree and position
// encoding that TVM's cache asks for without a plan. FlashAttention-2 on mma.sync: online softmax
// over tiles of keys that cp.async brings to shared memory while the tile before is worked on.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_KERNEL_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_KERNEL_CUH_

#include "attention_rotary.cuh"
#include "attention_schedule.cuh"
#include "attention_scores.cuh"
#include "attention_tiles.cuh"
#include "mma.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*!
 * \brief Sizes of one shape of tile: kWarpsQ warps with kBlocksQ blocks of 16 rows each, times
 * kWarpsKV warps that work on the same rows and on different keys of a tile, which is for batches
 * with few rows a request.
 */
template <typename T, typename KV, int DQK, int DVO, int kWarpsQ, int kBlocksQ, int kWarpsKV>
struct AttentionTraits {
  static constexpr int kThreads = 32 * kWarpsQ * kWarpsKV;
  static constexpr int kRowsOfWarp = 16 * kBlocksQ;
  static constexpr int kRows = kRowsOfWarp * kWarpsQ;
  // Large heads take smaller tiles, so that the stages fit the shared memory of one block.
  static constexpr int kKeys = DQK > 128 && kWarpsKV == 1 ? 32 : 64;
  static constexpr int kKeysOfWarp = kKeys / kWarpsKV;
  // Tiles of keys in shared memory: one is worked on while the others come. Few rows leave the
  // time to the memory, which wants more under way.
  static constexpr int kStages = kWarpsKV > 1 && DQK <= 128 ? 3 : 2;
  // 8 elements more than a row shift each row by 4 banks: ldmatrix then has no conflicts.
  static constexpr int kStrideQK = DQK + 8;
  static constexpr int kStrideVO = DVO + 8;
  static constexpr int kQueryBytes = kRows * kStrideQK * sizeof(T);
  static constexpr int kKeyBytes = kKeys * (kStrideQK + kStrideVO) * sizeof(T);
  // 8-bit keys come as they are stored, and each tile is widened to one of T when its turn comes.
  static constexpr bool kWidens = sizeof(KV) < sizeof(T);
  static constexpr int kPadding = kWidens ? 0 : 8 * sizeof(T);
  static constexpr int kStageBytes = kWidens ? kKeys * (DQK + DVO) * sizeof(KV) : kKeyBytes;
  static constexpr size_t kTileBytes =
      kQueryBytes + kStages * kStageBytes + (kWidens ? kKeyBytes : 0);
  // The warps that share rows merge their outputs through the same memory.
  static constexpr size_t kMergeBytes =
      kWarpsKV == 1 ? 0 : kWarpsKV * kRows * (DVO * sizeof(float) + sizeof(float2));
  static constexpr size_t kSharedBytes = kTileBytes > kMergeBytes ? kTileBytes : kMergeBytes;
  // Blocks that are to fit one SM at a time, which bounds the registers of a thread.
  static constexpr int kBlocksOfSM = (kWarpsKV > 1 && DVO <= 128) || kBlocksQ > 1 ? 2 : 1;
};

/*! \brief What a kernel does besides masks of ranges; a kernel that does less is faster. */
enum class Scores {
  kPlain,
  kRotated,  // keys are rotated whole, in registers
  kExtras,   // trees, packed masks, caps, slopes, any RoPE
};

/*! \brief Whether there is a kernel that rotates keys in registers: one with few rows a request. */
template <int DQK, int kWarpsKV>
constexpr bool kRotatesInRegisters = kWarpsKV > 1 && DQK <= 128 && DQK % 32 == 0;

template <typename T, typename KV, int DQK, int DVO, int kWarpsQ, int kBlocksQ, int kWarpsKV,
          Scores kScores>
__global__ void __launch_bounds__(
    32 * kWarpsQ * kWarpsKV,
    AttentionTraits<T, KV, DQK, DVO, kWarpsQ, kBlocksQ, kWarpsKV>::kBlocksOfSM)
    AttentionKernel(const __grid_constant__ AttentionParams<T> p) {
  using Traits = AttentionTraits<T, KV, DQK, DVO, kWarpsQ, kBlocksQ, kWarpsKV>;
  constexpr int kThreads = Traits::kThreads, kStages = Traits::kStages;
  constexpr int kTilesS = Traits::kKeysOfWarp / 8;
  constexpr bool kExtras = kScores == Scores::kExtras, kRotated = kScores == Scores::kRotated;
  extern __shared__ __align__(16) char memory[];
  __shared__ ScheduleMemory<kThreads> schedule_memory;
  __shared__ KeyAddress addresses[kStages][Traits::kKeys];
  __shared__ int exists[kStages][Traits::kKeys];
  __shared__ int next_index;
  T* q_tile = reinterpret_cast<T*>(memory);
  char* stages = memory + Traits::kQueryBytes;

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_q = warp % kWarpsQ, warp_kv = warp / kWarpsQ;
  Schedule<T, kThreads> schedule(p, Traits::kRows, &schedule_memory);

  auto take_item = [&] { return static_cast<int>(gridDim.x + atomicAdd(p.items_taken, 1u)); };
  // Whoever is done takes the next item: under a causal mask they are of unequal size.
  for (int index = blockIdx.x;; index = next_index) {
    WorkItem item;
    const int kv_head = index % p.num_kv_heads;
    if (!schedule.Find(index / p.num_kv_heads, &item)) break;
    const RequestInfo r = ReadRequest(p, item.request);
    const int packed_rows = r.num_rows * p.group_size;
    const int first_row = item.tile * Traits::kRows;

    // The keys that some row of the tile sees, and this item's share of them.
    // Bounds rise with the row, so the first row has the lowest begin and the last the highest end.
    const int last = min(first_row + Traits::kRows, packed_rows) - 1;
    const int range_begin = RangeOfRow(p, r, first_row / p.group_size).begin;
    const int range_end = RangeOfRow(p, r, last / p.group_size).end;
    const int tile_keys = max(range_end - range_begin, 0);
    const int chunk = schedule.ChunkOf(tile_keys);
    const int num_chunks = max(CeilDivInt(tile_keys, chunk), 1);
    if (item.chunk >= num_chunks) {
      __syncthreads();
      if (threadIdx.x == 0) next_index = take_item();
      __syncthreads();
      continue;
    }
    const int begin = range_begin + item.chunk * chunk;
    const int end = min(begin + chunk, max(range_end, range_begin));
    const int num_tiles = CeilDivInt(max(end - begin, 0), Traits::kKeys);

    auto locate = [&](int tile) {
      const int key = begin + tile * Traits::kKeys + static_cast<int>(threadIdx.x);
      const bool exists = threadIdx.x < Traits::kKeys && key < end;
      return exists ? LocateKey(p, r, key, kv_head) : KeyAddress{nullptr, nullptr};
    };
    auto publish = [&](int tile, const KeyAddress& at) {
      if (threadIdx.x >= Traits::kKeys) return;
      const bool found = at.k != nullptr;
      addresses[tile % kStages][threadIdx.x] = found ? at : KeyAddress{p.k, p.v};
      exists[tile % kStages][threadIdx.x] = found;
    };
    // Every tile is one group of copies, those past the end are empty ones: so many are under way
    // at each point of the loop.
    auto fetch = [&](int tile) {
      if (tile < num_tiles) {
        char* stage = stages + (tile % kStages) * Traits::kStageBytes;
        LoadKeys<KV, DQK, DVO, Traits::kKeys, kThreads, Traits::kPadding>(
            addresses[tile % kStages], exists[tile % kStages], stage,
            stage + Traits::kKeys * (DQK * sizeof(KV) + Traits::kPadding));
      }
      CommitCopies();
    };
    // The page table is read for all of them before the first is used.
    KeyAddress first[kStages];
#pragma unroll
    for (int tile = 0; tile < kStages; ++tile) first[tile] = locate(tile);
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) publish(tile, first[tile]);
    KeyAddress following = first[kStages - 1];
    __syncthreads();
#pragma unroll
    for (int tile = 0; tile < kStages - 1; ++tile) fetch(tile);

    // Asked for before the queries are, and so known when they have come.
    const int next = threadIdx.x == 0 ? take_item() : 0;
    LoadQueries<T, DQK, Traits::kRows, Traits::kStrideQK, kThreads, kExtras || kRotated>(
        p, r, kv_head, first_row, packed_rows, q_tile);
    if (threadIdx.x == 0) next_index = next;
    [[maybe_unused]] std::conditional_t<kRotated, KeyRotation<T, DQK, Traits::kKeys>, char>
        rotation;
    if constexpr (kRotated) {
      static_assert(kTilesS == 2 && kBlocksQ == 1, "a warp has 16 keys and 16 rows");
      static_assert(rotation.kScratchBytes <= Traits::kStageBytes, "one stage holds the angles");
      // The last stage is empty until the loop fetches its first tile.
      rotation.Start(p, p.k_positions[item.request] + begin, warp_kv * Traits::kKeysOfWarp,
                     kThreads,
                     reinterpret_cast<float2*>(stages + (kStages - 1) * Traits::kStageBytes));
    }

    // The first of the rows that this thread has scores of.
    const int first_packed = first_row + warp_q * Traits::kRowsOfWarp + lane / 4;
    RowState<DVO, kBlocksQ> state;
    KeyRange seen[kBlocksQ][2];
    int tree_order[kBlocksQ][2];
    int lowest_end = 0x7fffffff, highest_begin = 0;
#pragma unroll
    for (int m = 0; m < kBlocksQ; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        state.max[m][i] = -INFINITY;
        state.sum[m][i] = 0.f;
        const int packed = first_packed + m * 16 + 8 * i;
        // Rows past the end see what the last one sees, so that whole tiles stay without mask
        // checks.
        const int inside = min(packed / p.group_size, r.num_rows - 1);
        seen[m][i] = RangeOfRow(p, r, inside);
        seen[m][i].end = min(seen[m][i].end, end);
        tree_order[m][i] = kExtras ? TreeOrderOfRow(p, r, item.request, inside) : 0;
        highest_begin = max(highest_begin, seen[m][i].begin);
        lowest_end = min(lowest_end, seen[m][i].end);
      }
#pragma unroll
      for (int i = 0; i < DVO / 8; ++i) {
        state.o[m][i][0] = state.o[m][i][1] = state.o[m][i][2] = state.o[m][i][3] = 0.f;
      }
    }
    const int tree_start = kExtras ? TreeStart(p, r, item.request) : 0x7fffffff;
    const bool has_bits = kExtras && p.mask_indptr != nullptr;
    // From whole_begin to whole_end every row of the warp sees every key.
    const int whole_begin = __reduce_max_sync(0xffffffffu, highest_begin);
    const int whole_end =
        min(__reduce_min_sync(0xffffffffu, lowest_end), has_bits ? 0 : tree_start);

    for (int tile = 0; tile < num_tiles; ++tile) {
      publish(tile + kStages - 1, following);
      WaitCopies<kStages - 2>();
      // The tile has come, and no warp works any more on the one whose place the next takes.
      __syncthreads();
      fetch(tile + kStages - 1);
      following = locate(tile + kStages);
      char* stage = stages + (tile % kStages) * Traits::kStageBytes;
      T* k_tile =
          reinterpret_cast<T*>(Traits::kWidens ? stages + kStages * Traits::kStageBytes : stage);
      T* v_tile = k_tile + Traits::kKeys * Traits::kStrideQK;
      if constexpr (Traits::kWidens) {
        WidenRows<T, KV, DQK, Traits::kKeys, kThreads>(stage, k_tile, 1.f / kKeyUnit<T, KV>);
        WidenRows<T, KV, DVO, Traits::kKeys, kThreads>(stage + Traits::kKeys * DQK, v_tile, 1.f);
        __syncthreads();
      }
      const int tile_begin = begin + tile * Traits::kKeys;
      if constexpr (kExtras) {
        if (p.rotary_dim > 0) {
          RotateKeys<T, Traits::kKeys, Traits::kStrideQK, kThreads>(p, r, item.request, tile_begin,
                                                                    end, k_tile);
          __syncthreads();
        }
      }
      const int warp_begin = tile_begin + warp_kv * Traits::kKeysOfWarp;

      // s = q k^T for the rows and the keys of this warp.
      float s[kBlocksQ][kTilesS][4];
#pragma unroll
      for (int m = 0; m < kBlocksQ; ++m) {
#pragma unroll
        for (int i = 0; i < kTilesS; ++i) {
          s[m][i][0] = s[m][i][1] = s[m][i][2] = s[m][i][3] = 0.f;
        }
      }
      const T* q_rows =
          q_tile + (warp_q * Traits::kRowsOfWarp + lane % 16) * Traits::kStrideQK + lane / 16 * 8;
      const T* k_rows =
          k_tile + (warp_kv * Traits::kKeysOfWarp + lane % 8 + lane / 16 * 8) * Traits::kStrideQK +
          lane / 8 % 2 * 8;
      if constexpr (kRotated) {
#pragma unroll
        for (int d = 0; d < DQK / 2; d += 16) {
          uint32_t a[4], b[2][4];
          LoadMatrices(b[0], k_rows + d);
          LoadMatrices(b[1], k_rows + d + DQK / 2);
          rotation.Rotate(d / 16, b[0], b[1]);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            LoadMatrices(a, q_rows + d + half * (DQK / 2));
            MultiplyAdd<T>(s[0][0], a, b[half][0], b[half][1]);
            MultiplyAdd<T>(s[0][1], a, b[half][2], b[half][3]);
          }
        }
        rotation.Advance();
      } else {
#pragma unroll
        for (int d = 0; d < DQK; d += 16) {
          uint32_t a[kBlocksQ][4];
#pragma unroll
          for (int m = 0; m < kBlocksQ; ++m) {
            LoadMatrices(a[m], q_rows + m * 16 * Traits::kStrideQK + d);
          }
#pragma unroll
          for (int i = 0; i < kTilesS; i += 2) {
            uint32_t b[4];
            LoadMatrices(b, k_rows + i * 8 * Traits::kStrideQK + d);
#pragma unroll
            for (int m = 0; m < kBlocksQ; ++m) {
              MultiplyAdd<T>(s[m][i], a[m], b[0], b[1]);
              MultiplyAdd<T>(s[m][i + 1], a[m], b[2], b[3]);
            }
          }
        }
      }

      if constexpr (kExtras) {
        TransformScores(p, r, item.request, kv_head, first_packed, warp_begin + lane % 4 * 2, s);
      }
      // A branch round all of the masks: as a condition of each they would cost as much as the
      // products.
      if (warp_begin < whole_begin || warp_begin + Traits::kKeysOfWarp > whole_end) {
#pragma unroll
        for (int i = 0; i < kTilesS; ++i) {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            const int key = warp_begin + i * 8 + lane % 4 * 2 + j;
            KeyRange orders{-0x7fffffff - 1, 0x7fffffff};
            if constexpr (kExtras) {
              if (key >= tree_start) orders = OrdersOfNode(p, item.request, key - tree_start);
            }
#pragma unroll
            for (int m = 0; m < kBlocksQ; ++m) {
#pragma unroll
              for (int h = 0; h < 2; ++h) {
                const KeyRange& range = seen[m][h];
                bool visible = key >= range.begin && key < range.end;
                if constexpr (kExtras) {
                  visible &= tree_order[m][h] >= orders.begin && tree_order[m][h] < orders.end;
                }
                if (!visible) s[m][i][2 * h + j] = -INFINITY;
              }
            }
          }
        }
        if constexpr (kExtras) {
          if (has_bits) {
            HideByBits(p, r, item.request, first_packed, warp_begin + lane % 4 * 2, s);
          }
        }
      }
      uint32_t weights[kBlocksQ][kTilesS][2];
#pragma unroll
      for (int m = 0; m < kBlocksQ; ++m) {
        // Where nothing else changes the scores, the softmax scales them as it subtracts.
        UpdateState<T>(s[m], kExtras ? 1.f : p.scale_log2, m, &state, weights[m]);
      }

      // o += weights v.
      const T* v_rows =
          v_tile + (warp_kv * Traits::kKeysOfWarp + lane % 16) * Traits::kStrideVO + lane / 16 * 8;
#pragma unroll
      for (int i = 0; i < kTilesS; i += 2) {
#pragma unroll
        for (int d = 0; d < DVO; d += 16) {
          uint32_t b[4];
          LoadMatricesTransposed(b, v_rows + i * 8 * Traits::kStrideVO + d);
#pragma unroll
          for (int m = 0; m < kBlocksQ; ++m) {
            const uint32_t a[4] = {weights[m][i][0], weights[m][i][1], weights[m][i + 1][0],
                                   weights[m][i + 1][1]};
            MultiplyAdd<T>(state.o[m][d / 8], a, b[0], b[1]);
            MultiplyAdd<T>(state.o[m][d / 8 + 1], a, b[2], b[3]);
          }
        }
      }
    }
    // The memory of the tiles is used again, by the merge and by the next item.
    WaitCopies<0>();
    __syncthreads();

    // The sums of a row lie in four lanes.
#pragma unroll
    for (int m = 0; m < kBlocksQ; ++m) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        state.sum[m][i] += __shfl_xor_sync(0xffffffffu, state.sum[m][i], 1);
        state.sum[m][i] += __shfl_xor_sync(0xffffffffu, state.sum[m][i], 2);
        if constexpr (!kExtras) state.max[m][i] *= p.scale_log2;
      }
    }
    StoreRows<T, KV, DVO, kWarpsQ, kBlocksQ, kWarpsKV>(p, r, item, kv_head, first_row, packed_rows,
                                                       num_chunks, index, state, memory);
    __syncthreads();
  }
  // The last block to leave prepares the counters for the next launch.
  if (threadIdx.x == 0 && atomicAdd(p.blocks_done, 1u) == gridDim.x - 1) {
    *p.items_taken = 0;
    *p.blocks_done = 0;
  }
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_KERNEL_CUH_

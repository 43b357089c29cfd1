// Prefill on Hopper: FlashInfer's FA3 kernel with a scheduler and loads of our own.
//
// What is FlashInfer's: the kernel, its two products and softmax, and the loads of pages. Its loads
// of ragged keys leave what lies after the last key of a request in shared memory, such as the
// first keys of the next request; their weights are 0, but 0 times NaN is NaN. So those loads are
// our own, and clear the values after the last key. So is the epilogue, where FlashInfer's barriers
// do not hold.
//
// Never in one file with the FA2 headers: both define the same names.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_PREFILL_SM90_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_PREFILL_SM90_CUH_

// Tiles of 96 and 192 keys need shapes that CuTe leaves out unless asked.
#define CUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED
// Of this header the kernel uses nothing, and it needs CUTLASS' tools and cuRAND.
#define FLASHINFER_CUTLASS_UTILS_CUH_
#include <cutlass/numeric_types.h>

#pragma nv_diagnostic push
#pragma nv_diag_suppress 1444, 3357  // FlashInfer uses what CuTe gave up, and a bit of C++20
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#pragma nv_diagnostic pop

#include <algorithm>
#include <limits>

#include "plan_buffer.h"
#include "prefill_schedule.h"
#include "unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

namespace fi = flashinfer;

/*! \brief CUTLASS' type of the same number. */
template <typename T>
using CutlassType =
    std::conditional_t<std::is_same_v<T, half>, cutlass::half_t, cutlass::bfloat16_t>;

/*! \brief Elements of 128 bytes: TMA brings rows of that length, which it swizzles. */
constexpr int kChunk = 64;

/*! \brief Hands out the works of a PrefillSchedule. */
struct PrefillScheduler {
  struct Params {
    const int32_t* work_indptr;
    const int32_t* work_tile;
    const int32_t* work_head;
    const PrefillTile* tiles;
    int32_t num_groups;
    cutlass::FastDivmod heads_per_kv_head;
  };

  struct WorkTileInfo {
    int work, end;
    int tile, qo_head, kv_head, first_row, num_rows, first_key, num_keys, request;

    CUTLASS_DEVICE bool is_valid(const Params&) const { return work < end; }
    CUTLASS_DEVICE auto get_block_coord(const Params&) const {
      return cute::tuple{tile, qo_head, kv_head, first_row, first_key, num_rows, num_keys, request};
    }
  };

  CUTLASS_DEVICE WorkTileInfo Load(const Params& params, int work, int end) const {
    WorkTileInfo info{};
    info.work = work;
    info.end = end;
    if (work >= end) return info;
    info.qo_head = params.work_head[work] * params.num_groups + blockIdx.x % params.num_groups;
    info.kv_head = params.heads_per_kv_head.divide(info.qo_head);
    const int4* tile = reinterpret_cast<const int4*>(params.tiles + params.work_tile[work]);
    const int4 first = tile[0], second = tile[1];
    info.tile = first.x;
    info.first_row = first.y;
    info.num_rows = first.z;
    info.first_key = first.w;
    info.num_keys = second.x;
    info.request = second.y;
    return info;
  }

  CUTLASS_DEVICE WorkTileInfo get_initial_work(const Params& params) const {
    const int block = blockIdx.x / params.num_groups;
    return Load(params, params.work_indptr[block], params.work_indptr[block + 1]);
  }
  template <bool is_producer = false>
  CUTLASS_DEVICE WorkTileInfo get_next_work(const Params& params, const WorkTileInfo& info) const {
    return Load(params, info.work + 1, info.end);
  }
  CUTLASS_DEVICE void init_consumer() const {}
  CUTLASS_DEVICE void prefetch_next_work(const Params&, const WorkTileInfo&) const {}
  CUTLASS_DEVICE void broadcast_next_work(const WorkTileInfo&) const {}
};

/*!
 * \brief The ring of tiles between the loads and the products. A tile of values that holds fewer
 * than kRows keys is cleared behind them by whoever waits for it.
 */
template <int kStages, int kRows, int kChunks>
class TilePipeline : public cutlass::PipelineTmaAsync<kStages> {
 public:
  using Base = cutlass::PipelineTmaAsync<kStages>;
  using PipelineState = typename Base::PipelineState;
  using Params = typename Base::Params;

  struct alignas(8) Tile {
    uint32_t address;  // in shared memory
    int32_t num_rows;
  };
  struct SharedStorage : Base::SharedStorage {
    Tile tiles[kStages];
  };

  template <typename ClusterShape>
  CUTLASS_DEVICE TilePipeline(SharedStorage& storage, const Params& params, ClusterShape shape)
      : Base(storage, params, shape), storage_(&storage) {}

  /*! \brief Wait until the stage is free, then announce num_bytes. For one thread. */
  CUTLASS_DEVICE void Acquire(const PipelineState& state, uint32_t num_bytes, const Tile& tile) {
    const int stage = state.index();
    storage_->empty_barrier_[stage].wait(state.phase());
    // In assembly, since CUTLASS' waits do not keep the compiler from moving other accesses.
    asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(AddressOf(stage)), "r"(tile.address),
                 "r"(tile.num_rows)
                 : "memory");
    storage_->full_barrier_[stage].arrive_and_expect_tx(num_bytes);
  }

  /*! \brief Hides that of the base, which the products call. */
  CUTLASS_DEVICE void consumer_wait(const PipelineState& state, cutlass::ConsumerToken token) {
    Base::consumer_wait(state, token);
    Tile tile;
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                 : "=r"(tile.address), "=r"(tile.num_rows)
                 : "r"(AddressOf(state.index()))
                 : "memory");
    if (tile.num_rows < kRows) Clear(tile);
  }

 private:
  CUTLASS_DEVICE uint32_t AddressOf(int stage) const {
    return cute::cast_smem_ptr_to_uint(&storage_->tiles[stage]);
  }

  /*!
   * \brief Clear the rows behind num_rows. Each warpgroup does so for itself, and may while another
   * one reads: that one has written the same zeros before.
   */
  static CUTLASS_DEVICE void Clear(const Tile& tile) {
    constexpr int kVectors = 8;  // of 16 bytes in a row of a chunk
    const int num_vectors = (kRows - tile.num_rows) * kVectors;
    const int thread = threadIdx.x % cutlass::NumThreadsPerWarpGroup;
#pragma unroll 1
    for (int i = thread; i < num_vectors; i += cutlass::NumThreadsPerWarpGroup) {
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const uint32_t address = tile.address + (chunk * kRows + tile.num_rows) * 128 + i * 16;
        asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(address), "r"(0) : "memory");
      }
    }
    cutlass::arch::fence_view_async_shared();
    // Barriers that CUTLASS reserves for kinds of kernels that this one is not.
    const int barrier = static_cast<int>(cutlass::arch::ReservedNamedBarriers::TransposeBarrier) +
                        cutlass::canonical_warp_group_idx() - 1;
    cutlass::arch::NamedBarrier::sync(cutlass::NumThreadsPerWarpGroup,
                                      static_cast<cutlass::arch::ReservedNamedBarriers>(barrier));
  }

  SharedStorage* storage_;
};

/*!
 * \brief FlashInfer's softmax, exact for scores of any size.
 *
 * exp2(score * scale - max * scale) is one fused product whose second part is rounded: for scores
 * in the ten thousands by more than what a weight may be off. Such maxima are subtracted first.
 */
template <int kNumRows>
struct Softmax : fi::OnlineSoftmax<kNumRows, /*WITH_SCALE=*/true> {
  using Base = fi::OnlineSoftmax<kNumRows, true>;
  using Base::Base;

  /*! \brief Up to here rounding moves a weight by less than a quarter of what float16 tells. */
  static constexpr float kLargestFused = 2048.f;

  /*! \brief Hides that of the base: turn the scores of a tile into weights, and count them. */
  template <bool kFirst, typename Accumulator>
  CUTLASS_DEVICE void update(Accumulator& accumulator) {
    constexpr float kLowest = std::numeric_limits<float>::lowest();
    const float scale = this->sm_scale_log2;
    auto scores =
        cute::make_tensor(accumulator.data(), fi::convert_layout_acc_rowcol(accumulator.layout()));
    auto previous = cute::make_fragment_like(this->row_max);
    if constexpr (!kFirst) cute::copy(this->row_max, previous);
    fi::reduce_max<kFirst>(scores, this->row_max);
    float maxima[kNumRows], offsets[kNumRows];
    bool is_large = false;
#pragma unroll
    for (int row = 0; row < kNumRows; ++row) {
      // Rows that see no key yet have a maximum of -inf, and -inf less -inf is NaN.
      maxima[row] = ::fmaxf(this->row_max(row), kLowest);
      offsets[row] = maxima[row] * scale;
      is_large |= ::fabsf(offsets[row]) > kLargestFused;
      if constexpr (!kFirst) {
        this->scores_scale(row) = exp2f((previous(row) - maxima[row]) * scale);
        this->row_sum(row) *= this->scores_scale(row);
      }
    }
    if (__any_sync(0xffffffff, is_large)) {
#pragma unroll
      for (int row = 0; row < kNumRows; ++row) {
#pragma unroll
        for (int i = 0; i < cute::size<1>(scores); ++i) scores(row, i) -= maxima[row];
        offsets[row] = 0.f;
      }
    }
#pragma unroll
    for (int row = 0; row < kNumRows; ++row) {
#pragma unroll
      for (int i = 0; i < cute::size<1>(scores); ++i) {
        scores(row, i) = exp2f(scores(row, i) * scale - offsets[row]);
      }
    }
    fi::reduce_sum<kFirst, /*warp_reduce=*/false>(scores, this->row_sum);
  }
};

/*! \brief FlashInfer's attention without changes of scores, with our softmax. */
struct PlainAttention : fi::StandardAttention {
  using fi::StandardAttention::StandardAttention;

  /*! \brief Hides that of the base. */
  template <int kNumRows>
  CUTLASS_DEVICE auto GetAttentionUpdater() {
    return Softmax<kNumRows>(sm_scale_log2);
  }
};

/*! \brief FlashInfer's traits with our pipeline. */
template <typename T, int kHeadDimQK, int kHeadDimVO, int kRows, int kKeys>
struct PrefillTraits
    : fi::AttentionKernelTraits</*USE_TMA_LOAD_KV=*/true, kHeadDimQK, kHeadDimVO, kRows, kKeys,
                                /*NUM_STAGES=*/2, T, T, T, int32_t, PlainAttention> {
  using Base = fi::AttentionKernelTraits<true, kHeadDimQK, kHeadDimVO, kRows, kKeys, 2, T, T, T,
                                         int32_t, PlainAttention>;
  using MainloopPipeline = TilePipeline<2, kKeys, kHeadDimVO / kChunk>;
  using SharedStorage =
      fi::SharedStorageQKVO<MainloopPipeline, T, T, T, int32_t, kKeys, typename Base::SmemLayoutQ,
                            typename Base::SmemLayoutK, typename Base::SmemLayoutV,
                            typename Base::SmemLayoutO>;
};

/*!
 * \brief What FlashInfer's kernel takes as its main loop: the loads of ragged keys, which one warp
 * issues. One TMA brings a tile of one head; keys after the last one of the tensor come as zeros.
 */
template <typename Traits, bool kCausal>
struct PrefillMainloop {
  using T = typename Traits::DTypeKV;
  using MainloopPipeline = typename Traits::MainloopPipeline;
  using PipelineState = typename MainloopPipeline::PipelineState;
  static constexpr bool USE_TMA_LOAD_KV = true;
  static constexpr int kRows = Traits::CTA_Q, kKeys = Traits::CTA_KV;
  static constexpr int kChunksQK = Traits::HEAD_DIM_QK / kChunk;
  static constexpr int kChunksVO = Traits::HEAD_DIM_VO / kChunk;
  static constexpr uint32_t kBytesQ = kRows * Traits::HEAD_DIM_QK * sizeof(T);
  static constexpr uint32_t TmaTransactionBytesK = kKeys * Traits::HEAD_DIM_QK * sizeof(T);
  static constexpr uint32_t TmaTransactionBytesV = kKeys * Traits::HEAD_DIM_VO * sizeof(T);
  using WarpScheduler = fi::WarpScheduler<Traits, (Traits::HEAD_DIM_VO <= 128)>;

  struct AdditionalParams {
    float sm_scale;
  };
  struct Params {
    CUtensorMap q, k, v;
    int window_left;
    AdditionalParams additional_params;
  };

  static CUTLASS_DEVICE void prefetch_tma_descriptors(const Params& params) {
    for (const CUtensorMap* map : {&params.q, &params.k, &params.v}) {
      cute::prefetch_tma_descriptor(reinterpret_cast<const cute::TmaDescriptor*>(map));
    }
  }

  CUTLASS_DEVICE int get_num_kv_tiles(const Params&, int tile, int num_rows, int num_keys) const {
    int last = num_keys;
    if constexpr (kCausal) last = min(last, (tile + 1) * kRows + num_keys - num_rows);
    return last <= 0 ? 0 : (last + kKeys - 1) / kKeys;
  }

  template <bool kWindow, typename Coord, typename Scheduler, typename SharedStorage>
  CUTLASS_DEVICE void load(const Params& params, MainloopPipeline pipeline_k,
                           MainloopPipeline pipeline_v, PipelineState& write_k,
                           PipelineState& write_v, SharedStorage& storage, Scheduler&,
                           const typename Scheduler::Params&, typename Scheduler::WorkTileInfo&,
                           const Coord& coord, int work_index) const {
    // FlashInfer's order; names of a structured binding could not be captured below.
    const int tile = cute::get<0>(coord), qo_head = cute::get<1>(coord);
    const int kv_head = cute::get<2>(coord), first_row = cute::get<3>(coord);
    const int first_key = cute::get<4>(coord), num_rows = cute::get<5>(coord);
    const int num_keys = cute::get<6>(coord);
    uint8_t* smem_k = reinterpret_cast<uint8_t*>(storage.smem_k.data());
    uint8_t* smem_v = reinterpret_cast<uint8_t*>(storage.smem_v.data());
    const bool issues = threadIdx.x % 32 == 0;

    int kv_tile = get_num_kv_tiles(params, tile, num_rows, num_keys) - 1;
    int begin = 0;
    if constexpr (kWindow) {
      begin =
          fi::get_swa_begin_kv_tile_idx<kRows, kKeys>(params.window_left, tile, num_rows, num_keys);
    }
    constexpr auto kKeep = static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_NORMAL);
    const auto load_k = [&](int at) {
      if (issues) {
        pipeline_k.Acquire(write_k, TmaTransactionBytesK, {0, kKeys});
        cute::SM90_TMA_LOAD_4D::copy(&params.k, pipeline_k.producer_get_barrier(write_k), kKeep,
                                     smem_k + write_k.index() * TmaTransactionBytesK, 0,
                                     first_key + at * kKeys, 0, kv_head);
      }
      __syncwarp();
      ++write_k;
    };
    const auto load_v = [&](int at) {
      if (issues) {
        uint8_t* to = smem_v + write_v.index() * TmaTransactionBytesV;
        pipeline_v.Acquire(write_v, TmaTransactionBytesV,
                           {cute::cast_smem_ptr_to_uint(to), min(kKeys, num_keys - at * kKeys)});
        cute::SM90_TMA_LOAD_4D::copy(&params.v, pipeline_v.producer_get_barrier(write_v), kKeep, to,
                                     0, first_key + at * kKeys, 0, kv_head);
      }
      __syncwarp();
      ++write_v;
    };

    load_k(kv_tile);
    // The products are done with the queries of the last work.
    cutlass::arch::NamedBarrier::sync(Traits::NUM_MMA_THREADS + Traits::NUM_PRODUCER_THREADS,
                                      static_cast<uint32_t>(fi::NamedBarriers::kQueryEmpty));
    if (issues) {
      storage.barrier_Q.arrive_and_expect_tx(kBytesQ);
      cute::SM90_TMA_LOAD_4D::copy(&params.q, reinterpret_cast<uint64_t*>(&storage.barrier_Q),
                                   static_cast<uint64_t>(cute::TMA::CacheHintSm90::EVICT_FIRST),
                                   storage.smem_q.data(), 0, first_row + tile * kRows, 0, qo_head);
    }
    // The outputs of the last work lie where values do.
    storage.barrier_O.wait((work_index + 1) % 2);
#pragma unroll 1
    for (; kv_tile > begin; --kv_tile) {
      load_k(kv_tile - 1);
      load_v(kv_tile);
    }
    load_v(kv_tile);
  }

  CUTLASS_DEVICE void load_tail(MainloopPipeline pipeline_k, MainloopPipeline pipeline_v,
                                PipelineState& write_k, PipelineState& write_v) const {
    if (threadIdx.x == 0) {
      pipeline_k.producer_tail(write_k);
      pipeline_v.producer_tail(write_v);
    }
  }
};

/*!
 * \brief FlashInfer's epilogue, with barriers between the writes and the reads of shared memory.
 *
 * There every thread arrives at a barrier and then waits at the same one, so that half of the warps
 * fill it with two arrivals each: they read outputs that the others have not written yet. And the
 * next values come when one warp has read its outputs.
 */
template <typename Traits>
struct PrefillEpilogue : fi::CollectiveEpilogue<Traits> {
  using Base = fi::CollectiveEpilogue<Traits>;

  /*! \brief Hides that of the base: write the outputs and LSEs of a tile. */
  template <typename Coord, typename SharedStorage, typename Accumulator, typename Lse,
            typename TiledMma>
  CUTLASS_DEVICE void store(const typename Base::Params& params, const Accumulator& accumulator,
                            const Lse& lse, SharedStorage& storage, TiledMma tiled_mma, int thread,
                            const Coord& coord) {
    using TileShape = decltype(cute::select<0, 1>(typename Base::TileShape_PDV()));
    const int tile = cute::get<0>(coord), head = cute::get<1>(coord);
    const int first_row = cute::get<3>(coord), num_rows = cute::get<5>(coord);
    auto shared =
        cute::make_tensor(cute::make_smem_ptr(storage.smem_o.data()), typename Base::SmemLayoutO());
    auto tiled_copy = cute::make_tiled_copy_C(typename Base::SmemCopyAtomO(), tiled_mma);
    auto of_thread = tiled_copy.get_thread_slice(thread);
    auto outputs = fi::convert_type<typename Base::DTypeO>(accumulator);
    WaitForAll();  // outputs lie where values do, which all have used by now
    cute::copy(tiled_copy, of_thread.retile_S(outputs), of_thread.partition_D(shared));
    cutlass::arch::fence_view_async_shared();  // before TMA writes values there
    WaitForAll();
    fi::write_O<Base::NUM_COPY_THREADS>(params.O_ptr, typename Base::TiledCopyO(), params.layout_O,
                                        TileShape(), shared, thread, tile, head, first_row,
                                        num_rows, /*write_warp_idx=*/0);
    if (params.lse_ptr != nullptr) {
      auto all = cute::make_tensor(cute::make_gmem_ptr(params.lse_ptr), params.layout_LSE);
      auto of_tile = fi::get_lse_local_tile_tensor(all, cute::Shape<cute::Int<Base::CTA_Q>>(), head,
                                                   first_row, num_rows)(cute::_, tile);
      auto places =
          tiled_mma.get_thread_slice(thread).partition_C(cute::make_identity_tensor(TileShape()));
      auto rows = places(cute::make_coord(cute::_0(), cute::_, cute::_0()), cute::_, cute::_0());
      static_assert(decltype(cute::size(rows))::value == decltype(cute::size(lse))::value);
      const bool has_first_column = cute::get<1>(rows(cute::_0())) == 0;
#pragma unroll
      for (int i = 0; i < cute::size(lse); ++i) {
        const int row = cute::get<0>(rows(i));
        if (has_first_column && row < num_rows - tile * Base::CTA_Q) of_tile(row) = lse(i);
      }
    }
    WaitForAll();  // the loads of the next values wait for one warp
  }

 private:
  /*! \brief Of the warps that compute. */
  static CUTLASS_DEVICE void WaitForAll() {
    cutlass::arch::NamedBarrier::sync(Base::NUM_MMA_THREADS,
                                      static_cast<uint32_t>(fi::NamedBarriers::kValueEmpty));
  }
};

/*! \brief What TMA is to know of a tensor. Strides count elements; that of a chunk is known. */
template <typename T>
CUtensorMap MakeTensorMap(const void* data, const int64_t (&shape)[4], const int64_t (&strides)[3],
                          const int (&box)[4]) {
  constexpr int kRank = 4;
  CUtensorMap map;
  cuuint64_t dims[kRank], steps[kRank - 1];
  cuuint32_t box_dims[kRank], element_steps[kRank];
  for (int i = 0; i < kRank; ++i) {
    dims[i] = static_cast<cuuint64_t>(std::max<int64_t>(shape[i], 1));
    box_dims[i] = static_cast<cuuint32_t>(box[i]);
    element_steps[i] = 1;
    if (i > 0) steps[i - 1] = static_cast<cuuint64_t>(strides[i - 1]) * sizeof(T);
  }
  static const auto encode =
      DriverFunction<decltype(&cuTensorMapEncodeTiled)>("cuTensorMapEncodeTiled");
  const CUresult status =
      encode(&map,
             std::is_same_v<T, cutlass::half_t> ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             kRank, const_cast<void*>(data), dims, steps, box_dims, element_steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (status != CUDA_SUCCESS) {
    throw std::invalid_argument(
        "TMA cannot read q, keys or values of these shapes and strides "
        "(CUresult " +
        std::to_string(static_cast<int>(status)) + "); copy them to contiguous tensors");
  }
  return map;
}

/*! \brief (rows, heads, head_dim) for tiles of kTile rows of one head. */
template <typename T, int kTile, int kHeadDim>
CUtensorMap MapRows(const void* data, int64_t num_rows, int64_t num_heads, int64_t stride_row,
                    int64_t stride_head) {
  return MakeTensorMap<T>(data, {kChunk, num_rows, kHeadDim / kChunk, num_heads},
                          {stride_row, kChunk, stride_head}, {kChunk, kTile, kHeadDim / kChunk, 1});
}

/*! \brief Launch a kernel over the works of a plan. */
template <typename Mainloop, typename Traits, bool kWindow, bool kCausal>
cudaError_t LaunchPrefill(const AttentionArgs& args, const PrefillSM90Plan& plan,
                          const PlanView& view, const typename Mainloop::Params& mainloop,
                          cudaStream_t stream) {
  using T = typename Traits::DTypeO;
  using Epilogue = PrefillEpilogue<Traits>;
  constexpr int64_t kHeadDim = Traits::HEAD_DIM_VO;
  const typename Epilogue::Params epilogue{
      static_cast<T*>(args.o),
      fi::get_gmem_layout(static_cast<int>(args.num_rows), args.num_qo_heads, kHeadDim,
                          args.num_qo_heads * kHeadDim, kHeadDim),
      args.lse, fi::get_lse_gmem_layout(static_cast<int>(args.num_rows), args.num_qo_heads)};
  void* workspace = view.int_workspace;
  const PrefillScheduler::Params scheduler{
      At<int32_t>(workspace, plan.work_indptr),
      At<int32_t>(workspace, plan.work_tile),
      At<int32_t>(workspace, plan.work_head),
      At<PrefillTile>(workspace, plan.tiles),
      static_cast<int32_t>(plan.num_groups),
      cutlass::FastDivmod(args.num_qo_heads / args.num_kv_heads)};
  auto* kernel =
      fi::PrefillWithKVCacheKernel<Mainloop, Epilogue, Traits, kWindow, kCausal, PrefillScheduler>;
  constexpr int kSmem = sizeof(typename Traits::SharedStorage);
  cudaError_t status =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSmem);
  if (status != cudaSuccess) return status;
  kernel<<<static_cast<uint32_t>(plan.num_blocks), Traits::NUM_THREADS, kSmem, stream>>>(
      mainloop, epilogue, scheduler);
  return cudaGetLastError();
}

/*! \brief Keys of a tile that TMA fills, tuned by FlashInfer. */
constexpr int PrefillTileKeys(int head_dim_qk, int head_dim_vo, bool causal) {
  if (head_dim_vo == 256) return 64;
  return head_dim_qk == 128 && !causal ? 192 : 128;
}

/*! \brief Call launch with the mask and the window of this run as template arguments. */
template <typename Launch>
cudaError_t DispatchMaskAndWindow(bool causal, int32_t window_left, const Launch& launch) {
  auto with_mask = [&](auto mask) {
    return window_left >= 0 ? launch(mask, std::true_type()) : launch(mask, std::false_type());
  };
  return causal ? with_mask(std::true_type()) : with_mask(std::false_type());
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_PREFILL_SM90_CUH_

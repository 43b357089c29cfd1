// Shared by the FA2 prefill units: the attention variant, the plan's fields put into FlashInfer's
// parameter structs, and the launch.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_PREFILL_UNIT_H_
#define TVM_FLASHINFER_KERNELS_CUDA_PREFILL_UNIT_H_

#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>

#include "split_launch.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

// The window is compiled in always: its mask code runs on boundary tiles alone, so that a run
// without window (window_left = -1) costs nothing and one kernel serves both.
using PrefillVariant =
    flashinfer::DefaultAttention</*use_custom_mask=*/false, /*use_sliding_window=*/true,
                                 /*use_logits_soft_cap=*/false, /*use_alibi=*/false>;

template <typename Params>
void SetPlan(const Plan& plan, const PlanView& view, Params* params) {
  params->request_indices = At<int32_t>(view.int_workspace, plan.request_indices);
  params->qo_tile_indices = At<int32_t>(view.int_workspace, plan.qo_tile_indices);
  params->kv_tile_indices = At<int32_t>(view.int_workspace, plan.kv_tile_indices);
  params->o_indptr = At<int32_t>(view.int_workspace, plan.o_indptr);
  params->kv_chunk_size_ptr = At<int32_t>(view.int_workspace, plan.kv_chunk_size);
  params->merge_indptr =
      plan.split_kv ? At<int32_t>(view.int_workspace, plan.merge_indptr) : nullptr;
  params->padded_batch_size = plan.num_blocks;
  params->max_total_num_rows = plan.num_rows;
}

/*! \brief The kernel of FlashInfer for keys in pages, or for ragged ones. */
template <bool kPaged, typename Traits, typename Params>
constexpr auto PrefillKernel() {
  if constexpr (kPaged) {
    return &flashinfer::BatchPrefillWithPagedKVCacheKernel</*SAME_KV_STRIDES=*/true, Traits,
                                                           Params>;
  } else {
    return &flashinfer::BatchPrefillWithRaggedKVCacheKernel<Traits, Params>;
  }
}

/*!
 * \brief Launch FA2 with tiles of kTileQ packed rows. As in FlashInfer, tiles of keys are as large
 * as registers allow and as lets two blocks run on an SM, if two can.
 */
template <bool kPaged, int kTileQ, int kHeadDimQK, int kHeadDimVO, flashinfer::MaskMode kMask,
          typename Params>
cudaError_t LaunchFA2(const Params& params, uint32_t num_kv_heads, const Plan& plan,
                      const PlanView& view, int device_id, cudaStream_t stream) {
  namespace fi = flashinfer;
  using T = typename Params::DTypeO;
  static_assert(kHeadDimVO <= 256, "larger heads share memory in ways that are not counted here");
  constexpr uint32_t kMmaQ = fi::get_num_mma_q(kTileQ);
  constexpr uint32_t kWarpsQ = fi::get_num_warps_q(kTileQ);
  constexpr uint32_t kWarpsKV = fi::get_num_warps_kv(kTileQ);
  constexpr int kSharedQ = kTileQ * kHeadDimQK * sizeof(T);
  constexpr int kSharedOfMma = (kHeadDimQK + kHeadDimVO) * 16 * kWarpsKV * sizeof(T);
  const GpuFacts& gpu = FactsOf(device_id);
  const int blocks_on_sm = gpu.shared_of_sm >= 2 * (kSharedQ + kSharedOfMma) ? 2 : 1;
  const int shared = std::min(gpu.shared_of_sm / blocks_on_sm, gpu.shared_of_block);
  const int mmas = std::min<int>((shared - kSharedQ) / kSharedOfMma, 8 / kMmaQ);
  const auto launch = [&](auto mma_kv) -> cudaError_t {
    using Traits = fi::KernelTraits<kMask, kTileQ, kMmaQ, decltype(mma_kv)::value, kHeadDimQK / 16,
                                    kHeadDimVO / 16, kWarpsQ, kWarpsKV, fi::PosEncodingMode::kNone,
                                    T, T, T, float, typename Params::IdType, PrefillVariant>;
    if constexpr (Traits::IsInvalid()) {
      throw std::runtime_error("FlashInfer has no FA2 kernel for this GPU and head dimension");
    } else {
      using Shared = std::conditional_t<kPaged, typename Traits::SharedStoragePaged,
                                        typename Traits::SharedStorage>;
      return LaunchSplit<kHeadDimVO>(PrefillKernel<kPaged, Traits, Params>(),
                                     dim3(static_cast<unsigned>(plan.num_blocks), 1, num_kv_heads),
                                     dim3(32, kWarpsQ, kWarpsKV), sizeof(Shared), params, plan,
                                     view, params.merge_indptr, plan.num_rows, device_id, stream);
    }
  };
  if (mmas >= 8) return launch(std::integral_constant<uint32_t, 8>());
  if (mmas >= 4) return launch(std::integral_constant<uint32_t, 4>());
  if (mmas >= 2) return launch(std::integral_constant<uint32_t, 2>());
  if (mmas >= 1) return launch(std::integral_constant<uint32_t, 1>());
  throw std::runtime_error("a block of this GPU has too little shared memory for FA2: " +
                           std::to_string(gpu.shared_of_block) + " bytes");
}

/*! \brief Call launch with the tile size and the mask of this run as template arguments. */
template <typename Launch>
cudaError_t DispatchTileAndMask(int64_t cta_tile_q, bool causal, const Launch& launch) {
  using flashinfer::MaskMode;
  auto with_tile = [&](auto tile) {
    return causal ? launch(tile, std::integral_constant<MaskMode, MaskMode::kCausal>())
                  : launch(tile, std::integral_constant<MaskMode, MaskMode::kNone>());
  };
  switch (cta_tile_q) {
    case 16:
      return with_tile(std::integral_constant<uint32_t, 16>());
    case 64:
      return with_tile(std::integral_constant<uint32_t, 64>());
    case 128:
      return with_tile(std::integral_constant<uint32_t, 128>());
  }
  throw std::runtime_error("the plan asks for a query tile that is not compiled: cta_tile_q = " +
                           std::to_string(cta_tile_q));
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_PREFILL_UNIT_H_

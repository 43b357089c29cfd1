// Shared by the FA2 prefill units: the attention variant, and the plan's fields put into
// FlashInfer's parameter structs.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_PREFILL_UNIT_H_
#define TVM_FLASHINFER_KERNELS_CUDA_PREFILL_UNIT_H_

#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/variants.cuh>

#include "plan_buffer.h"
#include "unit.h"

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

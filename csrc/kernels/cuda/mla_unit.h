// Shared by the units of latent attention: the arguments and the plan put into FlashInfer's
// parameter struct.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_MLA_UNIT_H_
#define TVM_FLASHINFER_KERNELS_CUDA_MLA_UNIT_H_

#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/mla_params.cuh>

#include "plan_buffer.h"
#include "unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

template <typename T>
using MLAParams = flashinfer::MLAParams<T, T, T, int32_t>;

template <typename T>
MLAParams<T> MakeMLAParams(const MLAArgs& args, const MLAPlan& plan, const PlanView& view) {
  auto ints = [&](int64_t offset) { return At<int32_t>(view.int_workspace, offset); };
  MLAParams<T> params{};
  params.q_nope = static_cast<T*>(const_cast<void*>(args.q_nope));
  params.q_pe = static_cast<T*>(const_cast<void*>(args.q_pe));
  params.ckv = static_cast<T*>(const_cast<void*>(args.ckv));
  params.kpe = static_cast<T*>(const_cast<void*>(args.kpe));
  params.partial_o = At<T>(view.float_workspace, plan.partial_o);
  params.partial_lse = At<float>(view.float_workspace, plan.partial_lse);
  params.final_o = static_cast<T*>(args.o);
  params.final_lse = args.lse;
  params.q_indptr = ints(plan.first_row);
  params.kv_indptr = ints(plan.first_page);
  params.partial_indptr = ints(plan.partial_start);
  params.merge_packed_offset_start = ints(plan.merge_begin);
  params.merge_packed_offset_end = ints(plan.merge_end);
  params.merge_partial_packed_offset_start = ints(plan.merge_part_begin);
  params.merge_partial_packed_offset_end = ints(plan.merge_part_end);
  params.merge_partial_stride = ints(plan.merge_stride);
  params.kv_indices = const_cast<int32_t*>(args.page_indices);
  params.q_len = ints(plan.num_rows);
  params.kv_len = ints(plan.num_keys);
  params.q_start = ints(plan.tile_start);
  params.kv_start = ints(plan.key_begin);
  params.kv_end = ints(plan.key_end);
  params.work_indptr = ints(plan.work_indptr);
  params.block_size = flashinfer::uint_fastdiv(args.page_size);
  params.num_heads = flashinfer::uint_fastdiv(args.num_heads);
  params.q_nope_stride_n = args.q_nope_stride_row;
  params.q_nope_stride_h = args.q_nope_stride_head;
  params.q_pe_stride_n = args.q_pe_stride_row;
  params.q_pe_stride_h = args.q_pe_stride_head;
  params.ckv_stride_page = args.ckv_stride_page;
  params.ckv_stride_n = args.ckv_stride_slot;
  params.kpe_stride_page = args.kpe_stride_page;
  params.kpe_stride_n = args.kpe_stride_slot;
  params.o_stride_n = args.num_heads * args.head_dim_ckv;
  params.o_stride_h = args.head_dim_ckv;
  params.sm_scale = args.sm_scale;
  params.return_lse_base_on_e = false;
  return params;
}

/*! \brief Call launch with the mask of the plan as template argument. */
template <typename Launch>
cudaError_t DispatchMLAMask(const MLAPlan& plan, const Launch& launch) {
  using flashinfer::MaskMode;
  return plan.causal ? launch(std::integral_constant<MaskMode, MaskMode::kCausal>())
                     : launch(std::integral_constant<MaskMode, MaskMode::kNone>());
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_MLA_UNIT_H_

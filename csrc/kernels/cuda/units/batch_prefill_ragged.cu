// FA2 attention of ragged queries over ragged keys, for one dtype and head_dim.
#include "../prefill_unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

using T = TVM_FLASHINFER_DTYPE;
constexpr int kHeadDimQK = TVM_FLASHINFER_HEAD_DIM_QK;
constexpr int kHeadDimVO = TVM_FLASHINFER_HEAD_DIM_VO;

int BatchPrefillRagged(const AttentionArgs& args, const RaggedKV& kv, const PlanView& view,
                       CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    namespace fi = flashinfer;
    const Plan& plan = Plan::From(view);
    fi::BatchPrefillRaggedParams<T, T, T, int32_t> params(
        static_cast<T*>(const_cast<void*>(args.q)), static_cast<T*>(const_cast<void*>(kv.k)),
        static_cast<T*>(const_cast<void*>(kv.v)), /*maybe_custom_mask=*/nullptr,
        const_cast<int32_t*>(args.qo_indptr), const_cast<int32_t*>(kv.indptr),
        /*maybe_mask_indptr=*/nullptr, /*maybe_q_rope_offset=*/nullptr,
        /*maybe_k_rope_offset=*/nullptr, static_cast<T*>(args.o), args.lse,
        /*maybe_alibi_slopes=*/nullptr, args.num_qo_heads, args.num_kv_heads, args.q_stride_row,
        args.q_stride_head, kv.k_stride_token, kv.k_stride_head, args.window_left,
        /*logits_soft_cap=*/0.f, args.sm_scale, /*rope_scale=*/1.f, /*rope_theta=*/1.f);
    params.v_stride_n = kv.v_stride_token;
    params.v_stride_h = kv.v_stride_head;
    SetPlan(plan, view, &params);
    return DispatchTileAndMask(plan.cta_tile_q, args.causal, [&](auto tile, auto mask) {
      return LaunchFA2</*kPaged=*/false, decltype(tile)::value, kHeadDimQK, kHeadDimVO,
                       decltype(mask)::value>(params, args.num_kv_heads, plan, view,
                                              stream.device_id, handle);
    });
  });
}

const std::string& Name() {
  static const std::string name =
      KernelName("batch_prefill_ragged", DTypeOf<T>(), kHeadDimQK, kHeadDimVO);
  return name;
}

TVM_FLASHINFER_REGISTER(batch_prefill_ragged, Name().c_str(), &BatchPrefillRagged);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

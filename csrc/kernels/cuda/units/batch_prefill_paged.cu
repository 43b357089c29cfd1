// FA2 attention of ragged queries over paged keys, for one dtype and head_dim.
#include "../prefill_unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

using T = TVM_FLASHINFER_DTYPE;
constexpr int kHeadDim = TVM_FLASHINFER_HEAD_DIM_QK;
static_assert(kHeadDim == TVM_FLASHINFER_HEAD_DIM_VO, "paged kernels have one head_dim");

int BatchPrefillPaged(const AttentionArgs& args, const PagedKV& kv, const PlanView& view,
                      CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    namespace fi = flashinfer;
    const Plan& plan = Plan::From(view);
    auto* mutable_indptr = const_cast<int32_t*>(kv.indptr);
    fi::paged_kv_t<T, int32_t> paged_kv(
        args.num_kv_heads, kv.page_size, kHeadDim, args.batch_size, fi::QKVLayout::kHND,
        static_cast<T*>(const_cast<void*>(kv.k)), static_cast<T*>(const_cast<void*>(kv.v)),
        const_cast<int32_t*>(kv.indices), mutable_indptr, const_cast<int32_t*>(kv.last_page_len));
    paged_kv.stride_page = paged_kv.v_stride_page = kv.k_stride_page;
    paged_kv.stride_h = paged_kv.v_stride_h = kv.k_stride_head;
    paged_kv.stride_n = paged_kv.v_stride_n = kv.k_stride_slot;
    // Decode runs through this kernel with one row per request; its plan made the row offsets.
    int32_t* qo_indptr = plan.qo_indptr >= 0 ? At<int32_t>(view.int_workspace, plan.qo_indptr)
                                             : const_cast<int32_t*>(args.qo_indptr);
    fi::BatchPrefillPagedParams<T, T, T, int32_t> params(
        static_cast<T*>(const_cast<void*>(args.q)), paged_kv, /*maybe_custom_mask=*/nullptr,
        qo_indptr, /*maybe_mask_indptr=*/nullptr, /*maybe_q_rope_offset=*/nullptr,
        static_cast<T*>(args.o), args.lse, /*maybe_alibi_slopes=*/nullptr, args.num_qo_heads,
        args.q_stride_row, args.q_stride_head, args.window_left, /*logits_soft_cap=*/0.f,
        args.sm_scale, /*rope_scale=*/1.f, /*rope_theta=*/1.f);
    SetPlan(plan, view, &params);
    return DispatchTileAndMask(plan.cta_tile_q, args.causal, [&](auto tile, auto mask) {
      return LaunchFA2</*kPaged=*/true, decltype(tile)::value, kHeadDim, kHeadDim,
                       decltype(mask)::value>(params, args.num_kv_heads, plan, view,
                                              stream.device_id, handle);
    });
  });
}

const std::string& Name() {
  static const std::string name =
      KernelName("batch_prefill_paged", DTypeOf<T>(), kHeadDim, kHeadDim);
  return name;
}

TVM_FLASHINFER_REGISTER(batch_prefill_paged, Name().c_str(), &BatchPrefillPaged);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

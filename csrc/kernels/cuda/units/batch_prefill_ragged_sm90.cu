// Attention of ragged queries over ragged keys on Hopper, for one dtype and head_dim.
#include "../prefill_sm90.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

using T = CutlassType<TVM_FLASHINFER_DTYPE>;
constexpr int kHeadDimQK = TVM_FLASHINFER_HEAD_DIM_QK;
constexpr int kHeadDimVO = TVM_FLASHINFER_HEAD_DIM_VO;
constexpr int kRows = PrefillTileRows(kHeadDimVO);

int BatchPrefillRagged(const AttentionArgs& args, const RaggedKV& kv, const PlanView& view,
                       CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    const PrefillSM90Plan& plan = PrefillSM90Plan::From(view);
    return DispatchMaskAndWindow(args.causal, args.window_left, [&](auto causal, auto window) {
      constexpr bool kCausal = decltype(causal)::value;
      constexpr int kKeys = PrefillTileKeys(kHeadDimQK, kHeadDimVO, kCausal);
      using Traits = PrefillTraits<T, kHeadDimQK, kHeadDimVO, kRows, kKeys>;
      using Mainloop = PrefillMainloop<Traits, kCausal>;
      // Without keys there may be no memory, and TMA wants an address.
      const void* k = plan.num_keys > 0 ? kv.k : args.q;
      const void* v = plan.num_keys > 0 ? kv.v : args.q;
      const typename Mainloop::Params params{
          MapRows<T, kRows, kHeadDimQK>(args.q, args.num_rows, args.num_qo_heads, args.q_stride_row,
                                        args.q_stride_head),
          MapRows<T, kKeys, kHeadDimQK>(k, plan.num_keys, args.num_kv_heads, kv.k_stride_token,
                                        kv.k_stride_head),
          MapRows<T, kKeys, kHeadDimVO>(v, plan.num_keys, args.num_kv_heads, kv.v_stride_token,
                                        kv.v_stride_head),
          args.window_left,
          {static_cast<float>(args.sm_scale)}};
      return LaunchPrefill<Mainloop, Traits, decltype(window)::value, kCausal>(args, plan, view,
                                                                               params, handle);
    });
  });
}

const std::string& Name() {
  static const std::string name = KernelName(
      "batch_prefill_ragged_sm90", DTypeOf<TVM_FLASHINFER_DTYPE>(), kHeadDimQK, kHeadDimVO);
  return name;
}

TVM_FLASHINFER_REGISTER(batch_prefill_ragged_sm90, Name().c_str(), &BatchPrefillRagged);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

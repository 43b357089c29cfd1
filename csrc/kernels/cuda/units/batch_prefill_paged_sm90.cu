// Attention of ragged queries over paged keys on Hopper, for one dtype and head_dim.
#include "../prefill_sm90.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

using T = CutlassType<TVM_FLASHINFER_DTYPE>;
constexpr int kHeadDim = TVM_FLASHINFER_HEAD_DIM_QK;
static_assert(kHeadDim == TVM_FLASHINFER_HEAD_DIM_VO, "paged kernels have one head_dim");
constexpr int kRows = PrefillTileRows(kHeadDim);

/*! \brief Keys of a tile that are gathered, tuned by FlashInfer. */
constexpr int kKeys = kHeadDim == 256 ? 32 : 96;

struct GatherParams {
  float sm_scale;
};

template <bool kCausal, bool kWindow>
cudaError_t LaunchGather(const AttentionArgs& args, const PagedKV& kv, const PlanView& view,
                         cudaStream_t stream) {
  using Traits =
      fi::AttentionKernelTraits</*USE_TMA_LOAD_KV=*/false, kHeadDim, kHeadDim, kRows, kKeys,
                                /*NUM_STAGES=*/2, T, T, T, int32_t, PlainAttention>;
  using Mainloop = fi::SparseCollectiveMainloop<GatherParams, Traits, kCausal>;
  const auto layout =
      fi::get_gmem_layout(0, args.num_kv_heads, kHeadDim, kv.k_stride_slot, kv.k_stride_head);
  const auto params = Mainloop::to_underlying_arguments(
      {static_cast<const T*>(args.q),
       fi::get_gmem_layout(static_cast<int>(args.num_rows), args.num_qo_heads, kHeadDim,
                           args.q_stride_row, args.q_stride_head),
       static_cast<const T*>(kv.k),
       layout,
       static_cast<const T*>(kv.v),
       layout,
       kv.indices,
       // As far back as no sequence reaches, and far from where sums would overflow.
       std::min(args.window_left, 1 << 30),
       kv.k_stride_page,
       kv.v_stride_page,
       static_cast<uint32_t>(kv.page_size),
       {static_cast<float>(args.sm_scale)}});
  return LaunchPrefill<Mainloop, Traits, kWindow, kCausal>(args, PrefillSM90Plan::From(view), view,
                                                           params, stream);
}

int BatchPrefillPaged(const AttentionArgs& args, const PagedKV& kv, const PlanView& view,
                      CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchMaskAndWindow(args.causal, args.window_left, [&](auto causal, auto window) {
      return LaunchGather<decltype(causal)::value, decltype(window)::value>(args, kv, view, handle);
    });
  });
}

const std::string& Name() {
  static const std::string name =
      KernelName("batch_prefill_paged_sm90", DTypeOf<TVM_FLASHINFER_DTYPE>(), kHeadDim, kHeadDim);
  return name;
}

TVM_FLASHINFER_REGISTER(batch_prefill_paged_sm90, Name().c_str(), &BatchPrefillPaged);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

// Latent attention on the warpgroup instructions of Hopper, for one dtype and head dimensions.
// Never in one library unit with batch_mla: the headers share names.
#include <flashinfer/attention/mla_hopper.cuh>

#include "../mla_unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

using T = TVM_FLASHINFER_DTYPE;
// A key is a latent part and a rotated one; the latent part is the value too.
constexpr int kHeadDimCKV = TVM_FLASHINFER_HEAD_DIM_VO;
constexpr int kHeadDimKPE = TVM_FLASHINFER_HEAD_DIM_QK - TVM_FLASHINFER_HEAD_DIM_VO;

int BatchMLASM90(const MLAArgs& args, const PlanView& view, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    const MLAPlan& plan = MLAPlan::From(view);
    const MLAParams<T> params = MakeMLAParams<T>(args, plan, view);
    return DispatchMLAMask(plan, [&](auto mask) {
      return flashinfer::mla::BatchMLAPageAttentionHopper<decltype(mask)::value, kHeadDimCKV,
                                                          kHeadDimKPE>(
          params, plan.blocks_per_cluster, plan.num_clusters, handle);
    });
  });
}

const std::string& Name() {
  static const std::string name = KernelName(
      "batch_mla_sm90", DTypeOf<T>(), TVM_FLASHINFER_HEAD_DIM_QK, TVM_FLASHINFER_HEAD_DIM_VO);
  return name;
}

TVM_FLASHINFER_REGISTER(batch_mla_sm90, Name().c_str(), &BatchMLASM90);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

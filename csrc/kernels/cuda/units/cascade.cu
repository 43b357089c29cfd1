// Merges of many attention states, of every dtype.
#include "../merge_many.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

TVM_FLASHINFER_REGISTER(merge_many_states, "merge_many_states", &MergeManyStates);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

// Sampling: filters of tokens, softmax with a temperature, and verification of drafts.
#include "../token_filter.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

TVM_FLASHINFER_REGISTER(draw_filtered, "draw_filtered", &DrawFiltered);
TVM_FLASHINFER_REGISTER(renorm_filtered, "renorm_filtered", &RenormFiltered);
TVM_FLASHINFER_REGISTER(draw_sorted, "draw_sorted", &DrawSorted);
TVM_FLASHINFER_REGISTER(renorm_sorted, "renorm_sorted", &RenormSorted);
TVM_FLASHINFER_REGISTER(softmax_rows, "softmax_rows", &SoftmaxRows);
TVM_FLASHINFER_REGISTER(verify_drafts, "verify_drafts", &VerifyDrafts);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

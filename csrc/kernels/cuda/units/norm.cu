// Norms and gated activations of every dtype.
#include "../activation.cuh"
#include "../norm.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

TVM_FLASHINFER_REGISTER(norm_rows, "norm_rows", &NormRows);
TVM_FLASHINFER_REGISTER(gate_rows, "gate_rows", &GateRows);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

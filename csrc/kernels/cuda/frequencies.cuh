// Rotary frequencies on their way to a kernel.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_FREQUENCIES_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_FREQUENCIES_CUH_

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*!
 * \brief Frequencies as a kernel parameter: they reach the kernel without a device allocation. Most
 * models have few, and a launch takes longer the more bytes it has.
 */
template <int kCount>
struct InverseFrequencies {
  float values[kCount];
};
constexpr int kFewFrequencies = 64;

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_FREQUENCIES_CUH_

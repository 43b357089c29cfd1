// The rotation by an angle, for RoPE outside and inside attention.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ANGLE_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ANGLE_CUH_

#include <cuda_runtime.h>

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*!
 * \brief Cosine and sine of an angle that was rounded to float, as in TVM's kernels. Its reduction
 * to one turn is exact enough for any position, where the fast sine of a large float is not.
 */
__device__ __forceinline__ float2 CosineAndSine(float angle) {
  const double turns = static_cast<double>(angle) * 0.15915494309189535;
  float2 result;
  sincospif(static_cast<float>(2.0 * (turns - rint(turns))), &result.y, &result.x);
  return result;
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ANGLE_CUH_

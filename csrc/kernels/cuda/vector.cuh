// Loads and stores of several elements at once, and their conversion to float.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_VECTOR_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_VECTOR_CUH_

#include "unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

__device__ __forceinline__ float ToFloat(float x) { return x; }
__device__ __forceinline__ float ToFloat(half x) { return __half2float(x); }
__device__ __forceinline__ float ToFloat(nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T FromFloat(float x);
template <>
__device__ __forceinline__ float FromFloat<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ half FromFloat<half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ nv_bfloat16 FromFloat<nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

/*! \brief kSize elements that move in one instruction when their address allows it. */
template <typename T, int kSize>
struct alignas(sizeof(T) * kSize) Vector {
  T data[kSize];
};

/*! \brief Elements of T in 16 bytes. */
template <typename T>
constexpr int kWide = 16 / sizeof(T);

/*! \brief Whether rows of row_bytes that start at these addresses can move in pieces of 16 bytes.
 */
inline bool CanVectorize(int64_t row_bytes, std::initializer_list<const void*> addresses) {
  if (row_bytes % 16 != 0) return false;
  for (const void* address : addresses) {
    if (reinterpret_cast<uintptr_t>(address) % 16 != 0) return false;
  }
  return true;
}

inline int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

/*! \brief Call body(T()) with the element type of dtype. */
template <typename Body>
cudaError_t DispatchDType(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(float());
    case DType::kFloat16:
      return body(half());
    case DType::kBFloat16:
      return body(nv_bfloat16());
    default:
      return cudaErrorInvalidValue;
  }
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_VECTOR_CUH_

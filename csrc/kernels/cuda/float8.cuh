// The 8-bit elements of stored keys and values: to 16 bits, and the rounding of rows to them.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_FLOAT8_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_FLOAT8_CUH_

#include "mma.cuh"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

template <typename KV>
constexpr __nv_fp8_interpretation_t kFloat8Format =
    std::is_same_v<KV, __nv_fp8_e4m3> ? __NV_E4M3 : __NV_E5M2;

/*!
 * \brief A key over what it is read as. RoPE makes elements up to 1.5 times as large, and those of
 * e5m2 nearly fill the range of half already; a power of two this small loses none of their bits.
 */
template <typename T, typename KV>
constexpr float kKeyUnit =
    std::is_same_v<T, half> && std::is_same_v<KV, __nv_fp8_e5m2> ? 16.f : 1.f;

/*! \brief Two elements, times a power of two, exactly. */
template <typename T, typename KV>
__device__ __forceinline__ uint32_t WidenPair(uint32_t codes, float factor) {
  const half2 pair = __half2(__nv_cvt_fp8x2_to_halfraw2(
      static_cast<__nv_fp8x2_storage_t>(codes & 0xffff), kFloat8Format<KV>));
  if constexpr (std::is_same_v<T, half>) {
    const half2 scaled = factor == 1.f ? pair : __hmul2(pair, __float2half2_rn(factor));
    return *reinterpret_cast<const uint32_t*>(&scaled);
  } else {
    const float2 values = __half22float2(pair);
    return Pack<T>(values.x * factor, values.y * factor);
  }
}

/*! \brief Rows of D elements, one after the other, to rows of T with 8 elements of padding. */
template <typename T, typename KV, int D, int kRows, int kThreads>
__device__ __forceinline__ void WidenRows(const char* rows, T* tile, float factor) {
  constexpr int kPieces = D / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
    const uint2 codes = *reinterpret_cast<const uint2*>(rows + i * 8);
    const uint4 piece =
        make_uint4(WidenPair<T, KV>(codes.x, factor), WidenPair<T, KV>(codes.x >> 16, factor),
                   WidenPair<T, KV>(codes.y, factor), WidenPair<T, KV>(codes.y >> 16, factor));
    *reinterpret_cast<uint4*>(tile + i / kPieces * (D + 8) + i % kPieces * 8) = piece;
  }
}

/*! \brief x / scale to nearest even, saturated; NaN stays NaN, without a sign. */
template <typename KV>
__device__ __forceinline__ uint8_t Quantize(float x, float scale) {
  // Units are compiled with fast division, which is not exact and has no denormal numbers.
  float quotient;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(x), "f"(scale));
  if (isnan(quotient)) return 0x7f;
  return __nv_cvt_float_to_fp8(quotient, __NV_SATFINITE, kFloat8Format<KV>);
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_FLOAT8_CUH_

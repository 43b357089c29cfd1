// The tensor-core instructions of our own attention kernel, as functions. All run on sm_80 and
// later.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_MMA_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_MMA_CUH_

#include "unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

/*! \brief Start a copy of 16 bytes to shared memory; zeros come when `exists` is 0. */
__device__ __forceinline__ void CopyAsync16(void* shared, const void* global, int exists) {
  asm volatile(
      "{\n.reg .pred ignored;\nsetp.eq.s32 ignored, %2, 0;\n"
      "cp.async.cg.shared.global.L2::128B [%0], [%1], 16, ignored;\n}\n" ::"r"(
          SharedAddress(shared)),
      "l"(global), "r"(exists));
}

__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;\n" ::); }

/*! \brief Wait until at most kPending groups of copies are under way. */
template <int kPending>
__device__ __forceinline__ void WaitCopies() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kPending));
}

/*! \brief Four 8x8 matrices of 16-bit elements; each lane gives the address of one row. */
__device__ __forceinline__ void LoadMatrices(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row)));
}

/*! \brief The same, each matrix transposed. */
__device__ __forceinline__ void LoadMatricesTransposed(uint32_t (&r)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(SharedAddress(row)));
}

/*! \brief c (16x8, float) += a (16x16) * b (16x8). */
template <typename T>
__device__ __forceinline__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                            uint32_t b1) {
  if constexpr (std::is_same_v<T, half>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

/*! \brief Two floats rounded and packed, the first in the low half. */
template <typename T>
__device__ __forceinline__ uint32_t Pack(float low, float high) {
  if constexpr (std::is_same_v<T, half>) {
    half2 packed = __floats2half2_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&packed);
  } else {
    nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<uint32_t*>(&packed);
  }
}

/*! \brief The floats that Pack was given, rounded. */
template <typename T>
__device__ __forceinline__ float2 Unpack(uint32_t packed) {
  if constexpr (std::is_same_v<T, half>) {
    return __half22float2(*reinterpret_cast<half2*>(&packed));
  } else {
    return __bfloat1622float2(*reinterpret_cast<nv_bfloat162*>(&packed));
  }
}

/*! \brief 2^x, and exactly 0 for -inf. */
__device__ __forceinline__ float Exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_MMA_CUH_

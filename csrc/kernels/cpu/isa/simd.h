// Vectors of floats as wide as the instruction set of the unit has them, on the vector extensions
// of GCC and clang.
//
// This and the other headers in isa/ are included by one unit per instruction set. Whatever they
// emit must stay inside that unit: if two units emitted the same inline function, the linker would
// keep either copy, and the baseline might end up executing AVX-512. Hence everything is in an
// unnamed namespace, and no header of the C++ library is included.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_SIMD_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_SIMD_H_

#ifndef TVM_FLASHINFER_ISA
#error "Include this from one of isa/*.cc, which define TVM_FLASHINFER_ISA"
#endif

#include <stdint.h>
#include <string.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "../../types.h"

#define TFI_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define TFI_UNROLL _Pragma("clang loop unroll(full)")
#else
#define TFI_UNROLL _Pragma("GCC unroll 16")
#endif

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IVec __attribute__((vector_size(kLanes * 4)));
typedef uint32_t UVec __attribute__((vector_size(kLanes * 4)));
typedef float FourFloats __attribute__((vector_size(16)));
typedef uint16_t HalfVec __attribute__((vector_size(kLanes * 2)));
typedef uint8_t ByteVec __attribute__((vector_size(kLanes)));
// For memory of any alignment.
typedef float VecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef int32_t IVecUnaligned __attribute__((vector_size(kLanes * 4), aligned(4), may_alias));
typedef uint16_t HalfVecUnaligned __attribute__((vector_size(kLanes * 2), aligned(2), may_alias));
typedef uint8_t ByteVecUnaligned __attribute__((vector_size(kLanes), aligned(1), may_alias));

TFI_INLINE Vec Load(const float* p) { return *reinterpret_cast<const VecUnaligned*>(p); }
TFI_INLINE void Store(float* p, Vec v) { *reinterpret_cast<VecUnaligned*>(p) = v; }
TFI_INLINE IVec LoadInt(const int32_t* p) { return *reinterpret_cast<const IVecUnaligned*>(p); }
TFI_INLINE Vec Broadcast(float x) { return x - Vec{}; }
TFI_INLINE IVec BroadcastInt(int32_t x) { return x - IVec{}; }
TFI_INLINE Vec Max(Vec a, Vec b) { return a > b ? a : b; }

TFI_INLINE float ReduceSum(Vec v) {
  float lanes[kLanes];
  Store(lanes, v);
  TFI_UNROLL for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  }
  return lanes[0];
}

TFI_INLINE float ReduceMax(Vec v) {
  float lanes[kLanes];
  Store(lanes, v);
  TFI_UNROLL for (int half = kLanes / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
    }
  }
  return lanes[0];
}

/*! \brief 0, 1, 2, ... */
TFI_INLINE IVec LaneIndex() {
#if defined(__AVX512F__)
  return IVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif defined(__AVX2__)
  return IVec{0, 1, 2, 3, 4, 5, 6, 7};
#else
  return IVec{0, 1, 2, 3};
#endif
}

/*! \brief Exchange of the lanes 2 i and 2 i + 1. */
TFI_INLINE Vec SwapPairs(Vec v) {
#if defined(__AVX512F__)
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif defined(__AVX2__)
  return __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  return __builtin_shufflevector(v, v, 1, 0, 3, 2);
#endif
}

/*! \brief Lane i of the result is the sum of the lanes of v[i]. */
TFI_INLINE Vec SumOfEach(const Vec (&v)[kLanes]) {
  // First four vectors at a time inside groups of four lanes, then across the groups.
  Vec quad[kLanes / 4];
  TFI_UNROLL for (int g = 0; g < kLanes / 4; ++g) {
    const Vec a = v[4 * g], b = v[4 * g + 1], c = v[4 * g + 2], d = v[4 * g + 3];
#if defined(__AVX512F__)
#define TFI_QUADS(i, j, k, l) \
  i, j, k, l, i + 4, j + 4, k + 4, l + 4, i + 8, j + 8, k + 8, l + 8, i + 12, j + 12, k + 12, l + 12
#elif defined(__AVX2__)
#define TFI_QUADS(i, j, k, l) i, j, k, l, i + 4, j + 4, k + 4, l + 4
#else
#define TFI_QUADS(i, j, k, l) i, j, k, l
#endif
    const Vec ab = __builtin_shufflevector(a, b, TFI_QUADS(0, kLanes, 1, kLanes + 1)) +
                   __builtin_shufflevector(a, b, TFI_QUADS(2, kLanes + 2, 3, kLanes + 3));
    const Vec cd = __builtin_shufflevector(c, d, TFI_QUADS(0, kLanes, 1, kLanes + 1)) +
                   __builtin_shufflevector(c, d, TFI_QUADS(2, kLanes + 2, 3, kLanes + 3));
    quad[g] = __builtin_shufflevector(ab, cd, TFI_QUADS(0, 1, kLanes, kLanes + 1)) +
              __builtin_shufflevector(ab, cd, TFI_QUADS(2, 3, kLanes + 2, kLanes + 3));
#undef TFI_QUADS
  }
#if defined(__AVX512F__)
#define TFI_GROUPS(a, b, c, d) \
  a, a + 1, a + 2, a + 3, b, b + 1, b + 2, b + 3, c, c + 1, c + 2, c + 3, d, d + 1, d + 2, d + 3
  const Vec low = __builtin_shufflevector(quad[0], quad[1], TFI_GROUPS(0, 4, 16, 20)) +
                  __builtin_shufflevector(quad[0], quad[1], TFI_GROUPS(8, 12, 24, 28));
  const Vec high = __builtin_shufflevector(quad[2], quad[3], TFI_GROUPS(0, 4, 16, 20)) +
                   __builtin_shufflevector(quad[2], quad[3], TFI_GROUPS(8, 12, 24, 28));
  return __builtin_shufflevector(low, high, TFI_GROUPS(0, 8, 16, 24)) +
         __builtin_shufflevector(low, high, TFI_GROUPS(4, 12, 20, 28));
#undef TFI_GROUPS
#elif defined(__AVX2__)
  return __builtin_shufflevector(quad[0], quad[1], 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(quad[0], quad[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  return quad[0];
#endif
}

/*!
 * \brief 2^x for x <= 0, with a relative error below 2e-7: 0 below 2^-126 and for -inf, NaN for
 * NaN.
 */
TFI_INLINE Vec Exp2(Vec x) {
  // Adding 1.5 * 2^23 rounds to an integer, which is then in the low bits of the sum.
  const Vec shifted = x + 12582912.0f;
  const Vec f = x - (shifted - 12582912.0f);
  // Minimax polynomial for 2^f on [-1/2, 1/2] that is exact at 0.
  Vec p = Broadcast(0.001326472731307149f);
  p = p * f + 0.009671512991189957f;
  p = p * f + 0.05550733581185341f;
  p = p * f + 0.24022242426872253f;
  p = p * f + 0.6931470036506653f;
  p = p * f + 1.0f;
  const Vec scaled = (Vec)((UVec)p + ((UVec)shifted << 23));  // unsigned: it may wrap round
  return x < -126.0f ? Vec{} : scaled;
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_SIMD_H_

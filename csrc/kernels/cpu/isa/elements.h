// Loads and stores that convert between the stored dtype and float32. Rounding is to nearest even.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_ELEMENTS_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_ELEMENTS_H_

#include "simd.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

template <typename A, typename B>
constexpr bool kSame = false;
template <typename A>
constexpr bool kSame<A, A> = true;

struct Float32 {
  typedef float Raw;
  TFI_INLINE Vec LoadVec(const Raw* p) { return Load(p); }
  TFI_INLINE void StoreVec(Raw* p, Vec v) { Store(p, v); }
};

TFI_INLINE UVec Widen(const uint16_t* p) {
  // GCC 12 takes __builtin_convertvector apart into several instructions.
#if defined(__AVX512F__)
  // With a full mask of our own: GCC 12 warns about the undefined operand of the unmasked form.
  return (UVec)_mm512_maskz_cvtepu16_epi32(0xffff,
                                           _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  return (UVec)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  return __builtin_convertvector((HalfVec) * reinterpret_cast<const HalfVecUnaligned*>(p), UVec);
#endif
}

TFI_INLINE void StoreNarrow(uint16_t* p, UVec bits) {
  *reinterpret_cast<HalfVecUnaligned*>(p) = __builtin_convertvector(bits, HalfVec);
}

struct BFloat16 {
  typedef uint16_t Raw;
  TFI_INLINE Vec LoadVec(const Raw* p) { return (Vec)(Widen(p) << 16); }
  TFI_INLINE void StoreVec(Raw* p, Vec v) {
    const UVec bits = (UVec)v;
    const UVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    // Rounding could carry a NaN over into infinity or zero: keep its upper bits and make it quiet.
    const UVec nan = (bits >> 16) | 0x40;
    StoreNarrow(p, v != v ? nan : rounded);
  }
};

struct Float16 {
  typedef uint16_t Raw;
  TFI_INLINE Vec LoadVec(const Raw* p) {
    return FromBits(*reinterpret_cast<const HalfVecUnaligned*>(p));
  }
#if defined(__AVX512F__)
  // Masked for the same reason as Widen.
  TFI_INLINE Vec FromBits(HalfVec half) {
    return (Vec)_mm512_maskz_cvtph_ps(0xffff, (__m256i)half);
  }
  TFI_INLINE void StoreVec(Raw* p, Vec v) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p),
                        _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT));
  }
#elif defined(__AVX2__)
  TFI_INLINE Vec FromBits(HalfVec half) { return (Vec)_mm256_cvtph_ps((__m128i)half); }
  TFI_INLINE void StoreVec(Raw* p, Vec v) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                     _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
  }
#else
  TFI_INLINE Vec FromBits(HalfVec bits16) {
    const UVec half = __builtin_convertvector(bits16, UVec);
    const UVec sign = (half & 0x8000) << 16;
    const UVec magnitude = half & 0x7fff;
    // Move the exponent from bias 15 to bias 127; infinity and NaN get the largest exponent.
    UVec bits = (magnitude << 13) + (112u << 23);
    bits = magnitude >= 0x7c00 ? bits + (112u << 23) : bits;
    // Subnormals by way of an integer, so that a CPU set to flush subnormals gets them right too.
    const Vec subnormal = __builtin_convertvector((IVec)magnitude, Vec) * 0x1p-24f;
    bits = magnitude < 0x0400 ? (UVec)subnormal : bits;
    return (Vec)(bits | sign);
  }
  TFI_INLINE void StoreVec(Raw* p, Vec v) {
    const UVec bits = (UVec)v;
    const UVec sign = (bits >> 16) & 0x8000;
    const UVec magnitude = bits & 0x7fffffff;
    const UVec normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    // The addition aligns the last bit of a float with the last bit of a subnormal half, and
    // rounds.
    const UVec subnormal = (UVec)((Vec)magnitude + 0.5f) - 0x3f000000u;
    const UVec nan_or_inf =
        magnitude > 0x7f800000u ? (magnitude >> 13 & 0x3ff) | 0x7e00u : UVec{} + 0x7c00u;
    UVec half = magnitude < (113u << 23) ? subnormal : normal;
    half = magnitude >= (143u << 23) ? nan_or_inf : half;
    StoreNarrow(p, half | sign);
  }
#endif
};

/*! \brief Call body(Element()) for the dtype of queries and outputs. */
template <typename Body>
TFI_INLINE void DispatchFloat(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32:
      return body(Float32());
    case DType::kFloat16:
      return body(Float16());
    case DType::kBFloat16:
      return body(BFloat16());
    default:
      return;  // refused by the ops layer
  }
}

/*! \brief The first n < kLanes elements; the other lanes are 0. */
template <typename Element>
TFI_INLINE Vec LoadPart(const typename Element::Raw* p, int64_t n) {
  typename Element::Raw part[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) part[i] = p[i];
  return Element::LoadVec(part);
}

template <typename Element>
TFI_INLINE void StorePart(typename Element::Raw* p, int64_t n, Vec v) {
  typename Element::Raw part[kLanes];
  Element::StoreVec(part, v);
  for (int64_t i = 0; i < n; ++i) p[i] = part[i];
}

/*! \brief Convert a row to float; dst has room for, and is filled with zeros up to, whole vectors.
 */
template <typename Element>
TFI_INLINE void LoadRow(const typename Element::Raw* src, int64_t n, float* dst) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) Store(dst + i, Element::LoadVec(src + i));
  if (i < n) Store(dst + i, LoadPart<Element>(src + i, n - i));
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_ELEMENTS_H_

// The 8-bit elements of stored keys and values, and the rounding of rows to them.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_FLOAT8_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_FLOAT8_H_

#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

/*! \brief As many 16-bit lanes as a register has. */
typedef uint16_t WideHalfVec __attribute__((vector_size(kLanes * 4)));
typedef uint16_t WideHalfVecUnaligned
    __attribute__((vector_size(kLanes * 4), aligned(2), may_alias));

typedef uint8_t WideByteVec __attribute__((vector_size(kLanes * 2)));
typedef uint8_t WideByteVecUnaligned
    __attribute__((vector_size(kLanes * 2), aligned(1), may_alias));

TFI_INLINE void StoreNarrow(uint8_t* p, UVec bits) {
  *reinterpret_cast<ByteVecUnaligned*>(p) = __builtin_convertvector(bits, ByteVec);
}

// Codes in the upper bytes of 16-bit lanes. As for 16 bits, intrinsics where GCC 12 takes a
// __builtin_convertvector apart.
TFI_INLINE HalfVec LoadCodes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (HalfVec)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))) << 8;
#elif defined(__AVX2__)
  return (HalfVec)_mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))) << 8;
#else
  return __builtin_convertvector((ByteVec) * reinterpret_cast<const ByteVecUnaligned*>(p), HalfVec)
         << 8;
#endif
}

TFI_INLINE WideHalfVec LoadWideCodes(const uint8_t* p) {
#if defined(__AVX512F__)
  return (WideHalfVec)_mm512_maskz_cvtepu8_epi16(
             0xffffffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))
         << 8;
#elif defined(__AVX2__)
  return (WideHalfVec)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))
         << 8;
#else
  return __builtin_convertvector((WideByteVec) * reinterpret_cast<const WideByteVecUnaligned*>(p),
                                 WideHalfVec)
         << 8;
#endif
}

/*!
 * \brief A float of 8 bits: a sign, an exponent, and kMantissa bits. kLeastNormal is the exponent
 * of the least normal number in the bias of float32, and kLargest the code of the largest one.
 *
 * Loads go by way of float16, to whose place a code is moved with the bias of its exponent as it
 * is. So what is loaded is the value divided by StoredUnit, for which the scales of the batch make
 * up.
 */
template <int kMantissa, int kLeastNormal, uint32_t kLargest>
struct Float8 {
  typedef uint8_t Raw;

  /*! \brief Codes, each in the upper byte of a lane, to float16. */
  template <typename HalfLanes>
  TFI_INLINE HalfLanes ToHalf(HalfLanes code) {
    if constexpr (kMantissa == 2) return code;
    // The one code that is no number would be one there.
    const HalfLanes moved = (code & 0x8000) | (code & 0x7f00) >> 1;
    return (code & 0x7f00) == 0x7f00 ? moved | 0x7e00 : moved;
  }

  TFI_INLINE Vec LoadVec(const Raw* p) { return Float16::FromBits(ToHalf(LoadCodes(p))); }

  /*! \brief To nearest even; what is too large, infinity too, becomes the largest number. */
  TFI_INLINE void StoreVec(Raw* p, Vec v) {
    const UVec bits = (UVec)v;
    const UVec magnitude = bits & 0x7fffffff;
    constexpr int kShift = 23 - kMantissa;
    constexpr uint32_t kRebias = static_cast<uint32_t>(kLeastNormal - 1) << 23;
    const UVec half = UVec{} + ((1u << (kShift - 1)) - 1);
    const UVec normal = (magnitude - kRebias + half + ((magnitude >> kShift) & 1)) >> kShift;
    // The addition aligns the last bit of a float with the last bit of a subnormal, and rounds.
    constexpr uint32_t kAligner = static_cast<uint32_t>(kLeastNormal + kShift) << 23;
    const Vec aligner = (Vec)(UVec{} + kAligner);
    const UVec subnormal = (UVec)((Vec)magnitude + aligner) - kAligner;
    UVec code = magnitude < (static_cast<uint32_t>(kLeastNormal) << 23) ? subnormal : normal;
    code = code > kLargest ? UVec{} + kLargest : code;
    code |= bits >> 24 & 0x80;
    // The NaN that the hardware makes, without a sign.
    StoreNarrow(p, magnitude > 0x7f800000u ? UVec{} + 0x7f : code);
  }
};

/*! \brief float8_e4m3fn: up to 448, no infinity, and NaN where all bits but the sign are set. */
typedef Float8<3, 121, 0x7e> Float8E4M3;
/*! \brief float8_e5m2: the upper byte of a float16, up to 57344. */
typedef Float8<2, 113, 0x7b> Float8E5M2;

/*! \brief The n elements of a row as float16, with zeros up to a whole WideHalfVec. */
template <typename Element>
TFI_INLINE void WidenRow(const uint8_t* source, int64_t n, uint16_t* target) {
  auto widen = [](const uint8_t* from, uint16_t* to) {
    *reinterpret_cast<WideHalfVecUnaligned*>(to) = Element::ToHalf(LoadWideCodes(from));
  };
  constexpr int64_t kStep = 2 * kLanes;
  int64_t i = 0;
  for (; i + kStep <= n; i += kStep) widen(source + i, target + i);
  if (i < n) {
    uint8_t part[kStep] = {};
    memcpy(part, source + i, n - i);
    widen(part, target + i);
  }
}

/*!
 * \brief In what the products of few rows read keys and values: as they are stored, but 8-bit rows
 * are widened once, since they are read several times. Float16 is as good as stored where the
 * hardware converts it.
 */
template <typename Element>
struct FewRowsElement {
  typedef Element Type;
};
#if defined(__AVX2__)
typedef Float16 Float8Widened;
#else
typedef Float32 Float8Widened;
#endif
template <>
struct FewRowsElement<Float8E4M3> {
  typedef Float8Widened Type;
};
template <>
struct FewRowsElement<Float8E5M2> {
  typedef Float8Widened Type;
};

/*! \brief Call body(Element()) for the dtype of keys and values. */
template <typename Body>
TFI_INLINE void DispatchKeys(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat8E4M3:
      return body(Float8E4M3());
    case DType::kFloat8E5M2:
      return body(Float8E5M2());
    default:
      return DispatchFloat(dtype, body);
  }
}

/*! \brief The n elements of source divided by scale, to an 8-bit dtype. */
template <typename From, typename To>
void QuantizeRowOf(const typename From::Raw* source, int64_t n, float scale, uint8_t* target) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) To::StoreVec(target + i, From::LoadVec(source + i) / scale);
  if (i < n) StorePart<To>(target + i, n - i, LoadPart<From>(source + i, n - i) / scale);
}

void QuantizeRow(DType from, DType to, const void* source, int64_t n, float scale,
                 uint8_t* target) {
  DispatchFloat(from, [&](auto element) {
    typedef decltype(element) From;
    const auto* rows = static_cast<const typename From::Raw*>(source);
    if (to == DType::kFloat8E4M3) {
      QuantizeRowOf<From, Float8E4M3>(rows, n, scale, target);
    } else {
      QuantizeRowOf<From, Float8E5M2>(rows, n, scale, target);
    }
  });
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_FLOAT8_H_

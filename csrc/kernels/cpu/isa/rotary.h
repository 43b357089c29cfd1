// Split of a fused QKV tensor with rotary embedding of q and k.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_ROTARY_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_ROTARY_H_

#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

constexpr int kDoubleLanes = kLanes / 2;
typedef double DVec __attribute__((vector_size(kLanes * 4)));
typedef int64_t LVec __attribute__((vector_size(kLanes * 4)));
typedef double DoublesUnaligned __attribute__((vector_size(kLanes * 4), aligned(8), may_alias));
typedef float FloatsOfDVec __attribute__((vector_size(kLanes * 2)));
typedef float FloatsUnaligned __attribute__((vector_size(kLanes * 2), aligned(4), may_alias));

/*! \brief Largest |angle| that SinCos reduces with an error far below that of a float. */
constexpr double kMaxReducedAngle = 1073741824.0;

/*!
 * \brief Sine and cosine times magnitude of kDoubleLanes angles, rounded to float once. Angles of
 * long contexts are large, so all is in double, where the reduction by multiples of pi / 2 is exact
 * enough.
 */
TFI_INLINE void SinCos(const double* angle, float magnitude, float* sine, float* cosine) {
  const DVec x = *reinterpret_cast<const DoublesUnaligned*>(angle);
  // Adding 1.5 * 2^52 rounds to an integer, which is then in the low bits of the sum.
  const DVec shifted = x * 0.63661977236758134308 + 6755399441055744.0;
  const DVec n = shifted - 6755399441055744.0;
  // pi / 2 in three parts; n has at most 31 bits and the first two have 22, so n times them is
  // exact.
  DVec r = x - n * 0x1.921fb4p+0;
  r = r - n * 0x1.4442dp-24;
  r = r - n * 0x1.8469898cc5170p-48;
  const DVec r2 = r * r;
  // Taylor series; on [-pi / 4, pi / 4] the first omitted terms are below 1e-10.
  DVec s = r2 * (-1.0 / 39916800) + 1.0 / 362880;
  s = s * r2 - 1.0 / 5040;
  s = s * r2 + 1.0 / 120;
  s = s * r2 - 1.0 / 6;
  s = s * r2 * r + r;
  DVec c = r2 * (1.0 / 479001600) - 1.0 / 3628800;
  c = c * r2 + 1.0 / 40320;
  c = c * r2 - 1.0 / 720;
  c = c * r2 + 1.0 / 24;
  c = c * r2 - 0.5;
  c = c * r2 + 1.0;
  // Quadrants: bit 0 exchanges the two, bit 1 negates the sine, bit 0 xor bit 1 the cosine.
  const LVec quadrant = (LVec)shifted;
  const LVec sign_bit = LVec{} + INT64_MIN;
  const LVec exchange = -(quadrant & 1);
  const LVec s_bits = ((LVec)s & ~exchange) | ((LVec)c & exchange);
  const LVec c_bits = ((LVec)c & ~exchange) | ((LVec)s & exchange);
  const DVec signed_s = (DVec)(s_bits ^ ((quadrant << 62) & sign_bit));
  const DVec signed_c = (DVec)(c_bits ^ (((quadrant << 62) ^ (quadrant << 63)) & sign_bit));
  const double factor = magnitude;
  *reinterpret_cast<FloatsUnaligned*>(sine) =
      __builtin_convertvector(signed_s * factor, FloatsOfDVec);
  *reinterpret_cast<FloatsUnaligned*>(cosine) =
      __builtin_convertvector(signed_c * factor, FloatsOfDVec);
}

/*! \brief Angles of the pairs of one row, with room for whole vectors. */
typedef double Angles[kMaxRotaryPairs + kLanes];

/*! \brief SinCos of count angles; sine and cosine have room for whole vectors. */
void SinCosOfAll(const double* angle, int64_t count, float magnitude, float* sine, float* cosine) {
  bool small = true;
  for (int64_t i = 0; i < count; ++i) small &= __builtin_fabs(angle[i]) < kMaxReducedAngle;
  if (small) {
    for (int64_t i = 0; i < count; i += kDoubleLanes) {
      SinCos(angle + i, magnitude, sine + i, cosine + i);
    }
  } else {
    for (int64_t i = 0; i < count; ++i) {
      sine[i] = static_cast<float>(__builtin_sin(angle[i]) * magnitude);
      cosine[i] = static_cast<float>(__builtin_cos(angle[i]) * magnitude);
    }
  }
}

/*! \brief Sine and cosine of the pairs of one row; the arrays have room for whole vectors. */
struct RowAngles {
  float sine[kMaxRotaryPairs + kLanes];
  float cosine[kMaxRotaryPairs + kLanes];
  // Of the second elements of pairs, where they have frequencies of their own.
  float sine_second[kMaxRotaryPairs + kLanes];
  float cosine_second[kMaxRotaryPairs + kLanes];
  // For interleaved pairs: (-sine, sine) and (cosine, cosine) of every pair.
  float signed_sines[2 * kMaxRotaryPairs + kLanes];
  float cosines[2 * kMaxRotaryPairs + kLanes];
};

/*! \brief The angles of a position; args has the frequencies, as SplitRotaryArgs. */
template <typename Args>
void ComputeAngles(const Args& args, int32_t position, RowAngles* out) {
  const int64_t pairs = args.rotary_dim / 2;
  // The product is rounded to float, as TVM's is.
  const float p = static_cast<float>(position);
  Angles angle = {};
  for (int64_t i = 0; i < pairs; ++i) angle[i] = p * args.inv_freq[i];
  SinCosOfAll(angle, pairs, args.magnitude, out->sine, out->cosine);
  if (args.inv_freq_second != nullptr) {
    for (int64_t i = 0; i < pairs; ++i) angle[i] = p * args.inv_freq_second[i];
    SinCosOfAll(angle, pairs, args.magnitude, out->sine_second, out->cosine_second);
  }
  if (args.interleaved) {
    const bool second = args.inv_freq_second != nullptr;
    for (int64_t i = 0; i < pairs; ++i) {
      out->signed_sines[2 * i] = -out->sine[i];
      out->signed_sines[2 * i + 1] = second ? out->sine_second[i] : out->sine[i];
      out->cosines[2 * i] = out->cosine[i];
      out->cosines[2 * i + 1] = second ? out->cosine_second[i] : out->cosine[i];
    }
  }
}

/*! \brief Rotate the pairs (i, i + pairs). */
template <typename Element, bool kSecond>
TFI_INLINE void RotateHalves(const typename Element::Raw* x, int64_t pairs, const RowAngles& angles,
                             typename Element::Raw* y) {
  const float* const sine_second = kSecond ? angles.sine_second : angles.sine;
  const float* const cosine_second = kSecond ? angles.cosine_second : angles.cosine;
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const Vec a = Element::LoadVec(x + i), b = Element::LoadVec(x + pairs + i);
    Element::StoreVec(y + i, a * Load(angles.cosine + i) - b * Load(angles.sine + i));
    Element::StoreVec(y + pairs + i, b * Load(cosine_second + i) + a * Load(sine_second + i));
  }
  if (i < pairs) {
    const int64_t n = pairs - i;
    const Vec a = LoadPart<Element>(x + i, n), b = LoadPart<Element>(x + pairs + i, n);
    StorePart<Element>(y + i, n, a * Load(angles.cosine + i) - b * Load(angles.sine + i));
    StorePart<Element>(y + pairs + i, n, b * Load(cosine_second + i) + a * Load(sine_second + i));
  }
}

/*! \brief Rotate the pairs (2 i, 2 i + 1). */
template <typename Element>
TFI_INLINE void RotateInterleaved(const typename Element::Raw* x, int64_t pairs,
                                  const RowAngles& angles, typename Element::Raw* y) {
  const int64_t dim = 2 * pairs;
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) {
    const Vec a = Element::LoadVec(x + i);
    const Vec s = Load(angles.signed_sines + i), c = Load(angles.cosines + i);
    Element::StoreVec(y + i, a * c + SwapPairs(a) * s);
  }
  if (i < dim) {
    const Vec a = LoadPart<Element>(x + i, dim - i);
    const Vec s = Load(angles.signed_sines + i), c = Load(angles.cosines + i);
    StorePart<Element>(y + i, dim - i, a * c + SwapPairs(a) * s);
  }
}

template <typename Element>
void SplitRotaryOf(const SplitRotaryArgs& args, int64_t begin, int64_t end) {
  typedef typename Element::Raw Raw;
  const int64_t dim = args.head_dim;
  const int64_t pairs = args.apply_rope ? args.rotary_dim / 2 : 0;
  const int64_t rest = 2 * pairs;
  const int64_t num_qo = args.num_qo_heads, num_kv = args.num_kv_heads;
  RowAngles angles;
  // The last vectors of the arrays are read whole, though only their first lanes count.
  memset(&angles, 0, sizeof(angles));
  for (int64_t row = begin; row < end; ++row) {
    if (pairs > 0) ComputeAngles(args, args.position_map[row], &angles);
    const Raw* source = static_cast<const Raw*>(args.qkv) + row * args.qkv_stride_row;
    for (int64_t head = 0; head < num_qo + 2 * num_kv; ++head, source += args.qkv_stride_head) {
      Raw* target;
      if (head < num_qo) {
        target = static_cast<Raw*>(args.q) + (row * num_qo + head) * dim;
      } else if (head < num_qo + num_kv) {
        target = static_cast<Raw*>(args.k) + (row * num_kv + head - num_qo) * dim;
      } else {
        target = static_cast<Raw*>(args.v) + (row * num_kv + head - num_qo - num_kv) * dim;
      }
      if (head >= num_qo + num_kv || pairs == 0) {
        memcpy(target, source, dim * sizeof(Raw));
        continue;
      }
      if (args.interleaved) {
        RotateInterleaved<Element>(source, pairs, angles, target);
      } else if (args.inv_freq_second != nullptr) {
        RotateHalves<Element, true>(source, pairs, angles, target);
      } else {
        RotateHalves<Element, false>(source, pairs, angles, target);
      }
      if (rest < dim) memcpy(target + rest, source + rest, (dim - rest) * sizeof(Raw));
    }
  }
}

void SplitRotary(const SplitRotaryArgs& args, int64_t begin, int64_t end) {
  DispatchFloat(args.dtype,
                [&](auto element) { SplitRotaryOf<decltype(element)>(args, begin, end); });
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_ROTARY_H_

// Gated activations.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_ACTIVATION_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_ACTIVATION_H_

#include "norm.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

constexpr float kLog2E = 1.44269504088896341f;

/*! \brief 1 / (1 + exp(-x)) with a relative error of a few roundings on either side of 0. */
TFI_INLINE Vec Sigmoid(Vec x) {
  const Vec e = Exp2((Vec)((IVec)x | INT32_MIN) * kLog2E);
  const Vec part = 1.0f / (1.0f + e);
  return x < 0.0f ? e * part : part;
}

/*!
 * \brief The normal distribution function, erfc(-x / sqrt(2)) / 2. The complementary error function
 * is Chebyshev's approximation of Numerical Recipes, with a relative error of 1.2e-7 everywhere.
 */
TFI_INLINE Vec NormalDistribution(Vec x) {
  const Vec z = (Vec)((IVec)x & 0x7fffffff) * 0.70710678118654752f;
  const Vec t = 1.0f / (1.0f + 0.5f * z);
  Vec p = Broadcast(0.17087277f);
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const Vec tail = 0.5f * t * Exp2((p - z * z) * kLog2E);
  return x < 0.0f ? tail : 1.0f - tail;
}

template <Activation kActivation>
TFI_INLINE Vec Activate(Vec x) {
  if (kActivation == Activation::kSilu) return x * Sigmoid(x);
  if (kActivation == Activation::kGelu) return x * NormalDistribution(x);
  // x / 2 * (1 + tanh(u)) = x * sigmoid(2 u) with u = sqrt(2 / pi) * (x + 0.044715 x^3).
  return x * Sigmoid(1.59576912160573071f * x * (1.0f + 0.044715f * x * x));
}

template <typename Element, Activation kActivation>
void GateRowsOf(const GatedArgs& args, int64_t begin, int64_t end) {
  typedef typename Element::Raw Raw;
  for (int64_t row = begin; row < end; ++row) {
    const Raw* x = static_cast<const Raw*>(args.x) + row * args.x_stride_row;
    Raw* out = static_cast<Raw*>(args.out) + row * args.dim;
    ForVectors(args.dim, [&](int64_t d, int n) {
      const Vec gate = LoadUpTo<Element>(x + d, n), up = LoadUpTo<Element>(x + args.dim + d, n);
      StoreUpTo<Element>(out + d, n, Activate<kActivation>(gate) * up);
    });
  }
}

void GateRows(const GatedArgs& args, int64_t begin, int64_t end) {
  DispatchFloat(args.dtype, [&](auto element) {
    typedef decltype(element) Element;
    switch (args.activation) {
      case Activation::kSilu:
        return GateRowsOf<Element, Activation::kSilu>(args, begin, end);
      case Activation::kGelu:
        return GateRowsOf<Element, Activation::kGelu>(args, begin, end);
      case Activation::kGeluTanh:
        return GateRowsOf<Element, Activation::kGeluTanh>(args, begin, end);
    }
  });
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_ACTIVATION_H_

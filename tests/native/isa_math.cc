// Compiled once for each instruction set, with TVM_FLASHINFER_ISA as the name. No header of the C++
// library is included, for the reason that csrc/kernels/cpu/isa/simd.h gives.
#include "isa_math.h"

#include "kernels/cpu/isa/float8.h"

namespace native {

namespace isa = tvm_flashinfer::kernels::cpu::TVM_FLASHINFER_ISA;
using isa::kLanes;
using isa::Load;
using isa::Store;
using isa::Vec;
using tvm_flashinfer::kernels::DType;

namespace {

void Exp2(const float* in, float* out, int n) {
  for (int i = 0; i < n; i += kLanes) Store(out + i, isa::Exp2(Load(in + i)));
}

void ToFloat(DType dtype, const void* in, float* out, int n) {
  isa::DispatchKeys(dtype, [&](auto element) {
    typedef decltype(element) Element;
    const auto* raw = static_cast<const typename Element::Raw*>(in);
    for (int i = 0; i < n; i += kLanes) Store(out + i, Element::LoadVec(raw + i));
  });
}

void FromFloat(DType dtype, const float* in, void* out, int n) {
  isa::DispatchKeys(dtype, [&](auto element) {
    typedef decltype(element) Element;
    auto* raw = static_cast<typename Element::Raw*>(out);
    for (int i = 0; i < n; i += kLanes) Element::StoreVec(raw + i, Load(in + i));
  });
}

float ReduceSum(const float* vector) { return isa::ReduceSum(Load(vector)); }
float ReduceMax(const float* vector) { return isa::ReduceMax(Load(vector)); }

void SumOfEach(const float* vectors, float* out) {
  Vec each[kLanes];
  for (int i = 0; i < kLanes; ++i) each[i] = Load(vectors + i * kLanes);
  Store(out, isa::SumOfEach(each));
}

void SwapPairs(const float* vector, float* out) { Store(out, isa::SwapPairs(Load(vector))); }

}  // namespace

namespace TVM_FLASHINFER_ISA {
const IsaMath kMath = {kLanes,    Exp2,      ToFloat,   FromFloat,
                       ReduceSum, ReduceMax, SumOfEach, SwapPairs};
}

}  // namespace native

// Attention sinks, applied to finished states.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_SINKS_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_SINKS_H_

#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

template <typename Element>
void ApplySinksOf(const ApplySinksArgs& args, int64_t begin, int64_t end) {
  typedef typename Element::Raw Raw;
  const float empty = -__builtin_inff();
  const int64_t dim = args.head_dim;
  for (int64_t i = begin; i < end; ++i) {
    Raw* o = static_cast<Raw*>(args.o) + i * dim;
    const float lse = args.lse[i];
    const float sink = args.sinks[i % args.num_heads] * 1.44269504088896341f;
    // Without a sink nothing changes, to the bit; without keys the sink is all there is.
    if (sink == empty) continue;
    if (lse == empty) {
      memset(o, 0, dim * sizeof(Raw));
      args.lse[i] = sink;
      continue;
    }
    const float top = lse > sink ? lse : sink;
    const float own = __builtin_exp2f(lse - top);
    const float total = own + __builtin_exp2f(sink - top);
    const float scale = own / total;
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      Element::StoreVec(o + d, Element::LoadVec(o + d) * scale);
    }
    if (d < dim) {
      StorePart<Element>(o + d, dim - d, LoadPart<Element>(o + d, dim - d) * scale);
    }
    args.lse[i] = top + __builtin_log2f(total);
  }
}

void ApplySinks(const ApplySinksArgs& args, int64_t begin, int64_t end) {
  DispatchFloat(args.dtype,
                [&](auto element) { ApplySinksOf<decltype(element)>(args, begin, end); });
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_SINKS_H_

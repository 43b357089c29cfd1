// Merge of two attention states.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_MERGE_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_MERGE_H_

#include "../../row_types.h"
#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

template <typename Element>
void MergeStatesOf(const MergeStateArgs& args, int64_t begin, int64_t end) {
  typedef typename Element::Raw Raw;
  const float empty = -__builtin_inff();
  const int64_t dim = args.head_dim;
  for (int64_t i = begin; i < end; ++i) {
    const Raw* a = static_cast<const Raw*>(args.v_a) + i * dim;
    const Raw* b = static_cast<const Raw*>(args.v_b) + i * dim;
    Raw* merged = static_cast<Raw*>(args.v_merged) + i * dim;
    const float s_a = args.s_a[i], s_b = args.s_b[i];
    // An empty state is left out altogether: its values may be anything, NaN included.
    if (s_a == empty || s_b == empty) {
      if (s_b != empty) {
        memcpy(merged, b, dim * sizeof(Raw));
      } else if (s_a != empty) {
        if (merged != a) memcpy(merged, a, dim * sizeof(Raw));
      } else {
        memset(merged, 0, dim * sizeof(Raw));
      }
      args.s_merged[i] = s_a == empty ? s_b : s_a;
      continue;
    }
    // The larger one has weight 1 even if it is infinite.
    const float top = s_a > s_b ? s_a : s_b;
    const float w_a = s_a == top ? 1.0f : __builtin_exp2f(s_a - top);
    const float w_b = s_b == top ? 1.0f : __builtin_exp2f(s_b - top);
    const float total = w_a + w_b;
    const float scale_a = w_a / total, scale_b = w_b / total;
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      Element::StoreVec(merged + d,
                        Element::LoadVec(a + d) * scale_a + Element::LoadVec(b + d) * scale_b);
    }
    if (d < dim) {
      StorePart<Element>(merged + d, dim - d,
                         LoadPart<Element>(a + d, dim - d) * scale_a +
                             LoadPart<Element>(b + d, dim - d) * scale_b);
    }
    args.s_merged[i] = top + __builtin_log2f(total);
  }
}

/*! \brief The same for any number of states of a row, which are weighted by their largest. */
template <typename Element>
void MergeManyOf(const MergeStatesArgs& args, int64_t begin, int64_t end) {
  typedef typename Element::Raw Raw;
  const float empty = -__builtin_inff();
  const int64_t dim = args.head_dim, heads = args.num_heads, states = args.num_states;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = i / heads * states * heads + i % heads;
    float top = empty, total = 0.0f;
    for (int64_t j = 0; j < states; ++j) {
      const float s = args.s[first + j * heads];
      top = s > top || s != s ? s : top;
    }
    auto weight = [&](int64_t j) {
      const float s = args.s[first + j * heads];
      return s == empty ? 0.0f : s == top ? 1.0f : __builtin_exp2f(s - top);
    };
    for (int64_t j = 0; j < states; ++j) total += weight(j);
    Raw* merged = static_cast<Raw*>(args.v_merged) + i * dim;
    args.s_merged[i] = top == empty ? empty : top + __builtin_log2f(total);
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t n = dim - d < kLanes ? dim - d : kLanes;
      Vec sum = {};
      for (int64_t j = 0; j < states; ++j) {
        const float w = weight(j);
        if (w == 0.0f) continue;  // its values may be anything, NaN included
        const Raw* v = static_cast<const Raw*>(args.v) + (first + j * heads) * dim + d;
        sum += (n == kLanes ? Element::LoadVec(v) : LoadPart<Element>(v, n)) * (w / total);
      }
      if (n == kLanes) {
        Element::StoreVec(merged + d, sum);
      } else {
        StorePart<Element>(merged + d, n, sum);
      }
    }
  }
}

void MergeManyStates(const MergeStatesArgs& args, int64_t begin, int64_t end) {
  DispatchFloat(args.dtype,
                [&](auto element) { MergeManyOf<decltype(element)>(args, begin, end); });
}

void MergeStates(const MergeStateArgs& args, int64_t begin, int64_t end) {
  DispatchFloat(args.dtype,
                [&](auto element) { MergeStatesOf<decltype(element)>(args, begin, end); });
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_MERGE_H_

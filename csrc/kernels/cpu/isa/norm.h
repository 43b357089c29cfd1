// Root mean square norms.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_NORM_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_NORM_H_

#include "../../row_types.h"
#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

/*! \brief The elements of a head; of pair (row, head) number `index` when heads are num_heads. */
template <typename Raw>
TFI_INLINE Raw* HeadOf(const HeadRows& rows, int64_t row, int64_t head) {
  return static_cast<Raw*>(rows.data) + row * rows.stride_row + head * rows.stride_head;
}

/*! \brief Call body(i, n) for the vectors of a row, the last of which may have n < kLanes. */
template <typename Body>
TFI_INLINE void ForVectors(int64_t dim, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= dim; i += kLanes) body(i, kLanes);
  if (i < dim) body(i, static_cast<int>(dim - i));
}

template <typename Element>
TFI_INLINE Vec LoadUpTo(const typename Element::Raw* p, int n) {
  return n == kLanes ? Element::LoadVec(p) : LoadPart<Element>(p, n);
}

template <typename Element>
TFI_INLINE void StoreUpTo(typename Element::Raw* p, int n, Vec v) {
  if (n == kLanes) {
    Element::StoreVec(p, v);
  } else {
    StorePart<Element>(p, n, v);
  }
}

template <typename Element>
void NormRowsOf(const NormArgs& args, int64_t begin, int64_t end) {
  typedef typename Element::Raw Raw;
  const Raw* const weight = static_cast<const Raw*>(args.weight);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = i / args.num_heads, head = i % args.num_heads;
    const Raw* y = HeadOf<const Raw>(args.x, row, head);
    if (args.residual.data != nullptr) {
      const Raw* residual = HeadOf<const Raw>(args.residual, row, head);
      Raw* sum = HeadOf<Raw>(args.sum, row, head);
      ForVectors(args.dim, [&](int64_t d, int n) {
        const Vec a = LoadUpTo<Element>(y + d, n), b = LoadUpTo<Element>(residual + d, n);
        StoreUpTo<Element>(sum + d, n, a + b);
      });
      y = sum;
    }
    Vec squares = {};
    ForVectors(args.dim, [&](int64_t d, int n) {
      const Vec v = LoadUpTo<Element>(y + d, n);
      squares += v * v;
    });
    const float mean = ReduceSum(squares) / args.dim;
    const float scale = 1.0f / __builtin_sqrtf(mean + args.eps);
    Raw* out = HeadOf<Raw>(args.out, row, head);
    ForVectors(args.dim, [&](int64_t d, int n) {
      const Vec w = LoadUpTo<Element>(weight + d, n) + args.weight_bias;
      StoreUpTo<Element>(out + d, n, LoadUpTo<Element>(y + d, n) * scale * w);
    });
  }
}

/*! \brief The pairs (row, head) numbered [begin, end). */
void NormRows(const NormArgs& args, int64_t begin, int64_t end) {
  DispatchFloat(args.dtype, [&](auto element) { NormRowsOf<decltype(element)>(args, begin, end); });
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_NORM_H_

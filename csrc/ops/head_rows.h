// Tensors whose rows have one or more heads, with gaps between them: slices of fused projections.
#ifndef TVM_FLASHINFER_OPS_HEAD_ROWS_H_
#define TVM_FLASHINFER_OPS_HEAD_ROWS_H_

#include <initializer_list>

#include "../kernels/row_types.h"
#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief A tensor (n, dim) or (n, num_heads, dim) with stride 1 in the last dimension. */
struct HeadTensor {
  const char* name;
  TensorView tensor;
  int64_t num_rows;
  int64_t num_heads;  // 1 for (n, dim)
  int64_t dim;
  kernels::HeadRows rows;
};

/*! \brief Check and read such a tensor. */
HeadTensor ReadHeads(const Checker& check, const char* name, const TensorView& tensor);

/*! \brief The same for one of the shape, dtype and device of another. */
HeadTensor ReadHeadsLike(const Checker& check, const char* name, const TensorView& tensor,
                         const HeadTensor& like);

/*!
 * \brief An output: its elements lie apart, and it shares none with the others. It may be one of
 * them, element by element, where `same` names it.
 */
void CheckHeadOutput(const Checker& check, const HeadTensor& output,
                     std::initializer_list<const HeadTensor*> others,
                     const HeadTensor* same = nullptr);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_HEAD_ROWS_H_

#include "head_rows.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief Elements of a row, the gaps between its heads included. */
int64_t RowExtent(const HeadTensor& x) { return (x.num_heads - 1) * x.rows.stride_head + x.dim; }

bool IsEmpty(const HeadTensor& x) { return x.num_rows == 0 || x.num_heads == 0 || x.dim == 0; }

/*!
 * \brief Whether two tensors may share an element: not when their bytes lie apart, and not when
 * they are slices of the rows of one tensor that lie apart.
 */
bool MayShare(const HeadTensor& a, const HeadTensor& b) {
  if (IsEmpty(a) || IsEmpty(b)) return false;
  const int64_t size = (a.tensor.dtype().bits + 7) / 8;
  const auto first = reinterpret_cast<intptr_t>(a.rows.data);
  const auto other = reinterpret_cast<intptr_t>(b.rows.data);
  auto bytes = [&](const HeadTensor& x) {
    return ((x.num_rows - 1) * x.rows.stride_row + RowExtent(x)) * size;
  };
  if (first + bytes(a) <= other || other + bytes(b) <= first) return false;
  const int64_t stride = a.rows.stride_row * size;
  if (stride == 0 || stride != b.rows.stride_row * size) return true;
  const int64_t ahead = ((other - first) % stride + stride) % stride;  // of b in the rows of a
  return ahead < RowExtent(a) * size || stride - ahead < RowExtent(b) * size;
}

bool IsSame(const HeadTensor& a, const HeadTensor& b) {
  return a.rows.data == b.rows.data && a.rows.stride_row == b.rows.stride_row &&
         (a.num_heads == 1 || a.rows.stride_head == b.rows.stride_head);
}

}  // namespace

HeadTensor ReadHeads(const Checker& check, const char* name, const TensorView& tensor) {
  const int rank = tensor.ndim();
  if (rank != 2 && rank != 3) {
    check.FailValue(Text("`", name, "` has shape ", ShapeText(tensor),
                         ", expected 2 dimensions (n, dim) or 3 (n, num_heads, dim)"));
  }
  check.Sizes32(name, tensor);
  check.UnitLastStride(name, tensor);
  HeadTensor x{name,
               tensor,
               tensor.size(0),
               rank == 3 ? tensor.size(1) : 1,
               tensor.size(rank - 1),
               {DataOf(tensor), StrideOf(tensor, 0), rank == 3 ? StrideOf(tensor, 1) : 0}};
  return x;
}

HeadTensor ReadHeadsLike(const Checker& check, const char* name, const TensorView& tensor,
                         const HeadTensor& like) {
  check.DType(name, tensor, like.tensor.dtype());
  check.OnDevice(name, tensor, like.tensor.device());
  const HeadTensor x = ReadHeads(check, name, tensor);
  bool same = tensor.ndim() == like.tensor.ndim();
  for (int dim = 0; same && dim < tensor.ndim(); ++dim) {
    same = tensor.size(dim) == like.tensor.size(dim);
  }
  if (!same) {
    check.FailValue(Text("`", name, "` has shape ", ShapeText(tensor), ", expected that of `",
                         like.name, "`, ", ShapeText(like.tensor)));
  }
  return x;
}

void CheckHeadOutput(const Checker& check, const HeadTensor& output,
                     std::initializer_list<const HeadTensor*> others, const HeadTensor* same) {
  const bool heads_apart = output.num_heads <= 1 || output.rows.stride_head >= output.dim;
  const bool rows_apart = output.num_rows <= 1 || output.rows.stride_row >= RowExtent(output);
  if (!IsEmpty(output) && !(heads_apart && rows_apart)) {
    check.FailValue(Text("`", output.name, "` of shape ", ShapeText(output.tensor),
                         " has strides with which its elements share memory; an output needs "
                         "memory of its own for each"));
  }
  for (const HeadTensor* other : others) {
    if (other == same && IsSame(output, *other)) continue;
    if (MayShare(output, *other)) {
      check.FailValue(Text("`", output.name, "` and `", other->name,
                           "` overlap in memory; an output needs memory of its own",
                           other == same ? ", or all of that of this input" : ""));
    }
  }
}

}  // namespace ops
}  // namespace tvm_flashinfer

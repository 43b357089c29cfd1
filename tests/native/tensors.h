// Tensors of the tests. Each lies in an allocation of its own that is full of 0xFF bytes, which are
// NaN in every float dtype: what a kernel reads without it being written shows, and so does what it
// writes outside of its outputs.
#ifndef TESTS_NATIVE_TENSORS_H_
#define TESTS_NATIVE_TENSORS_H_

#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "device.h"
#include "elements.h"

namespace native {

using tvm::ffi::Tensor;
using Shape = std::vector<int64_t>;
using Numbers = std::vector<float>;

inline int64_t Count(const Shape& shape) {
  int64_t count = 1;
  for (int64_t extent : shape) count *= extent;
  return count;
}

/*! \brief Strides of a contiguous tensor. */
inline Shape RowMajor(const Shape& shape) {
  Shape strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  return strides;
}

/*! \brief A contiguous tensor on a device. */
class Placed {
 public:
  /*! \brief Full of 0xFF. */
  Placed(DLDevice device, DLDataType dtype, Shape shape);
  Placed(DLDevice device, DLDataType dtype, Shape shape, const Numbers& values);

  /*! \brief The whole; it keeps the memory alive. */
  Tensor tensor() const { return View(shape_, RowMajor(shape_), 0); }
  operator tvm::ffi::Any() const { return tensor(); }  // NOLINT(runtime/explicit)

  /*! \brief A part that starts at an element, which is put into the tensor's byte_offset. */
  Tensor View(const Shape& shape, const Shape& strides, int64_t start) const;

  void Write(const Numbers& values);
  Numbers Read() const { return FromBytes(Bytes(), dtype_); }
  std::vector<int32_t> ReadInts() const;
  std::vector<uint8_t> Bytes() const;
  /*! \brief Whether the bytes before and after the tensor are as they were. */
  bool GuardsAreIntact() const;
  const Shape& shape() const { return shape_; }

 private:
  struct Memory;
  std::shared_ptr<Memory> memory_;
  DLDataType dtype_;
  Shape shape_;
};

/*! \brief int32 indices, with a byte offset of one element. */
Tensor Indices(DLDevice device, const std::vector<int32_t>& values);

/*! \brief 0 and the running sums of lengths. */
std::vector<int32_t> Offsets(const std::vector<int>& lengths);

/*! \brief Normal numbers that the dtype holds, from the test's own generator. */
Numbers Normal(int64_t count, DLDataType dtype, std::mt19937* generator);

}  // namespace native

#endif  // TESTS_NATIVE_TENSORS_H_

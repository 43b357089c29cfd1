// Tensors of this program: bfloat16 and int32, allocated and copied by TVM's runtime.
#ifndef EXAMPLES_CPP_TENSORS_H_
#define EXAMPLES_CPP_TENSORS_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/container/tensor.h>

#include <cstdint>
#include <vector>

namespace example {

using tvm::ffi::Shape;
using tvm::ffi::Tensor;

constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kUInt8{kDLUInt, 8, 1};
constexpr DLDevice kCPU{kDLCPU, 0};

Tensor Empty(const Shape& shape, DLDataType dtype, DLDevice device);

/*! \brief A tensor with these values rounded to bfloat16. */
Tensor BFloat16(const std::vector<float>& values, const Shape& shape, DLDevice device);

Tensor Int32(const std::vector<int32_t>& values, DLDevice device);

/*! \brief The values of a bfloat16 tensor, after all work on its device. */
std::vector<float> ToHost(const Tensor& tensor);

/*! \brief Normally distributed values that bfloat16 holds exactly; the same in every run. */
std::vector<float> Random(int64_t count);

}  // namespace example

#endif  // EXAMPLES_CPP_TENSORS_H_

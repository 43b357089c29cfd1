#include "tensors.h"

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>

#include <cstring>
#include <optional>
#include <random>

namespace example {

namespace {

using tvm::ffi::Function;

uint16_t Round(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits += 0x7fff + ((bits >> 16) & 1);  // to the nearest, ties to even
  return static_cast<uint16_t>(bits >> 16);
}

float Widen(uint16_t value) {
  const uint32_t bits = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, sizeof(wide));
  return wide;
}

template <typename T>
Tensor Copied(const std::vector<T>& values, const Shape& shape, DLDataType dtype, DLDevice device) {
  static const Function copy = Function::GetGlobalRequired("runtime.TVMTensorCopyFromBytes");
  Tensor tensor = Empty(shape, dtype, device);
  copy(tensor, static_cast<void*>(const_cast<T*>(values.data())),
       static_cast<int64_t>(values.size() * sizeof(T)));
  return tensor;
}

}  // namespace

Tensor Empty(const Shape& shape, DLDataType dtype, DLDevice device) {
  static const Function allocate = Function::GetGlobalRequired("runtime.TVMTensorAllocWithScope");
  return allocate(shape, dtype, device, nullptr).cast<Tensor>();
}

Tensor BFloat16(const std::vector<float>& values, const Shape& shape, DLDevice device) {
  std::vector<uint16_t> rounded;
  for (float value : values) rounded.push_back(Round(value));
  return Copied(rounded, shape, kBFloat16, device);
}

Tensor Int32(const std::vector<int32_t>& values, DLDevice device) {
  return Copied(values, Shape{static_cast<int64_t>(values.size())}, kInt32, device);
}

std::vector<float> ToHost(const Tensor& tensor) {
  static const Function copy = Function::GetGlobalRequired("runtime.TVMTensorCopyToBytes");
  std::vector<uint16_t> stored(tensor.numel());
  copy(tensor, static_cast<void*>(stored.data()), static_cast<int64_t>(stored.size() * 2));
  std::vector<float> values;
  for (uint16_t value : stored) values.push_back(Widen(value));
  return values;
}

std::vector<float> Random(int64_t count) {
  static std::mt19937 generator(7);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = Widen(Round(normal(generator)));
  return values;
}

}  // namespace example

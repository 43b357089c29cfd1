#include "tensors.h"

#include <algorithm>

namespace native {

namespace {

constexpr size_t kGuardBytes = 256;
constexpr uint8_t kFill = 0xff;

/*! \brief What a DLPack tensor points to. */
struct Described {
  DLManagedTensor managed;
  Shape shape, strides;
  std::shared_ptr<void> memory;
};

}  // namespace

struct Placed::Memory {
  Memory(DLDevice device, size_t bytes)
      : device(device), bytes(bytes), start(Allocate(device, bytes + 2 * kGuardBytes)) {
    const std::vector<uint8_t> fill(bytes + 2 * kGuardBytes, kFill);
    CopyTo(device, start, fill.data(), fill.size());
  }
  ~Memory() { Free(device, start); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  char* data() const { return static_cast<char*>(start) + kGuardBytes; }

  DLDevice device;
  size_t bytes;
  void* start;
};

Placed::Placed(DLDevice device, DLDataType dtype, Shape shape)
    : memory_(std::make_shared<Memory>(device, Count(shape) * dtype.bits / 8)),
      dtype_(dtype),
      shape_(std::move(shape)) {}

Placed::Placed(DLDevice device, DLDataType dtype, Shape shape, const Numbers& values)
    : Placed(device, dtype, std::move(shape)) {
  Write(values);
}

Tensor Placed::View(const Shape& shape, const Shape& strides, int64_t start) const {
  auto* described = new Described{{}, shape, strides, memory_};
  DLTensor& tensor = described->managed.dl_tensor;
  tensor.data = memory_->data();
  tensor.device = memory_->device;
  tensor.ndim = static_cast<int32_t>(shape.size());
  tensor.dtype = dtype_;
  tensor.shape = described->shape.data();
  tensor.strides = described->strides.data();
  tensor.byte_offset = static_cast<uint64_t>(start) * dtype_.bits / 8;
  described->managed.manager_ctx = described;
  described->managed.deleter = [](DLManagedTensor* self) {
    delete static_cast<Described*>(self->manager_ctx);
  };
  return Tensor::FromDLPack(&described->managed);
}

void Placed::Write(const Numbers& values) {
  const std::vector<uint8_t> bytes = ToBytes(values, dtype_);
  if (bytes.size() != memory_->bytes) throw std::logic_error("values of another shape");
  CopyTo(memory_->device, memory_->data(), bytes.data(), bytes.size());
}

std::vector<uint8_t> Placed::Bytes() const {
  std::vector<uint8_t> bytes(memory_->bytes);
  CopyFrom(memory_->device, bytes.data(), memory_->data(), bytes.size());
  return bytes;
}

std::vector<int32_t> Placed::ReadInts() const {
  const std::vector<uint8_t> bytes = Bytes();
  std::vector<int32_t> values(bytes.size() / sizeof(int32_t));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return values;
}

bool Placed::GuardsAreIntact() const {
  std::vector<uint8_t> all(memory_->bytes + 2 * kGuardBytes);
  CopyFrom(memory_->device, all.data(), memory_->start, all.size());
  const auto intact = [](uint8_t byte) { return byte == kFill; };
  return std::all_of(all.begin(), all.begin() + kGuardBytes, intact) &&
         std::all_of(all.end() - kGuardBytes, all.end(), intact);
}

Tensor Indices(DLDevice device, const std::vector<int32_t>& values) {
  Numbers shifted{-1};
  shifted.insert(shifted.end(), values.begin(), values.end());
  const int64_t count = static_cast<int64_t>(values.size());
  return Placed(device, kInt32, {count + 1}, shifted).View({count}, {1}, 1);
}

std::vector<int32_t> Offsets(const std::vector<int>& lengths) {
  std::vector<int32_t> offsets{0};
  for (int length : lengths) offsets.push_back(offsets.back() + length);
  return offsets;
}

Numbers Normal(int64_t count, DLDataType dtype, std::mt19937* generator) {
  std::normal_distribution<double> normal;
  Numbers values(count);
  for (float& value : values) value = static_cast<float>(Rounded(normal(*generator), dtype));
  return values;
}

}  // namespace native

#include "checks.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <sstream>

#include "../kernels/cpu/kernels.h"
#include "call_counts.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief The bytes from the first element of a tensor to its last. */
struct ByteRange {
  const char* begin;
  const char* end;
};

ByteRange BytesOf(const TensorView& tensor) {
  const char* begin = DataOf<const char>(tensor);
  const bool is_contiguous = tensor.IsContiguous();
  const tvm::ffi::ShapeView shape = tensor.shape();
  int64_t last = 0, size = 1;
  for (size_t i = 0; i < shape.size(); ++i) {
    size *= shape[i];
    if (!is_contiguous) last += (shape[i] - 1) * tensor.stride(i);
  }
  if (size == 0) return {begin, begin};
  const int64_t element_bytes = (tensor.dtype().bits * tensor.dtype().lanes + 7) / 8;
  return {begin, begin + (is_contiguous ? size : last + 1) * element_bytes};
}

bool Overlap(const ByteRange& a, const ByteRange& b) {
  return a.begin != a.end && b.begin != b.end && a.begin < b.end && b.begin < a.end;
}

bool SameDType(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

/*! \brief Whether dtype is an 8-bit one of stored keys and values. */
bool Float8DType(DLDataType dtype, kernels::DType* out) {
  if (dtype.bits != 8 || dtype.lanes != 1) return false;
  if (dtype.code == kDLFloat8_e4m3fn) *out = kernels::DType::kFloat8E4M3;
  if (dtype.code == kDLFloat8_e5m2) *out = kernels::DType::kFloat8E5M2;
  return dtype.code == kDLFloat8_e4m3fn || dtype.code == kDLFloat8_e5m2;
}

}  // namespace

bool IsCPU(DLDevice device) {
  return device.device_type == kDLCPU || device.device_type == kDLCUDAHost;
}

bool IsCUDA(DLDevice device) {
  return device.device_type == kDLCUDA || device.device_type == kDLCUDAManaged;
}

std::string ShapeText(const TensorView& tensor) {
  std::ostringstream text;
  text << "(";
  for (int i = 0; i < tensor.ndim(); ++i) text << (i ? ", " : "") << tensor.size(i);
  text << (tensor.ndim() == 1 ? ",)" : ")");
  return text.str();
}

std::string DTypeText(DLDataType dtype) {
  kernels::DType float8;
  if (Float8DType(dtype, &float8)) {
    return float8 == kernels::DType::kFloat8E4M3 ? "float8_e4m3fn" : "float8_e5m2";
  }
  const char* kind = dtype.code == kDLInt      ? "int"
                     : dtype.code == kDLUInt   ? "uint"
                     : dtype.code == kDLFloat  ? "float"
                     : dtype.code == kDLBfloat ? "bfloat"
                                               : nullptr;
  std::string text = kind == nullptr
                         ? Text("dtype of code ", int{dtype.code}, " and bits ", int{dtype.bits})
                         : Text(kind, int{dtype.bits});
  return dtype.lanes == 1 ? text : Text(text, "x", dtype.lanes);
}

std::string DeviceText(DLDevice device) {
  if (device.device_type == kDLCPU) return "cpu";
  if (device.device_type == kDLCUDAHost) return "pinned host memory";
  if (IsCUDA(device)) return Text("cuda:", device.device_id);
  return Text("device type ", static_cast<int>(device.device_type), ":", device.device_id);
}

void Checker::FailValue(const std::string& message) const {
  TVM_FFI_THROW(ValueError) << "flashinfer." << op_ << ": " << message;
  TVM_FFI_UNREACHABLE();
}

void Checker::FailType(const std::string& message) const {
  TVM_FFI_THROW(TypeError) << "flashinfer." << op_ << ": " << message;
  TVM_FFI_UNREACHABLE();
}

void Checker::FailRuntime(const std::string& message) const {
  TVM_FFI_THROW(RuntimeError) << "flashinfer." << op_ << ": " << message;
  TVM_FFI_UNREACHABLE();
}

DLDevice Checker::Device(const char* name, const TensorView& tensor) const {
  const DLDevice device = tensor.device();
  if (!IsCPU(device) && !IsCUDA(device)) {
    FailValue(Text("`", name, "` is on ", DeviceText(device), "; the kernels run on cpu and cuda"));
  }
  if (IsCPU(device)) CPUSettings();
  counted_ = IsCPU(device) ? Counted::kCPU : Counted::kCUDA;
  return device;
}

Checker::~Checker() {
  // An error that is on its way was thrown by this call.
  if (counted_ == Counted::kNo || std::uncaught_exceptions() != 0) return;
  CountCall(op_, counted_ == Counted::kCUDA);
}

void Checker::CPUSettings() const {
  for (const std::string* error :
       {&kernels::cpu::ThreadSettingError(), &kernels::cpu::InstructionSetError()}) {
    if (!error->empty()) FailValue(*error);
  }
}

void Checker::OnDevice(const char* name, const TensorView& tensor, DLDevice device) const {
  const DLDevice got = tensor.device();
  const bool same = IsCPU(device) ? IsCPU(got) : IsCUDA(got) && got.device_id == device.device_id;
  if (!same) {
    FailValue(Text("`", name, "` is on ", DeviceText(got), ", other arguments are on ",
                   DeviceText(device), "; all tensors of a call must be on one device"));
  }
}

void Checker::OnHost(const char* name, const TensorView& tensor) const {
  if (!IsCPU(tensor.device())) {
    FailValue(Text("`", name, "` is on ", DeviceText(tensor.device()),
                   "; a plan is made on the host: pass a CPU tensor with the same contents"));
  }
}

void Checker::Aligned(const char* name, const TensorView& tensor, int64_t num_bytes) const {
  const auto address = reinterpret_cast<uintptr_t>(DataOf(tensor));
  if (address % num_bytes == 0 || tensor.numel() == 0) return;
  FailValue(Text("`", name, "` starts at address 0x", std::hex, address, std::dec,
                 ", expected a multiple of ", num_bytes,
                 " bytes; copy it, or view the memory at another offset"));
}

kernels::DType Checker::FloatDType(const char* name, const TensorView& tensor) const {
  const DLDataType dtype = tensor.dtype();
  Aligned(name, tensor, std::max(dtype.bits / 8, 1));
  if (dtype.lanes == 1) {
    if (dtype.code == kDLFloat && dtype.bits == 16) return kernels::DType::kFloat16;
    if (dtype.code == kDLBfloat && dtype.bits == 16) return kernels::DType::kBFloat16;
    if (dtype.code == kDLFloat && dtype.bits == 32) return kernels::DType::kFloat32;
  }
  FailType(Text("`", name, "` is ", DTypeText(dtype), ", expected float16, bfloat16 or float32"));
}

void Checker::DType(const char* name, const TensorView& tensor, DLDataType expected) const {
  if (!SameDType(tensor.dtype(), expected)) {
    FailType(
        Text("`", name, "` is ", DTypeText(tensor.dtype()), ", expected ", DTypeText(expected)));
  }
  Aligned(name, tensor, std::max(expected.bits / 8, 1));
}

kernels::DType Checker::StoredDType(const char* name, const TensorView& tensor) const {
  kernels::DType dtype;
  if (Float8DType(tensor.dtype(), &dtype)) return dtype;
  const DLDataType got = tensor.dtype();
  if (got.code == kDLFloat || got.code == kDLBfloat) return FloatDType(name, tensor);
  FailType(Text("`", name, "` is ", DTypeText(got),
                ", expected float16, bfloat16, float32, float8_e4m3fn or float8_e5m2"));
}

kernels::DType Checker::KVDType(const char* name, const TensorView& tensor,
                                DLDataType q_dtype) const {
  kernels::DType dtype;
  if (Float8DType(tensor.dtype(), &dtype)) return dtype;
  if (SameDType(tensor.dtype(), q_dtype)) return FloatDType(name, tensor);
  FailType(Text("`", name, "` is ", DTypeText(tensor.dtype()), ", expected ", DTypeText(q_dtype),
                " as `q` is, float8_e4m3fn or float8_e5m2"));
}

void Checker::PlannedKVDType(const char* name, const TensorView& tensor, DLDataType q_dtype) const {
  kernels::DType dtype;
  if (Float8DType(tensor.dtype(), &dtype)) {
    FailType(Text("`", name, "` is ", DTypeText(tensor.dtype()), ", expected ", DTypeText(q_dtype),
                  " as `q` is; 8-bit keys and values are served without a plan, by what "
                  "flashinfer.bind_attention returns"));
  }
  DType(name, tensor, q_dtype);
}

void Checker::Workspace(const char* name, const TensorView& tensor) const {
  constexpr int64_t kAlignment = 16;  // what lies in it is read in such pieces
  DType(name, tensor, kUInt8);
  Rank(name, tensor, 1, "(num_bytes,)");
  Contiguous(name, tensor);
  Aligned(name, tensor, kAlignment);
}

void Checker::Rank(const char* name, const TensorView& tensor, int expected,
                   const char* meaning) const {
  if (tensor.ndim() != expected) {
    FailValue(Text("`", name, "` has shape ", ShapeText(tensor), ", expected ", expected,
                   expected == 1 ? " dimension " : " dimensions ", meaning));
  }
}

void Checker::Sizes32(const char* name, const TensorView& tensor) const {
  for (int dim = 0; dim < tensor.ndim(); ++dim) {
    if (tensor.size(dim) > INT32_MAX) {
      FailValue(Text("`", name, "` has shape ", ShapeText(tensor), "; dimension ", dim,
                     " must be below 2^31"));
    }
  }
}

void Checker::Shape(const char* name, const TensorView& tensor,
                    std::initializer_list<int64_t> expected, const char* meaning) const {
  Rank(name, tensor, static_cast<int>(expected.size()), meaning);
  int dim = 0;
  for (int64_t size : expected) {
    if (tensor.size(dim++) == size) continue;
    std::ostringstream want;
    const char* separator = "";
    for (int64_t part : expected) {
      want << separator << part;
      separator = ", ";
    }
    FailValue(Text("`", name, "` has shape ", ShapeText(tensor), ", expected (", want.str(),
                   expected.size() == 1 ? ",)" : ")", " = ", meaning));
  }
}

void Checker::Contiguous(const char* name, const TensorView& tensor) const {
  if (!tensor.IsContiguous()) {
    FailValue(Text("`", name, "` of shape ", ShapeText(tensor),
                   " has gaps between its elements; pass a contiguous tensor"));
  }
}

void Checker::UnitLastStride(const char* name, const TensorView& tensor) const {
  for (int dim = 0; dim < tensor.ndim(); ++dim) {
    const int64_t stride = StrideOf(tensor, dim);
    if (tensor.size(dim) <= 1) continue;
    if (dim == tensor.ndim() - 1 ? stride != 1 : stride < 0) {
      FailValue(Text("`", name, "` of shape ", ShapeText(tensor), " has stride ", stride,
                     " in dimension ", dim,
                     "; the last dimension must have stride 1 and the others may not be negative"));
    }
  }
}

void Checker::IndexVector(const char* name, const TensorView& tensor, int64_t size,
                          const char* meaning) const {
  DType(name, tensor, kInt32);
  Shape(name, tensor, {size}, meaning);
  Contiguous(name, tensor);
}

void Checker::Data(const char* name, const TensorView& tensor, DLDevice device, DLDataType dtype,
                   std::initializer_list<int64_t> expected, const char* meaning) const {
  DType(name, tensor, dtype);
  OnDevice(name, tensor, device);
  Shape(name, tensor, expected, meaning);
  Contiguous(name, tensor);
}

void Checker::NoOverlap(const char* output_name, const TensorView& output, const char* name,
                        const TensorView& tensor) const {
  NoOverlap(output_name, output, {{name, tensor}});
}

void Checker::NoOverlap(const char* output_name, const TensorView& output,
                        std::initializer_list<std::pair<const char*, TensorView>> tensors) const {
  const ByteRange written = BytesOf(output);
  for (const auto& [name, tensor] : tensors) {
    if (!Overlap(written, BytesOf(tensor))) continue;
    FailValue(Text("`", output_name, "` and `", name,
                   "` overlap in memory; an output needs memory of its own"));
  }
}

void Checker::Positive(const char* name, int64_t value) const {
  if (value <= 0 || value > INT32_MAX) {
    FailValue(Text("`", name, "` is ", value, ", expected a positive 32-bit integer"));
  }
}

void Checker::Finite(const char* name, double value) const {
  // Kernels compute with float32, where a larger number is infinite.
  if (!std::isfinite(static_cast<float>(value))) {
    FailValue(Text("`", name, "` is ", value, ", expected a finite number of float32"));
  }
}

void Checker::Defined(const char* name, const Tensor& tensor) const {
  if (!tensor.defined()) FailType(Text("`", name, "` is None, expected a tensor"));
}

void Checker::Flag(const char* name, int64_t value) const {
  if (value == 0 || value == 1) return;
  FailValue(Text("`", name, "` is ", value, ", expected 0 or 1"));
}

void Checker::HeadRatio(int64_t num_qo_heads, int64_t num_kv_heads) const {
  Positive("num_qo_heads", num_qo_heads);
  Positive("num_kv_heads", num_kv_heads);
  if (num_qo_heads % num_kv_heads != 0) {
    FailValue(Text("num_qo_heads ", num_qo_heads, " is no multiple of num_kv_heads ", num_kv_heads,
                   "; every KV head must serve the same number of query heads"));
  }
}

int64_t StrideOf(const TensorView& tensor, int dim) {
  if (!tensor.IsContiguous()) return tensor.stride(dim);
  int64_t stride = 1;
  for (int i = dim + 1; i < tensor.ndim(); ++i) stride *= tensor.size(i);
  return stride;
}

void CheckIndptr(const Checker& check, const char* name, const int32_t* indptr, int64_t batch_size,
                 int64_t limit, const char* limit_name) {
  if (indptr[0] != 0) {
    check.FailValue(Text("`", name, "`[0] is ", indptr[0], ", expected 0"));
  }
  for (int64_t b = 0; b < batch_size; ++b) {
    if (indptr[b + 1] < indptr[b]) {
      check.FailValue(Text("`", name, "` falls from ", indptr[b], " to ", indptr[b + 1],
                           " at index ", b + 1, "; it must never decrease"));
    }
  }
  if (indptr[batch_size] > limit) {
    check.FailValue(Text("`", name, "` ends at ", indptr[batch_size], ", but ", limit_name,
                         " has only ", limit, " entries"));
  }
}

void CheckPageTable(const Checker& check, const int32_t* indptr, const int32_t* indices,
                    const int32_t* last_page_len, int64_t batch_size, int64_t num_pages,
                    int64_t page_size) {
  for (int64_t b = 0; b < batch_size; ++b) {
    const int64_t pages = indptr[b + 1] - indptr[b];
    const int64_t low = pages == 0 ? 0 : 1, high = pages == 0 ? 0 : page_size;
    if ((pages - 1) * page_size + last_page_len[b] > INT32_MAX) {
      check.FailValue(Text("request ", b, " has ", pages, " pages of ", page_size,
                           " tokens; a request holds less than 2^31 tokens"));
    }
    if (last_page_len[b] < low || last_page_len[b] > high) {
      check.FailValue(Text("`last_page_len`[", b, "] is ", last_page_len[b], ", expected ", low,
                           " to ", high, ": request ", b, " has ", pages, " pages of ", page_size,
                           " tokens"));
    }
  }
  CheckPageIndices(check, indices, indptr[batch_size], num_pages);
}

void CheckPageIndices(const Checker& check, const int32_t* indices, int64_t size,
                      int64_t num_pages) {
  for (int64_t i = 0; i < size; ++i) {
    if (indices[i] < 0 || indices[i] >= num_pages) {
      check.FailValue(Text("`page_indices`[", i, "] is ", indices[i], ", but there are only ",
                           num_pages, " pages"));
    }
  }
}

void CheckPositions(const Checker& check, const char* name, const int32_t* positions, int64_t size,
                    int64_t num_slots, bool allow_skip) {
  for (int64_t i = 0; i < size; ++i) {
    const bool skipped = allow_skip && positions[i] == -1;
    if (!skipped && (positions[i] < 0 || positions[i] >= num_slots)) {
      check.FailValue(Text("`", name, "`[", i, "] is ", positions[i], ", but the pages have only ",
                           num_slots, " slots",
                           allow_skip ? "; -1 marks a row that is not written" : ""));
    }
  }
}

bool CheckDeviceContents() {
  const char* value = std::getenv("TVM_FLASHINFER_CHECK");
  return value != nullptr && std::strcmp(value, "1") == 0;
}

}  // namespace ops
}  // namespace tvm_flashinfer

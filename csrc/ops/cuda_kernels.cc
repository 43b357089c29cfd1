#include "cuda_kernels.h"

#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/function.h>

#include <mutex>
#include <set>
#include <sstream>

namespace tvm_flashinfer {
namespace ops {

namespace {

using kernels::cuda::Entries;
using kernels::cuda::KernelEntry;

const char* DTypeName(kernels::DType dtype) {
  switch (dtype) {
    case kernels::DType::kFloat32:
      return "float32";
    case kernels::DType::kFloat16:
      return "float16";
    case kernels::DType::kBFloat16:
      return "bfloat16";
    case kernels::DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case kernels::DType::kFloat8E5M2:
      return "float8_e5m2";
  }
  return "unknown";
}

struct Arch {
  int major;
  int minor;
};

/*! \brief Compute capability of a device, asked once; false when no CUDA unit is loaded yet. */
bool DeviceArch(const Checker& check, int device_id, Arch* arch) {
  static std::mutex mutex;
  static std::vector<Arch> known;  // by device id; major 0 means unknown
  std::lock_guard<std::mutex> lock(mutex);
  if (device_id < static_cast<int>(known.size()) && known[device_id].major != 0) {
    *arch = known[device_id];
    return true;
  }
  // Which archs a unit was compiled for does not matter here: this entry is host code.
  for (const KernelEntry* entry = Entries(); entry != nullptr; entry = entry->next) {
    if (std::string(entry->name) != "device_arch") continue;
    auto device_arch = reinterpret_cast<kernels::cuda::DeviceArchFn>(entry->function);
    Launch(check, device_arch, device_id, &arch->major, &arch->minor);
    if (device_id >= static_cast<int>(known.size())) known.resize(device_id + 1, Arch{0, 0});
    known[device_id] = *arch;
    return true;
  }
  return false;
}

void* Lookup(const Checker& check, const std::string& name, DLDevice device, Arch* arch) {
  if (!DeviceArch(check, device.device_id, arch)) return nullptr;
  return kernels::cuda::Find(name, arch->major, arch->minor);
}

std::string Available() {
  std::set<std::string> names;
  for (const KernelEntry* entry = Entries(); entry != nullptr; entry = entry->next) {
    if (std::string(entry->name).find(':') == std::string::npos) continue;
    names.insert(std::string(entry->name) + " (sm_" + entry->archs + ")");
  }
  if (names.empty()) return "none";
  std::ostringstream text;
  const char* separator = "";
  for (const std::string& name : names) {
    text << separator << name;
    separator = ", ";
  }
  return text.str();
}

}  // namespace

kernels::CudaStream CurrentStream(DLDevice device) {
  return {device.device_id, TVMFFIEnvGetStream(kDLCUDA, device.device_id)};
}

namespace {

void* FindOrBuild(const Checker& check, const std::string& name, const UnitSpec& spec,
                  DLDevice device) {
  Arch arch{0, 0};
  void* function = Lookup(check, name, device, &arch);
  if (function != nullptr) return function;
  // The Python package registers these: the first loads what was built ahead of time, the second
  // builds the unit with nvcc, and raises when it cannot.
  if (auto load = tvm::ffi::Function::GetGlobal("flashinfer.load_prebuilt_kernels")) {
    (*load)();
    function = Lookup(check, name, device, &arch);
    if (function != nullptr) return function;
  }
  if (auto build = tvm::ffi::Function::GetGlobal("flashinfer.request_kernels")) {
    (*build)(spec.kind, DTypeName(spec.dtype), spec.head_dim_qk, spec.head_dim_vo, device.device_id,
             DTypeName(spec.kv_dtype));
    function = Lookup(check, name, device, &arch);
    if (function != nullptr) return function;
  }
  std::ostringstream message;
  message << "no CUDA kernel `" << name << "` is loaded for cuda:" << device.device_id;
  if (arch.major != 0) message << " (sm_" << arch.major << arch.minor << ")";
  message << "; loaded attention kernels: " << Available()
          << ". Build them with `tvm-flashinfer build` on a machine with nvcc, or pass CPU tensors";
  check.FailRuntime(message.str());
}

}  // namespace

namespace {

/*! \brief The launchers that this thread found. Units are never unloaded. */
class FoundKernels {
 public:
  /*! \brief The place of a launcher, null until it is found. */
  void*& At(const char* op, const UnitSpec& unit, int device_id) {
    for (Entry& entry : entries_) {
      if (entry.op == op && entry.device_id == device_id && entry.unit == unit) {
        return entry.function;
      }
    }
    entries_.push_back({op, unit, device_id, nullptr});
    return entries_.back().function;
  }

 private:
  struct Entry {
    const char* op;  // a literal: compared by address, which at worst makes two entries
    UnitSpec unit;
    int device_id;
    void* function;
  };
  std::vector<Entry> entries_;
};

// The table is a list of names behind a lock; small kernels take less time than a walk over it.
thread_local FoundKernels found_kernels;

std::string NameOf(const char* op, const UnitSpec& unit) {
  if (unit.head_dim_qk == 0) return op;  // of the unit that serves every shape
  return kernels::cuda::KernelName(op, unit.dtype, unit.kv_dtype, unit.head_dim_qk,
                                   unit.head_dim_vo);
}

}  // namespace

void* RequireKernel(const Checker& check, const char* op, const UnitSpec& unit, DLDevice device) {
  void* function = found_kernels.At(op, unit, device.device_id);
  if (function != nullptr) return function;
  // What builds kernels may call functions of this library, so the place is asked for again.
  function = FindOrBuild(check, NameOf(op, unit), unit, device);
  return found_kernels.At(op, unit, device.device_id) = function;
}

void* FindLoaded(const Checker& check, const UnitSpec& unit, DLDevice device) {
  void*& function = found_kernels.At(unit.kind, unit, device.device_id);
  Arch arch{0, 0};
  if (function == nullptr) function = Lookup(check, NameOf(unit.kind, unit), device, &arch);
  return function;
}

void RefuseCapture(const Checker& check, DLDevice device, const char* reason) {
  auto is_capturing = RequireCommon<kernels::cuda::IsCapturingFn>(check, "is_capturing", device);
  bool capturing = false;
  Launch(check, is_capturing, CurrentStream(device), &capturing);
  if (capturing) {
    check.FailRuntime(Text("the current stream of ", DeviceText(device),
                           " is being captured into a CUDA graph: ", reason));
  }
}

bool RunsOnArch(const Checker& check, DLDevice device, int major, int minor) {
  Arch arch{0, 0};
  return DeviceArch(check, device.device_id, &arch) && arch.major == major && arch.minor == minor;
}

std::vector<int32_t> ReadBack(const Checker& check, const TensorView& tensor) {
  std::vector<int32_t> values(tensor.numel());
  if (values.empty()) return values;
  RefuseCapture(check, tensor.device(),
                "the host cannot read device tensors then; unset TVM_FLASHINFER_CHECK for the "
                "capture, and call functions with longrope once before it");
  auto read_back = RequireCommon<kernels::cuda::ReadBackFn>(check, "read_back", tensor.device());
  Launch(check, read_back, DataOf(tensor), static_cast<void*>(values.data()),
         static_cast<int64_t>(values.size() * sizeof(int32_t)), CurrentStream(tensor.device()));
  return values;
}

}  // namespace ops
}  // namespace tvm_flashinfer

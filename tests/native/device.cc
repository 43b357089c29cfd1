#include "device.h"

#include <dlfcn.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/string.h>
#include <tvm_flashinfer/functions.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <new>
#include <set>
#include <stdexcept>

namespace native {

namespace {

/*! \brief The functions of CUDA's driver that are needed, with its numbers for handles and errors.
 */
struct Driver {
  int (*Init)(unsigned);
  int (*DeviceGetCount)(int*);
  int (*DeviceGet)(int*, int);
  int (*DeviceGetAttribute)(int*, int, int);
  int (*DevicePrimaryCtxRetain)(void**, int);
  int (*CtxSetCurrent)(void*);
  int (*CtxSynchronize)();
  int (*MemAlloc)(unsigned long long*, size_t);
  int (*MemFree)(unsigned long long);
  int (*MemcpyHtoD)(unsigned long long, const void*, size_t);
  int (*MemcpyDtoH)(void*, unsigned long long, size_t);
  std::string missing;

  Driver() {
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == nullptr) {
      missing = "CUDA's driver libcuda.so.1 is not on this machine";
      return;
    }
    const auto find = [&](auto* function, const char* name) {
      void* symbol = dlsym(library, name);
      if (symbol == nullptr) missing = std::string("CUDA's driver has no function ") + name;
      std::memcpy(function, &symbol, sizeof(symbol));
    };
    find(&Init, "cuInit");
    find(&DeviceGetCount, "cuDeviceGetCount");
    find(&DeviceGet, "cuDeviceGet");
    find(&DeviceGetAttribute, "cuDeviceGetAttribute");
    find(&DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(&CtxSetCurrent, "cuCtxSetCurrent");
    find(&CtxSynchronize, "cuCtxSynchronize");
    find(&MemAlloc, "cuMemAlloc_v2");
    find(&MemFree, "cuMemFree_v2");
    find(&MemcpyHtoD, "cuMemcpyHtoD_v2");
    find(&MemcpyDtoH, "cuMemcpyDtoH_v2");
    if (missing.empty()) missing = Start();
  }

 private:
  std::string Start() {
    int count = 0, device = 0;
    void* context = nullptr;
    if (Init(0) != 0 || DeviceGetCount(&count) != 0 || count == 0) {
      return "CUDA's driver sees no GPU";
    }
    if (DeviceGet(&device, 0) != 0 || DevicePrimaryCtxRetain(&context, device) != 0 ||
        CtxSetCurrent(context) != 0) {
      return "CUDA's driver cannot use the first GPU";
    }
    return "";
  }
};

Driver& TheDriver() {
  static Driver driver;
  return driver;
}

void Check(int status, const char* what) {
  if (status == 0) return;
  throw std::runtime_error(std::string(what) + " failed with error " + std::to_string(status) +
                           " of CUDA's driver");
}

std::set<std::string>& LoadedUnits() {
  static std::set<std::string> names;
  return names;
}

/*! \brief Load the libraries of units: of the folder that the environment names, or the package's.
 */
std::string LoadUnits() {
  const char* named = std::getenv("TVM_FLASHINFER_TEST_KERNELS");
  const std::string folder = named == nullptr ? TVM_FLASHINFER_KERNELS_FOLDER : named;
  std::error_code ignored;
  for (auto it = std::filesystem::recursive_directory_iterator(folder, ignored);
       it != std::filesystem::recursive_directory_iterator(); it.increment(ignored)) {
    if (it->path().extension() == ".so") tvm_flashinfer::LoadKernels(it->path().string());
  }
  using tvm::ffi::Array;
  using tvm::ffi::String;
  for (const String& entry :
       tvm_flashinfer::Get("flashinfer.loaded_kernels")().cast<Array<String>>()) {
    const std::string name = entry;
    LoadedUnits().insert(name.substr(0, name.find('@')));
  }
  if (!LoadedUnits().empty()) return "";
  return "no kernel units are in \"" + folder +
         "\": build some with `tvm-flashinfer build`, or name their folder in "
         "TVM_FLASHINFER_TEST_KERNELS";
}

}  // namespace

const std::string& CudaMissing() {
  static const std::string missing =
      TheDriver().missing.empty() ? LoadUnits() : TheDriver().missing;
  return missing;
}

bool CudaIs(int major, int minor) {
  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
  int found_major = 0, found_minor = 0;
  Check(TheDriver().DeviceGetAttribute(&found_major, 75, 0), "cuDeviceGetAttribute");
  Check(TheDriver().DeviceGetAttribute(&found_minor, 76, 0), "cuDeviceGetAttribute");
  return found_major == major && found_minor == minor;
}

bool UnitIsLoaded(const std::string& name) {
  return CudaMissing().empty() && LoadedUnits().count(name) != 0;
}

bool CudaIsRequired() {
  const char* wanted = std::getenv("TVM_FLASHINFER_TEST_CUDA");
  return wanted != nullptr && std::string(wanted) == "required";
}

void* Allocate(DLDevice device, size_t bytes) {
  if (device.device_type == kDLCPU) {
    return ::operator new(bytes, std::align_val_t(256));
  }
  unsigned long long address = 0;
  Check(TheDriver().MemAlloc(&address, bytes), "cuMemAlloc");
  return reinterpret_cast<void*>(address);
}

void Free(DLDevice device, void* memory) {
  if (device.device_type == kDLCPU) {
    ::operator delete(memory, std::align_val_t(256));
  } else {
    TheDriver().CtxSynchronize();  // calls do not wait for their kernels
    TheDriver().MemFree(reinterpret_cast<unsigned long long>(memory));
  }
}

void CopyTo(DLDevice device, void* memory, const void* host, size_t bytes) {
  if (device.device_type == kDLCPU) {
    if (bytes > 0) std::memcpy(memory, host, bytes);  // an empty vector has no address
    return;
  }
  Check(TheDriver().CtxSynchronize(), "cuCtxSynchronize");
  Check(TheDriver().MemcpyHtoD(reinterpret_cast<unsigned long long>(memory), host, bytes),
        "cuMemcpyHtoD");
}

void CopyFrom(DLDevice device, void* host, const void* memory, size_t bytes) {
  if (device.device_type == kDLCPU) {
    std::memcpy(host, memory, bytes);
    return;
  }
  Check(TheDriver().CtxSynchronize(), "cuCtxSynchronize");
  Check(TheDriver().MemcpyDtoH(host, reinterpret_cast<unsigned long long>(memory), bytes),
        "cuMemcpyDtoH");
}

}  // namespace native

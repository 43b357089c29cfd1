#include "gpus.h"

#include <dlfcn.h>

#include <sstream>

namespace tvm_flashinfer {
namespace ops {

namespace {

// Numbers of the driver's interface, which never change.
constexpr int kMultiprocessorCount = 16, kCapabilityMajor = 75, kCapabilityMinor = 76;

/*! \brief The driver's library; null where there is none. It stays loaded. */
void* Driver() {
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return driver;
}

/*! \brief Whether the driver has the function and it returned CUDA_SUCCESS. */
template <typename... Args>
bool Ask(const char* name, Args... args) {
  using Function = int (*)(Args...);
  auto function = Driver() == nullptr ? nullptr : reinterpret_cast<Function>(dlsym(Driver(), name));
  return function != nullptr && function(args...) == 0;
}

std::vector<Gpu> AskForGpus() {
  std::vector<Gpu> gpus;
  int count = 0;
  if (!Ask("cuInit", 0u) || !Ask("cuDeviceGetCount", &count)) return gpus;
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    Gpu gpu;
    int device = 0;
    char name[256] = "";
    if (Ask("cuDeviceGet", &device, ordinal) &&
        Ask("cuDeviceGetName", &name[0], static_cast<int>(sizeof(name)), device)) {
      gpu.name = name;
      Ask("cuDeviceGetAttribute", &gpu.num_sm, kMultiprocessorCount, device);
      Ask("cuDeviceGetAttribute", &gpu.major, kCapabilityMajor, device);
      Ask("cuDeviceGetAttribute", &gpu.minor, kCapabilityMinor, device);
    }
    gpus.push_back(gpu);
  }
  return gpus;
}

}  // namespace

std::string Gpu::ToText() const {
  std::ostringstream text;
  text << name << " (sm_" << major << minor << ", " << num_sm << " SMs)";
  return text.str();
}

const std::vector<Gpu>& Gpus() {
  static const std::vector<Gpu> gpus = AskForGpus();
  return gpus;
}

const Gpu* FindGpu(int device_id) {
  const std::vector<Gpu>& gpus = Gpus();
  return device_id >= 0 && device_id < static_cast<int>(gpus.size()) ? &gpus[device_id] : nullptr;
}

int DriverCudaMajor() {
  static const int major = [] {
    int version = 0;
    return Ask("cuDriverGetVersion", &version) ? version / 1000 : 0;
  }();
  return major;
}

}  // namespace ops
}  // namespace tvm_flashinfer

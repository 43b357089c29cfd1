// What every kernel unit needs: registration, launch errors, dtype dispatch.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_UNIT_H_
#define TVM_FLASHINFER_KERNELS_CUDA_UNIT_H_

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "kernel_table.h"

#ifndef TVM_FLASHINFER_ARCHS
#error "compile kernel units with -DTVM_FLASHINFER_ARCHS=\"80,90a\""
#endif

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Adds one entry to the table when the library is loaded. */
struct Registrar {
  Registrar(KernelEntry* entry) { Register(entry); }  // NOLINT(runtime/explicit)
};

template <typename T>
constexpr DType DTypeOf() {
  if (std::is_same_v<T, half>) return DType::kFloat16;
  if (std::is_same_v<T, __nv_fp8_e4m3>) return DType::kFloat8E4M3;
  if (std::is_same_v<T, __nv_fp8_e5m2>) return DType::kFloat8E5M2;
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, nv_bfloat16> || sizeof(T) == 1,
                "no kernel dtype");
  return DType::kBFloat16;
}

/*! \brief Makes a device current and puts the former one back. */
class DeviceGuard {
 public:
  explicit DeviceGuard(int device_id) {
    status_ = cudaGetDevice(&former_);
    if (status_ == cudaSuccess && former_ != device_id) {
      status_ = cudaSetDevice(device_id);
      changed_ = status_ == cudaSuccess;
    }
  }
  ~DeviceGuard() {
    if (changed_) cudaSetDevice(former_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  cudaError_t status() const { return status_; }

 private:
  int former_ = 0;
  bool changed_ = false;
  cudaError_t status_;
};

inline int Fail(char* error, const char* what, int code = kFailed) {
  std::snprintf(error, kErrorSize, "%s", what);
  return code;
}

inline int FailCuda(char* error, cudaError_t status) {
  std::snprintf(error, kErrorSize, "%s: %s", cudaGetErrorName(status), cudaGetErrorString(status));
  return kFailed;
}

/*!
 * \brief Run body (returning cudaError_t) on the stream's device. Exceptions of the kernel library
 * and CUDA errors become the message: none may cross the boundary between units and ops.
 */
template <typename Body>
int Guarded(CudaStream stream, char* error, const Body& body) {
  try {
    DeviceGuard guard(stream.device_id);
    if (guard.status() != cudaSuccess) return FailCuda(error, guard.status());
    cudaError_t status = body(static_cast<cudaStream_t>(stream.handle));
    // Also what a launch reports late; reading it clears it, so that the next call starts clean.
    cudaError_t last = cudaGetLastError();
    if (status == cudaSuccess) status = last;
    return status == cudaSuccess ? 0 : FailCuda(error, status);
  } catch (const std::invalid_argument& e) {
    return Fail(error, e.what(), kBadArgument);
  } catch (const std::exception& e) {
    return Fail(error, e.what());
  }
}

/*! \brief A function of the driver, found without linking the driver. */
template <typename Function>
Function DriverFunction(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &result);
#else
  const cudaError_t status = cudaGetDriverEntryPoint(name, &found, cudaEnableDefault, &result);
#endif
  if (status != cudaSuccess || result != cudaDriverEntryPointSuccess) {
    throw std::runtime_error(std::string("the CUDA driver has no ") + name + "; it is too old");
  }
  return reinterpret_cast<Function>(found);
}

/*! \brief When a kernel may start beside the one before it on its stream. */
enum class Start : int32_t {
  kAfterKernel,  // when that one is done
  kAfterTrigger  // when that one says so; the kernel itself waits for its results. From 9.0 on
};

/*!
 * \brief cudaLaunchKernel by the driver: the runtime looks the kernel up in each launch, which
 * shows in kernels of a few microseconds.
 */
inline cudaError_t LaunchByAddresses(const void* kernel, dim3 blocks, dim3 threads, size_t shared,
                                     cudaStream_t stream, void** params,
                                     Start start = Start::kAfterKernel) {
#if CUDART_VERSION >= 12010
  thread_local std::unordered_map<const void*, cudaKernel_t> handles;  // those of every device
  cudaKernel_t& handle = handles[kernel];
  if (handle == nullptr) {
    const cudaError_t status = cudaGetKernel(&handle, kernel);
    if (status != cudaSuccess) return status;
  }
  const auto function = reinterpret_cast<CUfunction>(handle);
  CUresult status;
  if (start == Start::kAfterKernel) {
    static const auto launch = DriverFunction<decltype(&cuLaunchKernel)>("cuLaunchKernel");
    status = launch(function, blocks.x, blocks.y, blocks.z, threads.x, threads.y, threads.z,
                    static_cast<unsigned>(shared), stream, params, nullptr);
  } else {
    static const auto launch = DriverFunction<decltype(&cuLaunchKernelEx)>("cuLaunchKernelEx");
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = blocks.x, config.gridDimY = blocks.y, config.gridDimZ = blocks.z;
    config.blockDimX = threads.x, config.blockDimY = threads.y, config.blockDimZ = threads.z;
    config.sharedMemBytes = static_cast<unsigned>(shared);
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    status = launch(&config, function, params, nullptr);
  }
  return static_cast<cudaError_t>(status);  // the runtime's numbers are the driver's
#else
  (void)start;  // later is right as well
  return cudaLaunchKernel(kernel, blocks, threads, params, shared, stream);
#endif
}

/*! \brief kernel<<<blocks, threads, shared, stream>>>(args...), see LaunchByAddresses. */
template <typename... Params, typename... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), dim3 blocks, dim3 threads, size_t shared,
                         cudaStream_t stream, Args&&... args) {
  std::tuple<Params...> params(std::forward<Args>(args)...);
  return std::apply(
      [&](auto&... param) {
        void* addresses[] = {static_cast<void*>(&param)...};
        return LaunchByAddresses(reinterpret_cast<const void*>(kernel), blocks, threads, shared,
                                 stream, addresses);
      },
      params);
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

/*! \brief Register `function` under `name` for the archs of this unit. */
#define TVM_FLASHINFER_REGISTER(id, name, function)                            \
  static ::tvm_flashinfer::kernels::cuda::KernelEntry entry_##id = {           \
      name, reinterpret_cast<void*>(function), TVM_FLASHINFER_ARCHS, nullptr}; \
  static ::tvm_flashinfer::kernels::cuda::Registrar registrar_##id(&entry_##id)

#endif  // TVM_FLASHINFER_KERNELS_CUDA_UNIT_H_

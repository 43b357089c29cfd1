// What every kernel unit needs: registration, launch errors, dtype dispatch.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_UNIT_H_
#define TVM_FLASHINFER_KERNELS_CUDA_UNIT_H_

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <type_traits>
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

/*!
 * \brief kernel<<<blocks, threads, shared, stream>>>(args...) in one call of the runtime: the
 * syntax makes three, which shows in kernels of a few microseconds.
 */
template <typename... Params, typename... Args>
cudaError_t LaunchKernel(void (*kernel)(Params...), dim3 blocks, dim3 threads, size_t shared,
                         cudaStream_t stream, Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = threads;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...);
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

// The CUDA kernel for a call: found in the table, or built on request, or an error that says how to
// get it.
#ifndef TVM_FLASHINFER_OPS_CUDA_KERNELS_H_
#define TVM_FLASHINFER_OPS_CUDA_KERNELS_H_

#include <string>
#include <vector>

#include "../kernels/cuda/kernel_table.h"
#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief TVM's current stream of a CUDA device. */
kernels::CudaStream CurrentStream(DLDevice device);

/*! \brief A unit of kernels, as the Python package spells its specs. */
struct UnitSpec {
  const char* kind;  // "common", "batch_prefill_paged", ...: a file of csrc/kernels/cuda/units
  kernels::DType dtype;
  int head_dim_qk;
  int head_dim_vo;
  kernels::DType kv_dtype = dtype;

  bool operator==(const UnitSpec& other) const {
    return kind == other.kind && dtype == other.dtype && head_dim_qk == other.head_dim_qk &&
           head_dim_vo == other.head_dim_vo && kv_dtype == other.kv_dtype;
  }
};

/*! \brief The unit of the functions that serve every dtype and head_dim. */
constexpr UnitSpec kCommonUnit{"common", kernels::DType::kFloat16, 0, 0};

/*! \brief Units of further families, which serve every dtype and shape as well. */
constexpr UnitSpec kNormUnit{"norm", kernels::DType::kFloat16, 0, 0};
constexpr UnitSpec kCascadeUnit{"cascade", kernels::DType::kFloat16, 0, 0};
constexpr UnitSpec kRopeUnit{"rope", kernels::DType::kFloat16, 0, 0};
constexpr UnitSpec kSamplingUnit{"sampling", kernels::DType::kFloat16, 0, 0};

/*! \brief The launcher `op` of a unit that runs on `device`, or a RuntimeError. */
void* RequireKernel(const Checker& check, const char* op, const UnitSpec& unit, DLDevice device);
inline void* RequireKernel(const Checker& check, const UnitSpec& unit, DLDevice device) {
  return RequireKernel(check, unit.kind, unit, device);
}

/*! \brief The same if it is loaded by now, or null; nothing is built. */
void* FindLoaded(const Checker& check, const UnitSpec& unit, DLDevice device);

/*! \brief Whether `device` has this compute capability; needs a loaded unit. */
bool RunsOnArch(const Checker& check, DLDevice device, int major, int minor);

template <typename Fn>
Fn RequireCommon(const Checker& check, const char* name, DLDevice device) {
  return reinterpret_cast<Fn>(RequireKernel(check, name, kCommonUnit, device));
}

/*! \brief Raise what a launcher reported. */
template <typename Fn, typename... Args>
void Launch(const Checker& check, Fn function, Args&&... args) {
  char error[kernels::cuda::kErrorSize];  // as it is: filling it takes longer than a check
  error[0] = 0;
  const int status = function(std::forward<Args>(args)..., error);
  if (status == kernels::cuda::kBadArgument) check.FailValue(error);
  if (status != kernels::cuda::kOk) check.FailRuntime(error);
}

/*! \brief Launch `op` of a unit that serves every dtype and shape, on the current stream. */
template <typename Fn, typename Args>
void LaunchOf(const Checker& check, const UnitSpec& unit, const char* op, DLDevice device,
              const Args& args) {
  Launch(check, reinterpret_cast<Fn>(RequireKernel(check, op, unit, device)), args,
         CurrentStream(device));
}

/*!
 * \brief Raise while the current stream is captured into a CUDA graph. `reason` says why the call
 * does not fit a graph, and what to do.
 */
void RefuseCapture(const Checker& check, DLDevice device, const char* reason);

/*! \brief The reason of all functions with a plan: a graph would read what later plans overwrite.
 */
constexpr const char* kPlansAreNotCaptured =
    "plans hold for one step and cannot be captured; call the function of "
    "flashinfer.bind_attention, which reads its lengths on the device";

/*! \brief A host copy of an int32 device tensor; waits for the work of the current stream. */
std::vector<int32_t> ReadBack(const Checker& check, const TensorView& tensor);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_CUDA_KERNELS_H_

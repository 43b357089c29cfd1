// The GPUs of this machine by name, as the CUDA driver tells: this library has no CUDA in it.
#ifndef TVM_FLASHINFER_OPS_GPUS_H_
#define TVM_FLASHINFER_OPS_GPUS_H_

#include <string>
#include <vector>

namespace tvm_flashinfer {
namespace ops {

/*! \brief What figures that were measured on a GPU hold for. */
struct Gpu {
  std::string name;  // such as "NVIDIA H200"
  int major = 0;     // compute capability
  int minor = 0;
  int num_sm = 0;

  bool operator==(const Gpu& other) const {
    return name == other.name && major == other.major && minor == other.minor &&
           num_sm == other.num_sm;
  }
  /*! \brief "NVIDIA H200 (sm_90, 132 SMs)". */
  std::string ToText() const;
};

/*! \brief All that the process sees, by device id; none without a driver. Asked once. */
const std::vector<Gpu>& Gpus();

/*! \brief Null for a device that the driver does not show. */
const Gpu* FindGpu(int device_id);

/*! \brief The newest CUDA that the driver runs, such as 13; 0 without a driver. */
int DriverCudaMajor();

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_GPUS_H_

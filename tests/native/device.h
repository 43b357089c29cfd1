// Memory of the devices that tests run on. CUDA comes from the driver, found at run time: the same
// program runs where there is none.
#ifndef TESTS_NATIVE_DEVICE_H_
#define TESTS_NATIVE_DEVICE_H_

#include <dlpack/dlpack.h>

#include <cstddef>
#include <string>

namespace native {

constexpr DLDevice kCPU{kDLCPU, 0};
constexpr DLDevice kCUDA{kDLCUDA, 0};

/*! \brief Why tests of CUDA cannot run here, or an empty string. Loads the units when first asked.
 */
const std::string& CudaMissing();

/*! \brief Whether the GPU is of this compute capability. */
bool CudaIs(int major, int minor);

/*! \brief Whether a unit is loaded, by the name that its kernel is registered under. */
bool UnitIsLoaded(const std::string& name);

/*! \brief Whether what cannot run on CUDA shall fail: TVM_FLASHINFER_TEST_CUDA is "required". */
bool CudaIsRequired();

void* Allocate(DLDevice device, size_t bytes);
void Free(DLDevice device, void* memory);
/*! \brief Copies wait for all work of the device. */
void CopyTo(DLDevice device, void* memory, const void* host, size_t bytes);
void CopyFrom(DLDevice device, void* host, const void* memory, size_t bytes);

}  // namespace native

#endif  // TESTS_NATIVE_DEVICE_H_

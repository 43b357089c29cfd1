// The one symbol that a shared library of kernel units exports: what LoadLibrary looks for.
#include "kernel_table.h"

extern "C" __attribute__((visibility("default"))) const tvm_flashinfer::kernels::cuda::KernelEntry*
tvm_flashinfer_kernel_entries() {
  return tvm_flashinfer::kernels::cuda::Entries();
}

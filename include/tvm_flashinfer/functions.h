/*!
 * \brief The packed functions of tvm_flashinfer by name, for programs that link the CMake target
 * `flashinfer_tvm` or `flashinfer_tvm_shared`. docs/ops.md has their arguments.
 */
#ifndef TVM_FLASHINFER_FUNCTIONS_H_
#define TVM_FLASHINFER_FUNCTIONS_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/string.h>
#include <tvm_flashinfer/function_list.h>

namespace tvm_flashinfer {

/*! \brief Names of the global functions: `names::kMergeState` is "flashinfer.merge_state". */
namespace names {
#define TVM_FLASHINFER_NAME(name, function) constexpr const char* k##function = "flashinfer." #name;
TVM_FLASHINFER_FUNCTIONS(TVM_FLASHINFER_NAME)
#undef TVM_FLASHINFER_NAME
}  // namespace names

/*! \brief Whether the functions are registered in this process. */
inline bool IsAvailable() {
  return ::tvm::ffi::Function::GetGlobal("flashinfer.load_kernels").has_value();
}

/*!
 * \brief Return a function.
 * \param name One of `names`.
 * \throws RuntimeError when the library is not in this process.
 */
inline ::tvm::ffi::Function Get(const char* name) {
  auto function = ::tvm::ffi::Function::GetGlobal(name);
  if (!function.has_value()) {
    TVM_FFI_THROW(RuntimeError)
        << "there is no function `" << name
        << "`: link the CMake target flashinfer_tvm or flashinfer_tvm_shared of tvm_flashinfer, or "
           "load libtvm_flashinfer.so";
  }
  return *function;
}

/*!
 * \brief Give the functions CUDA kernels: a shared library that `tvm-flashinfer build` made.
 *
 * Where Python and this package are in the process, kernels are found and compiled without it.
 *
 * \param path The library. It stays loaded; loading it again does nothing.
 * \throws RuntimeError when it cannot be loaded.
 */
inline void LoadKernels(const ::tvm::ffi::String& path) { Get("flashinfer.load_kernels")(path); }

}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_FUNCTIONS_H_

// The `flashinfer.*` globals: of the shared library, and of programs that link the static one.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm_flashinfer/function_list.h>

#include <cstdio>
#include <string>

#include "../kernels/cpu/kernels.h"
#include "../kernels/cuda/kernel_table.h"
#include "../ops/call_counts.h"
#include "../ops/checks.h"
#include "../ops/ops.h"

namespace tvm_flashinfer {

namespace {

using tvm::ffi::Array;
using tvm::ffi::Map;
using tvm::ffi::String;

/*! \brief Add the kernels of a library that `tvm-flashinfer build` made. */
void LoadKernels(String path) {
  const std::string error = kernels::cuda::LoadLibrary(path);
  if (!error.empty()) {
    ops::Checker("load_kernels").FailRuntime("cannot load \"" + std::string(path) + "\": " + error);
  }
}

/*! \brief Names of the loaded CUDA kernels, each with the archs it was compiled for. */
Array<String> LoadedKernels() {
  Array<String> names;
  for (auto* entry = kernels::cuda::Entries(); entry != nullptr; entry = entry->next) {
    names.push_back(std::string(entry->name) + "@" + entry->archs);
  }
  return names;
}

Map<String, String> CPUInfo() {
  ops::Checker("cpu_info").CPUSettings();
  return {{"threads", std::to_string(kernels::cpu::NumThreads())},
          {"instruction_set", kernels::cpu::InstructionSet()}};
}

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  // A second registration of a name would throw, and nobody can catch what is thrown from here.
  if (tvm::ffi::Function::GetGlobal("flashinfer.load_kernels").has_value()) {
    std::fputs(
        "tvm_flashinfer: a second copy of libtvm_flashinfer.so was loaded; the functions of the "
        "first stay in use\n",
        stderr);
    return;
  }
#define TVM_FLASHINFER_REGISTER_FUNCTION(name, function) \
  refl::GlobalDef().def("flashinfer." #name, ops::function);
  TVM_FLASHINFER_FUNCTIONS(TVM_FLASHINFER_REGISTER_FUNCTION)
#undef TVM_FLASHINFER_REGISTER_FUNCTION
  refl::GlobalDef()
      .def("flashinfer.load_kernels", LoadKernels)
      .def("flashinfer.loaded_kernels", LoadedKernels)
      .def("flashinfer.cpu_info", CPUInfo);
}

}  // namespace tvm_flashinfer

// What the linker is told to look for, so that it takes this file and requirement.cc out of the
// archive.
extern "C" void tvm_flashinfer_requirement();
extern "C" void tvm_flashinfer_register() { tvm_flashinfer_requirement(); }

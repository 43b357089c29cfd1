// flashinfer_example [--device cpu|cuda] [--kernels LIBRARY]
#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>

#include <cstdio>
#include <exception>
#include <stdexcept>
#include <string>

#ifdef USE_FLASHINFER
#include <dlfcn.h>
#include <tvm_flashinfer/functions.h>

#include "example.h"

namespace {

/*! \brief Largest difference that bfloat16 explains: its results have 8 bits. */
constexpr double kTolerance = 0.03;

struct Options {
  DLDevice device{kDLCPU, 0};
  std::string kernels;
};

Options Parse(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string name = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (name == "--device" && (value == "cpu" || value == "cuda")) {
      options.device.device_type = value == "cuda" ? kDLCUDA : kDLCPU;
    } else if (name == "--kernels" && !value.empty()) {
      options.kernels = value;
    } else {
      throw std::invalid_argument("usage: flashinfer_example [--device cpu|cuda] [--kernels FILE]");
    }
  }
  return options;
}

bool Report(const char* what, double error) {
  std::printf("%s: largest error %.5f, %s\n", what, error, error <= kTolerance ? "ok" : "WRONG");
  return error <= kTolerance;
}

int Run(const Options& options) {
  if (options.device.device_type == kDLCUDA) {
    // TVM keeps what needs the driver in a library of its own.
    if (dlopen("libtvm_runtime_cuda.so", RTLD_NOW | RTLD_GLOBAL) == nullptr) {
      throw std::runtime_error(std::string("TVM's runtime for CUDA cannot be loaded: ") +
                               dlerror());
    }
    // A program without Python does not compile kernels; `tvm-flashinfer build` did.
    if (!options.kernels.empty()) tvm_flashinfer::LoadKernels(options.kernels);
  }
  const bool decode = Report("decode", example::Decode(options.device));
  const bool cache = Report("KV cache", example::KVCache(options.device));
  return decode && cache ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  try {
    return Run(Parse(argc, argv));
  } catch (const tvm::ffi::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.kind().c_str(), error.message().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
  }
  return 2;
}

#else

int main() {
  const bool registered = tvm::ffi::Function::GetGlobal("flashinfer.merge_state").has_value();
  std::printf("built with USE_FLASHINFER=OFF; flashinfer.* %s\n",
              registered ? "registered by another library" : "not registered");
  return registered ? 1 : 0;
}

#endif  // USE_FLASHINFER

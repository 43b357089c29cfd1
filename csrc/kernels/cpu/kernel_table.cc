#include "kernel_table.h"

#include <cstdlib>
#include <string>

#if defined(TVM_FLASHINFER_CPU_V3) || defined(TVM_FLASHINFER_CPU_V4)
#include <cpuid.h>
#endif

#include "kernels.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace {

#if defined(TVM_FLASHINFER_CPU_V3) || defined(TVM_FLASHINFER_CPU_V4)
// The levels are spelt out feature by feature: "x86-64-v3" and the like are known to
// __builtin_cpu_supports only from GCC 12 and clang 18 on, and so are f16c, lzcnt and movbe.
[[maybe_unused]] bool HasV3() {
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2")) {
    return false;
  }
  constexpr unsigned kF16c = 1u << 29, kMovbe = 1u << 22, kLzcnt = 1u << 5;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & kF16c) == 0 || (c & kMovbe) == 0) return false;
  return __get_cpuid(0x80000001u, &a, &b, &c, &d) && (c & kLzcnt) != 0;
}

[[maybe_unused]] bool HasV4() {
  return HasV3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}
#endif

std::string WantedInstructionSet() {
  const char* wanted = std::getenv("TVM_FLASHINFER_CPU_ISA");
  return wanted == nullptr ? "" : wanted;
}

const KernelTable* ChooseKernels() {
  // A name asks for at most that level: asking for more than the CPU has must not crash.
  const std::string wanted = WantedInstructionSet();
  const bool allow_v3 = wanted != "baseline";
  const bool allow_v4 = allow_v3 && wanted != "v3";
#ifdef TVM_FLASHINFER_CPU_V4
  if (allow_v4 && HasV4()) return &v4::kKernelTable;
#endif
#ifdef TVM_FLASHINFER_CPU_V3
  if (allow_v3 && HasV3()) return &v3::kKernelTable;
#endif
  (void)allow_v3;
  (void)allow_v4;
  return &baseline::kKernelTable;
}

}  // namespace

const KernelTable& ActiveKernels() {
  static const KernelTable* const table = ChooseKernels();
  return *table;
}

const std::string& InstructionSetError() {
  static const std::string error = [] {
    const std::string wanted = WantedInstructionSet();
    for (const char* name : {"", "baseline", "v3", "v4"}) {
      if (wanted == name) return std::string();
    }
    return "the environment variable TVM_FLASHINFER_CPU_ISA is \"" + wanted +
           "\"; it is \"baseline\", \"v3\" or \"v4\". Set one of these, or unset it";
  }();
  return error;
}

const char* InstructionSet() { return ActiveKernels().name; }

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

// The device and dtype that a test runs with: one set of bodies for CPU and CUDA.
#ifndef TESTS_NATIVE_FIXTURE_H_
#define TESTS_NATIVE_FIXTURE_H_

#include <gtest/gtest.h>
#include <tvm_flashinfer/functions.h>

#include <cstdlib>
#include <initializer_list>
#include <ostream>
#include <random>
#include <string>
#include <vector>

#include "tensors.h"

namespace native {

namespace names = tvm_flashinfer::names;
using tvm_flashinfer::Get;

struct Param {
  DLDevice device;
  DLDataType dtype;
  /*! \brief Of planned prefill on CUDA: "fa2" or "fa3", which needs a Hopper GPU. */
  const char* prefill_kernel = "";

  bool is_cuda() const { return device.device_type == kDLCUDA; }
};

/*! \brief A dtype as kernels spell it. */
inline std::string Name(DLDataType dtype) {
  if (dtype.code == kDLBfloat) return "bf16";
  if (Same(dtype, kE4M3)) return "e4m3";
  if (Same(dtype, kE5M2)) return "e5m2";
  return "f" + std::to_string(dtype.bits);
}

inline std::string ParamName(const testing::TestParamInfo<Param>& info) {
  const std::string kernel = info.param.prefill_kernel;
  return Name(info.param.dtype) + (kernel.empty() ? "" : "_" + kernel);
}

/*! \brief What failures say the parameter is. */
inline void PrintTo(const Param& param, std::ostream* out) {
  *out << (param.is_cuda() ? "cuda " : "cpu ") << Name(param.dtype) << " " << param.prefill_kernel;
}

/*! \brief A unit of attention by the name of its kernel, such as "batch_decode:f16:d128". */
inline std::string Unit(const std::string& kind, DLDataType dtype, int64_t head_dim) {
  return kind + ":" + Name(dtype) + ":d" + std::to_string(head_dim);
}

/*! \brief Skips what cannot run here, and seeds the numbers by the test's name. */
class OnDevice : public testing::TestWithParam<Param> {
 protected:
  void SetUp() override {
    std::string test = testing::UnitTest::GetInstance()->current_test_info()->name();
    std::seed_seq seed(test.begin(), test.end());
    generator.seed(seed);
    if (!GetParam().is_cuda()) return;
    if (!CudaMissing().empty()) {
      if (CudaIsRequired()) FAIL() << CudaMissing();
      GTEST_SKIP() << "no CUDA: " << CudaMissing();
    }
    const std::string kernel = GetParam().prefill_kernel;
    if (kernel == "fa3" && !CudaIs(9, 0)) GTEST_SKIP() << "FA3 needs a Hopper GPU";
    if (kernel.empty()) {
      unsetenv("TVM_FLASHINFER_PREFILL_KERNEL");
    } else {
      setenv("TVM_FLASHINFER_PREFILL_KERNEL", kernel.c_str(), 1);
    }
  }

  DLDevice device() const { return GetParam().device; }
  DLDataType dtype() const { return GetParam().dtype; }
  Numbers Random(int64_t count) { return Normal(count, dtype(), &generator); }

  /*! \brief Which of the units is not loaded, as a reason to skip; where CUDA is required, none. */
  std::string MissingUnit(std::initializer_list<std::string> units) const {
    if (!GetParam().is_cuda() || CudaIsRequired()) return "";
    for (const std::string& unit : units) {
      if (!UnitIsLoaded(unit)) return "no unit " + unit + " is among the kernels that are loaded";
    }
    return "";
  }

  std::mt19937 generator;
};

#define SKIP_IF(reason) \
  if (const std::string why_not = (reason); !why_not.empty()) GTEST_SKIP() << why_not

inline const std::vector<Param> kAttentionOnCPU{
    {kCPU, kFloat32}, {kCPU, kFloat16}, {kCPU, kBFloat16}};
inline const std::vector<Param> kAttentionOnCUDA{{kCUDA, kFloat16}, {kCUDA, kBFloat16}};
inline const std::vector<Param> kPrefillOnCUDA{{kCUDA, kFloat16, "fa2"},
                                               {kCUDA, kBFloat16, "fa2"},
                                               {kCUDA, kFloat16, "fa3"},
                                               {kCUDA, kBFloat16, "fa3"}};
inline const std::vector<Param> kMovesOnCUDA{
    {kCUDA, kFloat32}, {kCUDA, kFloat16}, {kCUDA, kBFloat16}};

/*! \brief Instances of a suite, by which CTest tells those of CPU and CUDA apart. */
#define RUN_ON_DEVICES(Suite, on_cpu, on_cuda)                                \
  INSTANTIATE_TEST_SUITE_P(Cpu, Suite, testing::ValuesIn(on_cpu), ParamName); \
  INSTANTIATE_TEST_SUITE_P(Cuda, Suite, testing::ValuesIn(on_cuda), ParamName)

}  // namespace native

#endif  // TESTS_NATIVE_FIXTURE_H_

// The arithmetic below the kernels: conversions of elements, powers of two, sums over vectors. The
// oracle converts by the definition of each format.
#include <tvm/ffi/container/map.h>

#include <algorithm>

#include "fixture.h"
#include "isa_math.h"

namespace native {
namespace {

using tvm_flashinfer::kernels::DType;

struct Level {
  const char* name;
  const IsaMath* math;
};

/*! \brief What this processor runs. */
std::vector<Level> Levels() {
  std::vector<Level> levels{{"baseline", &math_baseline::kMath}};
#ifdef NATIVE_TESTS_HAVE_V3
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    levels.push_back({"v3", &math_v3::kMath});
  }
#endif
#ifdef NATIVE_TESTS_HAVE_V4
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    levels.push_back({"v4", &math_v4::kMath});
  }
#endif
  return levels;
}

struct Stored {
  DLDataType dtype;
  DType kernel_dtype;
  /*! \brief Of what is loaded: 8-bit numbers come divided by a power of two. */
  double unit;
};
const Stored kStored[] = {{kFloat16, DType::kFloat16, 1},
                          {kBFloat16, DType::kBFloat16, 1},
                          {kE4M3, DType::kFloat8E4M3, 0x1p-8},
                          {kE5M2, DType::kFloat8E5M2, 1}};

/*! \brief Every code of a dtype, as bytes of a tensor. */
std::vector<uint8_t> EveryCode(DLDataType dtype) {
  std::vector<uint8_t> bytes;
  for (uint32_t code = 0; code < 1u << dtype.bits; ++code) {
    for (int byte = 0; byte < dtype.bits / 8; ++byte) {
      bytes.push_back(static_cast<uint8_t>(code >> (8 * byte)));
    }
  }
  return bytes;
}

TEST(Math, EveryCodeIsLoaded) {
  for (const Level& level : Levels()) {
    for (const Stored& stored : kStored) {
      const std::vector<uint8_t> codes = EveryCode(stored.dtype);
      const int count = 1 << stored.dtype.bits;
      Numbers got(count);
      level.math->to_float(stored.kernel_dtype, codes.data(), got.data(), count);
      for (int code = 0; code < count; ++code) {
        const double expected = Decode(code, stored.dtype) * stored.unit;
        const bool same = std::isnan(expected) ? std::isnan(got[code]) : got[code] == expected;
        ASSERT_TRUE(same) << level.name << ", " << Name(stored.dtype) << ", code " << code << ": "
                          << got[code] << ", expected " << expected;
      }
    }
  }
}

/*! \brief Numbers at, between and just beside the codes of a dtype, and some at random. */
Numbers NumbersToRound(DLDataType dtype) {
  Numbers numbers{INFINITY, -INFINITY, NAN, 0.f, -0.f, 3e38f, -3e38f, 1e-44f};
  for (int code = 0; code < 1 << (dtype.bits - 1); code += dtype.bits == 16 ? 5 : 1) {
    const double low = Decode(code, dtype), high = Decode(code + 1, dtype);
    if (!std::isfinite(low) || !std::isfinite(high)) continue;
    const float middle = static_cast<float>((low + high) / 2);
    for (float x : {static_cast<float>(low), middle, std::nextafterf(middle, 0.f),
                    std::nextafterf(middle, INFINITY)}) {
      numbers.push_back(x);
      numbers.push_back(-x);
    }
  }
  std::mt19937 generator(1);
  std::uniform_real_distribution<double> exponent(-45, 38), mantissa(-1, 1);
  while (numbers.size() < 100000 || numbers.size() % 16 != 0) {
    numbers.push_back(static_cast<float>(mantissa(generator) * std::pow(10, exponent(generator))));
  }
  return numbers;
}

TEST(Math, StoresRoundToNearestEven) {
  for (const Level& level : Levels()) {
    for (const Stored& stored : kStored) {
      const Numbers numbers = NumbersToRound(stored.dtype);
      const size_t size = stored.dtype.bits / 8;
      std::vector<uint8_t> got(numbers.size() * size);
      level.math->from_float(stored.kernel_dtype, numbers.data(), got.data(),
                             static_cast<int>(numbers.size()));
      for (size_t i = 0; i < numbers.size(); ++i) {
        uint32_t code = 0;
        std::memcpy(&code, got.data() + i * size, size);
        // What 8 bits cannot hold is the largest number; 16 bits have infinity.
        const uint32_t expected = Encode(numbers[i], stored.dtype, /*saturate=*/size == 1);
        const bool same =
            std::isnan(numbers[i]) ? std::isnan(Decode(code, stored.dtype)) : code == expected;
        ASSERT_TRUE(same) << level.name << ", " << Name(stored.dtype) << ", " << numbers[i]
                          << ": code " << code << ", expected " << expected;
      }
    }
  }
}

TEST(Math, PowersOfTwo) {
  Numbers in{0.f, -INFINITY, NAN, -126.f, -126.5f, -1e30f, -1.f, -0.f};
  for (int i = 0; in.size() < 64000; ++i) in.push_back(-126.f * static_cast<float>(i) / 63992);
  for (const Level& level : Levels()) {
    Numbers got(in.size());
    level.math->exp2(in.data(), got.data(), static_cast<int>(in.size()));
    EXPECT_EQ(got[0], 1.f);
    EXPECT_EQ(got[1], 0.f);
    EXPECT_TRUE(std::isnan(got[2]));
    for (size_t i = 3; i < in.size(); ++i) {
      const double exact = in[i] < -126 ? 0 : std::exp2(static_cast<double>(in[i]));
      ASSERT_NEAR(got[i], exact, 2e-7 * exact) << level.name << ", 2 ^ " << in[i];
    }
  }
}

TEST(Math, SumsOverVectors) {
  std::mt19937 generator(2);
  for (const Level& level : Levels()) {
    SCOPED_TRACE(level.name);
    const int lanes = level.math->lanes;
    Numbers vectors(lanes * lanes), sums(lanes), swapped(lanes);
    // Whole numbers, whose sums are exact in any order.
    for (float& x : vectors) x = static_cast<float>(generator() % 2001) - 1000;
    level.math->sum_of_each(vectors.data(), sums.data());
    for (int i = 0; i < lanes; ++i) {
      const float* vector = vectors.data() + i * lanes;
      float sum = 0;
      for (int j = 0; j < lanes; ++j) sum += vector[j];
      EXPECT_EQ(sums[i], sum) << "vector " << i;
      EXPECT_EQ(level.math->reduce_sum(vector), sum) << "vector " << i;
      EXPECT_EQ(level.math->reduce_max(vector), *std::max_element(vector, vector + lanes));
    }
    level.math->swap_pairs(vectors.data(), swapped.data());
    for (int i = 0; i < lanes; ++i) EXPECT_EQ(swapped[i], vectors[i ^ 1]) << "lane " << i;
  }
}

// The library runs the widest instruction set of the processor, unless it is told not to.
TEST(Math, InstructionSetOfTheLibrary) {
  using tvm::ffi::Map;
  using tvm::ffi::String;
  const auto info = Get("flashinfer.cpu_info")().cast<Map<String, String>>();
  const std::string got = info["instruction_set"];
  const char* wanted = std::getenv("TVM_FLASHINFER_CPU_ISA");
  const std::string level = wanted == nullptr ? Levels().back().name : wanted;
#ifdef __x86_64__
  EXPECT_EQ(got, level == "baseline" ? "x86-64" : "x86-64-" + level);
#else
  EXPECT_EQ(got, "generic");
#endif
}

}  // namespace
}  // namespace native

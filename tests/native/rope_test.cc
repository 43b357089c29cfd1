// Position encoding: the frequencies of every scaling, and the rotation of queries and keys.
#include "fixture.h"
#include "ops/checks.h"
#include "ops/rope_frequencies.h"
#include "oracle.h"
#include "worst.h"

namespace native {
namespace {

using tvm::ffi::Function;

struct Case {
  const char* name;
  Rope rope;
  const char* json;
};

std::vector<Case> Scalings(int rotary_dim) {
  Rope rope;
  rope.rotary_dim = rotary_dim;
  Rope linear = rope, llama3 = rope, yarn = rope, interleaved = rope;
  interleaved.scaling = Rope::kInterleaved;
  linear.scaling = Rope::kLinear;
  linear.factor = 4;
  linear.scale = 0.5;
  llama3.scaling = Rope::kLlama3;
  llama3.theta = 5e5;
  llama3.factor = 8;
  llama3.low_freq_factor = 1;
  llama3.high_freq_factor = 4;
  llama3.original_length = 8192;
  yarn.scaling = Rope::kYarn;
  yarn.factor = 16;
  yarn.original_length = 4096;
  yarn.beta_fast = 32;
  yarn.beta_slow = 1;
  return {
      {"none", rope, "{}"},
      {"gptj", interleaved, R"({"rope_type": "gptj"})"},
      {"linear", linear, R"({"rope_type": "linear", "factor": 4.0})"},
      {"llama3", llama3,
       R"({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 8192})"},
      {"yarn", yarn,
       R"({"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096,
           "beta_fast": 32, "beta_slow": 1})"}};
}

const char* kLongrope =
    R"({"rope_type": "longrope", "max_position_embeddings": 131072,
        "original_max_position_embeddings": 20})";

Rope LongropeOf(int rotary_dim, const Numbers& factors) {
  Rope rope;
  rope.rotary_dim = rotary_dim;
  rope.scaling = Rope::kLongrope;
  rope.max_length = 131072;
  rope.original_length = 20;
  rope.factors = factors;
  return rope;
}

void ExpectFrequencies(const tvm_flashinfer::ops::RopeFrequencies& got, const Rope& rope) {
  const int half = rope.rotary_dim / 2;
  ASSERT_EQ(got.inv_freq.size(), static_cast<size_t>(half));
  EXPECT_EQ(got.interleaved, rope.scaling == Rope::kInterleaved);
  EXPECT_FLOAT_EQ(got.magnitude, static_cast<float>(MagnitudeOf(rope)));
  const bool has_second = !got.inv_freq_second.empty();
  EXPECT_EQ(has_second, rope.scaling == Rope::kYarn);
  const int step = rope.scaling == Rope::kInterleaved ? 2 : 1;
  for (int i = 0; i < half; ++i) {
    EXPECT_FLOAT_EQ(got.inv_freq[i], static_cast<float>(FrequencyOf(rope, i * step) * rope.scale))
        << "pair " << i;
    if (!has_second) continue;
    EXPECT_FLOAT_EQ(got.inv_freq_second[i],
                    static_cast<float>(FrequencyOf(rope, half + i) * rope.scale))
        << "second element of pair " << i;
  }
}

TEST(RopeFrequencies, OfEveryScaling) {
  const tvm_flashinfer::ops::Checker check("native_tests");
  for (int rotary_dim : {2, 40, 64, 128}) {
    for (const Case& c : Scalings(rotary_dim)) {
      if (rotary_dim == 2 && c.rope.scaling == Rope::kYarn) continue;  // one pair has no ramp
      SCOPED_TRACE(std::string(c.name) + ", rotary_dim " + std::to_string(rotary_dim));
      ExpectFrequencies(tvm_flashinfer::ops::MakeRopeFrequencies(check, c.rope.theta, c.rope.scale,
                                                                 rotary_dim, c.json, nullptr),
                        c.rope);
    }
    Numbers factors;
    for (int i = 0; i < rotary_dim / 2; ++i) factors.push_back(1.f + 0.37f * i);
    SCOPED_TRACE("longrope, rotary_dim " + std::to_string(rotary_dim));
    ExpectFrequencies(tvm_flashinfer::ops::MakeRopeFrequencies(check, 1e4, 1, rotary_dim, kLongrope,
                                                               factors.data()),
                      LongropeOf(rotary_dim, factors));
  }
}

TEST(RopeFrequencies, RefusedSettings) {
  const tvm_flashinfer::ops::Checker check("native_tests");
  const auto make = [&](double theta, int rotary_dim, const char* json) {
    return tvm_flashinfer::ops::MakeRopeFrequencies(check, theta, 1, rotary_dim, json, nullptr);
  };
  EXPECT_THROW(make(0, 64, "{}"), tvm::ffi::Error);
  EXPECT_THROW(make(1e4, 63, "{}"), tvm::ffi::Error);
  EXPECT_THROW(make(1e4, 64, R"({"rope_type": "dynamic"})"), tvm::ffi::Error);
  EXPECT_THROW(make(1e4, 64, R"({"rope_type": "linear", "factor": 0})"), tvm::ffi::Error);
  EXPECT_THROW(make(1e4, 64, R"({"rope_type": "linear"})"), tvm::ffi::Error);
  EXPECT_THROW(make(1e4, 64, kLongrope), tvm::ffi::Error);
  EXPECT_NO_THROW(make(1e4, 0, "{}"));
}

class SplitRotary : public OnDevice {
 protected:
  static constexpr int64_t kQ = 4, kKV = 2, kHeads = kQ + 2 * kKV;

  /*! \brief Split `rows` random rows by a bound function, and compare; `last` is its last argument.
   */
  void Check(const Function& bound, int64_t rows, int64_t d, const Rope* rope,
             const tvm::ffi::Any& last) {
    const Numbers qkv = Random(rows * kHeads * d);
    std::vector<int32_t> positions;
    for (int64_t i = 0; i < rows; ++i)
      positions.push_back(static_cast<int32_t>(generator() % 4000));
    positions[0] = 0;
    const Placed q(device(), dtype(), {rows, kQ, d}), k(device(), dtype(), {rows, kKV, d}),
        v(device(), dtype(), {rows, kKV, d});
    bound(Placed(device(), dtype(), {rows, kHeads, d}, qkv).tensor(), Indices(device(), positions),
          q.tensor(), k.tensor(), v.tensor(), last);
    EXPECT_TRUE(q.GuardsAreIntact() && k.GuardsAreIntact() && v.GuardsAreIntact());
    ExpectPart(q.Read(), qkv, 0, kQ, d, positions, rope);
    ExpectPart(k.Read(), qkv, kQ, kKV, d, positions, rope);
    ExpectPart(v.Read(), qkv, kQ + kKV, kKV, d, positions, nullptr);
  }

  /*! \brief Heads from `first` on are rotated, or as they were to the bit. */
  void ExpectPart(const Numbers& got, const Numbers& qkv, int64_t first, int64_t heads, int64_t d,
                  const std::vector<int32_t>& positions, const Rope* rope) {
    Worst worst(dtype());
    for (size_t i = 0; i < positions.size(); ++i) {
      for (int64_t h = 0; h < heads; ++h) {
        const float* head = qkv.data() + (i * kHeads + first + h) * d;
        const float* out = got.data() + (i * heads + h) * d;
        std::vector<double> exact(head, head + d);
        if (rope != nullptr) exact = Rotate(head, static_cast<int>(d), positions[i], *rope);
        for (int64_t j = 0; j < d; ++j) {
          const bool moves = rope != nullptr && j < rope->rotary_dim;
          // The angle is a float: its error grows with the position.
          const double angle = positions[i] * 2e-7 * 8;
          const double bound = moves ? RoundingBound(exact[j], dtype()) + angle + 1e-6 : 0x1p-140;
          worst.Compare(out[j], exact[j], bound, "element " + std::to_string(j) + " of row ",
                        static_cast<int>(i));
        }
      }
    }
    EXPECT_TRUE(worst.IsWithinBounds()) << "heads from " << first << ": " << worst.text();
  }
};

TEST_P(SplitRotary, EveryScaling) {
  SKIP_IF(MissingUnit({"split_qkv_rotary"}));
  for (int rotary_dim : {64, 40}) {
    for (const Case& c : Scalings(rotary_dim)) {
      SCOPED_TRACE(std::string(c.name) + ", rotary_dim " + std::to_string(rotary_dim));
      const Function bound =
          Get(names::kBindSplitQKVRotary)(c.rope.theta, c.rope.scale, rotary_dim, c.json)
              .cast<Function>();
      Check(bound, 13, 64, &c.rope, 1);
      Check(bound, 13, 64, nullptr, 0);
    }
  }
}

TEST_P(SplitRotary, Longrope) {
  SKIP_IF(MissingUnit({"split_qkv_rotary"}));
  const int rotary_dim = 48;
  Numbers factors;
  for (int i = 0; i < rotary_dim; ++i) factors.push_back(1.f + 0.7f * i);
  const Function bound =
      Get(names::kBindSplitQKVRotary)(1e4, 1.0, rotary_dim, kLongrope).cast<Function>();
  const Placed table(device(), kFloat32, {rotary_dim}, factors);
  // Calls of more rows than the original length take the first half of the factors.
  for (int rows : {20, 21}) {
    const auto middle = factors.begin() + rotary_dim / 2;
    const Rope rope = LongropeOf(
        rotary_dim, rows > 20 ? Numbers(factors.begin(), middle) : Numbers(middle, factors.end()));
    Check(bound, rows, 64, &rope, table.tensor());
  }
}

RUN_ON_DEVICES(SplitRotary, kAttentionOnCPU, kMovesOnCUDA);

}  // namespace
}  // namespace native

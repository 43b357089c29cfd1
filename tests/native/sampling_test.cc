// Sampling from probabilities by uniform numbers that the caller draws.
#include <algorithm>

#include "fixture.h"

namespace native {
namespace {

class Sampling : public OnDevice {
 protected:
  std::vector<int32_t> Sample(const Numbers& probs, int64_t rows, const Numbers& uniform,
                              const std::vector<int32_t>& indices) {
    const int64_t count = static_cast<int64_t>(uniform.size());
    const int64_t vocab = static_cast<int64_t>(probs.size()) / rows;
    const Placed ids(device(), kInt32, {count});
    const Tensor out = ids.tensor();
    const Tensor returned =
        Get("flashinfer.sampling.parallel_sampling_from_prob")(
            Placed(device(), kFloat32, {rows, vocab}, probs).tensor(),
            Placed(device(), kFloat32, {count}, uniform).tensor(), Indices(device(), indices), out)
            .cast<Tensor>();
    EXPECT_TRUE(returned.same_as(out));
    EXPECT_TRUE(ids.GuardsAreIntact());
    return ids.ReadInts();
  }

  Numbers RandomRows(int64_t rows, int64_t vocab) {
    std::uniform_real_distribution<double> uniform;
    Numbers probs;
    for (int64_t r = 0; r < rows; ++r) {
      std::vector<double> row(vocab);
      double sum = 0;
      for (double& p : row) sum += p = std::pow(uniform(generator), 4);
      for (double p : row) probs.push_back(static_cast<float>(p / sum));
    }
    return probs;
  }
};

TEST_P(Sampling, TheFirstTokenWhoseRunningSumIsAbove) {
  SKIP_IF(MissingUnit({"sample_from_probs"}));
  constexpr double kSlack = 2e-5;  // of sums in float32
  for (int64_t vocab : {1, 3, 31, 1000, 16385, 50000}) {
    const Numbers probs = RandomRows(5, vocab);
    Numbers uniform;
    std::vector<int32_t> indices;
    for (int i = 0; i < 40; ++i) {
      uniform.push_back(std::uniform_real_distribution<float>()(generator));
      indices.push_back(static_cast<int32_t>(generator() % 5));
    }
    const std::vector<int32_t> ids = Sample(probs, 5, uniform, indices);
    for (int i = 0; i < 40; ++i) {
      ASSERT_TRUE(ids[i] >= 0 && ids[i] < vocab) << "sample " << i << " of " << vocab;
      const float* row = probs.data() + indices[i] * vocab;
      double before = 0;
      for (int32_t t = 0; t < ids[i]; ++t) before += row[t];
      EXPECT_GT(row[ids[i]], 0) << "sample " << i << " of " << vocab;
      EXPECT_LE(before, uniform[i] + kSlack) << "sample " << i << " of " << vocab;
      EXPECT_GT(before + row[ids[i]], uniform[i] - kSlack) << "sample " << i << " of " << vocab;
    }
  }
}

TEST_P(Sampling, RowsInAnyOrder) {
  SKIP_IF(MissingUnit({"sample_from_probs"}));
  const Numbers probs{0.25f, 0.25f, 0.f, 0.5f, 0.f, 0.f, 1.f, 0.f, 0.5f, 0.f, 0.f, 0.5f};
  const std::vector<int32_t> expected{0, 3, 3, 2};
  EXPECT_EQ(Sample(probs, 3, {0.1f, 0.9f, 0.5f, 0.f}, {0, 0, 2, 1}), expected);
}

TEST_P(Sampling, ExactBoundaries) {
  SKIP_IF(MissingUnit({"sample_from_probs"}));
  const std::vector<int32_t> expected{0, 0, 1, 1, 3, 3, 3};
  EXPECT_EQ(Sample({0.25f, 0.25f, 0.f, 0.5f}, 1, {0.f, 0.2f, 0.25f, 0.49f, 0.5f, 0.99f, 1.f},
                   {0, 0, 0, 0, 0, 0, 0}),
            expected);
}

TEST_P(Sampling, ARowOfNaNAndARowOfZeros) {
  SKIP_IF(MissingUnit({"sample_from_probs"}));
  Numbers probs;
  for (int row = 0; row < 5; ++row) {
    for (int t = 0; t < 40; ++t) {
      probs.push_back(row == 1 ? NAN : row == 3 ? 0.f : t == 10 * row / 2 + 3 ? 1.f : 0.f);
    }
  }
  const std::vector<int32_t> expected{3, -1, 13, -1, 23};
  EXPECT_EQ(Sample(probs, 5, {0.5f, 0.5f, 0.5f, 0.5f, 0.5f}, {0, 1, 2, 3, 4}), expected);
}

const std::vector<Param> kOnCPU{{kCPU, kFloat32}}, kOnCUDA{{kCUDA, kFloat32}};
RUN_ON_DEVICES(Sampling, kOnCPU, kOnCUDA);

}  // namespace
}  // namespace native

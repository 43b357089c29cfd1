// Sampling from probabilities by uniform numbers that the caller draws.
#include <algorithm>
#include <functional>
#include <numeric>

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

/*! \brief What a filter keeps of a row: at least the most probable token, and those as probable. */
enum class Filter { kTopK, kTopP, kMinP };

std::vector<double> Kept(const float* row, int64_t vocab, Filter filter, double setting) {
  std::vector<double> sorted(row, row + vocab);
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  double least = sorted[0];
  if (filter == Filter::kTopK) least = setting <= 0 ? 0 : sorted[static_cast<size_t>(setting) - 1];
  if (filter == Filter::kMinP) least = setting * sorted[0];
  if (filter == Filter::kTopP) {
    double sum = 0;
    least = 0;
    for (double p : sorted) {
      sum += p;
      if (sum < setting) continue;
      least = p;
      break;
    }
  }
  std::vector<double> kept(row, row + vocab);
  for (double& p : kept) p = p >= least ? p : 0;
  return kept;
}

TEST_P(Sampling, TokensThatAFilterKeeps) {
  SKIP_IF(MissingUnit({"draw_filtered"}));
  const struct {
    const char* name;
    Filter filter;
    Numbers settings;  // of each row
    DLDataType dtype;
  } cases[] = {
      {"flashinfer.sampling.top_k_from_probs", Filter::kTopK, {1, 7, 0, 200}, kInt32},
      {"flashinfer.sampling.top_p_from_probs", Filter::kTopP, {0, 0.31f, 0.9f, 1}, kFloat32},
      {"flashinfer.sampling.min_p_from_probs", Filter::kMinP, {1, 0.3f, 0, 0.05f}, kFloat32}};
  constexpr int64_t kVocab = 201, kRows = 4, kSamples = 60;
  for (const auto& [name, filter, settings, setting_dtype] : cases) {
    const Numbers probs = RandomRows(kRows, kVocab);
    Numbers uniform;
    std::vector<int32_t> indices;
    for (int64_t i = 0; i < kSamples; ++i) {
      uniform.push_back(std::uniform_real_distribution<float>()(generator));
      indices.push_back(static_cast<int32_t>(i % kRows));
    }
    const Placed ids(device(), kInt32, {kSamples});
    Get(name)(Placed(device(), kFloat32, {kRows, kVocab}, probs).tensor(),
              Placed(device(), kFloat32, {kSamples}, uniform).tensor(), Indices(device(), indices),
              Placed(device(), setting_dtype, {kRows}, settings).tensor(), ids.tensor());
    EXPECT_TRUE(ids.GuardsAreIntact());
    const std::vector<int32_t> got = ids.ReadInts();
    for (int64_t i = 0; i < kSamples; ++i) {
      const std::vector<double> kept =
          Kept(probs.data() + indices[i] * kVocab, kVocab, filter, settings[indices[i]]);
      ASSERT_TRUE(got[i] >= 0 && got[i] < kVocab) << name << ", sample " << i;
      const double sum = std::accumulate(kept.begin(), kept.end(), 0.0);
      const double before = std::accumulate(kept.begin(), kept.begin() + got[i], 0.0);
      EXPECT_GT(kept[got[i]], 0) << name << ", sample " << i << " is " << got[i];
      EXPECT_LE(before, uniform[i] * sum + 2e-5) << name << ", sample " << i;
      EXPECT_GT(before + kept[got[i]], uniform[i] * sum - 2e-5) << name << ", sample " << i;
    }
  }
}

const std::vector<Param> kOnCPU{{kCPU, kFloat32}}, kOnCUDA{{kCUDA, kFloat32}};
RUN_ON_DEVICES(Sampling, kOnCPU, kOnCUDA);

}  // namespace
}  // namespace native

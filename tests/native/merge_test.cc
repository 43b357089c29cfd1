// States of attention: merged over parts of the keys, and given sinks.
#include <algorithm>
#include <tuple>

#include "batch.h"

namespace native {
namespace {

class Merge : public OnDevice {
 protected:
  static constexpr int64_t kRows = 9, kHeads = 3, kDim = 64;

  Placed Values(const Numbers& values) {
    return Placed(device(), dtype(), {kRows, kHeads, kDim}, values);
  }
  Placed Sums(const Numbers& values) { return Placed(device(), kFloat32, {kRows, kHeads}, values); }

  /*! \brief Of very different sizes, and -inf for every fourth row. */
  Numbers RandomSums(int first_empty) {
    Numbers sums = Normal(kRows * kHeads, kFloat32, &generator);
    for (int64_t i = 0; i < kRows * kHeads; ++i) {
      sums[i] *= 20;
      if (i % 4 == first_empty) sums[i] = -INFINITY;
    }
    return sums;
  }

  void Expect(const Numbers& v_a, const Numbers& s_a, const Numbers& v_b, const Numbers& s_b,
              const Numbers& v, const Numbers& s) {
    Worst worst(dtype());
    for (int64_t i = 0; i < kRows * kHeads; ++i) {
      const auto row = [&](const Numbers& all) {
        return std::vector<double>(all.begin() + i * kDim, all.begin() + (i + 1) * kDim);
      };
      const std::vector<double> a = row(v_a), b = row(v_b);
      const auto [exact, sum] = native::Merge(a, s_a[i], b, s_b[i]);
      if (std::isinf(sum)) {
        EXPECT_EQ(s[i], -INFINITY) << "row " << i;
      } else {
        worst.Compare(s[i], sum, 1e-5 * (1 + std::fabs(sum)), "LSE of ", i);
      }
      for (int64_t j = 0; j < kDim; ++j) {
        // Beside a state of no weight nothing of it may be left, NaN included.
        const double size =
            (std::isinf(s_a[i]) ? 0 : std::fabs(a[j])) + (std::isinf(s_b[i]) ? 0 : std::fabs(b[j]));
        worst.Compare(v[i * kDim + j], exact[j], RoundingBound(exact[j], dtype()) + 1e-5 * size,
                      "element " + std::to_string(j) + " of row ", i);
      }
    }
    EXPECT_TRUE(worst.IsWithinBounds()) << worst.text();
  }

  /*! \brief Other values in empty states: 0, or NaN, since no weight hides them. */
  static Numbers Emptied(Numbers values, const Numbers& sums, float fill) {
    for (int64_t i = 0; i < kRows * kHeads; ++i) {
      if (std::isinf(sums[i])) std::fill_n(values.begin() + i * kDim, kDim, fill);
    }
    return values;
  }
};

TEST_P(Merge, TwoStates) {
  SKIP_IF(MissingUnit({"merge_state"}));
  const Numbers s_a = RandomSums(0), s_b = RandomSums(2);
  const Numbers v_a = Emptied(Random(kRows * kHeads * kDim), s_a, NAN);
  const Numbers v_b = Emptied(Random(kRows * kHeads * kDim), s_b, NAN);
  const Placed v(device(), dtype(), {kRows, kHeads, kDim}), s(device(), kFloat32, {kRows, kHeads});
  Get(names::kMergeState)(Values(v_a).tensor(), Sums(s_a).tensor(), Values(v_b).tensor(),
                          Sums(s_b).tensor(), v.tensor(), s.tensor());
  Expect(v_a, s_a, v_b, s_b, v.Read(), s.Read());
  EXPECT_TRUE(v.GuardsAreIntact() && s.GuardsAreIntact());
}

TEST_P(Merge, InPlace) {
  SKIP_IF(MissingUnit({"merge_state"}));
  const Numbers s_a = RandomSums(0), s_b = RandomSums(2);
  const Numbers v_a = Emptied(Random(kRows * kHeads * kDim), s_a, NAN);
  const Numbers v_b = Emptied(Random(kRows * kHeads * kDim), s_b, NAN);
  const Placed v = Values(v_a), s = Sums(s_a);
  Get(names::kMergeStateInPlace)(v.tensor(), s.tensor(), Values(v_b).tensor(), Sums(s_b).tensor());
  Expect(v_a, s_a, v_b, s_b, v.Read(), s.Read());
}

TEST_P(Merge, EmptyWithEmpty) {
  SKIP_IF(MissingUnit({"merge_state"}));
  const Numbers zeros(64, 0.f), none{-INFINITY};
  const Placed v(device(), dtype(), {1, 1, 64}, zeros), s(device(), kFloat32, {1, 1}, none);
  const Placed v_b(device(), dtype(), {1, 1, 64}, zeros), s_b(device(), kFloat32, {1, 1}, none);
  const Placed merged_v(device(), dtype(), {1, 1, 64}), merged_s(device(), kFloat32, {1, 1});
  Get(names::kMergeState)(v.tensor(), s.tensor(), v_b.tensor(), s_b.tensor(), merged_v.tensor(),
                          merged_s.tensor());
  Get(names::kMergeStateInPlace)(v.tensor(), s.tensor(), v_b.tensor(), s_b.tensor());
  EXPECT_EQ(merged_v.Read(), zeros);
  EXPECT_EQ(merged_s.Read(), none);
  EXPECT_EQ(v.Read(), zeros);
  EXPECT_EQ(s.Read(), none);
}

// Any number of states a row; some have no keys, and some rows are of such states alone.
TEST_P(Merge, ManyStates) {
  SKIP_IF(MissingUnit({"merge_many_states"}));
  for (int64_t states : {1, 2, 7}) {
    const int64_t sums = kRows * states * kHeads;
    Numbers v = Random(sums * kDim), s = Normal(sums, kFloat32, &generator);
    for (int64_t i = 0; i < sums; ++i) {
      s[i] *= 20;
      if (i % 3 == 0 || i / (states * kHeads) == 4) s[i] = -INFINITY;
      if (std::isinf(s[i])) std::fill_n(v.begin() + i * kDim, kDim, NAN);
    }
    const Placed merged_v(device(), dtype(), {kRows, kHeads, kDim});
    const Placed merged_s(device(), kFloat32, {kRows, kHeads});
    Get(names::kMergeStates)(Placed(device(), dtype(), {kRows, states, kHeads, kDim}, v).tensor(),
                             Placed(device(), kFloat32, {kRows, states, kHeads}, s).tensor(),
                             merged_v.tensor(), merged_s.tensor());
    const Numbers got_v = merged_v.Read(), got_s = merged_s.Read();
    Worst worst(dtype());
    for (int64_t at = 0; at < kRows * kHeads; ++at) {
      std::vector<double> exact(kDim, 0.0), magnitude(kDim, 0.0);
      double sum = -INFINITY;
      for (int64_t j = 0; j < states; ++j) {
        const int64_t i = (at / kHeads * states + j) * kHeads + at % kHeads;
        const std::vector<double> state(v.begin() + i * kDim, v.begin() + (i + 1) * kDim);
        std::tie(exact, sum) = native::Merge(exact, sum, state, s[i]);
        for (int64_t k = 0; k < kDim && std::isfinite(s[i]); ++k) {
          magnitude[k] = std::max(magnitude[k], std::fabs(state[k]));
        }
      }
      if (std::isinf(sum)) {
        EXPECT_EQ(got_s[at], -INFINITY) << "state " << at;
      } else {
        worst.Compare(got_s[at], sum, 1e-5 * (1 + std::fabs(sum)), "LSE of ", at);
      }
      for (int64_t k = 0; k < kDim; ++k) {
        worst.Compare(got_v[at * kDim + k], exact[k],
                      RoundingBound(exact[k], dtype()) + 2e-5 * magnitude[k],
                      "element " + std::to_string(k) + " of state ", at);
      }
    }
    EXPECT_TRUE(worst.IsWithinBounds()) << states << " states: " << worst.text();
  }
}

// A cascade: attention over parts of the keys, merged in a row, is attention over all of them.
TEST_P(Merge, PartsOfTheKeysGiveTheWhole) {
  SKIP_IF(MissingUnit({"merge_state", Unit("batch_attention", dtype(), 64)}));
  if (Same(dtype(), kFloat32) && GetParam().is_cuda()) {
    GTEST_SKIP() << "CUDA attention has no float32 kernels";
  }
  Spec spec;
  spec.qo_lens = {5, 2};
  spec.kv_lens = {60, 90};
  const Batch whole(spec, GetParam(), &generator);
  const int cuts[][4] = {{0, 13, 13, 60}, {0, 1, 50, 90}};  // of each request: three parts
  std::vector<State> parts;
  for (int part = 0; part < 3; ++part) {
    Spec some = spec;
    for (int b = 0; b < 2; ++b) some.kv_lens[b] = cuts[b][part + 1] - cuts[b][part];
    Batch batch(some, GetParam(), &generator);
    batch.q = whole.q;
    const int token = spec.num_kv_heads * spec.head_dim;
    for (int b = 0; b < 2; ++b) {
      const auto cut = [&](const Numbers& all) {
        return Numbers(all.begin() + cuts[b][part] * token,
                       all.begin() + cuts[b][part + 1] * token);
      };
      batch.keys[b] = cut(whole.keys[b]);
      batch.values[b] = cut(whole.values[b]);
    }
    parts.push_back(batch.BoundRaggedPrefill());
  }
  for (int part = 1; part < 3; ++part) {
    Get(names::kMergeStateInPlace)(parts[0].o.tensor(), parts[0].lse.tensor(),
                                   parts[part].o.tensor(), parts[part].lse.tensor());
  }
  whole.Expect(parts[0], "three parts");
}

TEST_P(Merge, SinksOfAFinishedState) {
  SKIP_IF(MissingUnit({"apply_sinks"}));
  const Numbers s = RandomSums(1), sinks{-INFINITY, 0.5f, 12.f};
  const Numbers v = Emptied(Random(kRows * kHeads * kDim), s, 0.f);
  const Placed o = Values(v), lse = Sums(s);
  Get(names::kApplyAttentionSinks)(o.tensor(), lse.tensor(),
                                   Placed(device(), kFloat32, {kHeads}, sinks).tensor());
  const Numbers got_o = o.Read(), got_lse = lse.Read();
  Worst worst(dtype());
  for (int64_t i = 0; i < kRows * kHeads; ++i) {
    // A sink is a state of its own, whose values are zeros.
    const std::vector<double> row(v.begin() + i * kDim, v.begin() + (i + 1) * kDim);
    const auto [exact, sum] = native::Merge(row, s[i], std::vector<double>(kDim, 0.0),
                                            static_cast<double>(sinks[i % kHeads]) * kLog2E);
    if (std::isinf(sum)) {
      EXPECT_EQ(got_lse[i], -INFINITY);
    } else {
      worst.Compare(got_lse[i], sum, 1e-5 * (1 + std::fabs(sum)), "LSE of ", i);
    }
    for (int64_t j = 0; j < kDim; ++j) {
      const double bound = RoundingBound(exact[j], dtype()) + 1e-5 * std::fabs(row[j]);
      worst.Compare(got_o[i * kDim + j], exact[j], bound, "an element of row ", i);
    }
  }
  EXPECT_TRUE(worst.IsWithinBounds()) << worst.text();
}

RUN_ON_DEVICES(Merge, kAttentionOnCPU, kMovesOnCUDA);

}  // namespace
}  // namespace native

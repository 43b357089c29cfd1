// Norms and gated activations: functions of one row.
#include "fixture.h"
#include "worst.h"

namespace native {
namespace {

class Norms : public OnDevice {
 protected:
  static constexpr int64_t kRows = 5, kHeads = 3;

  /*! \brief Bound of y * weight / norm: the sum of squares is in float32, the result rounded once.
   */
  double BoundFor(double exact) const {
    return RoundingBound(exact, dtype()) + 2e-6 * std::fabs(exact);
  }

  /*! \brief y / sqrt(mean(y^2) + eps) * weight, for rows of weight.size() elements. */
  void Expect(const Numbers& got, const Numbers& y, const Numbers& weight, double offset,
              const std::string& what) {
    Worst worst(dtype());
    const size_t d = weight.size();
    for (size_t row = 0; row < y.size() / d; ++row) {
      double squares = 0;
      for (size_t i = 0; i < d; ++i) squares += std::pow(static_cast<double>(y[row * d + i]), 2);
      const double norm = std::sqrt(squares / static_cast<double>(d) + kEpsilon);
      for (size_t i = 0; i < d; ++i) {
        const double exact = y[row * d + i] / norm * (weight[i] + offset);
        worst.Compare(got[row * d + i], exact, BoundFor(exact),
                      what + ", element " + std::to_string(i) + " of row ", static_cast<int>(row));
      }
    }
    EXPECT_TRUE(worst.IsWithinBounds()) << worst.text();
  }

  static constexpr double kEpsilon = 1e-3;
};

TEST_P(Norms, OfRows) {
  SKIP_IF(MissingUnit({"norm_rows"}));
  const struct {
    const char* name;
    double offset;
  } cases[] = {{names::kRMSNorm, 0}, {names::kGemmaRMSNorm, 1}};
  for (const auto& [name, offset] : cases) {
    for (int64_t d : {1, 8, 100, 129, 4096}) {
      const Numbers x = Random(kRows * d), weight = Random(d);
      const Placed out(device(), dtype(), {kRows, d});
      Get(name)(Placed(device(), dtype(), {kRows, d}, x).tensor(),
                Placed(device(), dtype(), {d}, weight).tensor(), kEpsilon, out.tensor());
      EXPECT_TRUE(out.GuardsAreIntact());
      Expect(out.Read(), x, weight, offset, std::string(name) + " of " + std::to_string(d));
    }
  }
}

// Of each head of the queries in a fused projection, in place; the other heads stay.
TEST_P(Norms, OfHeadsInPlace) {
  SKIP_IF(MissingUnit({"norm_rows"}));
  const int64_t d = 64, all_heads = kHeads + 2;
  const Numbers fused = Random(kRows * all_heads * d), weight = Random(d);
  const Placed placed(device(), dtype(), {kRows, all_heads, d}, fused);
  const Tensor heads = placed.View({kRows, kHeads, d}, {all_heads * d, d, 1}, d);
  Get(names::kRMSNorm)(heads, Placed(device(), dtype(), {d}, weight).tensor(), kEpsilon, heads);
  const Numbers got = placed.Read();
  for (int64_t row = 0; row < kRows; ++row) {
    for (int64_t head = 0; head < all_heads; ++head) {
      const auto part = [&](const Numbers& from) {
        const auto first = from.begin() + (row * all_heads + head) * d;
        return Numbers(first, first + d);
      };
      if (head == 0 || head == all_heads - 1) {
        EXPECT_EQ(part(got), part(fused)) << "head " << head;
      } else {
        Expect(part(got), part(fused), weight, 0, "head " + std::to_string(head));
      }
    }
  }
}

TEST_P(Norms, OfASumThatIsStored) {
  SKIP_IF(MissingUnit({"norm_rows"}));
  const int64_t d = 200;
  const struct {
    const char* name;
    double offset;
  } cases[] = {{names::kFusedAddRMSNorm, 0}, {names::kGemmaFusedAddRMSNorm, 1}};
  for (const auto& [name, offset] : cases) {
    const Numbers x = Random(kRows * d), residual = Random(kRows * d), weight = Random(d);
    const Placed out(device(), dtype(), {kRows, d}), sum(device(), dtype(), {kRows, d}, residual);
    Get(name)(Placed(device(), dtype(), {kRows, d}, x).tensor(), sum.tensor(),
              Placed(device(), dtype(), {d}, weight).tensor(), kEpsilon, out.tensor(),
              sum.tensor());
    Numbers stored;
    for (size_t i = 0; i < x.size(); ++i) {
      stored.push_back(
          static_cast<float>(Rounded(static_cast<double>(x[i]) + residual[i], dtype())));
    }
    EXPECT_EQ(sum.Read(), stored);
    Expect(out.Read(), stored, weight, offset, name);
  }
}

TEST_P(Norms, GatedActivations) {
  SKIP_IF(MissingUnit({"gate_rows"}));
  const struct {
    const char* name;
    double (*function)(double);
  } cases[] = {
      {names::kSiluAndMul, [](double x) { return x / (1 + std::exp(-x)); }},
      {names::kGeluAndMul, [](double x) { return x * (1 + std::erf(x / std::sqrt(2.0))) / 2; }},
      {names::kGeluTanhAndMul, [](double x) {
         return x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x))) / 2;
       }}};
  for (const auto& [name, function] : cases) {
    for (int64_t d : {1, 64, 130}) {
      Numbers x = Random(kRows * 2 * d);
      for (float& number : x) number *= 4;  // exact, and far enough for both ends
      const Placed out(device(), dtype(), {kRows, d});
      Get(name)(Placed(device(), dtype(), {kRows, 2 * d}, x).tensor(), out.tensor());
      EXPECT_TRUE(out.GuardsAreIntact());
      const Numbers got = out.Read();
      Worst worst(dtype());
      for (int64_t row = 0; row < kRows; ++row) {
        for (int64_t i = 0; i < d; ++i) {
          const double gate = x[row * 2 * d + i], factor = x[row * 2 * d + d + i];
          const double exact = function(gate) * factor;
          // Where 1 and a tail cancel, what float32 keeps of the tail is a part of the gate.
          const double bound =
              (RoundingError(dtype()) + 2e-6) * std::fabs(exact) + 5e-7 * std::fabs(gate * factor);
          worst.Compare(got[row * d + i], exact, bound, std::string(name) + ", row ",
                        static_cast<int>(row));
        }
      }
      EXPECT_TRUE(worst.IsWithinBounds()) << worst.text();
    }
  }
}

RUN_ON_DEVICES(Norms, kAttentionOnCPU, kMovesOnCUDA);

}  // namespace
}  // namespace native

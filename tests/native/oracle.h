// What the functions must compute: loops in double precision, without a line of the library.
#ifndef TESTS_NATIVE_ORACLE_H_
#define TESTS_NATIVE_ORACLE_H_

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <utility>
#include <vector>

namespace native {

constexpr double kLog2E = 1.4426950408889634;

/*! \brief What one head of one row attends to: its keys and values, whether it sees them. */
struct RowInput {
  const float* query;
  int head_dim_qk;
  int head_dim_vo;
  int num_keys;
  double sm_scale;
  std::function<const float*(int)> key;
  std::function<const float*(int)> value;
  std::function<bool(int)> sees;
  double soft_cap = 0;
  double sink = -INFINITY;
};

struct RowResult {
  std::vector<double> o;
  double lse = -INFINITY;
  /*! \brief The sums of weight * |value|: what errors of the weights are relative to. */
  std::vector<double> magnitude;
  /*! \brief The largest |value|, and the number of keys seen. */
  double largest = 0;
  int seen = 0;
  /*! \brief The largest sum over i of |query_i * key_i| * sm_scale. */
  double score_magnitude = 0;
};

/*! \brief Attention of one head of one row. One that sees no key gets 0 and -inf. */
inline RowResult Attend(const RowInput& in) {
  RowResult result;
  result.o.assign(in.head_dim_vo, 0.0);
  result.magnitude.assign(in.head_dim_vo, 0.0);
  std::vector<std::pair<int, double>> scores;
  double top = in.sink;
  for (int j = 0; j < in.num_keys; ++j) {
    if (!in.sees(j)) continue;
    const float* key = in.key(j);
    double score = 0, magnitude = 0;
    for (int i = 0; i < in.head_dim_qk; ++i) {
      const double product = static_cast<double>(in.query[i]) * key[i];
      score += product;
      magnitude += std::fabs(product);
    }
    score *= in.sm_scale;
    result.score_magnitude = std::max(result.score_magnitude, magnitude * in.sm_scale);
    if (in.soft_cap > 0) score = in.soft_cap * std::tanh(score / in.soft_cap);
    scores.emplace_back(j, score);
    top = std::max(top, score);
  }
  result.seen = static_cast<int>(scores.size());
  if (std::isinf(top)) return result;
  double sum = std::exp(in.sink - top);
  for (const auto& [j, score] : scores) {
    const double weight = std::exp(score - top);
    const float* value = in.value(j);
    sum += weight;
    for (int i = 0; i < in.head_dim_vo; ++i) {
      result.o[i] += weight * value[i];
      result.magnitude[i] += weight * std::fabs(value[i]);
      result.largest = std::max(result.largest, std::fabs(static_cast<double>(value[i])));
    }
  }
  for (int i = 0; i < in.head_dim_vo; ++i) {
    result.o[i] /= sum;
    result.magnitude[i] /= sum;
  }
  result.lse = top * kLog2E + std::log2(sum);
  return result;
}

/*!
 * \brief How far element i may be off: weights and the output are rounded to the dtype, whose
 * largest relative error is u; in float16 small weights lose bits besides; sums are in float32.
 */
inline double BoundOf(const RowResult& row, int i, double u, bool is_float16) {
  const double sums = 1e-6 * (10 + row.score_magnitude);
  const double small = is_float16 ? (row.seen * row.largest + 1) * 0x1p-25 : 0;
  return (3 * u + sums) * row.magnitude[i] + small + 1e-30;
}

inline double LseBoundOf(const RowResult& row, double u) {
  return 1.5 * u + 1e-5 + 1e-6 * (row.score_magnitude + std::fabs(row.lse));
}

/*! \brief Whether row i of qo_len sees key j of kv_len, aligned at the ends. */
inline bool Sees(int i, int qo_len, int j, int kv_len, bool causal, int window_left) {
  const int diagonal = i + kv_len - qo_len;
  return (!causal || j <= diagonal) && (window_left < 0 || j >= diagonal - window_left);
}

/*! \brief Two states over disjoint keys; two empty ones give 0 and -inf. */
inline std::pair<std::vector<double>, double> Merge(const std::vector<double>& a, double lse_a,
                                                    const std::vector<double>& b, double lse_b) {
  std::vector<double> merged(a.size(), 0.0);
  const double top = std::max(lse_a, lse_b);
  if (std::isinf(top)) return {merged, top};
  const double weight_a = std::exp2(lse_a - top), weight_b = std::exp2(lse_b - top);
  for (size_t i = 0; i < a.size(); ++i) {
    if (weight_a > 0) merged[i] += weight_a * a[i];
    if (weight_b > 0) merged[i] += weight_b * b[i];
    merged[i] /= weight_a + weight_b;
  }
  return {merged, top + std::log2(weight_a + weight_b)};
}

/*! \brief RoPE as a model's configuration names it. */
struct Rope {
  enum Scaling { kNone, kInterleaved, kLinear, kLlama3, kYarn, kLongrope };
  Scaling scaling = kNone;
  int rotary_dim;
  double theta = 10000;
  double scale = 1;
  double factor = 1;
  double original_length = 0;
  double max_length = 0;
  double low_freq_factor = 0;
  double high_freq_factor = 0;
  double beta_fast = 0;
  double beta_slow = 0;
  std::vector<float> factors;  // of longrope, one a pair
};

/*! \brief The frequency of dimension i of rotary_dim; i and its partner have the same but in yarn.
 */
inline double FrequencyOf(const Rope& rope, int i) {
  const int dim = rope.rotary_dim;
  const int pair = rope.scaling == Rope::kInterleaved ? i / 2 : i % (dim / 2);
  const double plain = std::pow(rope.theta, -2.0 * pair / dim);
  if (rope.scaling == Rope::kLinear) return plain / rope.factor;
  if (rope.scaling == Rope::kLongrope) return plain / rope.factors[pair];
  if (rope.scaling == Rope::kLlama3) {
    const double rotations = rope.original_length * plain / (2 * M_PI);
    if (rotations <= rope.low_freq_factor) return plain / rope.factor;
    if (rotations >= rope.high_freq_factor) return plain;
    const double keep =
        (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor);
    return (1 - keep) * plain / rope.factor + keep * plain;
  }
  if (rope.scaling == Rope::kYarn) {
    // The dimension at which a number of rotations fits into the original length.
    const auto dimension_of = [&](double rotations) {
      return dim * std::log(rope.original_length / (rotations * 2 * M_PI)) /
             (2 * std::log(rope.theta));
    };
    const double low = std::max(dimension_of(rope.beta_fast), 0.0);
    const double high = std::min(dimension_of(rope.beta_slow), dim - 1.0);
    const double ramp =
        std::min(std::max((i - low) / (low == high ? 0.001 : high - low), 0.0), 1.0);
    return plain / rope.factor * ramp + plain * (1 - ramp);
  }
  return plain;
}

/*! \brief Longrope makes sines and cosines larger, by how much the length has grown. */
inline double MagnitudeOf(const Rope& rope) {
  if (rope.scaling != Rope::kLongrope || rope.max_length <= rope.original_length) return 1;
  return std::sqrt(1 + std::log(rope.max_length / rope.original_length) /
                           std::log(rope.original_length));
}

/*! \brief One head at a position; dimensions from rotary_dim on stay. */
inline std::vector<double> Rotate(const float* head, int head_dim, double position,
                                  const Rope& rope) {
  std::vector<double> rotated(head, head + head_dim);
  const int dim = rope.rotary_dim;
  for (int i = 0; i < dim; ++i) {
    const bool is_first = rope.scaling == Rope::kInterleaved ? i % 2 == 0 : i < dim / 2;
    const int step = rope.scaling == Rope::kInterleaved ? 1 : dim / 2;
    const double other = is_first ? -static_cast<double>(head[i + step]) : head[i - step];
    const double angle = position * rope.scale * FrequencyOf(rope, i);
    rotated[i] = MagnitudeOf(rope) * (head[i] * std::cos(angle) + other * std::sin(angle));
  }
  return rotated;
}

}  // namespace native

#endif  // TESTS_NATIVE_ORACLE_H_

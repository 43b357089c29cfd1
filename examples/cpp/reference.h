// Attention as plain loops in double precision, to compare with.
#ifndef EXAMPLES_CPP_REFERENCE_H_
#define EXAMPLES_CPP_REFERENCE_H_

#include <algorithm>
#include <cmath>
#include <vector>

namespace example {

/*! \brief One head of a row: a query against its keys, all of `dim` numbers. */
inline std::vector<double> Attend(const std::vector<double>& query,
                                  const std::vector<std::vector<double>>& keys,
                                  const std::vector<std::vector<double>>& values) {
  const size_t dim = query.size();
  std::vector<double> scores;
  for (const auto& key : keys) {
    double score = 0;
    for (size_t i = 0; i < dim; ++i) score += query[i] * key[i];
    scores.push_back(score / std::sqrt(static_cast<double>(dim)));
  }
  const double largest = *std::max_element(scores.begin(), scores.end());
  double sum = 0;
  std::vector<double> output(dim, 0.0);
  for (size_t j = 0; j < keys.size(); ++j) {
    const double weight = std::exp(scores[j] - largest);
    sum += weight;
    for (size_t i = 0; i < dim; ++i) output[i] += weight * values[j][i];
  }
  for (double& value : output) value /= sum;
  return output;
}

/*! \brief RoPE of one head at a position, in the order of Llama: i goes with i + dim / 2. */
inline std::vector<double> Rotate(const std::vector<double>& head, int position, double theta) {
  const size_t half = head.size() / 2;
  std::vector<double> rotated(head.size());
  for (size_t i = 0; i < half; ++i) {
    const double angle = position * std::pow(theta, -static_cast<double>(i) / half);
    rotated[i] = head[i] * std::cos(angle) - head[i + half] * std::sin(angle);
    rotated[i + half] = head[i + half] * std::cos(angle) + head[i] * std::sin(angle);
  }
  return rotated;
}

}  // namespace example

#endif  // EXAMPLES_CPP_REFERENCE_H_

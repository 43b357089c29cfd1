// Rotary frequencies from a model's RoPE settings.
#ifndef TVM_FLASHINFER_OPS_ROPE_FREQUENCIES_H_
#define TVM_FLASHINFER_OPS_ROPE_FREQUENCIES_H_

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

struct RopeFrequencies {
  /*! \brief The angle of pair i at position p is p * inv_freq[i]. */
  std::vector<float> inv_freq;
  /*! \brief Those of the second elements of pairs; empty when they are the same. */
  std::vector<float> inv_freq_second;
  /*! \brief Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2). */
  bool interleaved;
  /*! \brief Factor of sines and cosines. */
  float magnitude;

  const float* second() const { return inv_freq_second.empty() ? nullptr : inv_freq_second.data(); }
};

/*!
 * \brief Frequencies of `rope_scaling`, a JSON object as in a model's configuration.
 *
 * No `rope_type`, "default" and "gptj" use theta alone; "llama3" takes factor, low_freq_factor,
 * high_freq_factor and original_max_position_embeddings; "linear" takes factor; "yarn" takes
 * factor, original_max_position_embeddings, beta_fast and beta_slow, and inv_theta_log_scale if it
 * is not 1 / (2 ln theta); "longrope" takes max_position_embeddings and
 * original_max_position_embeddings. A type that is not served raises ValueError. The formulas are
 * those of TVM's position_embedding.py.
 *
 * \param ext_factors rotary_dim / 2 divisors of the frequencies, which longrope needs; else null.
 */
RopeFrequencies MakeRopeFrequencies(const Checker& check, double theta, double scale,
                                    int64_t rotary_dim, const std::string& rope_scaling,
                                    const float* ext_factors = nullptr);

/*! \brief Whether the frequencies need a table of factors, which only a call brings. */
bool NeedsExtFactors(const Checker& check, const std::string& rope_scaling);

/*!
 * \brief Frequencies for calls that bring theta and scale; made once for each pair of them.
 *
 * A cache has two pairs at most: TVM's for its layers, and (10000, 1) for layers with a window.
 */
class RopeFrequencyCache {
 public:
  explicit RopeFrequencyCache(std::string rope_scaling) : rope_scaling_(std::move(rope_scaling)) {}

  std::shared_ptr<const RopeFrequencies> Get(const Checker& check, double theta, double scale,
                                             int64_t rotary_dim);

 private:
  struct Entry {
    double theta;
    double scale;
    int64_t rotary_dim;
    std::shared_ptr<const RopeFrequencies> frequencies;
  };

  const std::string rope_scaling_;
  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_ROPE_FREQUENCIES_H_

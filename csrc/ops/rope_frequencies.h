// Rotary frequencies from a model's RoPE settings.
#ifndef TVM_FLASHINFER_OPS_ROPE_FREQUENCIES_H_
#define TVM_FLASHINFER_OPS_ROPE_FREQUENCIES_H_

#include <string>
#include <vector>

#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

struct RopeFrequencies {
  /*! \brief The angle of pair i at position p is p * inv_freq[i]. */
  std::vector<float> inv_freq;
  /*! \brief Pairs are (2 i, 2 i + 1) instead of (i, i + rotary_dim / 2). */
  bool interleaved;
};

/*!
 * \brief Frequencies of `rope_scaling`, a JSON object as in a model's configuration.
 *
 * No `rope_type`, "default" and "gptj" use theta alone; "llama3" takes factor, low_freq_factor,
 * high_freq_factor and original_max_position_embeddings; "linear" takes factor. A type that is not
 * served raises ValueError. The formulas are those of TVM's position_embedding.py.
 */
RopeFrequencies MakeRopeFrequencies(const Checker& check, double theta, double scale,
                                    int64_t rotary_dim, const std::string& rope_scaling);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_ROPE_FREQUENCIES_H_

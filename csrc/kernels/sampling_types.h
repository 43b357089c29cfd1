// What the kernels of sampling are given, besides SampleArgs of types.h. All probabilities are
// float32; NaN counts as 0, and so does what is below the smallest normal number.
#ifndef TVM_FLASHINFER_KERNELS_SAMPLING_TYPES_H_
#define TVM_FLASHINFER_KERNELS_SAMPLING_TYPES_H_

#include "types.h"

namespace tvm_flashinfer {
namespace kernels {

/*!
 * \brief Which tokens of a row are kept: those with at least the probability t, the largest of
 *   t_k, the largest one that top_k[row] tokens reach; all are kept where top_k[row] <= 0;
 *   t_p, the largest one that tokens reach whose sum is top_p[row] at least, or with joint false
 *     that part of the sum of what t_k keeps; all are kept where no sum is;
 *   t_min, min_p[row] times the largest probability.
 * Tokens as probable as the last one that is kept are kept too, and the most probable one is
 * always.
 */
struct TokenFilter {
  const int32_t* top_k;  // each (num_rows,), or null
  const float* top_p;
  const float* min_p;
  bool joint;
};

/*! \brief Rows to draw from: sample i from row row_indices[i] by the number uniform[i]. */
struct Draws {
  int64_t num_samples;
  const float* uniform;
  const int32_t* row_indices;
  int32_t* ids;
};

/*!
 * \brief Draw from what is left of probs (num_rows, vocab_size): ids[i] is the first kept token at
 * which the running sum of kept ones is above uniform[i] times their sum; the last kept one where
 * no sum is, and -1 for a row without one and for one that does not exist.
 */
struct FilterDrawArgs {
  int64_t num_rows;
  int32_t vocab_size;
  const float* probs;
  TokenFilter filter;
  Draws draws;
};

/*! \brief out = what is left of probs, over its sum; 0 for the other tokens. */
struct FilterRenormArgs {
  int64_t num_rows;
  int32_t vocab_size;
  const float* probs;
  TokenFilter filter;
  float* out;
};

/*!
 * \brief Rows in descending order, of which the first tokens are kept: up to the first at which the
 * running sum is top_p[row] at least, and top_k[row] at most, one at least.
 *
 * With probs null tokens are drawn as in FilterDrawArgs, in the order of the row, and their numbers
 * are those of sorted_indices. Else out is probs where it is at least the last kept probability,
 * over their sum, and 0 elsewhere.
 */
struct SortedArgs {
  int64_t num_rows;
  int32_t vocab_size;
  const float* sorted_probs;
  const int32_t* sorted_indices;
  const float* top_p;
  const int32_t* top_k;
  Draws draws;
  const float* probs;
  float* out;
};

/*!
 * \brief out = softmax(logits / temperature) over the first active_size tokens, 0 for the others.
 * With a temperature of 1e-5 or less the tokens with the largest logit share 1.
 */
struct SoftmaxArgs {
  int64_t num_rows;
  int32_t vocab_size;
  int32_t active_size;
  const float* logits;
  const float* temperature;
  float* out;
};

/*!
 * \brief Verification of a chain of drafts: draft_ids (batch_size, num_drafts), drawn from
 * draft_probs (batch_size, num_drafts, vocab_size), against target_probs (batch_size, num_drafts +
 * 1, vocab_size).
 *
 * Draft i is accepted while uniform[b][i] * draft_prob < target_prob of its token. After the last
 * accepted one a token is drawn by uniform[b][num_drafts]: from max(target - draft, 0) of the
 * position that was refused (from target, should that be 0 everywhere), or from the last target.
 * ids (batch_size, num_drafts + 1) are the accepted ones, then that token, then -1.
 */
struct SpeculativeArgs {
  int32_t batch_size;
  int32_t num_drafts;
  int32_t vocab_size;
  const float* draft_probs;
  const int32_t* draft_ids;
  const float* target_probs;
  const float* uniform;  // (batch_size, num_drafts + 1)
  int32_t* ids;
  int32_t* num_accepted;  // (batch_size,)
};

}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_SAMPLING_TYPES_H_

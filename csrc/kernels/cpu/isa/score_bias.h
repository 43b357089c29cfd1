// Numbers that a model adds to its scores, one for every row and key.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_SCORE_BIAS_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_SCORE_BIAS_H_

#include "../attention_block.h"
#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

TFI_INLINE bool HasBias(const AttentionBlock& block) {
  return block.extras != nullptr && block.extras->args.bias.data != nullptr;
}

/*!
 * \brief The bias of one row of the block and of count keys from `begin` on, kKeyTile at most; up
 * to whole vectors there is 0.
 */
void ReadBias(const AttentionBlock& block, int64_t row, int64_t begin, int64_t count, float* out) {
  const ScoreBias& bias = block.extras->args.bias;
  const int64_t query = row / block.group, head = block.first_head + row % block.group;
  const int64_t first = block.request / bias.heads_as_requests * bias.stride_sequence +
                        (block.request % bias.heads_as_requests + head) * bias.stride_head +
                        query * bias.stride_row + begin * bias.stride_key;
  DispatchFloat(bias.dtype, [&](auto element) {
    typedef decltype(element) Element;
    const auto* p = static_cast<const typename Element::Raw*>(bias.data) + first;
    if (bias.stride_key == 1) {
      LoadRow<Element>(p, count, out);
      return;
    }
    typename Element::Raw keys[kKeyTile];
    for (int64_t i = 0; i < count; ++i) keys[i] = p[i * bias.stride_key];
    LoadRow<Element>(keys, count, out);
  });
}

/*! \brief Add it to the scores of the row, of which there are `padded`, a multiple of kLanes. */
void AddBiasToRow(const AttentionBlock& block, int64_t row, int64_t begin, int64_t count,
                  int64_t padded, float* s) {
  float bias[kKeyTile];
  ReadBias(block, row, begin, count, bias);
  for (int64_t i = 0; i < padded; i += kLanes) Store(s + i, Load(s + i) + Load(bias + i));
}

/*! \brief The same for num_rows rows from `row` on, s being (count, width). */
void AddBiasToPanel(const AttentionBlock& block, int64_t row, int64_t num_rows, int64_t begin,
                    int64_t count, int64_t width, float* s) {
  for (int64_t r = 0; r < num_rows; ++r) {
    float bias[kKeyTile];
    ReadBias(block, row + r, begin, count, bias);
    for (int64_t i = 0; i < count; ++i) s[i * width + r] += bias[i];
  }
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_SCORE_BIAS_H_

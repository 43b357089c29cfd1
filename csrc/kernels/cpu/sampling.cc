// Draws from rows of probabilities.
#include "kernels.h"
#include "thread_pool.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace {

int32_t Draw(const float* probs, int32_t size, float uniform) {
  double sum = 0;
  int32_t last = -1;
  for (int32_t i = 0; i < size; ++i) {
    if (!(probs[i] > 0)) continue;  // NaN too
    sum += probs[i];
    last = i;
    if (sum > uniform) break;
  }
  return last;
}

}  // namespace

void SampleFromProbs(const SampleArgs& args) {
  ParallelFor(args.num_samples, 1.0 * args.num_samples * args.vocab_size, [&](int64_t i) {
    const int32_t row = args.row_indices[i];
    const bool exists = row >= 0 && row < args.num_rows;
    const float* probs = args.probs + static_cast<int64_t>(row) * args.vocab_size;
    args.ids[i] = exists ? Draw(probs, args.vocab_size, args.uniform[i]) : -1;
  });
}

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

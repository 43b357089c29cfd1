// Merge of states, sinks, and split of QKV with rotary embedding: rows that know nothing of each
// other.
#include <algorithm>

#include "kernel_table.h"
#include "kernels.h"
#include "thread_pool.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace {

/*! \brief Call function(begin, end) for ranges of at most rows_per_item rows. */
template <typename Function>
void ParallelForRanges(int64_t num_rows, double cost_ns_per_row, const Function& function) {
  constexpr double kItemCostNs = 10e3;
  const int64_t rows_per_item = std::max<int64_t>(1, kItemCostNs / cost_ns_per_row);
  const int64_t count = (num_rows + rows_per_item - 1) / rows_per_item;
  ParallelFor(count, num_rows * cost_ns_per_row, [&](int64_t i) {
    function(i * rows_per_item, std::min(num_rows, (i + 1) * rows_per_item));
  });
}

}  // namespace

void MergeState(const MergeStateArgs& args) {
  const double cost_ns = 20 + 0.2 * args.head_dim;
  const KernelTable& kernels = ActiveKernels();
  ParallelForRanges(args.num_rows * args.num_heads, cost_ns,
                    [&](int64_t begin, int64_t end) { kernels.merge_states(args, begin, end); });
}

void ApplySinks(const ApplySinksArgs& args) {
  const double cost_ns = 20 + 0.2 * args.head_dim;
  const KernelTable& kernels = ActiveKernels();
  ParallelForRanges(args.num_rows * args.num_heads, cost_ns,
                    [&](int64_t begin, int64_t end) { kernels.apply_sinks(args, begin, end); });
}

void SplitQKVRotary(const SplitRotaryArgs& args) {
  const int64_t num_heads = args.num_qo_heads + 2 * static_cast<int64_t>(args.num_kv_heads);
  const double cost_ns = 2.0 * args.rotary_dim + num_heads * (5 + 0.15 * args.head_dim);
  const KernelTable& kernels = ActiveKernels();
  ParallelForRanges(args.num_rows, cost_ns,
                    [&](int64_t begin, int64_t end) { kernels.split_rotary(args, begin, end); });
}

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

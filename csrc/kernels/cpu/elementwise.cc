// Merge of states, sinks, norms, activations and rotary embedding: rows that know nothing of each
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

void NormRows(const NormArgs& args) {
  const double cost_ns = 20 + 0.3 * args.dim;
  const KernelTable& kernels = ActiveKernels();
  ParallelForRanges(args.num_rows * args.num_heads, cost_ns,
                    [&](int64_t begin, int64_t end) { kernels.norm_rows(args, begin, end); });
}

void GateRows(const GatedArgs& args) {
  const double cost_ns = 20 + 0.5 * args.dim;
  const KernelTable& kernels = ActiveKernels();
  ParallelForRanges(args.num_rows, cost_ns,
                    [&](int64_t begin, int64_t end) { kernels.gate_rows(args, begin, end); });
}

void MergeManyStates(const MergeStatesArgs& args) {
  const double cost_ns = 20 + args.num_states * (20 + 0.1 * args.head_dim);
  const KernelTable& kernels = ActiveKernels();
  ParallelForRanges(args.num_rows * args.num_heads, cost_ns, [&](int64_t begin, int64_t end) {
    kernels.merge_many_states(args, begin, end);
  });
}

void MoveRotated(const RotaryMoveArgs& args) {
  const int64_t num_heads = int64_t{args.q.num_heads} + args.k.num_heads + args.v.num_heads;
  const double cost_ns = 2.0 * args.rotary_dim + num_heads * (5 + 0.15 * args.head_dim);
  const KernelTable& kernels = ActiveKernels();
  ParallelForRanges(args.num_rows, cost_ns,
                    [&](int64_t begin, int64_t end) { kernels.move_rotated(args, begin, end); });
}

void FindTokenSlots(const TokenSlotsArgs& args) {
  ParallelFor(args.batch_size, 2.0 * args.num_rows, [&](int64_t b) {
    const int64_t first = args.qo_indptr[b], rows = args.qo_indptr[b + 1] - first;
    const int64_t pages = args.page_indptr[b + 1] - args.page_indptr[b];
    const int64_t keys = pages == 0 ? 0 : (pages - 1) * args.page_size + args.last_page_len[b];
    const int32_t* indices = args.page_indices + args.page_indptr[b];
    for (int64_t i = 0; i < rows; ++i) {
      const int64_t position = keys - rows + i;
      args.positions[first + i] = static_cast<int32_t>(position);
      args.slots[first + i] = static_cast<int32_t>(
          int64_t{indices[position / args.page_size]} * args.page_size + position % args.page_size);
    }
  });
}

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

// Prints the schedule of a batch that is read from the standard input, whether prefill on Hopper is
// the faster kernel for it, and whether a copy of its pages would pay. For
// test_prefill_schedule.py.
#include "kernels/cuda/prefill_schedule.h"

#include <iostream>

int main() {
  namespace cuda = tvm_flashinfer::kernels::cuda;
  int32_t num_sm, size, num_qo_heads, num_kv_heads, head_dim, causal, window_left;
  std::cin >> num_sm >> num_qo_heads >> num_kv_heads >> head_dim >> causal >> window_left >> size;
  std::vector<int32_t> qo_indptr{0}, kv_indptr{0}, kv_len(size);
  for (int32_t b = 0, rows; b < size; ++b) {
    std::cin >> rows >> kv_len[b];
    qo_indptr.push_back(qo_indptr.back() + rows);
    kv_indptr.push_back(kv_indptr.back() + kv_len[b]);
  }
  const cuda::PrefillBatch batch{qo_indptr.data(), kv_indptr.data(), kv_len.data(), size,
                                 num_qo_heads,     num_kv_heads,     head_dim,      head_dim,
                                 causal != 0,      window_left};
  const cuda::PrefillSchedule s = cuda::MakePrefillSchedule(num_sm, batch);
  std::cout << cuda::PreferPrefillSM90(num_sm, batch) << " "
            << cuda::PreferCopyOfPages(num_sm, batch) << " " << s.num_groups << "\n";
  // One line for each work of each block: block, head, tile.
  for (int32_t block = 0; block < num_sm; ++block) {
    const int32_t group = block % s.num_groups, member = block / s.num_groups;
    for (int32_t w = s.work_indptr[member]; w < s.work_indptr[member + 1]; ++w) {
      const cuda::PrefillTile& tile = s.tiles[s.work_tile[w]];
      std::cout << block << " " << s.work_head[w] * s.num_groups + group << " " << tile.request
                << " " << tile.index << " " << tile.first_row << " " << tile.num_rows << " "
                << tile.first_page << " " << tile.num_keys << "\n";
    }
  }
}

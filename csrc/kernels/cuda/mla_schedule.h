// The schedule of latent attention: which cluster of blocks works on which rows and keys. Host code
// without CUDA. The kernels are FlashInfer's, and so are the arrays that they read; how the arrays
// are made is not, because FlashInfer's own planner takes for granted what a batch may break.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_MLA_SCHEDULE_H_
#define TVM_FLASHINFER_KERNELS_CUDA_MLA_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <limits>
#include <queue>
#include <stdexcept>
#include <utility>
#include <vector>

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Packed rows (a row of the batch times a head) that one block works on at a time. */
constexpr int kMLATileRows = 64;

/*!
 * \brief Rows of a request that see the same keys, or, under the kernel's causal mask, that see one
 * key more from row to row, the last one all of them.
 */
struct MLAUnit {
  int32_t first_row;
  int32_t num_rows;
  int32_t first_page;  // an index into page_indices
  int32_t num_keys;
};

/*! \brief The arrays that the kernels read. Those of works are in the order of the clusters. */
struct MLASchedule {
  int blocks_per_cluster = 1;
  int num_clusters = 0;
  bool causal = false;  // whether the kernel has to mask
  std::vector<int32_t> work_indptr;
  std::vector<int32_t> first_row, num_rows, first_page, num_keys;
  std::vector<int32_t> tile_start;  // in packed rows from first_row on
  std::vector<int32_t> key_begin, key_end;
  std::vector<int32_t> partial_start;  // -1: the work writes the output itself
  // By block: the packed rows whose parts it merges, where the parts begin and end, and how many
  // packed rows one part has.
  std::vector<int32_t> merge_begin, merge_end, merge_part_begin, merge_part_end, merge_stride;
  int64_t num_partial_rows = 0;
};

/*!
 * \brief The rows of the batch as units.
 *
 * The kernels' causal mask is right only for tiles that hold whole rows of requests with at least
 * as many keys as rows: they round the last key of a tile down, and count the keys of a row that
 * sees none as if it saw all. So rows are grouped to units here that fit a tile each; rows without
 * keys are units of their own; and where a tile does not hold more than one row, every row is a
 * unit with the keys that it sees, which needs no mask.
 */
inline std::vector<MLAUnit> MLAUnits(const int32_t* qo_indptr, const int32_t* page_indptr,
                                     const int32_t* kv_len, int64_t batch_size, int64_t num_heads,
                                     int64_t tile_rows, bool causal) {
  std::vector<MLAUnit> units;
  const int32_t rows_per_tile =
      static_cast<int32_t>(std::max<int64_t>(1, num_heads > 0 ? tile_rows / num_heads : 1));
  for (int64_t b = 0; b < batch_size; ++b) {
    const int32_t first = qo_indptr[b], rows = qo_indptr[b + 1] - first, keys = kv_len[b];
    if (rows == 0) continue;
    if (!causal || rows == 1) {
      units.push_back({first, rows, page_indptr[b], keys});
      continue;
    }
    const int32_t blind = std::max(rows - keys, 0);
    if (blind > 0) units.push_back({first, blind, page_indptr[b], 0});
    for (int32_t begin = blind; begin < rows; begin += rows_per_tile) {
      const int32_t end = std::min(begin + rows_per_tile, rows);
      units.push_back({first + begin, end - begin, page_indptr[b], keys - (rows - end)});
    }
  }
  return units;
}

/*! \brief Keys of a chunk: enough that the work fits the clusters, in sizes that fill key tiles. */
inline int64_t MLAChunk(int64_t keys_per_cluster) {
  if (keys_per_cluster <= 8) return 32;
  if (keys_per_cluster <= 16) return 64;
  if (keys_per_cluster <= 32) return 128;
  if (keys_per_cluster <= 64) return 192;
  const int64_t chunk = (keys_per_cluster + 255) / 256 * 256;
  return std::min<int64_t>(chunk, std::numeric_limits<int32_t>::max() / 256 * 256);
}

inline MLASchedule MakeMLASchedule(int num_sm, const int32_t* qo_indptr, const int32_t* page_indptr,
                                   const int32_t* kv_len, int64_t batch_size, int64_t num_heads,
                                   bool causal) {
  MLASchedule s;
  int64_t requests = 0;
  for (int64_t b = 0; b < batch_size; ++b) requests += qo_indptr[b + 1] > qo_indptr[b];
  const int64_t packed_rows = static_cast<int64_t>(qo_indptr[batch_size]) * num_heads;
  // Two blocks share the keys of a cluster, through the L2 cache, when a request fills both.
  s.blocks_per_cluster = requests > 0 && packed_rows / requests > kMLATileRows ? 2 : 1;
  s.num_clusters = std::max(1, num_sm / s.blocks_per_cluster);
  const int64_t tile_rows = static_cast<int64_t>(kMLATileRows) * s.blocks_per_cluster;
  const std::vector<MLAUnit> units =
      MLAUnits(qo_indptr, page_indptr, kv_len, batch_size, num_heads, tile_rows, causal);

  int64_t total_keys = 0;
  for (const MLAUnit& unit : units) {
    s.causal = s.causal || (causal && unit.num_keys > 0 && unit.num_rows > 1);
    total_keys += (unit.num_rows * num_heads + tile_rows - 1) / tile_rows * unit.num_keys;
  }
  const int64_t chunk = MLAChunk((total_keys + s.num_clusters - 1) / s.num_clusters);

  struct Work {
    MLAUnit unit;
    int32_t tile_start, key_begin, key_end, partial_start;
  };
  std::vector<std::vector<Work>> works(s.num_clusters);
  using Load = std::pair<int64_t, int>;  // cost, cluster
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (int c = 0; c < s.num_clusters; ++c) loads.push({0, c});
  const int num_blocks = s.num_clusters * s.blocks_per_cluster;

  for (const MLAUnit& unit : units) {
    const int64_t unit_rows = unit.num_rows * num_heads;
    for (int64_t start = 0; start < unit_rows; start += tile_rows) {
      const int64_t rows = std::min(tile_rows, unit_rows - start);
      const int64_t keys = unit.num_keys;
      const bool split = keys > chunk;
      if (split) {
        // At most blocks_per_cluster * keys / chunk blocks merge a tile. Since chunk times clusters
        // is at least the sum of keys, all tiles together take no more blocks than there are.
        const int64_t merges = std::max<int64_t>(1, keys * s.blocks_per_cluster / chunk);
        const int64_t merge_rows = (rows + merges - 1) / merges;
        const int64_t first = unit.first_row * num_heads + start;
        const int64_t parts = (keys + chunk - 1) / chunk * rows;
        for (int64_t at = 0; at < rows; at += merge_rows) {
          s.merge_begin.push_back(static_cast<int32_t>(first + at));
          s.merge_end.push_back(static_cast<int32_t>(first + std::min(at + merge_rows, rows)));
          s.merge_part_begin.push_back(static_cast<int32_t>(s.num_partial_rows + at));
          s.merge_part_end.push_back(static_cast<int32_t>(s.num_partial_rows + parts));
          s.merge_stride.push_back(static_cast<int32_t>(rows));
        }
      }
      int64_t begin = 0;
      do {  // a tile without keys is a work too: it writes 0 and -inf
        const int64_t end = std::min(begin + chunk, keys);
        auto [cost, cluster] = loads.top();
        loads.pop();
        loads.push({cost + 2 * tile_rows + end - begin, cluster});
        works[cluster].push_back({unit, static_cast<int32_t>(start), static_cast<int32_t>(begin),
                                  static_cast<int32_t>(end),
                                  split ? static_cast<int32_t>(s.num_partial_rows) : -1});
        if (split) s.num_partial_rows += rows;
        begin = end;
      } while (begin < keys);
    }
  }
  if (static_cast<int>(s.merge_begin.size()) > num_blocks) {
    throw std::runtime_error("the schedule of latent attention has more merges than blocks");
  }
  for (auto* array :
       {&s.merge_begin, &s.merge_end, &s.merge_part_begin, &s.merge_part_end, &s.merge_stride}) {
    array->resize(num_blocks, 0);
  }
  s.work_indptr.push_back(0);
  for (const std::vector<Work>& of_cluster : works) {
    for (const Work& work : of_cluster) {
      s.first_row.push_back(work.unit.first_row);
      s.num_rows.push_back(work.unit.num_rows);
      s.first_page.push_back(work.unit.first_page);
      s.num_keys.push_back(work.unit.num_keys);
      s.tile_start.push_back(work.tile_start);
      s.key_begin.push_back(work.key_begin);
      s.key_end.push_back(work.key_end);
      s.partial_start.push_back(work.partial_start);
    }
    s.work_indptr.push_back(static_cast<int32_t>(s.first_row.size()));
  }
  return s;
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_MLA_SCHEDULE_H_

// The schedule of prefill on Hopper: which block works on which rows of which head, and whether
// that kernel is the faster one for a batch. Host code without CUDA.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_PREFILL_SCHEDULE_H_
#define TVM_FLASHINFER_KERNELS_CUDA_PREFILL_SCHEDULE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <numeric>
#include <queue>
#include <utility>
#include <vector>

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief A batch as the schedule sees it. The index arrays are in host memory. */
struct PrefillBatch {
  const int32_t* qo_indptr;
  const int32_t* kv_indptr;  // counts pages, or keys where those are ragged
  const int32_t* kv_len;
  int32_t batch_size;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  bool causal;
  int32_t window_left;
};

/*! \brief Rows of one request that a block works on at a time, for one head. Read by the device. */
struct PrefillTile {
  int32_t index;                 // of the tile in the request
  int32_t first_row, num_rows;   // of the request
  int32_t first_page, num_keys;  // of the request; its first key where keys are ragged
  int32_t request;
  int32_t unused[2];
};

/*! \brief Query rows of a tile of the Hopper kernel. */
constexpr int32_t PrefillTileRows(int32_t head_dim_vo) { return head_dim_vo == 64 ? 192 : 128; }

/*! \brief Keys that the rows [begin, end) of a request see together. */
inline int64_t VisibleKeys(const PrefillBatch& batch, int64_t num_rows, int64_t num_keys,
                           int64_t begin, int64_t end) {
  const int64_t diagonal = num_keys - num_rows;
  const int64_t last = batch.causal ? std::min(num_keys, end + diagonal) : num_keys;
  const int64_t first =
      batch.window_left < 0 ? 0 : std::max<int64_t>(0, begin + diagonal - batch.window_left);
  return std::max<int64_t>(0, last - first);
}

/*! \brief What a tile costs besides its keys, in keys: filling and draining the pipeline. */
constexpr int64_t kPrefillTileCost = 256;

/*!
 * \brief The arrays that the Hopper kernel reads.
 *
 * All heads have the same tiles. So the blocks form num_groups groups that get the same works, each
 * for heads of its own: group g has the heads g, g + num_groups, ... and the blocks likewise. Heads
 * that share keys are neighbours, and so are worked on at the same time. Works [work_indptr[i],
 * work_indptr[i + 1]) are those of the i-th block of a group.
 */
struct PrefillSchedule {
  int32_t num_groups = 1;
  std::vector<PrefillTile> tiles;
  std::vector<int32_t> work_indptr;
  std::vector<int32_t> work_tile;
  std::vector<int32_t> work_head;  // among those of the group
};

/*! \brief Works of each block that are handed out by their cost alone. */
constexpr int32_t kBalancedWorks = 4;

/*!
 * \brief Hand out the works one after the other, each to the block that is free first.
 *
 * The tiles of a request and head come together, the longest first, so that its keys come from
 * memory once and then from L2. The last works are sorted by their cost instead, so that the short
 * ones fill what is left.
 */
inline PrefillSchedule MakePrefillSchedule(int32_t num_sm, const PrefillBatch& batch) {
  PrefillSchedule s;
  struct Work {
    int64_t cost;
    int32_t tile, head;
  };
  struct Request {
    int32_t first_tile, num_tiles;
    int64_t longest;
  };
  std::vector<int64_t> costs;  // of the tiles
  std::vector<Request> requests;
  const int32_t tile_rows = PrefillTileRows(batch.head_dim_vo);
  for (int32_t b = 0; b < batch.batch_size; ++b) {
    const int32_t first = batch.qo_indptr[b], rows = batch.qo_indptr[b + 1] - first;
    const int32_t num_tiles = rows / tile_rows + (rows % tile_rows != 0);
    const int32_t first_tile = static_cast<int32_t>(s.tiles.size());
    int64_t longest = 0;
    for (int32_t t = num_tiles - 1; t >= 0; --t) {  // under a causal mask the last is the longest
      const int64_t begin = static_cast<int64_t>(t) * tile_rows;
      const int64_t end = std::min<int64_t>(rows, begin + tile_rows);
      costs.push_back(VisibleKeys(batch, rows, batch.kv_len[b], begin, end) + kPrefillTileCost);
      longest = std::max(longest, costs.back());
      s.tiles.push_back(
          {t, first, rows, batch.kv_indptr[b], batch.kv_len[b], b, /*unused=*/{0, 0}});
    }
    requests.push_back({first_tile, num_tiles, longest});
  }
  std::stable_sort(requests.begin(), requests.end(),
                   [](const Request& a, const Request& b) { return a.longest > b.longest; });
  s.num_groups = std::gcd(num_sm, batch.num_qo_heads);
  const int32_t num_blocks = num_sm / s.num_groups, num_heads = batch.num_qo_heads / s.num_groups;
  std::vector<Work> works;
  works.reserve(s.tiles.size() * num_heads);
  for (const Request& request : requests) {
    for (int32_t head = 0; head < num_heads; ++head) {
      for (int32_t t = request.first_tile; t < request.first_tile + request.num_tiles; ++t) {
        works.push_back({costs[t], t, head});
      }
    }
  }
  const int64_t balanced = std::min<int64_t>(works.size(), int64_t{kBalancedWorks} * num_blocks);
  std::stable_sort(works.end() - balanced, works.end(),
                   [](const Work& a, const Work& b) { return a.cost > b.cost; });
  using Load = std::pair<int64_t, int32_t>;  // cost, block
  std::priority_queue<Load, std::vector<Load>, std::greater<Load>> loads;
  for (int32_t i = 0; i < num_blocks; ++i) loads.push({0, i});
  std::vector<std::vector<const Work*>> of_blocks(num_blocks);
  for (const Work& work : works) {
    const auto [load, block] = loads.top();
    loads.pop();
    loads.push({load + work.cost, block});
    of_blocks[block].push_back(&work);
  }
  s.work_indptr.push_back(0);
  for (const auto& of_block : of_blocks) {
    for (const Work* work : of_block) {
      s.work_tile.push_back(work->tile);
      s.work_head.push_back(work->head);
    }
    s.work_indptr.push_back(static_cast<int32_t>(s.work_tile.size()));
  }
  return s;
}

/*! \brief How many times as fast the Hopper kernel is as FA2 where both have full tiles. */
constexpr double kPrefillSM90Speedup = 1.7;

/*! \brief Work of the Hopper kernel, in rows times keys: whole tiles count, whatever their rows. */
struct PrefillWork {
  double total = 0;    // of one head
  double longest = 0;  // of a tile

  void Add(const PrefillWork& other) {
    total += other.total;
    longest = std::max(longest, other.longest);
  }
  /*! \brief That of the slowest block. */
  double Slowest(int32_t num_sm, int32_t num_heads) const {
    return std::max(total * num_heads / num_sm, longest);
  }
};

inline PrefillWork WorkOfRequest(const PrefillBatch& batch, int32_t b) {
  const int64_t tile_rows = PrefillTileRows(batch.head_dim_vo);
  const int64_t rows = batch.qo_indptr[b + 1] - batch.qo_indptr[b];
  PrefillWork work;
  for (int64_t begin = 0; begin < rows; begin += tile_rows) {
    const int64_t end = std::min(rows, begin + tile_rows);
    const int64_t keys = VisibleKeys(batch, rows, batch.kv_len[b], begin, end);
    const double of_tile = static_cast<double>((keys + kPrefillTileCost) * tile_rows);
    work.Add({of_tile, of_tile});
  }
  return work;
}

/*!
 * \brief Whether the Hopper kernel is the faster one for a batch.
 *
 * It neither packs the query heads of a KV head into one tile nor splits keys, as FA2 does: a tile
 * of it with few rows takes as long as a full one, and few long tiles leave most of the GPU idle.
 * So the keys that the slowest block of it works on are compared with those of a block of FA2.
 */
inline bool PreferPrefillSM90(int32_t num_sm, const PrefillBatch& batch) {
  const int64_t tile_rows = PrefillTileRows(batch.head_dim_vo);
  const int64_t group = batch.num_qo_heads / batch.num_kv_heads;
  const int64_t total_rows = batch.qo_indptr[batch.batch_size];
  if (batch.batch_size == 0 || total_rows == 0) return false;
  const int64_t packed = total_rows * group / batch.batch_size;
  const int64_t fa2_rows = packed > 64 && batch.head_dim_vo < 256 ? 128 : packed > 16 ? 64 : 16;
  PrefillWork work;
  double fa2_total = 0;
  for (int32_t b = 0; b < batch.batch_size; ++b) {
    const int64_t rows = batch.qo_indptr[b + 1] - batch.qo_indptr[b];
    if (rows == 0) continue;
    const PrefillWork of_request = WorkOfRequest(batch, b);
    work.Add(of_request);
    const int64_t num_tiles = (rows + tile_rows - 1) / tile_rows;
    const int64_t fa2_tiles = (rows * group + fa2_rows - 1) / fa2_rows;
    const double rows_of_fa2 = static_cast<double>(fa2_tiles * fa2_rows) / group;
    fa2_total += of_request.total / (num_tiles * tile_rows) * rows_of_fa2;
  }
  return work.Slowest(num_sm, batch.num_qo_heads) <=
         kPrefillSM90Speedup * fa2_total * batch.num_qo_heads / num_sm;
}

/*! \brief By how much of its time the Hopper kernel is faster over ragged keys than over pages. */
constexpr double kRaggedGain = 0.16;

/*! \brief Rows times keys of a head that the Hopper kernel works on while one key is copied. */
constexpr double kCopyOfKey = 324;

/*! \brief The same while the copy starts and ends. */
constexpr double kCopyStart = 3.5e6;

/*!
 * \brief Whether the Hopper kernel is faster with a copy of all pages to ragged keys before it.
 *
 * Over pages it gathers key by key, with a warpgroup for it, where over ragged keys one thread asks
 * TMA for a tile. The copy takes as long as memory does, so it pays for long prompts.
 */
inline bool PreferCopyOfPages(int32_t num_sm, const PrefillBatch& batch) {
  PrefillWork work;
  double num_keys = 0;
  for (int32_t b = 0; b < batch.batch_size; ++b) {
    work.Add(WorkOfRequest(batch, b));
    num_keys += batch.kv_len[b];
  }
  const double attention = work.Slowest(num_sm, batch.num_qo_heads) * num_sm;
  return num_keys * batch.num_kv_heads * kCopyOfKey + kCopyStart <= kRaggedGain * attention;
}

/*! \brief Bytes of the copy; keys and values have 16 bits. */
inline int64_t BytesOfCopy(int64_t num_keys, int32_t num_kv_heads, int32_t head_dim_qk,
                           int32_t head_dim_vo) {
  return num_keys * num_kv_heads * (head_dim_qk + head_dim_vo) * 2;
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_PREFILL_SCHEDULE_H_

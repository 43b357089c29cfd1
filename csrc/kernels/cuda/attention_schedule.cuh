// The schedule of our own attention kernel, made by every block for itself from the index arrays.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCHEDULE_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCHEDULE_CUH_

#include "attention_params.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Items per place on the GPU that a large batch is split into; see Schedule. */
constexpr int kWaves = 2;

__device__ __forceinline__ int CeilDivInt(int a, int b) { return (a + b - 1) / b; }

/*! \brief Work of one block: some keys of some rows of one request and one KV head. */
struct WorkItem {
  int request;
  int tile;         // rows [tile * tile_rows, ...) of the request, heads of a group packed
  int chunk;        // keys [chunk * chunk_len, ...) of those the tile sees
  int64_t tile_id;  // counts the tiles of the batch
};

/*! \brief What the threads of a block share to make the schedule and to read it. */
template <int kThreads>
struct ScheduleMemory {
  // Batches up to this size are looked up in a table; larger ones are counted again for each item.
  static constexpr int kTableSize = 256;
  longlong2 sums[kThreads / 32];
  int item_end[kTableSize];
  int tile_end[kTableSize];
  WorkItem found;
  int is_found;
};

/*!
 * \brief Numbers the items of a batch: requests, tiles, chunks, in this order. An item is a chunk
 * of the largest number of keys that a tile of its request can see; some items find no keys left.
 */
template <typename T, int kThreads>
class Schedule {
 public:
  using Memory = ScheduleMemory<kThreads>;

  /*! \brief All threads of the block call this, and Find. */
  __device__ Schedule(const AttentionParams<T>& p, int tile_rows, Memory* memory)
      : p_(p), tile_rows_(tile_rows), memory_(memory) {
    long long work = 0, tiles = 0;
    for (int b = threadIdx.x; b < p.batch_size; b += kThreads) {
      const RequestInfo r = ReadRequest(p, b);
      const long long own = Tiles(r);
      tiles += own;
      work += own * max(r.num_keys, 1);
    }
    longlong2 total;
    InclusiveScan(make_longlong2(work, tiles), &total);
    work = total.x;
    tiles = total.y;
    // With fewer tiles than blocks that fit the GPU, keys are split until there is a block for each
    // place. With more, they are split so that the last wave of blocks is a small part of the
    // whole, but not so far that merging the parts shows. Rounding up adds one item a tile at most,
    // so there are never more than max_split_items, whatever the index arrays hold.
    const long long most = p.max_split_items;
    const long long places =
        min(static_cast<long long>(max(p.resident_blocks / p.num_kv_heads, 1)), most);
    if (tiles < places) {
      chunk_len_ = ChunkLen(work, places - tiles, 64);
    } else if (tiles < most) {
      chunk_len_ = ChunkLen(work, most - tiles, 512);
    } else {
      chunk_len_ = kMaxKeys;
    }
    if (p.batch_size <= Memory::kTableSize) {
      ForEachRequest([&](int b, const RequestInfo&, long long item_end, long long tile_end) {
        memory_->item_end[b] = static_cast<int>(item_end);
        memory_->tile_end[b] = static_cast<int>(tile_end);
      });
    }
  }

  /*! \brief Keys of a chunk when a tile sees `num_keys`: its chunks are of about equal length. */
  __device__ int ChunkOf(int num_keys) const {
    const int chunks = max(CeilDivInt(num_keys, chunk_len_), 1);
    return max(CeilDivInt(CeilDivInt(num_keys, chunks), 64) * 64, 64);
  }

  /*! \brief Find item `index`; false when there are not so many. */
  __device__ bool Find(int index, WorkItem* item) {
    if (p_.batch_size <= Memory::kTableSize) {
      int low = 0, high = p_.batch_size;  // the first request that ends after the item
      while (low < high) {
        const int middle = (low + high) / 2;
        if (memory_->item_end[middle] > index) {
          high = middle;
        } else {
          low = middle + 1;
        }
      }
      if (low == p_.batch_size) return false;
      *item = MakeItem(low, ReadRequest(p_, low), index, memory_->item_end[low],
                       memory_->tile_end[low]);
      return true;
    }
    if (threadIdx.x == 0) memory_->is_found = 0;
    __syncthreads();
    ForEachRequest([&](int b, const RequestInfo& r, long long item_end, long long tile_end) {
      if (index >= item_end || index < item_end - Items(r)) return;
      memory_->found = MakeItem(b, r, index, item_end, tile_end);
      memory_->is_found = 1;
    });
    *item = memory_->found;
    const bool result = memory_->is_found != 0;
    __syncthreads();
    return result;
  }

 private:
  __device__ static int ChunkLen(long long work, long long blocks, long long least) {
    // Numbers of 64 bits take ten times as long to divide, and few batches need them.
    const bool fits = work + blocks <= 0xffffffffll;
    const long long even =
        fits ? static_cast<unsigned>(work + blocks - 1) / static_cast<unsigned>(blocks)
             : (work + blocks - 1) / blocks;
    return static_cast<int>(
        min(max((even + 63) / 64 * 64, least), static_cast<long long>(kMaxKeys)));
  }

  __device__ int Tiles(const RequestInfo& r) const {
    return CeilDivInt(r.num_rows * p_.group_size, tile_rows_);
  }

  __device__ int Chunks(const RequestInfo& r) const {
    return max(CeilDivInt(r.num_keys, chunk_len_), 1);
  }

  __device__ long long Items(const RequestInfo& r) const {
    return static_cast<long long>(Tiles(r)) * Chunks(r);
  }

  __device__ WorkItem MakeItem(int b, const RequestInfo& r, int index, long long item_end,
                               long long tile_end) const {
    const int tiles = Tiles(r), chunks = Chunks(r);
    const int local = static_cast<int>(index - (item_end - Items(r)));
    // The last rows of a request come first: under a causal mask they see the most keys, and small
    // items are best left for the end.
    const int tile = tiles - 1 - local / chunks;
    return {b, tile, local % chunks, tile_end - tiles + tile};
  }

  /*! \brief Call visit with each request and the numbers of items and tiles up to its end. */
  template <typename Visit>
  __device__ void ForEachRequest(const Visit& visit) {
    long long items_before = 0, tiles_before = 0;
    for (int base = 0; base < p_.batch_size; base += kThreads) {
      const int b = base + threadIdx.x;
      RequestInfo r{};
      if (b < p_.batch_size) r = ReadRequest(p_, b);
      const bool exists = b < p_.batch_size;
      longlong2 total;
      const longlong2 end =
          InclusiveScan(exists ? make_longlong2(Items(r), Tiles(r)) : make_longlong2(0, 0), &total);
      if (exists) visit(b, r, items_before + end.x, tiles_before + end.y);
      items_before += total.x;
      tiles_before += total.y;
    }
    __syncthreads();
  }

  /*! \brief Of two numbers of each thread at once. */
  __device__ longlong2 InclusiveScan(longlong2 value, longlong2* total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const long long x = __shfl_up_sync(0xffffffffu, value.x, step);
      const long long y = __shfl_up_sync(0xffffffffu, value.y, step);
      if (lane >= step) value = make_longlong2(value.x + x, value.y + y);
    }
    if (lane == 31) memory_->sums[warp] = value;
    __syncthreads();
    longlong2 before = make_longlong2(0, 0), sum = before;
    for (int w = 0; w < kThreads / 32; ++w) {
      const longlong2 other = memory_->sums[w];
      if (w < warp) before = make_longlong2(before.x + other.x, before.y + other.y);
      sum = make_longlong2(sum.x + other.x, sum.y + other.y);
    }
    __syncthreads();
    *total = sum;
    return make_longlong2(before.x + value.x, before.y + value.y);
  }

  const AttentionParams<T>& p_;
  int tile_rows_;
  Memory* memory_;
  int chunk_len_;
};

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCHEDULE_CUH_

// The schedule of our own attention kernel, made by every block for itself from the index arrays.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCHEDULE_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCHEDULE_CUH_

#include "attention_params.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Items per place on the GPU that a large batch is split into; see Schedule. */
constexpr int kWaves = 4;

__device__ __forceinline__ int CeilDivInt(int a, int b) { return (a + b - 1) / b; }

/*! \brief Work of one block: some keys of some rows of one request and one KV head. */
struct WorkItem {
  int request;
  int tile;         // rows [tile * tile_rows, ...) of the request, heads of a group packed
  int chunk;        // keys [chunk * chunk_len, ...) of those the tile sees
  int64_t tile_id;  // counts the tiles of the batch
};

/*!
 * \brief Numbers the items of a batch: requests, tiles, chunks, in this order. An item is a chunk
 * of the largest number of keys that a tile of its request can see; some items find no keys left.
 */
template <typename T, int kThreads>
class Schedule {
 public:
  /*! \brief shared: a value for each warp. All threads of the block call this. */
  __device__ Schedule(const AttentionParams<T>& p, int tile_rows, long long* shared)
      : p_(p), tile_rows_(tile_rows), shared_(shared) {
    long long work = 0, tiles = 0;
    for (int b = threadIdx.x; b < p.batch_size; b += kThreads) {
      const RequestInfo r = ReadRequest(p, b);
      const long long own = Tiles(r);
      tiles += own;
      work += own * max(r.num_keys, 1);
    }
    work = Sum(work);
    tiles = Sum(tiles);
    // With fewer tiles than blocks that fit the GPU, keys are split until there is a block for each
    // place. With more, they are split so that the last wave of blocks is a small part of the
    // whole, but not so far that merging the parts shows.
    const long long places = max(p.resident_blocks / p.num_kv_heads, 1);
    if (tiles < places) {
      chunk_len_ = ChunkLen(work, places - tiles, 64);
    } else if (tiles < kWaves * places) {
      chunk_len_ = ChunkLen(work, kWaves * places - tiles, 512);
    } else {
      chunk_len_ = 1 << 30;
    }
  }

  /*! \brief Keys of a chunk when a tile sees `num_keys`: its chunks are of about equal length. */
  __device__ int ChunkOf(int num_keys) const {
    const int chunks = max(CeilDivInt(num_keys, chunk_len_), 1);
    return max(CeilDivInt(CeilDivInt(num_keys, chunks), 64) * 64, 64);
  }

  /*! \brief Find item `index`; false when there are not so many. All threads call this. */
  __device__ bool Find(long long index, WorkItem* item) {
    __shared__ WorkItem found;
    __shared__ int is_found;
    if (threadIdx.x == 0) is_found = 0;
    long long items_before = 0, tiles_before = 0;
    for (int base = 0; base < p_.batch_size; base += kThreads) {
      const int b = base + threadIdx.x;
      int tiles = 0, chunks = 0;
      if (b < p_.batch_size) {
        const RequestInfo r = ReadRequest(p_, b);
        tiles = Tiles(r);
        chunks = Chunks(r);
      }
      long long items_total, tiles_total;
      const long long item_end =
          items_before + InclusiveScan(static_cast<long long>(tiles) * chunks, &items_total);
      const long long tile_end = tiles_before + InclusiveScan(tiles, &tiles_total);
      const long long item_begin = item_end - static_cast<long long>(tiles) * chunks;
      if (index >= item_begin && index < item_end) {
        const int local = static_cast<int>(index - item_begin);
        found = {b, local / chunks, local % chunks, tile_end - tiles + local / chunks};
        is_found = 1;
      }
      items_before += items_total;
      tiles_before += tiles_total;
      __syncthreads();
      if (is_found) break;
    }
    *item = found;
    const bool result = is_found != 0;
    __syncthreads();
    return result;
  }

 private:
  __device__ static int ChunkLen(long long work, long long blocks, long long least) {
    const long long even = (work + blocks - 1) / blocks;
    return static_cast<int>(min(max((even + 63) / 64 * 64, least), 1LL << 30));
  }

  __device__ int Tiles(const RequestInfo& r) const {
    return CeilDivInt(r.num_rows * p_.group_size, tile_rows_);
  }

  __device__ int Chunks(const RequestInfo& r) const {
    return max(CeilDivInt(r.num_keys, chunk_len_), 1);
  }

  __device__ long long InclusiveScan(long long value, long long* total) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const long long other = __shfl_up_sync(0xffffffffu, value, step);
      if (lane >= step) value += other;
    }
    if (lane == 31) shared_[warp] = value;
    __syncthreads();
    long long before = 0, sum = 0;
    for (int w = 0; w < kThreads / 32; ++w) {
      if (w < warp) before += shared_[w];
      sum += shared_[w];
    }
    __syncthreads();
    *total = sum;
    return before + value;
  }

  __device__ long long Sum(long long value) {
    long long total;
    InclusiveScan(value, &total);
    return total;
  }

  const AttentionParams<T>& p_;
  int tile_rows_;
  long long* shared_;
  int chunk_len_;
};

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCHEDULE_CUH_

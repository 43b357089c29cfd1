// Attention scheduled on the device, over paged or ragged keys, for one dtype of queries, one of
// keys and values, and head dimensions.
#include <mutex>

#include "../../workspace.h"
#include "../attention_kernel.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

using T = TVM_FLASHINFER_DTYPE;
using KV = TVM_FLASHINFER_KV_DTYPE;
constexpr int kHeadDimQK = TVM_FLASHINFER_HEAD_DIM_QK;
constexpr int kHeadDimVO = TVM_FLASHINFER_HEAD_DIM_VO;
/*! \brief Warps that share the keys of a tile, where requests have few rows. */
constexpr int kDecodeWarps = 4;
static_assert(kHeadDimQK % 16 == 0 && kHeadDimVO % 16 == 0, "head dimensions come in 16s");

AttentionParams<T> MakeParams(const AttentionArgs& args, const PagedKV* paged,
                              const RaggedKV* ragged, const AttentionExtras& extras,
                              int64_t kv_length) {
  constexpr int64_t kElement = sizeof(KV);
  AttentionParams<T> p{};
  p.batch_size = args.batch_size;
  p.num_qo_heads = args.num_qo_heads;
  p.num_kv_heads = args.num_kv_heads;
  p.group_size = args.num_qo_heads / args.num_kv_heads;
  p.num_rows = static_cast<int>(args.num_rows);
  p.q = static_cast<const T*>(args.q);
  p.q_stride_row = args.q_stride_row;
  p.q_stride_head = args.q_stride_head;
  p.qo_indptr = args.qo_indptr;
  p.o = static_cast<T*>(args.o);
  p.lse = args.lse;
  if (paged != nullptr) {
    p.k = static_cast<const char*>(paged->k);
    p.v = static_cast<const char*>(paged->v);
    p.k_stride_outer = kElement * paged->k_stride_page;
    p.k_stride_head = kElement * paged->k_stride_head;
    p.k_stride_slot = kElement * paged->k_stride_slot;
    p.v_stride_outer = kElement * paged->v_stride_page;
    p.v_stride_head = kElement * paged->v_stride_head;
    p.v_stride_slot = kElement * paged->v_stride_slot;
    p.num_pages = paged->num_pages;
    p.num_indices = kv_length;
    p.page_size = paged->page_size;
    p.kv_indptr = paged->indptr;
    p.indices = paged->indices;
    p.last_page_len = paged->last_page_len;
    p.window_offset = extras.window_offset;
    p.sink_size = extras.sink_size;
  } else {
    p.k = static_cast<const char*>(ragged->k);
    p.v = static_cast<const char*>(ragged->v);
    p.k_stride_head = kElement * ragged->k_stride_head;
    p.k_stride_slot = kElement * ragged->k_stride_token;
    p.v_stride_head = kElement * ragged->v_stride_head;
    p.v_stride_slot = kElement * ragged->v_stride_token;
    p.num_tokens = static_cast<int>(kv_length);
    p.kv_indptr = ragged->indptr;
  }
  p.causal = args.causal;
  p.rows_after_keys = extras.rows_after_keys;
  p.window_left = args.window_left;
  p.tree_indptr = extras.tree_indptr;
  p.tree_mask = extras.tree_mask;
  p.num_tree_nodes = extras.num_tree_nodes;
  p.mask_indptr = extras.mask_indptr;
  p.packed_mask = extras.packed_mask;
  p.num_mask_bytes = extras.num_mask_bytes;
  constexpr double kLog2E = 1.4426950408889634;
  const double cap = extras.logits_soft_cap;
  const double sm_scale = args.sm_scale * kKeyUnit<T, KV>;
  p.scale_log2 = static_cast<float>(cap > 0 ? sm_scale / cap : sm_scale * kLog2E);
  p.cap_log2 = static_cast<float>(cap > 0 ? cap * kLog2E : 0.0);
  p.v_scale = static_cast<float>(args.v_scale);
  p.alibi_slopes = extras.alibi_slopes;
  p.alibi_by_position = extras.alibi_by_position;
  p.bias = extras.bias;
  p.sinks = extras.sinks;
  p.rotary_dim = extras.rotary_dim;
  p.interleaved = extras.interleaved;
  p.magnitude = extras.magnitude;
  p.q_positions = extras.q_positions;
  p.k_positions = extras.k_positions;
  const float* second =
      extras.inv_freq_second == nullptr ? extras.inv_freq : extras.inv_freq_second;
  p.same_frequencies = true;
  for (int i = 0; i < extras.rotary_dim / 2; ++i) {
    p.inv_freq[0][i] = extras.inv_freq[i];
    p.inv_freq[1][i] = second[i];
    p.same_frequencies = p.same_frequencies && extras.inv_freq[i] == second[i];
  }
  return p;
}

/*! \brief Devices that things are remembered of; of others they are asked each time. */
constexpr int kMaxDevices = 64;

/*! \brief Blocks of a kernel that fit the current device at one time; asked once per device. */
template <auto kernel>
cudaError_t ResidentBlocks(int device, int threads, size_t shared, int* blocks) {
  static int known[kMaxDevices] = {};  // written with the same value by whoever comes
  if (device < kMaxDevices && known[device] != 0) {
    *blocks = known[device];
    return cudaSuccess;
  }
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared));
  if (status != cudaSuccess) return status;
  int per_sm = 0, num_sm = 0;
  status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_sm, kernel, threads, shared);
  if (status != cudaSuccess) return status;
  status = cudaDeviceGetAttribute(&num_sm, cudaDevAttrMultiProcessorCount, device);
  if (status != cudaSuccess) return status;
  if (per_sm == 0) {
    throw std::runtime_error("this GPU has too little shared memory for head_dim " +
                             std::to_string(kHeadDimQK));
  }
  *blocks = per_sm * num_sm;
  if (device < kMaxDevices) known[device] = *blocks;
  return cudaSuccess;
}

/*! \brief Tiles of a batch of one KV head, at most. */
int64_t MaxTiles(const AttentionParams<T>& p, int tile_rows) {
  return int64_t{p.num_rows} * p.group_size / tile_rows + p.batch_size;
}

/*!
 * \brief Items of one KV head that tiles whose keys are split may come to; 0 when no tile is split.
 *
 * Tiles are split to fill the GPU, and no further than into 64 keys.
 */
int64_t MaxSplitItems(const AttentionParams<T>& p, int tile_rows) {
  const int64_t places = kWaves * std::max(p.resident_blocks / p.num_kv_heads, 1);
  if (CeilDiv(int64_t{p.num_rows} * p.group_size, tile_rows) >= places) return 0;
  const int64_t keys = p.page_size == 0 ? p.num_tokens : p.num_indices * p.page_size;
  const int64_t chunks = std::min(CeilDiv(keys, 64), places);
  const int64_t tiles = MaxTiles(p, tile_rows);
  const int64_t rows_of_request = int64_t{p.num_rows / p.batch_size} * p.group_size;
  const int64_t of_request = p.qo_indptr == nullptr ? CeilDiv(rows_of_request, tile_rows) : tiles;
  return std::min(places, tiles + of_request * chunks);
}

constexpr int64_t kCountersBeforeArrivals = 2;

/*!
 * \brief Counters that are zero whenever no kernel of the stream runs; null if there are none.
 *
 * A kernel leaves its counters at zero, so those of one stream can be kept, and no memset holds the
 * kernel up. Only the default stream is known to be the same one in the next call: others may have
 * been destroyed since, and be captured into graphs, which replay beside eager calls.
 */
cudaError_t KeptCounters(int device, size_t bytes, cudaStream_t stream, unsigned** counters) {
  constexpr size_t kBytes = 64 << 10;
  static std::mutex mutex;
  static unsigned* kept[kMaxDevices] = {};
  if (stream != nullptr || bytes > kBytes || device >= kMaxDevices) return cudaSuccess;
  std::lock_guard<std::mutex> lock(mutex);
  if (kept[device] == nullptr) {
    void* memory = nullptr;
    cudaError_t status = cudaMallocAsync(&memory, kBytes, stream);
    if (status == cudaSuccess) status = cudaMemsetAsync(memory, 0, kBytes, stream);
    if (status != cudaSuccess) return status;
    kept[device] = static_cast<unsigned*>(memory);
  }
  *counters = kept[device];
  return cudaSuccess;
}

template <int kWarpsQ, int kBlocksQ, int kWarpsKV, Scores kScores>
cudaError_t Run(AttentionParams<T> p, int device, cudaStream_t stream) {
  using Traits = AttentionTraits<T, KV, kHeadDimQK, kHeadDimVO, kWarpsQ, kBlocksQ, kWarpsKV>;
  constexpr auto kernel =
      AttentionKernel<T, KV, kHeadDimQK, kHeadDimVO, kWarpsQ, kBlocksQ, kWarpsKV, kScores>;
  cudaError_t status =
      ResidentBlocks<kernel>(device, Traits::kThreads, Traits::kSharedBytes, &p.resident_blocks);
  if (status != cudaSuccess) return status;
  p.max_split_items = static_cast<int>(MaxSplitItems(p, Traits::kRows));
  const int64_t slots = int64_t{p.max_split_items} * p.num_kv_heads;
  const int64_t items = std::max(MaxTiles(p, Traits::kRows) * p.num_kv_heads, slots);
  if (items > INT32_MAX / 2)
    throw std::invalid_argument("the batch has too many requests and rows");
  const size_t o_bytes = slots * Traits::kRows * kHeadDimVO * sizeof(float);
  const size_t state_bytes = slots * Traits::kRows * sizeof(float2);
  const size_t counter_bytes = kCountersBeforeArrivals * sizeof(unsigned) + slots * sizeof(int);
  CheckWorkspaceBytes(o_bytes + state_bytes + counter_bytes);
  unsigned* counters = nullptr;
  status = KeptCounters(device, counter_bytes, stream, &counters);
  if (status != cudaSuccess) return status;
  const bool kept = counters != nullptr;
  const size_t bytes = o_bytes + state_bytes + (kept ? 0 : counter_bytes);
  char* workspace = nullptr;
  if (bytes > 0) status = cudaMallocAsync(&workspace, bytes, stream);
  if (status != cudaSuccess) return status;
  if (!kept) {
    counters = reinterpret_cast<unsigned*>(workspace + o_bytes + state_bytes);
    status = cudaMemsetAsync(counters, 0, counter_bytes, stream);
  }
  p.partial_o = reinterpret_cast<float*>(workspace);
  p.partial_state = reinterpret_cast<float2*>(workspace + o_bytes);
  p.items_taken = counters;
  p.blocks_done = counters + 1;
  p.arrivals = reinterpret_cast<int*>(counters + kCountersBeforeArrivals);
  if (status == cudaSuccess) {
    const int64_t blocks = std::min<int64_t>(p.resident_blocks, items);
    status = LaunchKernel(kernel, static_cast<unsigned>(blocks), Traits::kThreads,
                          Traits::kSharedBytes, stream, p);
  }
  const cudaError_t freed = workspace == nullptr ? cudaSuccess : cudaFreeAsync(workspace, stream);
  return status != cudaSuccess ? status : freed;
}

int BatchAttention(const AttentionArgs& args, const PagedKV* paged, const RaggedKV* ragged,
                   const AttentionExtras& extras, int64_t kv_length, CudaStream stream,
                   char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    if (extras.rotary_dim / 2 > kMaxInlineRotaryPairs) {
      throw std::invalid_argument("rotary_dim is " + std::to_string(extras.rotary_dim) +
                                  ", inside attention it can be 256 at most");
    }
    const AttentionParams<T> p = MakeParams(args, paged, ragged, extras, kv_length);
    const bool has_others = extras.tree_indptr != nullptr || extras.mask_indptr != nullptr ||
                            extras.logits_soft_cap > 0 || extras.alibi_slopes != nullptr ||
                            extras.bias.data != nullptr;
    // Tiles about as large as the requests: larger ones read the keys less often.
    const int64_t rows_of_request =
        args.num_rows * p.group_size / std::max<int64_t>(args.batch_size, 1);
    if constexpr (kRotatesInRegisters<kHeadDimQK, kDecodeWarps>) {
      if (rows_of_request <= 32 && !has_others && p.rotary_dim == kHeadDimQK && !p.interleaved &&
          p.same_frequencies && p.k_positions != nullptr) {
        return Run<1, 1, kDecodeWarps, Scores::kRotated>(p, stream.device_id, handle);
      }
    }
    auto run = [&](auto scores_tag) {
      constexpr Scores kScores = decltype(scores_tag)::value;
      if (rows_of_request <= 32)
        return Run<1, 1, kDecodeWarps, kScores>(p, stream.device_id, handle);
      if (rows_of_request <= 256) return Run<4, 1, 1, kScores>(p, stream.device_id, handle);
      // Two blocks of rows a warp read each key once for both, if the registers hold them.
      constexpr bool kFits = kScores == Scores::kPlain && kHeadDimQK <= 128 && kHeadDimVO <= 128;
      return Run<kFits ? 4 : 8, kFits ? 2 : 1, 1, kScores>(p, stream.device_id, handle);
    };
    return has_others || p.rotary_dim > 0 ? run(std::integral_constant<Scores, Scores::kExtras>())
                                          : run(std::integral_constant<Scores, Scores::kPlain>());
  });
}

const std::string& Name() {
  static const std::string name =
      KernelName("batch_attention", DTypeOf<T>(), DTypeOf<KV>(), kHeadDimQK, kHeadDimVO);
  return name;
}

TVM_FLASHINFER_REGISTER(batch_attention, Name().c_str(), &BatchAttention);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

// Attention scheduled on the device, over paged or ragged keys, for one dtype of queries, one of
// keys and values, and head dimensions.
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

/*! \brief Blocks of a kernel that fit the current device at one time; asked once per device. */
template <auto kernel>
cudaError_t ResidentBlocks(int threads, size_t shared, int* blocks) {
  constexpr int kMaxDevices = 64;
  static int known[kMaxDevices] = {};  // written with the same value by whoever comes
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  if (status != cudaSuccess) return status;
  if (device < kMaxDevices && known[device] != 0) {
    *blocks = known[device];
    return cudaSuccess;
  }
  status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
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

template <int kWarpsQ, int kBlocksQ, int kWarpsKV, bool kExtras>
cudaError_t Run(AttentionParams<T> p, cudaStream_t stream) {
  using Traits = AttentionTraits<T, KV, kHeadDimQK, kHeadDimVO, kWarpsQ, kBlocksQ, kWarpsKV>;
  constexpr auto kernel =
      AttentionKernel<T, KV, kHeadDimQK, kHeadDimVO, kWarpsQ, kBlocksQ, kWarpsKV, kExtras>;
  cudaError_t status =
      ResidentBlocks<kernel>(Traits::kThreads, Traits::kSharedBytes, &p.resident_blocks);
  if (status != cudaSuccess) return status;
  p.max_split_items = static_cast<int>(MaxSplitItems(p, Traits::kRows));
  const int64_t slots = int64_t{p.max_split_items} * p.num_kv_heads;
  const size_t o_bytes = slots * Traits::kRows * kHeadDimVO * sizeof(float);
  const size_t state_bytes = slots * Traits::kRows * sizeof(float2);
  const size_t counter_bytes = sizeof(unsigned long long) + slots * sizeof(int);
  CheckWorkspaceBytes(o_bytes + state_bytes + counter_bytes);
  char* workspace = nullptr;
  status = cudaMallocAsync(&workspace, o_bytes + state_bytes + counter_bytes, stream);
  if (status != cudaSuccess) return status;
  p.partial_o = reinterpret_cast<float*>(workspace);
  p.partial_state = reinterpret_cast<float2*>(workspace + o_bytes);
  p.items_taken = reinterpret_cast<unsigned long long*>(workspace + o_bytes + state_bytes);
  p.arrivals = reinterpret_cast<int*>(p.items_taken + 1);
  status = cudaMemsetAsync(p.items_taken, 0, counter_bytes, stream);
  if (status == cudaSuccess) {
    const int64_t items = std::max(MaxTiles(p, Traits::kRows) * p.num_kv_heads, slots);
    const int64_t blocks = std::min<int64_t>(p.resident_blocks, items);
    kernel<<<static_cast<unsigned>(blocks), Traits::kThreads, Traits::kSharedBytes, stream>>>(p);
    status = cudaGetLastError();
  }
  const cudaError_t freed = cudaFreeAsync(workspace, stream);
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
    const bool has_extras = extras.tree_indptr != nullptr || extras.mask_indptr != nullptr ||
                            extras.logits_soft_cap > 0 || extras.alibi_slopes != nullptr ||
                            extras.rotary_dim > 0;
    // Tiles about as large as the requests: larger ones read the keys less often.
    const int64_t rows_of_request =
        args.num_rows * p.group_size / std::max<int64_t>(args.batch_size, 1);
    auto run = [&](auto extras_tag) {
      constexpr bool kExtras = decltype(extras_tag)::value;
      if (rows_of_request <= 32) return Run<1, 1, 4, kExtras>(p, handle);
      if (rows_of_request <= 256) return Run<4, 1, 1, kExtras>(p, handle);
      // Two blocks of rows a warp read each key once for both, if the registers hold them.
      constexpr bool kFits = !kExtras && kHeadDimQK <= 128 && kHeadDimVO <= 128;
      return Run<kFits ? 4 : 8, kFits ? 2 : 1, 1, kExtras>(p, handle);
    };
    return has_extras ? run(std::true_type()) : run(std::false_type());
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

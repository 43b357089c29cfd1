// What our own attention kernel is given, and which keys a row sees.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_PARAMS_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_PARAMS_CUH_

#include <cmath>

#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

constexpr int kMaxInlineRotaryPairs = 128;

/*! \brief Keys of a request; index arrays that say more are wrong. */
constexpr int kMaxKeys = 1 << 30;

/*!
 * \brief AttentionArgs, keys and extras as one kernel parameter. Strides of q count elements; those
 * of keys and values, whose elements may be smaller, bytes.
 */
template <typename T>
struct AttentionParams {
  int batch_size;
  int num_qo_heads;
  int num_kv_heads;
  int group_size;
  int num_rows;
  const T* q;
  int64_t q_stride_row;
  int64_t q_stride_head;
  const int32_t* qo_indptr;  // null: every request has equally many rows
  T* o;
  float* lse;

  const char* k;
  const char* v;
  int64_t k_stride_outer, k_stride_head, k_stride_slot;
  int64_t v_stride_outer, v_stride_head, v_stride_slot;
  int num_tokens;  // of ragged keys
  int64_t num_pages;
  int64_t num_indices;
  int page_size;  // 0: ragged keys
  const int32_t* kv_indptr;
  const int32_t* indices;
  const int32_t* last_page_len;
  const int32_t* window_offset;
  const int32_t* sink_size;

  bool causal;
  bool rows_after_keys;
  int window_left;
  const int32_t* tree_indptr;
  const int32_t* tree_mask;
  int64_t num_tree_nodes;
  const int32_t* mask_indptr;
  const uint8_t* packed_mask;
  int64_t num_mask_bytes;

  float scale_log2;  // sm_scale * log2(e), or sm_scale / cap with a cap
  float cap_log2;    // cap * log2(e), 0 without a cap
  float v_scale;     // of 8-bit values; 1 with others, whose kernels do not read it
  const float* alibi_slopes;
  bool alibi_by_position;
  ScoreBias bias;
  const float* sinks;

  int rotary_dim;  // 0: none
  bool interleaved;
  float magnitude;
  const int32_t* q_positions;
  const int32_t* k_positions;
  bool same_frequencies;
  // Those of the first elements of pairs, and those of the second.
  float inv_freq[2][kMaxInlineRotaryPairs];

  // Where tiles whose keys are split put their parts. Slot i has rows of DVO floats, then (max,
  // sum).
  int resident_blocks;  // that fit the GPU at one time
  int max_split_items;  // of one KV head, when keys are split; 0 when no tile is to be split
  float* partial_o;
  float2* partial_state;
  // Counters, zero at the start and at the end: parts of each tile and KV head, items besides the
  // first of each block, and blocks that are done.
  int* arrivals;
  unsigned* items_taken;
  unsigned* blocks_done;
};

/*!
 * \brief Rows and keys of one request. What the index arrays say is cut to what the tensors hold:
 * nobody checked it, and wrong contents may give wrong numbers but no access elsewhere.
 */
struct RequestInfo {
  int row_begin;
  int num_rows;
  int num_keys;
  int kv_begin;  // first page index, or first ragged token
  int window_offset;
  int sink_size;
};

__device__ __forceinline__ int Clamp(int value, int high) { return min(max(value, 0), high); }

template <typename T>
__device__ __forceinline__ RequestInfo ReadRequest(const AttentionParams<T>& p, int b) {
  RequestInfo r;
  if (p.qo_indptr == nullptr) {
    r.num_rows = p.num_rows / p.batch_size;
    r.row_begin = b * r.num_rows;
  } else {
    r.row_begin = Clamp(p.qo_indptr[b], p.num_rows);
    r.num_rows = max(Clamp(p.qo_indptr[b + 1], p.num_rows) - r.row_begin, 0);
  }
  if (p.kv_indptr == nullptr) {  // ragged keys, equally many of every request
    r.num_keys = p.num_tokens / p.batch_size;
    r.kv_begin = b * r.num_keys;
    r.window_offset = r.sink_size = 0;
    return r;
  }
  r.kv_begin = p.kv_indptr[b];
  const int kv_end = p.kv_indptr[b + 1];
  r.window_offset = r.sink_size = 0;
  if (p.page_size == 0) {
    r.kv_begin = Clamp(r.kv_begin, p.num_tokens);
    r.num_keys = Clamp(kv_end, p.num_tokens) - r.kv_begin;
  } else {
    const int count = max(kv_end - r.kv_begin, 0);
    r.num_keys = count == 0 ? 0 : (count - 1) * p.page_size + p.last_page_len[b];
    if (p.window_offset != nullptr) {
      r.window_offset = p.window_offset[b];
      r.sink_size = p.sink_size[b];
      r.num_keys = r.num_keys - r.window_offset + r.sink_size;
    }
  }
  r.num_keys = Clamp(r.num_keys, kMaxKeys);
  return r;
}

/*! \brief Where one key of a request and its value lie; null when the page table is bad. */
struct alignas(16) KeyAddress {
  const char* k;
  const char* v;
};

template <typename T>
__device__ __forceinline__ KeyAddress LocateKey(const AttentionParams<T>& p, const RequestInfo& r,
                                                int key, int kv_head) {
  const char* k = p.k + kv_head * p.k_stride_head;
  const char* v = p.v + kv_head * p.v_stride_head;
  if (p.page_size == 0) {
    const int64_t token = static_cast<int64_t>(r.kv_begin) + key;
    return {k + token * p.k_stride_slot, v + token * p.v_stride_slot};
  }
  const int slot = key < r.sink_size ? key : key - r.sink_size + r.window_offset;
  const int64_t index = static_cast<int64_t>(r.kv_begin) + slot / p.page_size;
  if (slot < 0 || index < 0 || index >= p.num_indices) return {nullptr, nullptr};
  const int64_t page = p.indices[index];
  if (page < 0 || page >= p.num_pages) return {nullptr, nullptr};
  const int in_page = slot % p.page_size;
  return {k + page * p.k_stride_outer + in_page * p.k_stride_slot,
          v + page * p.v_stride_outer + in_page * p.v_stride_slot};
}

/*! \brief The keys [begin, end) that a row may see; a tree takes more away. */
struct KeyRange {
  int begin;
  int end;
};

template <typename T>
__device__ __forceinline__ KeyRange RangeOfRow(const AttentionParams<T>& p, const RequestInfo& r,
                                               int row) {
  const int64_t diagonal =
      static_cast<int64_t>(row) + r.num_keys - (p.rows_after_keys ? 0 : r.num_rows);
  KeyRange range{0, r.num_keys};
  if (p.causal)
    range.end = static_cast<int>(max(min(diagonal + 1, (int64_t)r.num_keys), (int64_t)0));
  if (p.window_left >= 0) {
    range.begin =
        static_cast<int>(min(max(diagonal - p.window_left, (int64_t)0), (int64_t)r.num_keys));
  }
  return range;
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_PARAMS_CUH_

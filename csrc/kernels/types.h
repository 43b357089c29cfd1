// Types shared by the kernels of every device. No TVM and no CUDA header may be included here: the
// CUDA units are compiled by nvcc apart from the rest of the library and meet it only through these
// plain structs. All strides and offsets count elements and are 64-bit.
#ifndef TVM_FLASHINFER_KERNELS_TYPES_H_
#define TVM_FLASHINFER_KERNELS_TYPES_H_

#include <cstdint>

namespace tvm_flashinfer {
namespace kernels {

/*! \brief The 8-bit ones, float8_e4m3fn and float8_e5m2, are of stored keys and values alone. */
enum class DType : int32_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kBFloat16 = 2,
  kFloat8E4M3 = 3,
  kFloat8E5M2 = 4
};

// Static, so that no unit that is compiled for its own instruction set shares it with others.
static inline bool IsFloat8(DType dtype) {
  return dtype == DType::kFloat8E4M3 || dtype == DType::kFloat8E5M2;
}
static inline int64_t ElementSize(DType dtype) {
  return dtype == DType::kFloat32 ? 4 : IsFloat8(dtype) ? 1 : 2;
}

/*! \brief Where a CUDA kernel runs. The handle is a cudaStream_t. */
struct CudaStream {
  int32_t device_id;
  void* handle;
};

/*!
 * \brief What every attention kernel is given.
 *
 * q is (num_rows, num_qo_heads, head_dim_qk) with unit stride in the last dimension; o is
 * (num_rows, num_qo_heads, head_dim_vo), contiguous; lse is (num_rows, num_qo_heads), contiguous,
 * float32, base 2, and may be null. Request b owns the rows [qo_indptr[b], qo_indptr[b + 1]); with
 * a null qo_indptr every request has equally many, which is one in decode. A row that sees no key
 * gets o = 0 and lse = -inf.
 *
 * Row i of the qo_len rows of a request sees key j of its kv_len keys when
 *   (!causal || j <= i + kv_len - qo_len) && (window_left < 0 || j >= i + kv_len - qo_len -
 * window_left).
 */
struct AttentionArgs {
  DType dtype;
  int32_t batch_size;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int64_t num_rows;
  const void* q;
  int64_t q_stride_row;
  int64_t q_stride_head;
  const int32_t* qo_indptr;
  void* o;
  float* lse;
  bool causal;
  int32_t window_left;
  double sm_scale;
  /*! \brief Of keys and values: dtype, or an 8-bit one. */
  DType kv_dtype;
  /*! \brief Factor of the stored values. That of stored keys is part of sm_scale. */
  double v_scale;
};

/*!
 * \brief Keys and values of a ragged batch: request b owns the tokens [indptr[b], indptr[b + 1]).
 * Attention without a plan on CUDA also takes a null indptr: equally many tokens a request.
 */
struct RaggedKV {
  const void* k;
  const void* v;
  int64_t k_stride_token;
  int64_t k_stride_head;
  int64_t v_stride_token;
  int64_t v_stride_head;
  const int32_t* indptr;
};

/*!
 * \brief Keys and values in pages. Request b owns the pages indices[indptr[b]:indptr[b + 1]], all
 * of them full but the last, which holds last_page_len[b] tokens. A request without pages has no
 * keys.
 */
struct PagedKV {
  const void* k;
  const void* v;
  int64_t k_stride_page;
  int64_t k_stride_head;
  int64_t k_stride_slot;
  int64_t v_stride_page;
  int64_t v_stride_head;
  int64_t v_stride_slot;
  int64_t num_pages;
  int32_t page_size;
  const int32_t* indptr;
  const int32_t* indices;
  const int32_t* last_page_len;
};

/*!
 * \brief A number for every row, key and head of requests of equal length, which is added to the
 * score: that of row i and key j of request b and its query head h lies at
 * (b / heads_as_requests) * stride_sequence + (b % heads_as_requests + h) * stride_head +
 * i * stride_row + j * stride_key. Where there is one number for all of something, its stride is 0.
 */
struct ScoreBias {
  const void* data;  // null for none
  DType dtype;       // that of queries, or float32
  int32_t heads_as_requests;
  int64_t stride_sequence;
  int64_t stride_head;
  int64_t stride_row;
  int64_t stride_key;
};

/*!
 * \brief What attention may do besides; the default is none of it.
 *
 * Scores are s = sm_scale * q.k, then cap * tanh(s / cap) if a cap is set, then
 * s + slope * (j - i - kv_len + qo_len) with slopes, and s + bias with a bias. A sink adds
 * exp(sink) to the denominator of its query head and counts in the lse.
 */
struct AttentionExtras {
  /*!
   * \brief The keys lie all before the rows, which the cache does not hold yet: with a window, row
   * i sees key j when j >= i + kv_len - window_left.
   */
  bool rows_after_keys;

  /*!
   * \brief A tree over the last keys of each request: nodes in depth-first order, node t with the
   * interval [tree_mask[t][0], tree_mask[t][1]) of orders of its subtree, its own order being the
   * first. With T nodes, key j >= kv_len - T is node j - (kv_len - T) and row i is node i + T -
   * qo_len. Row i sees the keys before the tree, and the node of key j when its own order lies in
   * that one's interval.
   */
  const int32_t* tree_indptr;  // (batch_size + 1,), counts nodes; null for no tree
  const int32_t* tree_mask;    // (nodes, 2)
  int64_t num_tree_nodes;

  /*!
   * \brief A bit for every row and key of a request, in its bytes [mask_indptr[b], mask_indptr[b +
   * 1]) of packed_mask: row i does not see key j unless bit n = i * kv_len + j is set, which is bit
   * n % 8 of byte n / 8. The other masks hold as well. There is no tree beside it.
   */
  const int32_t* mask_indptr;  // (batch_size + 1,), counts bytes; null for no packed mask
  const uint8_t* packed_mask;
  int64_t num_mask_bytes;

  /*!
   * \brief Sliding pages. Key j is in slot j of the request's pages when j < sink_size[b], else in
   * slot j - sink_size[b] + window_offset[b]; kv_len is the count of slots less window_offset[b]
   * plus sink_size[b].
   */
  const int32_t* window_offset;  // (batch_size,), or null
  const int32_t* sink_size;      // (batch_size,), or null

  double logits_soft_cap;     // 0 for none
  const float* alibi_slopes;  // (num_qo_heads,), or null
  /*! \brief Slopes multiply the position of the key less that of the row, as given below. */
  bool alibi_by_position;
  ScoreBias bias;
  const float* sinks;  // (num_qo_heads,), or null

  /*!
   * \brief Rotary embedding of q and k inside attention; pairs and angles as in SplitRotaryArgs.
   * Row i has the position q_positions[i]; key j of request b has k_positions[b] + j, or, in a tree
   * over ragged keys, q_positions of its own row.
   */
  int32_t rotary_dim;  // 0 for none
  bool interleaved;
  float magnitude;
  const float* inv_freq;         // host memory, rotary_dim / 2 values
  const float* inv_freq_second;  // as in SplitRotaryArgs
  const int32_t* q_positions;    // (num_rows,)
  const int32_t* k_positions;    // (batch_size,), or null for those of the rows
};

/*!
 * \brief Latent attention (MLA) over pages: the key of all heads is a slot of ckv and then of kpe,
 * its value the slot of ckv alone.
 *
 * q_nope is (num_rows, num_heads, head_dim_ckv) and q_pe (num_rows, num_heads, head_dim_kpe); ckv
 * is (num_pages, page_size, head_dim_ckv) and kpe (num_pages, page_size, head_dim_kpe), all with
 * unit stride in the last dimension. o is (num_rows, num_heads, head_dim_ckv) and lse, which may be
 * null, (num_rows, num_heads), contiguous. Rows, masks and lse are those of AttentionArgs.
 */
struct MLAArgs {
  DType dtype;
  int32_t batch_size;
  int32_t num_heads;
  int32_t head_dim_ckv;
  int32_t head_dim_kpe;
  int64_t num_rows;
  const void* q_nope;
  const void* q_pe;
  int64_t q_nope_stride_row;
  int64_t q_nope_stride_head;
  int64_t q_pe_stride_row;
  int64_t q_pe_stride_head;
  const void* ckv;
  const void* kpe;
  int64_t ckv_stride_page;
  int64_t ckv_stride_slot;
  int64_t kpe_stride_page;
  int64_t kpe_stride_slot;
  int64_t num_pages;
  int32_t page_size;
  const int32_t* page_indices;
  void* o;
  float* lse;
  bool causal;
  double sm_scale;
};

/*! \brief Rows and pages of the requests of an MLA batch, as in AttentionArgs and PagedKV. */
struct MLATable {
  const int32_t* qo_indptr;
  const int32_t* page_indptr;
  const int32_t* last_page_len;
};

/*! \brief Merge of two attention states over disjoint keys; the merged one may alias the first. */
struct MergeStateArgs {
  DType dtype;
  int64_t num_rows;
  int32_t num_heads;
  int32_t head_dim;
  const void* v_a;
  const float* s_a;
  const void* v_b;
  const float* s_b;
  void* v_merged;
  float* s_merged;
};

/*!
 * \brief Sinks added to states: o (num_rows, num_heads, head_dim) is scaled and lse grows in place
 * as if each head had one more key with the score sinks[head] (natural, not base 2) and the value
 * 0.
 */
struct ApplySinksArgs {
  DType dtype;
  int64_t num_rows;
  int32_t num_heads;
  int32_t head_dim;
  void* o;
  float* lse;          // base 2
  const float* sinks;  // (num_heads,)
};

/*! \brief The most rotated pairs a head may have: head_dim <= 1024. */
constexpr int32_t kMaxRotaryPairs = 512;

/*!
 * \brief Split of a fused QKV tensor (num_rows, num_qo_heads + 2 * num_kv_heads, head_dim) into
 * contiguous q, k, v, with rotary embedding of q and k.
 *
 * Pair i of the rotary_dim / 2 pairs is rotated by the angle position * inv_freq[i] and scaled by
 * magnitude. Pair i is (i, i + rotary_dim / 2), or (2 i, 2 i + 1) when interleaved. Dimensions from
 * rotary_dim on are copied. When apply_rope is false everything is copied.
 */
struct SplitRotaryArgs {
  DType dtype;
  int64_t num_rows;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  int32_t rotary_dim;
  bool interleaved;
  bool apply_rope;
  float magnitude;
  const float* inv_freq;  // host memory, rotary_dim / 2 values
  /*!
   * \brief Frequencies by which the second element of each pair is computed, or null when they are
   * those of the first: TVM's yarn has others there, so its pairs are not quite rotated.
   */
  const float* inv_freq_second;
  const void* qkv;
  int64_t qkv_stride_row;
  int64_t qkv_stride_head;
  const int32_t* position_map;  // (num_rows,)
  void* q;
  void* k;
  void* v;
};

/*! \brief A pool of pages as TVM's cache keeps it: (num_pages, 2, num_kv_heads, page_size,
 * head_dim). */
struct PagePool {
  DType dtype;
  int64_t num_pages;
  int32_t num_kv_heads;
  int32_t page_size;
  int32_t head_dim;
  void* data;
};

/*!
 * \brief Write of k, v (num_rows, num_kv_heads, head_dim), contiguous, to the slots
 * position_map[row] = page * page_size + slot. Positions outside the pool are not written: -1 is
 * the caller's way to say so.
 */
struct AppendArgs {
  PagePool pool;
  int64_t num_rows;
  const void* k;
  const void* v;
  const int32_t* position_map;
  /*! \brief Of k and v: that of the pool, or one of 16 or 32 bits over a pool of 8. */
  DType dtype;
  /*! \brief What is divided by before rows become 8-bit: to nearest even, saturated, NaN kept. */
  float k_scale;
  float v_scale;
};

/*! \brief Copy of the first copy_length slots of one page to another. */
struct CopyPageArgs {
  PagePool pool;
  int64_t src_page;
  int64_t tgt_page;
  int64_t copy_length;
};

/*!
 * \brief Move of slots inside the pool: for request b and i in [indptr[b], indptr[b + 1]), in order
 * of i, slot src_pos[i] is copied to slot dst_pos[i]. Requests touch disjoint slots. Positions
 * outside the pool are skipped.
 */
struct CompactCopyArgs {
  PagePool pool;
  int32_t batch_size;
  const int32_t* indptr;
  const int32_t* src_pos;
  const int32_t* dst_pos;
  int64_t num_moves;  // length of src_pos and dst_pos
};

/*! \brief Read of the slots position_map[i] into k, v (num_rows, num_kv_heads, head_dim),
 * contiguous. */
struct ReadPagesArgs {
  PagePool pool;
  int64_t num_rows;
  const int32_t* position_map;
  void* k;
  void* v;
};

/*! \brief A pool of pages of latent attention: (num_pages, page_size, head_dim). */
struct RowPool {
  DType dtype;
  int64_t num_pages;
  int32_t page_size;
  int32_t head_dim;
  void* data;
};

/*! \brief AppendArgs, CopyPageArgs and ReadPagesArgs of a pool of rows (num_rows, head_dim). */
struct AppendRowsArgs {
  RowPool pool;
  int64_t num_rows;
  const void* rows;
  const int32_t* position_map;
  DType dtype;
  float scale;
};

struct CopyRowsArgs {
  RowPool pool;
  int64_t src_page;
  int64_t tgt_page;
  int64_t copy_length;
};

struct ReadRowsArgs {
  RowPool pool;
  int64_t num_rows;
  const int32_t* position_map;
  void* rows;
};

/*!
 * \brief Draw of one index for each sample from rows of probabilities (num_rows, vocab_size):
 * ids[i] is the first index at which the running sum of row row_indices[i] is above uniform[i]; the
 * last index with a positive probability where no sum is, and -1 where none is positive or the row
 * does not exist. NaN counts as 0.
 */
struct SampleArgs {
  int64_t num_samples;
  int64_t num_rows;
  int32_t vocab_size;
  const float* probs;
  const float* uniform;
  const int32_t* row_indices;
  int32_t* ids;
};

}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_TYPES_H_

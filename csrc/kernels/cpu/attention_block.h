// The unit of work of CPU attention and what the scheduler and the compiled variants agree on: how
// much scratch a block takes and how the state of a partial result is laid out. Everything here has
// internal linkage, because units compiled for different instruction sets include it.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ATTENTION_BLOCK_H_
#define TVM_FLASHINFER_KERNELS_CPU_ATTENTION_BLOCK_H_

#include <stdint.h>

#include "../types.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {

/*! \brief Most rows in a block. */
constexpr int64_t kRowBlock = 128;
/*!
 * \brief Keys whose state is computed on its own before it is folded into the result. The split is
 * always made, also by a single thread: this is why results do not depend on the number of threads.
 */
constexpr int64_t kKeyChunk = 512;
/*! \brief Keys that are scored, exponentiated and accumulated at a time. */
constexpr int64_t kKeyTile = 64;
/*! \brief Up to this many rows scores are dot products; more are laid across the vector lanes. */
constexpr int64_t kFewRows = 8;
/*! \brief The widest vector in floats; rows of scratch matrices are multiples of it. */
constexpr int64_t kMaxLanes = 16;

/*!
 * \brief Where the keys and values of one request and KV head are. Slot s of the request is slot
 * s % page_size of page pages[s / page_size]; ragged keys are one large page, and pages is null.
 * Key j is in slot j when j < sink_size, else in slot j + slot_shift.
 */
struct KeySource {
  const char* k;
  const char* v;
  int64_t k_stride_page;
  int64_t k_stride_slot;
  int64_t v_stride_page;
  int64_t v_stride_slot;
  const int32_t* pages;
  int64_t page_size;
  int64_t sink_size;
  int64_t slot_shift;
};

/*! \brief What a batch may have besides; blocks of a batch that has none of it point to none. */
struct BatchExtras {
  AttentionExtras args;
  /*! \brief Scores are capped, sloped or biased: then they are turned into their final unit first.
   */
  bool transforms_scores;
  float sm_scale;
  const int32_t* kv_indptr;
  /*! \brief (kKeyTile, 2, OffsetStride): cosines and signed sines of the rotations by 0, 1, ... */
  const float* offset_angles;
};

/*!
 * \brief Some rows of one request that share a KV head. Row r is query token r / group, head
 * r % group of the group; q, o and lse point to row 0 of the request.
 */
struct AttentionBlock {
  DType dtype;  // of q and o
  DType kv_dtype;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int64_t group;
  /*! \brief Queries are multiplied by this on reading: the sign of sm_scale, or 0. */
  float q_factor;
  /*! \brief |sm_scale| log2(e), or 1 if that is 0: factor of differences of raw scores. */
  float score_scale;
  float v_scale;
  const char* q;
  int64_t q_stride_row;
  int64_t q_stride_head;
  char* o;
  int64_t o_stride_row;
  float* lse;
  int64_t lse_stride_row;
  int64_t qo_len;
  int64_t kv_len;
  /*! \brief The key on the diagonal of query token 0: kv_len - qo_len, or past the keys. */
  int64_t first_diagonal;
  bool causal;
  int64_t window_left;
  int64_t row_begin;
  int64_t row_end;
  /*! \brief The keys that at least one row may see. */
  int64_t key_begin;
  int64_t key_end;
  KeySource keys;
  const BatchExtras* extras;
  /*! \brief Indices into the arrays of the extras: of the request, and of query token and head 0.
   */
  int64_t request;
  int64_t first_row;
  int64_t first_head;
};

static inline int64_t RoundUp(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

/*! \brief The value of an element over what the compiled variants read for it: see isa/float8.h. */
static inline double StoredUnit(DType kv_dtype) {
  return kv_dtype == DType::kFloat8E4M3 ? 256.0 : 1.0;
}

/*! \brief Chunks [FirstChunk, LastChunk) hold the keys of a block; chunk c starts at key c *
 * kKeyChunk. */
static inline int64_t FirstChunk(const AttentionBlock& block) {
  return block.key_begin / kKeyChunk;
}
static inline int64_t LastChunk(const AttentionBlock& block) {
  return block.key_end <= block.key_begin ? FirstChunk(block)
                                          : (block.key_end + kKeyChunk - 1) / kKeyChunk;
}

/*! \brief The last key that row r sees, below 0 if none; FirstKey <= LastKey unless it is. */
static inline int64_t LastKey(const AttentionBlock& block, int64_t r) {
  const int64_t last = block.kv_len - 1;
  const int64_t diagonal = r / block.group + block.first_diagonal;
  return block.causal && diagonal < last ? diagonal : last;
}
/*! \brief The first key that row r sees, kv_len at most. */
static inline int64_t FirstKey(const AttentionBlock& block, int64_t r) {
  if (block.window_left < 0) return 0;
  const int64_t first = r / block.group + block.first_diagonal - block.window_left;
  return first <= 0 ? 0 : first < block.kv_len ? first : block.kv_len;
}

/*! \brief The nodes of a tree are the last keys of a request. */
struct KeyTree {
  int64_t first_key;  // that is a node
  int64_t num_nodes;
  const int32_t* intervals;  // (num_nodes, 2)
};

static inline KeyTree TreeOf(const AttentionBlock& block) {
  if (block.extras == nullptr || block.extras->args.tree_indptr == nullptr) {
    return {block.kv_len, 0, nullptr};
  }
  const AttentionExtras& args = block.extras->args;
  const int64_t begin = args.tree_indptr[block.request];
  const int64_t num_nodes = args.tree_indptr[block.request + 1] - begin;
  return {block.kv_len - num_nodes, num_nodes, args.tree_mask + 2 * begin};
}

static inline bool IsRotated(const AttentionBlock& block) {
  return block.extras != nullptr && block.extras->args.rotary_dim > 0;
}

/*! \brief Floats between the angles of neighbouring offsets. */
static inline int64_t OffsetStride(int64_t rotary_dim) { return RoundUp(rotary_dim, kMaxLanes); }

// A state is o (rows, StateStride), not normalised, then the largest raw score of each row, then
// the sum of the exponentials below it. The row counts of the last two are rounded up.
static inline int64_t StateStride(const AttentionBlock& block) {
  return RoundUp(block.head_dim_vo, kMaxLanes);
}
static inline int64_t StateRows(const AttentionBlock& block) {
  return RoundUp(block.row_end - block.row_begin, kMaxLanes);
}
static inline int64_t StateFloats(const AttentionBlock& block) {
  return StateRows(block) * (StateStride(block) + 2);
}

/*! \brief Floats of scratch that the attention functions of a kernel table need. */
static inline int64_t ScratchFloats(int64_t head_dim_qk, int64_t head_dim_vo) {
  const int64_t dim_qk = RoundUp(head_dim_qk, kMaxLanes);
  const int64_t dim_vo = RoundUp(head_dim_vo, kMaxLanes);
  const int64_t queries = kRowBlock * dim_qk + 4 * dim_qk;
  const int64_t keys = kKeyTile * (dim_qk + dim_vo);
  const int64_t scores = kKeyTile * 4 * kMaxLanes;
  const int64_t states = 2 * kRowBlock * (dim_vo + 2);
  const int64_t row_values = 5 * kRowBlock;
  return queries + keys + scores + states + row_values;
}

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ATTENTION_BLOCK_H_

// What the kernels around attention are given: norms, activations, merges of many states, and
// rotary embedding of rows that lie anywhere. As types.h, this is free of TVM's and CUDA's headers,
// and strides count elements.
#ifndef TVM_FLASHINFER_KERNELS_ROW_TYPES_H_
#define TVM_FLASHINFER_KERNELS_ROW_TYPES_H_

#include "types.h"

namespace tvm_flashinfer {
namespace kernels {

/*! \brief Where the heads of rows lie; elements of a head follow each other. */
struct HeadRows {
  void* data;
  int64_t stride_row;
  int64_t stride_head;
};

/*!
 * \brief Root mean square norm of x, (num_rows, num_heads, dim): with y = x, or x + residual
 * rounded to dtype, out = y / sqrt(mean(y^2) + eps) * (weight + weight_bias), computed in float32.
 *
 * y is written to sum where there is a residual. out may be x, and sum may be the residual.
 */
struct NormArgs {
  DType dtype;
  int64_t num_rows;
  int32_t num_heads;
  int32_t dim;
  HeadRows x;
  HeadRows residual;   // data is null for none
  const void* weight;  // (dim,)
  float weight_bias;
  float eps;
  HeadRows out;
  HeadRows sum;
};

enum class Activation : int32_t { kSilu, kGelu, kGeluTanh };

/*! \brief out (num_rows, dim) = activation(x[:, :dim]) * x[:, dim:], in float32. */
struct GatedArgs {
  DType dtype;
  Activation activation;
  int64_t num_rows;
  int32_t dim;
  const void* x;
  int64_t x_stride_row;
  void* out;  // contiguous
};

/*!
 * \brief Merge of num_states states over disjoint keys for each of num_rows rows: v (num_rows,
 * num_states, num_heads, head_dim) with the base-2 lse s (num_rows, num_states, num_heads).
 */
struct MergeStatesArgs {
  DType dtype;
  int64_t num_rows;
  int64_t num_states;
  int32_t num_heads;
  int32_t head_dim;
  const void* v;
  const float* s;
  void* v_merged;
  float* s_merged;
};

/*! \brief Heads that are moved, and where to. */
struct HeadMove {
  int32_t num_heads;
  HeadRows source;  // not written
  HeadRows target;
};

/*!
 * \brief Rotary embedding of the heads of q and k, and a copy of those of v, to where they belong.
 *
 * Angles are those of SplitRotaryArgs, or with cos_sin given the cosines and then the sines of the
 * pairs of a position, (num_positions, rotary_dim). Row i has the position positions[i], or with
 * indptr given offsets[b] + i - indptr[b] in its request b. A target may be its source.
 *
 * With slots, the targets of k and v are pages: their stride_row is that of a page, their
 * stride_head is page_size * head_dim, and row i goes to slots[i] = page * page_size + slot; rows
 * whose slot is outside of the pool are not written. Positions outside of cos_sin count as the
 * nearest inside.
 */
struct RotaryMoveArgs {
  DType dtype;
  int64_t num_rows;
  int32_t head_dim;
  int32_t rotary_dim;
  bool interleaved;
  float magnitude;
  const float* inv_freq;  // host memory, rotary_dim / 2 values; unless cos_sin is given
  const float* inv_freq_second;
  const float* cos_sin;
  int64_t num_positions;
  const int32_t* positions;
  const int32_t* indptr;
  const int32_t* offsets;
  int32_t batch_size;
  HeadMove q;
  HeadMove k;
  HeadMove v;  // no heads for none
  const int32_t* slots;
  int64_t num_slots;
  int32_t page_size;
};

/*!
 * \brief Where the new tokens of a step go: token i of the qo_len ones of request b has position
 * p = kv_len - qo_len + i and the slot page_indices[page_indptr[b] + p / page_size] * page_size + p
 * % page_size, kv_len counting the tokens of its pages, new ones included.
 */
struct TokenSlotsArgs {
  int64_t num_rows;
  int32_t batch_size;
  int32_t page_size;
  int64_t num_indices;  // length of page_indices
  const int32_t* qo_indptr;
  const int32_t* page_indptr;
  const int32_t* page_indices;
  const int32_t* last_page_len;
  int32_t* positions;
  int32_t* slots;
};

}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_ROW_TYPES_H_

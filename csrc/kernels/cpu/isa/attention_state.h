// States of partial attention results: how they start, fold into each other and become outputs.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_STATE_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_STATE_H_

#include "../attention_block.h"
#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

struct State {
  float* o;    // (rows, stride), not normalised
  float* top;  // the largest raw score so far, -inf if there is none
  float* sum;  // the sum of 2^((score - top) score_scale)
  int64_t stride;
};

TFI_INLINE State StateAt(const AttentionBlock& block, float* memory) {
  const int64_t rows = StateRows(block);
  const int64_t stride = StateStride(block);
  return {memory, memory + rows * stride, memory + rows * (stride + 1), stride};
}

/*! \brief Buffers of one thread inside ScratchFloats floats. */
struct Scratch {
  float* q;
  float* k;
  float* v;
  float* scores;
  float* total;
  float* part;
  float* alpha;
  float* beta;
  int32_t* first_key;
  int32_t* last_key;
  int32_t* row_order;  // of the row's node in the tree
};

TFI_INLINE Scratch ScratchAt(const AttentionBlock& block, float* memory) {
  const int64_t dim_qk = RoundUp(block.head_dim_qk, kMaxLanes);
  const int64_t dim_vo = RoundUp(block.head_dim_vo, kMaxLanes);
  Scratch scratch;
  scratch.q = memory;
  scratch.k = scratch.q + kRowBlock * dim_qk + 4 * dim_qk;
  scratch.v = scratch.k + kKeyTile * dim_qk;
  scratch.scores = scratch.v + kKeyTile * dim_vo;
  scratch.total = scratch.scores + kKeyTile * 4 * kMaxLanes;
  scratch.part = scratch.total + kRowBlock * (dim_vo + 2);
  scratch.alpha = scratch.part + kRowBlock * (dim_vo + 2);
  scratch.beta = scratch.alpha + kRowBlock;
  scratch.first_key = reinterpret_cast<int32_t*>(scratch.beta + kRowBlock);
  scratch.last_key = scratch.first_key + kRowBlock;
  scratch.row_order = scratch.last_key + kRowBlock;
  return scratch;
}

/*! \brief What to subtract from scores: top, or 0 where there is no score, as -inf - -inf is NaN.
 */
TFI_INLINE Vec Subtrahend(Vec top) { return top == -__builtin_inff() ? Vec{} : top; }

void ClearState(const AttentionBlock& block, const State& state) {
  const int64_t rows = StateRows(block);
  memset(state.o, 0, (block.row_end - block.row_begin) * state.stride * sizeof(float));
  for (int64_t r = 0; r < rows; r += kLanes) {
    Store(state.top + r, Broadcast(-__builtin_inff()));
    Store(state.sum + r, Vec{});
  }
}

/*! \brief total = total + part. */
void FoldState(const AttentionBlock& block, const State& total, const State& part,
               const Scratch& scratch) {
  for (int64_t r = 0; r < StateRows(block); r += kLanes) {
    const Vec top_a = Load(total.top + r), top_b = Load(part.top + r);
    const Vec top = Max(top_a, top_b);
    const Vec base = Subtrahend(top);
    const Vec alpha = Exp2((top_a - base) * block.score_scale);
    const Vec beta = Exp2((top_b - base) * block.score_scale);
    Store(scratch.alpha + r, alpha);
    Store(scratch.beta + r, beta);
    Store(total.top + r, top);
    Store(total.sum + r, Load(total.sum + r) * alpha + Load(part.sum + r) * beta);
  }
  for (int64_t r = 0; r < block.row_end - block.row_begin; ++r) {
    float* o = total.o + r * total.stride;
    const float* o_part = part.o + r * part.stride;
    for (int64_t d = 0; d < total.stride; d += kLanes) {
      Store(o + d, Load(o + d) * scratch.alpha[r] + Load(o_part + d) * scratch.beta[r]);
    }
  }
}

struct RowEnd {
  float divisor;  // of o
  float lse;
};

/*! \brief What becomes of a row whose scores are at most top and whose weights add up to sum. */
TFI_INLINE RowEnd EndOfRow(const AttentionBlock& block, int64_t head, float top, float sum) {
  const float top_log2 = top * block.score_scale;
  if (block.extras != nullptr && block.extras->args.sinks != nullptr) {
    const float sink = block.extras->args.sinks[block.first_head + head] * 1.4426950408889634f;
    const float larger = top_log2 > sink ? top_log2 : sink;
    if (larger != -__builtin_inff()) {
      const float factor = __builtin_exp2f(top_log2 - larger);
      const float total = sum * factor + __builtin_exp2f(sink - larger);
      // A factor of 0 means weights that vanish next to the sink: o / inf is 0.
      return {total / factor, larger + __builtin_log2f(total)};
    }
  }
  if (sum == 0.0f) return {1.0f, -__builtin_inff()};  // o is 0 as well
  return {sum, top_log2 + __builtin_log2f(sum)};
}

/*! \brief Write o and lse of the block. */
template <typename Element>
void FinishStateOf(const AttentionBlock& block, const State& total) {
  typedef typename Element::Raw Raw;
  for (int64_t r = block.row_begin; r < block.row_end; ++r) {
    const int64_t query = r / block.group;
    const int64_t head = r - query * block.group;
    const RowEnd end =
        EndOfRow(block, head, total.top[r - block.row_begin], total.sum[r - block.row_begin]);
    const float* o = total.o + (r - block.row_begin) * total.stride;
    Raw* target =
        reinterpret_cast<Raw*>(block.o) + query * block.o_stride_row + head * block.head_dim_vo;
    const Vec divisor = Broadcast(end.divisor);
    const Vec v_scale = Broadcast(block.v_scale);
    int64_t d = 0;
    for (; d + kLanes <= block.head_dim_vo; d += kLanes) {
      Element::StoreVec(target + d, Load(o + d) / divisor * v_scale);
    }
    if (d < block.head_dim_vo) {
      StorePart<Element>(target + d, block.head_dim_vo - d, Load(o + d) / divisor * v_scale);
    }
    if (block.lse != nullptr) {
      block.lse[query * block.lse_stride_row + head] = end.lse;
    }
  }
}

void FinishState(const AttentionBlock& block, const State& total) {
  DispatchFloat(block.dtype, [&](auto element) { FinishStateOf<decltype(element)>(block, total); });
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_STATE_H_

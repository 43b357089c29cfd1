// What may happen to scores between the product and the softmax: soft cap, slopes, tree masks.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_SCORE_EXTRAS_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_SCORE_EXTRAS_H_

#include "../attention_block.h"
#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

/*! \brief tanh with a relative error below 3e-7. */
TFI_INLINE Vec Tanh(Vec x) {
  const Vec size = (Vec)((IVec)x & 0x7fffffff);
  // Next to 0 the quotient below would cancel.
  const Vec x2 = x * x;
  Vec p = Broadcast(-5.70498872745e-3f);
  p = p * x2 + 2.06390887954e-2f;
  p = p * x2 - 5.37397155531e-2f;
  p = p * x2 + 1.33314422036e-1f;
  p = p * x2 - 3.33332819422e-1f;
  const Vec near = p * x2 * x + x;
  const Vec e = Exp2(size * -2.88539008177792681f);
  const Vec far = (1.0f - e) / (1.0f + e);
  const Vec signed_far = (Vec)((IVec)far | ((IVec)x & INT32_MIN));
  return size < 0.625f ? near : signed_far;
}

TFI_INLINE bool TransformsScores(const AttentionBlock& block) {
  return block.extras != nullptr && block.extras->transforms_scores;
}

/*!
 * \brief What slopes multiply is the place of a key less that of a row: positions, or where they
 * are not asked for, the key and the diagonal of the row. Lanes without a row have any place.
 */
TFI_INLINE int32_t PlaceOfRow(const AttentionBlock& block, int64_t row) {
  const AttentionExtras& args = block.extras->args;
  const int64_t query = (row < block.row_end ? row : block.row_end - 1) / block.group;
  return args.alibi_by_position ? args.q_positions[block.first_row + query]
                                : static_cast<int32_t>(query + block.kv_len - block.qo_len);
}

/*! \brief The places of count keys, kKeyTile at most, from `begin` on, and anything up to there. */
void FindPlaces(const AttentionBlock& block, int64_t begin, int64_t count, int32_t* places) {
  const AttentionExtras& args = block.extras->args;
  if (args.alibi_by_position && args.k_positions == nullptr) {
    const int32_t* positions = args.q_positions + block.extras->kv_indptr[block.request] + begin;
    for (int64_t i = 0; i < kKeyTile; ++i) places[i] = i < count ? positions[i] : 0;
    return;
  }
  const int32_t first = args.alibi_by_position ? args.k_positions[block.request] : 0;
  for (int64_t i = 0; i < kKeyTile; ++i) places[i] = first + static_cast<int32_t>(begin + i);
}

/*! \brief Raw scores in the unit of the softmax; distance is the place of the key less the row's.
 */
TFI_INLINE Vec TransformScores(const BatchExtras& extras, Vec raw, Vec slope, IVec distance) {
  Vec s = raw * extras.sm_scale;
  const float cap = static_cast<float>(extras.args.logits_soft_cap);
  if (cap != 0.0f) s = Tanh(s / cap) * cap;
  return s + slope * __builtin_convertvector(distance, Vec);
}

TFI_INLINE float SlopeOf(const AttentionBlock& block, int64_t row) {
  const float* slopes = block.extras->args.alibi_slopes;
  return slopes == nullptr ? 0.0f : slopes[block.first_head + row % block.group];
}

/*! \brief The scores of one row of the block and of padded keys at the places. */
void TransformRow(const AttentionBlock& block, int64_t row, const int32_t* places, int64_t padded,
                  float* s) {
  const Vec slope = Broadcast(SlopeOf(block, row));
  const IVec own = BroadcastInt(PlaceOfRow(block, row));
  for (int64_t i = 0; i < padded; i += kLanes) {
    const IVec distance = LoadInt(places + i) - own;
    Store(s + i, TransformScores(*block.extras, Load(s + i), slope, distance));
  }
}

/*! \brief The same for kVecs vectors of rows from `row` on, s being (count, width). */
template <int kVecs>
void TransformPanel(const AttentionBlock& block, int64_t row, const int32_t* places, int64_t count,
                    float* s) {
  float slopes[kVecs * kLanes];
  int32_t own[kVecs * kLanes];
  for (int64_t r = 0; r < kVecs * kLanes; ++r) {
    slopes[r] = SlopeOf(block, row + r);
    own[r] = PlaceOfRow(block, row + r);
  }
  for (int64_t i = 0; i < count; ++i, s += kVecs * kLanes) {
    TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
      float* target = s + v * kLanes;
      const IVec distance = BroadcastInt(places[i]) - LoadInt(own + v * kLanes);
      Store(target,
            TransformScores(*block.extras, Load(target), Load(slopes + v * kLanes), distance));
    }
  }
}

/*! \brief The tree intervals of the keys of a tile; keys before the tree are seen by every row. */
struct TileIntervals {
  int32_t begin[kKeyTile];
  int32_t end[kKeyTile];
};

void FindIntervals(const KeyTree& tree, int64_t tile_begin, int64_t tile_end, TileIntervals* out) {
  for (int64_t i = 0; i < kKeyTile; ++i) {
    const int64_t key = tile_begin + i;
    const bool is_node = key >= tree.first_key && key < tile_end;
    out->begin[i] = is_node ? tree.intervals[2 * (key - tree.first_key)] : INT32_MIN;
    out->end[i] = is_node ? tree.intervals[2 * (key - tree.first_key) + 1] : INT32_MAX;
  }
}

/*! \brief Hide from one row the nodes that are not on its path. */
TFI_INLINE void MaskRowByTree(const TileIntervals& intervals, int32_t order, int64_t padded,
                              float* s) {
  const IVec own = BroadcastInt(order);
  for (int64_t i = 0; i < padded; i += kLanes) {
    const IVec hidden = (own < LoadInt(intervals.begin + i)) | (own >= LoadInt(intervals.end + i));
    Store(s + i, hidden ? Broadcast(-__builtin_inff()) : Load(s + i));
  }
}

/*! \brief The same for a panel and its count keys. */
template <int kVecs>
TFI_INLINE void MaskPanelByTree(const TileIntervals& intervals, const int32_t* orders,
                                int64_t count, float* s) {
  for (int64_t i = 0; i < count; ++i, s += kVecs * kLanes) {
    const IVec begin = BroadcastInt(intervals.begin[i]), last = BroadcastInt(intervals.end[i]);
    TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
      const IVec own = LoadInt(orders + v * kLanes);
      const IVec hidden = (own < begin) | (own >= last);
      Store(s + v * kLanes, hidden ? Broadcast(-__builtin_inff()) : Load(s + v * kLanes));
    }
  }
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_SCORE_EXTRAS_H_

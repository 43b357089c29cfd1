// Online softmax over one tile of keys, for few rows (decode) and for panels of rows (prefill).
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_TILE_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_TILE_H_

#include "attention_state.h"
#include "key_tile.h"
#include "micro_kernels.h"
#include "packed_mask.h"
#include "score_bias.h"
#include "score_extras.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

/*! \brief Gathered keys [begin, end). */
template <typename Element>
struct Tile {
  int64_t begin;
  int64_t end;
  const typename Element::Raw* k[kKeyTile];
  const typename Element::Raw* v[kKeyTile];
};

/*!
 * \brief The keys of a tile that a row sees: a range, of which a tree leaves the nodes on its path
 * and a packed mask those whose bits are set.
 */
struct TileMask {
  const int32_t* first_key;
  const int32_t* last_key;
  const int32_t* row_order;
  int64_t begin;                   // the first key
  const TileIntervals* intervals;  // of the keys from `begin` on; null when none is a node
  const uint64_t* seen;            // SeenKeys of the rows; null without a packed mask
};

/*!
 * \brief o = alpha o + p v for one row and the keys that it sees, in runs of neighbours. ones holds
 * a factor for every row of x.
 */
template <typename Element, WeightLayout kLayout>
void AccumulateSeen(const ValueProduct<Element>& x, const TileMask& mask, int64_t row, int64_t dim,
                    float* ones) {
  int64_t begin = mask.first_key[row] - mask.begin;
  int64_t end = mask.last_key[row] + 1 - mask.begin;
  begin = begin > 0 ? begin : 0;
  end = end < x.num_keys ? end : x.num_keys;
  auto sees = [&](int64_t i) {
    if (mask.seen != nullptr && (mask.seen[row] >> i & 1) == 0) return false;
    if (mask.intervals == nullptr) return true;
    const int32_t order = mask.row_order[row];
    return order >= mask.intervals->begin[i] && order < mask.intervals->end[i];
  };
  ValueProduct<Element> run = x;
  run.num_keys = 0;
  AccumulateValues<Element, kLayout>(run, row, row + 1, dim);
  ones[row] = 1.0f;
  run.alpha = ones;
  for (int64_t i = begin; i < end; i += run.num_keys + 1) {
    run.num_keys = 0;
    while (i + run.num_keys < end && sees(i + run.num_keys)) ++run.num_keys;
    if (run.num_keys == 0) continue;
    run.v = x.v + i;
    run.p = x.p + (kLayout == WeightLayout::kKeyMajor ? i * x.width : i);
    AccumulateValues<Element, kLayout>(run, row, row + 1, dim);
  }
}

/*!
 * \brief o = alpha o + p v for the rows [0, rows) when some of them do not see all the keys.
 *
 * A weight of 0 hides a key only as long as its value is finite: 0 * NaN would reach rows that do
 * not see it. So when a value is not finite, each row is given only the keys that it sees.
 */
template <typename Element, WeightLayout kLayout>
void AccumulateMasked(const ValueProduct<Element>& x, const TileMask& mask, int64_t rows,
                      int64_t dim, float* ones) {
  if (AllFinite<Element>(x.v, x.num_keys, dim)) {
    AccumulateValues<Element, kLayout>(x, 0, rows, dim);
    return;
  }
  for (int64_t r = 0; r < rows; ++r) AccumulateSeen<Element, kLayout>(x, mask, r, dim, ones);
}

/*! \brief Turn count scores into weights relative to the new top of the row. */
TFI_INLINE void SoftmaxRow(float* s, int64_t count, float scale, float* top, float* sum,
                           float* alpha) {
  Vec largest = Broadcast(*top);
  for (int64_t i = 0; i < count; i += kLanes) largest = Max(largest, Load(s + i));
  const Vec new_top = Broadcast(ReduceMax(largest));
  const Vec base = Subtrahend(new_top);
  Vec total = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec p = Exp2((Load(s + i) - base) * scale);
    total += p;
    Store(s + i, p);
  }
  *alpha = Exp2((*top - base) * scale)[0];
  *sum = *sum * *alpha + ReduceSum(total);
  *top = new_top[0];
}

/*!
 * \brief Fold a tile into the state of at most kFewRows rows. Keys and values are read as they are
 * stored, so both head dimensions must be multiples of kLanes, or the tile be padded.
 */
template <typename Element>
void AttendTileFewRows(const AttentionBlock& block, const Scratch& scratch, const State& state,
                       Tile<Element>& tile) {
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t count = tile.end - tile.begin;
  const int64_t padded = RoundUp(count, kLanes);
  const int64_t dim_qk = RoundUp(block.head_dim_qk, kLanes);
  for (int64_t i = count; i < padded; ++i) tile.k[i] = tile.k[count - 1];
  // Bounds do not decrease from row to row.
  const bool in_range =
      scratch.first_key[rows - 1] <= tile.begin && scratch.last_key[0] >= tile.end - 1;
  const KeyTree tree = TreeOf(block);
  const bool has_nodes = tree.num_nodes > 0 && tree.first_key < tile.end;
  const bool has_bits = HasPackedMask(block);
  const bool masked = !in_range || has_nodes || has_bits;
  TileIntervals intervals;
  if (has_nodes) FindIntervals(tree, tile.begin, tile.end, &intervals);
  uint64_t seen[kFewRows];
  if (has_bits) FindSeenKeys(block, block.row_begin, rows, tile.begin, count, seen);
  for (int64_t r = 0; r < rows; r += 2) {
    const float* q = scratch.q + r * dim_qk;
    float* s = scratch.scores + r * kKeyTile;
    if (r + 1 < rows) {
      ScoreRows<Element, 2>(q, dim_qk, tile.k, count, s);
    } else {
      ScoreRows<Element, 1>(q, dim_qk, tile.k, count, s);
    }
  }
  const bool transforms = TransformsScores(block), has_bias = HasBias(block);
  int32_t places[kKeyTile];
  if (transforms) FindPlaces(block, tile.begin, count, places);
  for (int64_t r = 0; r < rows; ++r) {
    float* s = scratch.scores + r * kKeyTile;
    if (transforms) TransformRow(block, block.row_begin + r, places, padded, s);
    if (has_bias) AddBiasToRow(block, block.row_begin + r, tile.begin, count, padded, s);
    if (has_nodes) MaskRowByTree(intervals, scratch.row_order[r], padded, s);
    if (has_bits) MaskRowByBits(seen[r], padded, s);
    if (!in_range || padded != count) {
      const int64_t last = scratch.last_key[r] < tile.end - 1 ? scratch.last_key[r] : tile.end - 1;
      const IVec lowest = BroadcastInt(scratch.first_key[r]);
      const IVec highest = BroadcastInt(static_cast<int32_t>(last));
      for (int64_t i = 0; i < padded; i += kLanes) {
        const IVec key = LaneIndex() + BroadcastInt(static_cast<int32_t>(tile.begin + i));
        const IVec hidden = (key < lowest) | (key > highest);
        Store(s + i, hidden ? Broadcast(-__builtin_inff()) : Load(s + i));
      }
    }
    SoftmaxRow(s, padded, block.score_scale, state.top + r, state.sum + r, scratch.alpha + r);
  }
  const ValueProduct<Element> product = {scratch.scores, 0,       tile.v,      count,
                                         scratch.alpha,  state.o, state.stride};
  const int64_t dim_vo = RoundUp(block.head_dim_vo, kLanes);
  if (masked) {
    const TileMask mask = {scratch.first_key,
                           scratch.last_key,
                           scratch.row_order,
                           tile.begin,
                           has_nodes ? &intervals : nullptr,
                           has_bits ? seen : nullptr};
    AccumulateMasked<Element, WeightLayout::kRowMajor>(product, mask, rows, dim_vo, scratch.beta);
  } else {
    AccumulateValues<Element, WeightLayout::kRowMajor>(product, 0, rows, dim_vo);
  }
}

template <int kVecs>
TFI_INLINE void MaskPanel(float* s, int64_t begin, int64_t end, const int32_t* first_key,
                          const int32_t* last_key) {
  IVec lowest[kVecs], highest[kVecs];
  TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
    lowest[v] = LoadInt(first_key + v * kLanes);
    highest[v] = LoadInt(last_key + v * kLanes);
  }
  for (int64_t i = begin; i < end; ++i, s += kVecs * kLanes) {
    const IVec key = BroadcastInt(static_cast<int32_t>(i));
    TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
      const IVec hidden = (key < lowest[v]) | (key > highest[v]);
      Store(s + v * kLanes, hidden ? Broadcast(-__builtin_inff()) : Load(s + v * kLanes));
    }
  }
}

/*! \brief SoftmaxRow for all rows of a panel, s being (count, kVecs * kLanes). */
template <int kVecs>
TFI_INLINE void SoftmaxPanel(float* s, int64_t count, float scale, float* top, float* sum,
                             float* alpha) {
  constexpr int64_t kWidth = kVecs * kLanes;
  Vec largest[kVecs], base[kVecs], total[kVecs];
  TFI_UNROLL for (int v = 0; v < kVecs; ++v) largest[v] = Load(top + v * kLanes);
  for (int64_t i = 0; i < count; ++i) {
    TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
      largest[v] = Max(largest[v], Load(s + i * kWidth + v * kLanes));
    }
  }
  TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
    base[v] = Subtrahend(largest[v]);
    total[v] = Vec{};
  }
  for (int64_t i = 0; i < count; ++i) {
    TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
      float* target = s + i * kWidth + v * kLanes;
      const Vec p = Exp2((Load(target) - base[v]) * scale);
      total[v] += p;
      Store(target, p);
    }
  }
  TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
    const Vec factor = Exp2((Load(top + v * kLanes) - base[v]) * scale);
    Store(alpha + v * kLanes, factor);
    Store(sum + v * kLanes, Load(sum + v * kLanes) * factor + total[v]);
    Store(top + v * kLanes, largest[v]);
  }
}

/*!
 * \brief Fold a tile into the state of the panel that starts at row `row` of the block and has
 * num_rows <= kVecs * kLanes rows.
 */
template <int kVecs>
void AttendTilePanel(const AttentionBlock& block, const Scratch& scratch, const State& state,
                     const Tile<Float32>& tile, int64_t row, int64_t num_rows) {
  constexpr int64_t kWidth = kVecs * kLanes;
  const int32_t* first_key = scratch.first_key + row;
  const int32_t* last_key = scratch.last_key + row;
  // Bounds do not decrease from row to row, so these are the keys that some row sees.
  const int64_t begin = first_key[0] > tile.begin ? first_key[0] : tile.begin;
  const int64_t end = last_key[num_rows - 1] < tile.end - 1 ? last_key[num_rows - 1] + 1 : tile.end;
  if (begin >= end) return;
  const float* const* k = tile.k + (begin - tile.begin);
  const float* const* v = tile.v + (begin - tile.begin);
  const bool in_range = first_key[num_rows - 1] <= begin && last_key[0] >= end - 1;
  const KeyTree tree = TreeOf(block);
  const bool has_nodes = tree.num_nodes > 0 && tree.first_key < end;

  float* s = scratch.scores;
  ScorePanel<kVecs>(scratch.q + row * block.head_dim_qk, block.head_dim_qk, k, end - begin, s);
  if (TransformsScores(block)) {
    int32_t places[kKeyTile];
    FindPlaces(block, begin, end - begin, places);
    TransformPanel<kVecs>(block, block.row_begin + row, places, end - begin, s);
  }
  if (HasBias(block)) {
    AddBiasToPanel(block, block.row_begin + row, num_rows, begin, end - begin, kWidth, s);
  }
  if (!in_range) MaskPanel<kVecs>(s, begin, end, first_key, last_key);
  TileIntervals intervals;
  if (has_nodes) {
    FindIntervals(tree, begin, end, &intervals);
    MaskPanelByTree<kVecs>(intervals, scratch.row_order + row, end - begin, s);
  }
  const bool has_bits = HasPackedMask(block);
  uint64_t seen[kWidth];
  if (has_bits) {
    FindSeenKeys(block, block.row_begin + row, kWidth, begin, end - begin, seen);
    MaskPanelByBits<kVecs>(seen, end - begin, s);
  }
  SoftmaxPanel<kVecs>(s, end - begin, block.score_scale, state.top + row, state.sum + row,
                      scratch.alpha);
  const ValueProduct<Float32> product = {
      s, kWidth, v, end - begin, scratch.alpha, state.o + row * state.stride, state.stride};
  const int64_t dim_vo = RoundUp(block.head_dim_vo, kLanes);
  if (!in_range || has_nodes || has_bits) {
    const TileMask mask = {first_key,
                           last_key,
                           scratch.row_order + row,
                           begin,
                           has_nodes ? &intervals : nullptr,
                           has_bits ? seen : nullptr};
    AccumulateMasked<Float32, WeightLayout::kKeyMajor>(product, mask, num_rows, dim_vo,
                                                       scratch.beta);
  } else {
    AccumulateValues<Float32, WeightLayout::kKeyMajor>(product, 0, num_rows, dim_vo);
  }
}

template <int kVecs>
void AttendTileLastPanel(const AttentionBlock& block, const Scratch& scratch, const State& state,
                         const Tile<Float32>& tile, int64_t row, int64_t num_rows) {
  if constexpr (kVecs > 1) {
    if (num_rows <= (kVecs - 1) * kLanes) {
      AttendTileLastPanel<kVecs - 1>(block, scratch, state, tile, row, num_rows);
      return;
    }
  }
  AttendTilePanel<kVecs>(block, scratch, state, tile, row, num_rows);
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_TILE_H_

// Attention of one block of rows: queries are laid out once, then the chunks of keys follow.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_H_

#include "attention_tile.h"
#include "inline_rotary.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

TFI_INLINE bool HasFewRows(const AttentionBlock& block) {
  return block.row_end - block.row_begin <= kFewRows;
}

/*! \brief Rows in the panel that starts at row `row` of the block, padding included. */
TFI_INLINE int64_t PanelWidth(int64_t rows, int64_t row) {
  return rows - row < kPanelRows ? RoundUp(rows - row, kLanes) : kPanelRows;
}

/*! \brief The rotation of one query token, kept for its other heads. */
struct QueryRotation {
  int64_t query = -1;
  Rotation rotation;
};

/*!
 * \brief Row r of the block as float32 times q_factor, padded with zeros; zeros if there is none.
 */
template <typename Element>
TFI_INLINE void LoadQuery(const AttentionBlock& block, int64_t r, QueryRotation* rotated,
                          float* target) {
  typedef typename Element::Raw Raw;
  const int64_t padded_dim = RoundUp(block.head_dim_qk, kLanes);
  if (block.row_begin + r >= block.row_end) {
    memset(target, 0, padded_dim * sizeof(float));
    return;
  }
  const int64_t query = (block.row_begin + r) / block.group;
  const int64_t head = block.row_begin + r - query * block.group;
  const Raw* source = reinterpret_cast<const Raw*>(block.q) + query * block.q_stride_row +
                      head * block.q_stride_head;
  LoadRow<Element>(source, block.head_dim_qk, target);
  if (IsRotated(block)) {
    const AttentionExtras& args = block.extras->args;
    if (rotated->query != query) {
      rotated->query = query;
      ComputeRotation(args, args.q_positions[block.first_row + query], args.magnitude,
                      &rotated->rotation);
    }
    RotateRow(args, rotated->rotation.cosine, rotated->rotation.sine, target);
  }
  for (int64_t d = 0; d < padded_dim; d += kLanes) {
    Store(target + d, Load(target + d) * block.q_factor);
  }
}

/*!
 * \brief Lay out the queries: few rows as (rows, padded dim), more as panels (dim, width) one after
 * the other, whose lanes without a row are 0.
 */
template <typename Element>
void LoadQueriesOf(const AttentionBlock& block, const Scratch& scratch) {
  const int64_t rows = block.row_end - block.row_begin;
  const int64_t dim = block.head_dim_qk;
  const int64_t padded_dim = RoundUp(dim, kLanes);
  QueryRotation rotated;
  if (HasFewRows(block)) {
    for (int64_t r = 0; r < rows; ++r) {
      LoadQuery<Element>(block, r, &rotated, scratch.q + r * padded_dim);
    }
    return;
  }
  // Four rows at a time: writing single floats to a transposed matrix is several times as slow.
  float* const quad = scratch.q + kRowBlock * RoundUp(dim, kMaxLanes);
  for (int64_t r = 0; r < RoundUp(rows, kLanes); r += 4) {
    for (int64_t i = 0; i < 4; ++i) {
      LoadQuery<Element>(block, r + i, &rotated, quad + i * padded_dim);
    }
    const int64_t panel = r / kPanelRows * kPanelRows;
    const int64_t width = PanelWidth(rows, panel);
    float* lanes = scratch.q + panel * dim + (r - panel);
    for (int64_t d = 0; d < dim; ++d, lanes += width) {
      const float* q = quad + d;
      const FourFloats column = {q[0], q[padded_dim], q[2 * padded_dim], q[3 * padded_dim]};
      memcpy(lanes, &column, sizeof(column));
    }
  }
}

void LoadQueries(const AttentionBlock& block, const Scratch& scratch) {
  DispatchFloat(block.dtype,
                [&](auto element) { LoadQueriesOf<decltype(element)>(block, scratch); });
}

/*! \brief Order of the node that each row is; -1, which sees no node, for rows that are none. */
void FindTreeOrders(const AttentionBlock& block, const KeyTree& tree, const Scratch& scratch) {
  const int64_t rows = block.row_end - block.row_begin;
  for (int64_t r = 0; r < RoundUp(rows, kMaxLanes); ++r) {
    const int64_t row = r < rows ? block.row_begin + r : block.row_end - 1;
    const int64_t node = row / block.group + tree.num_nodes - block.qo_len;
    scratch.row_order[r] = node < 0 ? -1 : tree.intervals[2 * node];
  }
}

void FindBounds(const AttentionBlock& block, const Scratch& scratch) {
  const int64_t rows = block.row_end - block.row_begin;
  for (int64_t r = 0; r < RoundUp(rows, kMaxLanes); ++r) {
    const int64_t row = r < rows ? block.row_begin + r : block.row_end - 1;
    const int64_t last = LastKey(block, row);
    scratch.first_key[r] = static_cast<int32_t>(FirstKey(block, row));
    scratch.last_key[r] = static_cast<int32_t>(last < 0 ? -1 : last);
  }
  const KeyTree tree = TreeOf(block);
  if (tree.num_nodes > 0) FindTreeOrders(block, tree, scratch);
}

TFI_INLINE int64_t TileEnd(int64_t begin, int64_t end) {
  return end - begin < kKeyTile ? end : begin + kKeyTile;
}

/*!
 * \brief Fold the keys [begin, end) into the state of few rows. Compute, in which the products read
 * them, is FewRowsElement or Float32.
 */
template <typename Element, typename Compute>
void AttendKeysFewRows(const AttentionBlock& block, const Scratch& scratch, int64_t begin,
                       int64_t end, const State& state) {
  const RowSource keys = KeysOf(block);
  const RowSource values = ValuesOf(block);
  Tile<Compute> tile;
  for (tile.begin = begin; tile.begin < end; tile.begin = tile.end) {
    tile.end = TileEnd(tile.begin, end);
    const int64_t count = tile.end - tile.begin;
    if constexpr (kSame<Compute, Float32>) {
      if (IsRotated(block)) {
        RotatedKeys<Element>(block, keys, tile.begin, count, scratch.k, tile.k);
      } else {
        FloatRows<Element>(keys, tile.begin, count, true, scratch.k, tile.k);
      }
      FloatRows<Element>(values, tile.begin, count, true, scratch.v, tile.v);
    } else {
      StoredRows<Element, Compute>(keys, tile.begin, count, scratch.k, tile.k);
      StoredRows<Element, Compute>(values, tile.begin, count, scratch.v, tile.v);
    }
    AttendTileFewRows(block, scratch, state, tile);
  }
}

/*! \brief Fold the keys [begin, end) into the state of all panels. */
template <typename Element>
void AttendKeysPanels(const AttentionBlock& block, const Scratch& scratch, int64_t begin,
                      int64_t end, const State& state) {
  const int64_t rows = block.row_end - block.row_begin;
  const RowSource keys = KeysOf(block);
  const RowSource values = ValuesOf(block);
  Tile<Float32> tile;
  for (tile.begin = begin; tile.begin < end; tile.begin = tile.end) {
    tile.end = TileEnd(tile.begin, end);
    const int64_t count = tile.end - tile.begin;
    // Panels read keys one element at a time, so only the values must be whole vectors.
    if (IsRotated(block)) {
      RotatedKeys<Element>(block, keys, tile.begin, count, scratch.k, tile.k);
    } else {
      FloatRows<Element>(keys, tile.begin, count, false, scratch.k, tile.k);
    }
    FloatRows<Element>(values, tile.begin, count, true, scratch.v, tile.v);
    int64_t row = 0;
    for (; row + kPanelRows <= rows; row += kPanelRows) {
      AttendTilePanel<kBlockVecs>(block, scratch, state, tile, row, kPanelRows);
    }
    if (row < rows) {
      AttendTileLastPanel<kBlockVecs>(block, scratch, state, tile, row, rows - row);
    }
  }
}

template <typename Element>
void AttendKeysOf(const AttentionBlock& block, const Scratch& scratch, int64_t chunk,
                  const State& state) {
  ClearState(block, state);
  const int64_t chunk_begin = chunk * kKeyChunk;
  const int64_t chunk_end = chunk_begin + kKeyChunk;
  const int64_t begin = block.key_begin > chunk_begin ? block.key_begin : chunk_begin;
  const int64_t end = block.key_end < chunk_end ? block.key_end : chunk_end;
  if (!HasFewRows(block)) {
    AttendKeysPanels<Element>(block, scratch, begin, end, state);
    return;
  }
  typedef typename FewRowsElement<Element>::Type Compute;
  const bool whole = block.head_dim_qk % kLanes == 0 && block.head_dim_vo % kLanes == 0;
  if (!IsRotated(block) && (whole || !kSame<Compute, Element>)) {
    AttendKeysFewRows<Element, Compute>(block, scratch, begin, end, state);
  } else {
    AttendKeysFewRows<Element, Float32>(block, scratch, begin, end, state);
  }
}

void AttendKeys(const AttentionBlock& block, const Scratch& scratch, int64_t chunk,
                const State& state) {
  DispatchKeys(block.kv_dtype, [&](auto element) {
    AttendKeysOf<decltype(element)>(block, scratch, chunk, state);
  });
}

void AttendBlock(const AttentionBlock& block, float* memory) {
  const Scratch scratch = ScratchAt(block, memory);
  const State total = StateAt(block, scratch.total);
  const State part = StateAt(block, scratch.part);
  ClearState(block, total);
  FindBounds(block, scratch);
  if (FirstChunk(block) < LastChunk(block)) LoadQueries(block, scratch);
  for (int64_t chunk = FirstChunk(block); chunk < LastChunk(block); ++chunk) {
    AttendKeys(block, scratch, chunk, part);
    FoldState(block, total, part, scratch);
  }
  FinishState(block, total);
}

void AttendChunk(const AttentionBlock& block, int64_t chunk, float* state, float* memory) {
  const Scratch scratch = ScratchAt(block, memory);
  FindBounds(block, scratch);
  LoadQueries(block, scratch);
  AttendKeys(block, scratch, chunk, StateAt(block, state));
}

void FoldChunks(const AttentionBlock& block, const float* states, float* memory) {
  const Scratch scratch = ScratchAt(block, memory);
  const State total = StateAt(block, scratch.total);
  ClearState(block, total);
  for (int64_t chunk = FirstChunk(block); chunk < LastChunk(block); ++chunk) {
    FoldState(block, total, StateAt(block, const_cast<float*>(states)), scratch);
    states += StateFloats(block);
  }
  FinishState(block, total);
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_ATTENTION_H_

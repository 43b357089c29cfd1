// Gathers the keys and values of a tile from pages as pointers to rows.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_KEY_TILE_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_KEY_TILE_H_

#include "../attention_block.h"
#include "float8.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

/*! \brief Memory laid out as pages of slots, each slot a row of dim elements. */
struct RowSource {
  const char* base;
  int64_t stride_page;
  int64_t stride_slot;
  const int32_t* pages;
  int64_t page_size;
  int64_t sink_size;
  int64_t slot_shift;
  int64_t dim;
};

TFI_INLINE RowSource KeysOf(const AttentionBlock& block) {
  const KeySource& keys = block.keys;
  return {keys.k,         keys.k_stride_page, keys.k_stride_slot, keys.pages,
          keys.page_size, keys.sink_size,     keys.slot_shift,    block.head_dim_qk};
}

TFI_INLINE RowSource ValuesOf(const AttentionBlock& block) {
  const KeySource& keys = block.keys;
  return {keys.v,         keys.v_stride_page, keys.v_stride_slot, keys.pages,
          keys.page_size, keys.sink_size,     keys.slot_shift,    block.head_dim_vo};
}

/*!
 * \brief Call visit(i, row) for the stored rows begin + i, 0 <= i < count, and for no other: slots
 * that are not in use may hold anything.
 */
template <typename Raw, typename Visitor>
TFI_INLINE void ForEachRow(const RowSource& source, int64_t begin, int64_t count,
                           const Visitor& visit) {
  for (int64_t i = 0; i < count;) {
    // Once, but twice when the rows lie on both sides of the end of the sink.
    const int64_t first = begin + i;
    const bool in_sink = first < source.sink_size;
    const int64_t run_end =
        in_sink && source.sink_size - begin < count ? source.sink_size - begin : count;
    const int64_t stored = in_sink ? first : first + source.slot_shift;
    int64_t page = stored / source.page_size;
    int64_t slot = stored - page * source.page_size;
    for (; i < run_end; ++page, slot = 0) {
      const int64_t page_index = source.pages == nullptr ? page : source.pages[page];
      const Raw* row = reinterpret_cast<const Raw*>(source.base) + page_index * source.stride_page +
                       slot * source.stride_slot;
      const int64_t left = source.page_size - slot;
      const int64_t end = run_end - i < left ? run_end : i + left;
      for (; i < end; ++i, row += source.stride_slot) visit(i, row);
    }
  }
}

/*! \brief Let rows[i] point to row begin + i where it is stored. */
template <typename Raw>
void LocateRows(const RowSource& source, int64_t begin, int64_t count, const Raw** rows) {
  ForEachRow<Raw>(source, begin, count, [&](int64_t i, const Raw* row) { rows[i] = row; });
}

/*! \brief Let rows[i] point to row begin + i as floats in scratch, padded to whole vectors with 0.
 */
template <typename Element>
void ConvertRows(const RowSource& source, int64_t begin, int64_t count, float* scratch,
                 const float** rows) {
  typedef typename Element::Raw Raw;
  const int64_t stride = RoundUp(source.dim, kMaxLanes);
  ForEachRow<Raw>(source, begin, count, [&](int64_t i, const Raw* row) {
    float* target = scratch + i * stride;
    LoadRow<Element>(row, source.dim, target);
    rows[i] = target;
  });
}

/*! \brief Let rows[i] point to row begin + i as floats, in place when that is possible. */
template <typename Element>
TFI_INLINE void FloatRows(const RowSource& source, int64_t begin, int64_t count, bool pad,
                          float* scratch, const float** rows) {
  if constexpr (kSame<Element, Float32>) {
    if (!pad || source.dim % kLanes == 0) {
      LocateRows<float>(source, begin, count, rows);
      return;
    }
  }
  ConvertRows<Element>(source, begin, count, scratch, rows);
}

/*!
 * \brief Let rows[i] point to row begin + i in the dtype Stored, from which LoadVec is cheap: where
 * it is, or, of 8-bit rows, in scratch, padded to whole vectors with 0.
 */
template <typename Element, typename Stored>
TFI_INLINE void StoredRows(const RowSource& source, int64_t begin, int64_t count, float* scratch,
                           const typename Stored::Raw** rows) {
  if constexpr (kSame<Element, Stored>) {
    LocateRows(source, begin, count, rows);
  } else {
    uint16_t* const halves = reinterpret_cast<uint16_t*>(scratch);
    const int64_t stride = RoundUp(source.dim, 2 * kMaxLanes);
    ForEachRow<uint8_t>(source, begin, count, [&](int64_t i, const uint8_t* row) {
      WidenRow<Element>(row, source.dim, halves + i * stride);
      rows[i] = halves + i * stride;
    });
  }
}

/*! \brief Whether the first dim elements, a multiple of kLanes, of all rows are finite. */
template <typename Element>
TFI_INLINE bool AllFinite(const typename Element::Raw* const* rows, int64_t count, int64_t dim) {
  Vec zeros = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec v = Element::LoadVec(rows[i] + d);
      zeros += v - v;
    }
  }
  return ReduceSum(zeros) == 0.0f;
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_KEY_TILE_H_

// Gathers the keys and values of a tile from pages as pointers to rows of floats.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_KEY_TILE_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_KEY_TILE_H_

#include "../attention_block.h"
#include "elements.h"

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
  int64_t dim;
};

TFI_INLINE RowSource KeysOf(const AttentionBlock& block) {
  const KeySource& keys = block.keys;
  return {keys.k,     keys.k_stride_page, keys.k_stride_slot,
          keys.pages, keys.page_size,     block.head_dim_qk};
}

TFI_INLINE RowSource ValuesOf(const AttentionBlock& block) {
  const KeySource& keys = block.keys;
  return {keys.v,     keys.v_stride_page, keys.v_stride_slot,
          keys.pages, keys.page_size,     block.head_dim_vo};
}

/*!
 * \brief Let rows[i] point to row begin + i as floats, i < count. Only these rows are touched.
 *
 * Rows are converted to scratch, whose rows are padded with zeros to whole vectors, unless they
 * are float32 already and the reader needs no padding.
 */
template <typename Element>
void GatherRows(const RowSource& source, int64_t begin, int64_t count, bool needs_padding,
                float* scratch, const float** rows) {
  typedef typename Element::Raw Raw;
  const bool in_place = sizeof(Raw) == sizeof(float) && !needs_padding;
  const int64_t scratch_stride = RoundUp(source.dim, kMaxLanes);
  int64_t page = begin / source.page_size;
  int64_t slot = begin - page * source.page_size;
  for (int64_t i = 0; i < count; ++page, slot = 0) {
    const int64_t page_index = source.pages == nullptr ? page : source.pages[page];
    const Raw* row = reinterpret_cast<const Raw*>(source.base) + page_index * source.stride_page +
                     slot * source.stride_slot;
    const int64_t left = source.page_size - slot;
    const int64_t end = count - i < left ? count : i + left;
    for (; i < end; ++i, row += source.stride_slot) {
      if (in_place) {
        rows[i] = reinterpret_cast<const float*>(row);
      } else {
        float* target = scratch + i * scratch_stride;
        LoadRow<Element>(row, source.dim, target);
        rows[i] = target;
      }
    }
  }
}

/*! \brief Whether the first dim floats (rounded up to whole vectors) of all rows are finite. */
TFI_INLINE bool AllFinite(const float* const* rows, int64_t count, int64_t dim) {
  Vec zeros = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec v = Load(rows[i] + d);
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

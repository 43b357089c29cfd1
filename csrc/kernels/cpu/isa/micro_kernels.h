// The two products of attention, blocked for registers: scores = q k^T and o += p v.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_MICRO_KERNELS_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_MICRO_KERNELS_H_

#include "../attention_block.h"
#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

// kBlockScalars broadcast scalars times kBlockVecs vectors are accumulated at a time: enough chains
// to hide the latency of the multiply-add, few enough to stay in registers (32, 16 and 16 vectors).
#if defined(__AVX512F__)
constexpr int kBlockScalars = 6;
constexpr int kBlockVecs = 4;
#elif defined(__AVX2__)
constexpr int kBlockScalars = 6;
constexpr int kBlockVecs = 2;
#else
constexpr int kBlockScalars = 5;
constexpr int kBlockVecs = 2;
#endif

/*! \brief Rows of a panel: queries lie transposed, (dim, width), one row per vector lane. */
constexpr int64_t kPanelRows = kBlockVecs * kLanes;

/*! \brief Scores of kKeys keys against a panel of kVecs vectors of rows, to s (kKeys, width). */
template <int kKeys, int kVecs>
void ScoreKeysByLanes(const float* q, int64_t dim, const float* const* k, float* s) {
  const float* key[kKeys];
  TFI_UNROLL for (int i = 0; i < kKeys; ++i) key[i] = k[i];
  Vec acc[kKeys][kVecs] = {};
  for (int64_t d = 0; d < dim; ++d) {
    Vec rows[kVecs];
    TFI_UNROLL for (int v = 0; v < kVecs; ++v) rows[v] = Load(q + (d * kVecs + v) * kLanes);
    TFI_UNROLL for (int i = 0; i < kKeys; ++i) {
      const Vec element = Broadcast(key[i][d]);
      TFI_UNROLL for (int v = 0; v < kVecs; ++v) acc[i][v] += element * rows[v];
    }
  }
  TFI_UNROLL for (int i = 0; i < kKeys; ++i) {
    TFI_UNROLL for (int v = 0; v < kVecs; ++v) Store(s + (i * kVecs + v) * kLanes, acc[i][v]);
  }
}

template <int kKeys, int kVecs>
void ScoreLastKeysByLanes(int64_t count, const float* q, int64_t dim, const float* const* k,
                          float* s) {
  if (count == kKeys) {
    ScoreKeysByLanes<kKeys, kVecs>(q, dim, k, s);
  } else if constexpr (kKeys > 1) {
    ScoreLastKeysByLanes<kKeys - 1, kVecs>(count, q, dim, k, s);
  }
}

/*! \brief Scores of count keys against a panel, to s (count, kVecs * kLanes). */
template <int kVecs>
void ScorePanel(const float* q, int64_t dim, const float* const* k, int64_t count, float* s) {
  constexpr int64_t kWidth = kVecs * kLanes;
  int64_t i = 0;
  for (; i + kBlockScalars <= count; i += kBlockScalars) {
    ScoreKeysByLanes<kBlockScalars, kVecs>(q, dim, k + i, s + i * kWidth);
  }
  if (i < count) {
    ScoreLastKeysByLanes<kBlockScalars - 1, kVecs>(count - i, q, dim, k + i, s + i * kWidth);
  }
}

/*!
 * \brief Scores of kLanes / kRows keys against kRows rows of queries, q_stride apart. Lane
 * r * kLanes / kRows + j of the result is the score of row r and key j; dim is a multiple of
 * kLanes.
 */
template <typename Element, int kRows>
TFI_INLINE Vec ScoreKeysByDot(const float* q, int64_t q_stride, int64_t dim,
                              const typename Element::Raw* const* k) {
  constexpr int kKeys = kLanes / kRows;
  const typename Element::Raw* key[kKeys];
  TFI_UNROLL for (int j = 0; j < kKeys; ++j) key[j] = k[j];
  Vec acc[kLanes] = {};
  for (int64_t d = 0; d < dim; d += kLanes) {
    Vec rows[kRows];
    TFI_UNROLL for (int r = 0; r < kRows; ++r) rows[r] = Load(q + r * q_stride + d);
    TFI_UNROLL for (int j = 0; j < kKeys; ++j) {
      const Vec element = Element::LoadVec(key[j] + d);
      TFI_UNROLL for (int r = 0; r < kRows; ++r) acc[r * kKeys + j] += rows[r] * element;
    }
  }
  return SumOfEach(acc);
}

/*!
 * \brief Scores of count keys against kRows rows, to s (kRows, kKeyTile). k is readable, and s is
 * written, up to whole vectors of keys.
 */
template <typename Element, int kRows>
void ScoreRows(const float* q, int64_t dim, const typename Element::Raw* const* k, int64_t count,
               float* s) {
  constexpr int kKeys = kLanes / kRows;
  for (int64_t i = 0; i < count; i += kKeys) {
    const Vec scores = ScoreKeysByDot<Element, kRows>(q, dim, dim, k + i);
    TFI_UNROLL for (int r = 0; r < kRows; ++r) {
      memcpy(s + r * kKeyTile + i, reinterpret_cast<const float*>(&scores) + r * kKeys,
             kKeys * sizeof(float));
    }
  }
}

// How the weights of a tile lie in memory: (keys, width) for panels, (rows, kKeyTile) for few rows.
enum class WeightLayout { kKeyMajor, kRowMajor };

/*!
 * \brief What o += p v is given: the weight of row r for key k is p[r + k * width] or
 * p[r * kKeyTile + k]. o is (rows, o_stride); values are whole vectors.
 */
template <typename Element>
struct ValueProduct {
  const float* p;
  int64_t width;
  const typename Element::Raw* const* v;
  int64_t num_keys;
  const float* alpha;  // o of each row is multiplied by this first
  float* o;
  int64_t o_stride;
};

template <typename Element, WeightLayout kLayout, int kRows, int kVecs>
void AccumulateBlock(const ValueProduct<Element>& x, int64_t row, int64_t column) {
  float* o = x.o + row * x.o_stride + column;
  Vec acc[kRows][kVecs];
  TFI_UNROLL for (int r = 0; r < kRows; ++r) {
    TFI_UNROLL for (int c = 0; c < kVecs; ++c) {
      acc[r][c] = Load(o + r * x.o_stride + c * kLanes) * x.alpha[row + r];
    }
  }
  const bool by_key = kLayout == WeightLayout::kKeyMajor;
  const float* p = x.p + (by_key ? row : row * kKeyTile);
  const int64_t step = by_key ? x.width : 1;
  const int64_t row_step = by_key ? 1 : kKeyTile;
  const typename Element::Raw* const* v = x.v;
  for (int64_t k = 0; k < x.num_keys; ++k, p += step) {
    const typename Element::Raw* value = v[k] + column;
    Vec values[kVecs];
    TFI_UNROLL for (int c = 0; c < kVecs; ++c) values[c] = Element::LoadVec(value + c * kLanes);
    TFI_UNROLL for (int r = 0; r < kRows; ++r) {
      const Vec weight = Broadcast(p[r * row_step]);
      TFI_UNROLL for (int c = 0; c < kVecs; ++c) acc[r][c] += weight * values[c];
    }
  }
  TFI_UNROLL for (int r = 0; r < kRows; ++r) {
    TFI_UNROLL for (int c = 0; c < kVecs; ++c) {
      Store(o + r * x.o_stride + c * kLanes, acc[r][c]);
    }
  }
}

template <typename Element, WeightLayout kLayout, int kRows>
void AccumulateRows(const ValueProduct<Element>& x, int64_t row, int64_t dim) {
  int64_t column = 0;
  for (; column + kBlockVecs * kLanes <= dim; column += kBlockVecs * kLanes) {
    AccumulateBlock<Element, kLayout, kRows, kBlockVecs>(x, row, column);
  }
  for (; column < dim; column += kLanes)
    AccumulateBlock<Element, kLayout, kRows, 1>(x, row, column);
}

template <typename Element, WeightLayout kLayout, int kRows>
void AccumulateLastRows(const ValueProduct<Element>& x, int64_t row, int64_t count, int64_t dim) {
  if (count == kRows) {
    AccumulateRows<Element, kLayout, kRows>(x, row, dim);
  } else if constexpr (kRows > 1) {
    AccumulateLastRows<Element, kLayout, kRows - 1>(x, row, count, dim);
  }
}

/*! \brief o = alpha o + p v for the rows [row, row_end). */
template <typename Element, WeightLayout kLayout>
void AccumulateValues(const ValueProduct<Element>& x, int64_t row, int64_t row_end, int64_t dim) {
  for (; row + kBlockScalars <= row_end; row += kBlockScalars) {
    AccumulateRows<Element, kLayout, kBlockScalars>(x, row, dim);
  }
  if (row < row_end) {
    AccumulateLastRows<Element, kLayout, kBlockScalars - 1>(x, row, row_end - row, dim);
  }
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_MICRO_KERNELS_H_

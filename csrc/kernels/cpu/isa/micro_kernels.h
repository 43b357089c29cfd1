// The two products of attention, blocked for registers: scores = q k^T and o += p v.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_MICRO_KERNELS_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_MICRO_KERNELS_H_

#include "../attention_block.h"
#include "simd.h"

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
 * \brief Scores of count keys against one row, to s. q and the keys are padded to whole vectors. k
 * is readable, and s is written, up to whole vectors of keys.
 */
TFI_INLINE void ScoreRow(const float* q, int64_t dim, const float* const* k, int64_t count,
                         float* s) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const float* key[kLanes];
    TFI_UNROLL for (int j = 0; j < kLanes; ++j) key[j] = k[i + j];
    Vec acc[kLanes] = {};
    for (int64_t d = 0; d < dim; d += kLanes) {
      const Vec row = Load(q + d);
      TFI_UNROLL for (int j = 0; j < kLanes; ++j) acc[j] += row * Load(key[j] + d);
    }
    Store(s + i, SumOfEach(acc));
  }
}

// How the weights of a tile lie in memory: (keys, width) for panels, (rows, kKeyTile) for few rows.
enum class WeightLayout { kKeyMajor, kRowMajor };

/*!
 * \brief What o += p v is given: the weight of row r for key k is p[r + k * width] or
 * p[r * kKeyTile + k]. o is (rows, o_stride); v is padded to whole vectors.
 */
struct ValueProduct {
  const float* p;
  int64_t width;
  const float* const* v;
  int64_t num_keys;
  const float* alpha;  // o of each row is multiplied by this first
  float* o;
  int64_t o_stride;
};

template <WeightLayout kLayout, int kRows, int kVecs>
void AccumulateBlock(const ValueProduct& x, int64_t row, int64_t column) {
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
  const float* const* v = x.v;
  for (int64_t k = 0; k < x.num_keys; ++k, p += step) {
    const float* value = v[k] + column;
    Vec values[kVecs];
    TFI_UNROLL for (int c = 0; c < kVecs; ++c) values[c] = Load(value + c * kLanes);
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

template <WeightLayout kLayout, int kRows>
void AccumulateRows(const ValueProduct& x, int64_t row, int64_t dim) {
  int64_t column = 0;
  for (; column + kBlockVecs * kLanes <= dim; column += kBlockVecs * kLanes) {
    AccumulateBlock<kLayout, kRows, kBlockVecs>(x, row, column);
  }
  for (; column < dim; column += kLanes) AccumulateBlock<kLayout, kRows, 1>(x, row, column);
}

template <WeightLayout kLayout, int kRows>
void AccumulateLastRows(const ValueProduct& x, int64_t row, int64_t count, int64_t dim) {
  if (count == kRows) {
    AccumulateRows<kLayout, kRows>(x, row, dim);
  } else if constexpr (kRows > 1) {
    AccumulateLastRows<kLayout, kRows - 1>(x, row, count, dim);
  }
}

/*! \brief o = alpha o + p v for the rows [row, row_end). */
template <WeightLayout kLayout>
void AccumulateValues(const ValueProduct& x, int64_t row, int64_t row_end, int64_t dim) {
  for (; row + kBlockScalars <= row_end; row += kBlockScalars) {
    AccumulateRows<kLayout, kBlockScalars>(x, row, dim);
  }
  if (row < row_end) {
    AccumulateLastRows<kLayout, kBlockScalars - 1>(x, row, row_end - row, dim);
  }
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_MICRO_KERNELS_H_

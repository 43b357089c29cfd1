// Rotary embedding of queries and keys inside attention.
//
// Keys of a tile have neighbouring positions, and sines are dear: those of the tile's first key are
// computed, and the others follow from them and from a table of small rotations by the addition
// theorem. The angles are products in double, for queries as well, so both err far less than a
// float product does at large positions.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_INLINE_ROTARY_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_INLINE_ROTARY_H_

#include "key_tile.h"
#include "rotary.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

/*!
 * \brief A rotation, by dimensions: y[d] = x[d] cosine[d] + x[partner of d] sine[d], where the sine
 * of the first element of a pair is negative. The arrays have room for whole vectors.
 */
struct Rotation {
  float cosine[2 * kMaxRotaryPairs + kLanes];
  float sine[2 * kMaxRotaryPairs + kLanes];
};

void ComputeRotation(const AttentionExtras& args, int64_t position, float magnitude,
                     Rotation* out) {
  const int64_t pairs = args.rotary_dim / 2;
  const int64_t step = args.interleaved ? 2 : 1, partner = args.interleaved ? 1 : pairs;
  float sine[kMaxRotaryPairs + kLanes], cosine[kMaxRotaryPairs + kLanes];
  Angles angle = {};
  for (int64_t i = 0; i < pairs; ++i) angle[i] = static_cast<double>(position) * args.inv_freq[i];
  SinCosOfAll(angle, pairs, magnitude, sine, cosine);
  for (int64_t i = 0; i < pairs; ++i) {
    out->cosine[i * step] = cosine[i];
    out->sine[i * step] = -sine[i];
  }
  if (args.inv_freq_second != nullptr) {
    for (int64_t i = 0; i < pairs; ++i) {
      angle[i] = static_cast<double>(position) * args.inv_freq_second[i];
    }
    SinCosOfAll(angle, pairs, magnitude, sine, cosine);
  }
  for (int64_t i = 0; i < pairs; ++i) {
    out->cosine[i * step + partner] = cosine[i];
    out->sine[i * step + partner] = sine[i];
  }
}

/*! \brief Rotate one row in place. */
TFI_INLINE void RotateRow(const AttentionExtras& args, const float* cosine, const float* sine,
                          float* x) {
  const int64_t dim = args.rotary_dim, pairs = dim / 2;
  if (args.interleaved) {
    int64_t d = 0;
    for (; d + kLanes <= dim; d += kLanes) {
      const Vec a = Load(x + d);
      Store(x + d, a * Load(cosine + d) + SwapPairs(a) * Load(sine + d));
    }
    for (; d < dim; d += 2) {
      const float a = x[d], b = x[d + 1];
      x[d] = a * cosine[d] + b * sine[d];
      x[d + 1] = b * cosine[d + 1] + a * sine[d + 1];
    }
    return;
  }
  int64_t i = 0;
  for (; i + kLanes <= pairs; i += kLanes) {
    const Vec a = Load(x + i), b = Load(x + pairs + i);
    Store(x + i, a * Load(cosine + i) + b * Load(sine + i));
    Store(x + pairs + i, b * Load(cosine + pairs + i) + a * Load(sine + pairs + i));
  }
  for (; i < pairs; ++i) {
    const float a = x[i], b = x[pairs + i];
    x[i] = a * cosine[i] + b * sine[i];
    x[pairs + i] = b * cosine[pairs + i] + a * sine[pairs + i];
  }
}

/*! \brief Fill offset_angles of BatchExtras for the offsets [0, count). */
void RotaryOffsets(const AttentionExtras& args, int64_t count, float* table) {
  const int64_t stride = OffsetStride(args.rotary_dim);
  Rotation rotation;
  memset(&rotation, 0, sizeof(rotation));
  for (int64_t i = 0; i < count; ++i, table += 2 * stride) {
    ComputeRotation(args, i, 1.0f, &rotation);
    memcpy(table, rotation.cosine, stride * sizeof(float));
    memcpy(table + stride, rotation.sine, stride * sizeof(float));
  }
}

/*! \brief The rotation by `base` and then by the offset whose angles are given. */
TFI_INLINE void AddOffset(const Rotation& base, const float* offset, int64_t stride,
                          Rotation* out) {
  for (int64_t d = 0; d < stride; d += kLanes) {
    const Vec base_c = Load(base.cosine + d), base_s = Load(base.sine + d);
    const Vec c = Load(offset + d), s = Load(offset + stride + d);
    // The signs of both sines are the same, so they cancel in the cosine and stay in the sine.
    Store(out->cosine + d, base_c * c - base_s * s);
    Store(out->sine + d, base_s * c + base_c * s);
  }
}

/*! \brief Let rows[i] point to the rotated key begin + i as floats in scratch, padded with 0. */
template <typename Element>
void RotatedKeys(const AttentionBlock& block, const RowSource& keys, int64_t begin, int64_t count,
                 float* scratch, const float** rows) {
  const BatchExtras& extras = *block.extras;
  const AttentionExtras& args = extras.args;
  ConvertRows<Element>(keys, begin, count, scratch, rows);
  const int64_t row_stride = RoundUp(keys.dim, kMaxLanes);
  Rotation base, rotation;
  if (args.k_positions == nullptr) {
    const int32_t* positions = args.q_positions + extras.kv_indptr[block.request] + begin;
    for (int64_t i = 0; i < count; ++i) {
      ComputeRotation(args, positions[i], args.magnitude, &rotation);
      RotateRow(args, rotation.cosine, rotation.sine, scratch + i * row_stride);
    }
    return;
  }
  const int64_t stride = OffsetStride(args.rotary_dim);
  memset(&base, 0, sizeof(base));
  ComputeRotation(args, args.k_positions[block.request] + begin, args.magnitude, &base);
  for (int64_t i = 0; i < count; ++i) {
    AddOffset(base, extras.offset_angles + i * 2 * stride, stride, &rotation);
    RotateRow(args, rotation.cosine, rotation.sine, scratch + i * row_stride);
  }
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_INLINE_ROTARY_H_

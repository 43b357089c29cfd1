// RoPE inside attention: of queries and keys in shared memory, and of keys on their way to the
// tensor cores.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_ROTARY_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_ROTARY_CUH_

#include "angle.cuh"
#include "attention_params.cuh"
#include "mma.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

template <typename T>
__device__ __forceinline__ float2 RotaryAngle(const AttentionParams<T>& p, int position,
                                              float inv_freq) {
  // As in SplitRotaryKernel: a float angle.
  const float2 angle = CosineAndSine(static_cast<float>(position) * inv_freq);
  return make_float2(p.magnitude * angle.x, p.magnitude * angle.y);
}

/*! \brief Dimensions of one rotated pair. */
template <typename T>
__device__ __forceinline__ int2 PairDims(const AttentionParams<T>& p, int pair) {
  return p.interleaved ? make_int2(2 * pair, 2 * pair + 1)
                       : make_int2(pair, pair + p.rotary_dim / 2);
}

/*! \brief Rotate one pair of a row in shared memory. */
template <typename T>
__device__ __forceinline__ void RotatePair(const AttentionParams<T>& p, int position, int pair,
                                           T* x) {
  const float f = p.inv_freq[0][pair], second = p.inv_freq[1][pair];
  const float2 angle = RotaryAngle(p, position, f);
  const float2 other = f == second ? angle : RotaryAngle(p, position, second);
  const int2 d = PairDims(p, pair);
  const float a = ToFloat(x[d.x]), b = ToFloat(x[d.y]);
  x[d.x] = FromFloat<T>(a * angle.x - b * angle.y);
  x[d.y] = FromFloat<T>(b * other.x + a * other.y);
}

/*! \brief Rotate pairs of two elements each that lie side by side: x to (x a.x - y a.y, y a.x + x
 * a.y).
 */
template <typename T>
__device__ __forceinline__ void RotateTwo(T* first, T* second, float2 a, float2 b,
                                          bool interleaved) {
  using Two = Vector<T, 2>;
  Two x = *reinterpret_cast<Two*>(first), y = *reinterpret_cast<Two*>(second);
  const float x0 = ToFloat(x.data[0]), x1 = ToFloat(x.data[1]);
  const float y0 = ToFloat(y.data[0]), y1 = ToFloat(y.data[1]);
  if (interleaved) {  // the pairs are (x0, x1) and (y0, y1)
    x.data[0] = FromFloat<T>(x0 * a.x - x1 * a.y);
    x.data[1] = FromFloat<T>(x1 * a.x + x0 * a.y);
    y.data[0] = FromFloat<T>(y0 * b.x - y1 * b.y);
    y.data[1] = FromFloat<T>(y1 * b.x + y0 * b.y);
  } else {  // (x0, y0) and (x1, y1)
    x.data[0] = FromFloat<T>(x0 * a.x - y0 * a.y);
    y.data[0] = FromFloat<T>(y0 * a.x + x0 * a.y);
    x.data[1] = FromFloat<T>(x1 * b.x - y1 * b.y);
    y.data[1] = FromFloat<T>(y1 * b.x + x1 * b.y);
  }
  *reinterpret_cast<Two*>(first) = x;
  *reinterpret_cast<Two*>(second) = y;
}

__device__ __forceinline__ float2 AddAngles(float2 a, float2 b) {
  return make_float2(a.x * b.x - a.y * b.y, a.y * b.x + a.x * b.y);
}

/*!
 * \brief Rotate keys of consecutive positions. A thread has two pairs of every so-manyth key, and
 * goes from one key to the next by adding angles: two sines a tile and pair, not one a key.
 */
template <typename T, int kKeys, int kStride, int kThreads>
__device__ __forceinline__ void RotateConsecutiveKeys(const AttentionParams<T>& p, int position,
                                                      T* tile) {
  const int columns = p.rotary_dim / 4, rows = kThreads / columns;
  const int row = threadIdx.x / columns, pair = threadIdx.x % columns * 2;
  if (row >= rows) return;
  float2 angle[2], step[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    angle[i] = RotaryAngle(p, position + row, p.inv_freq[0][pair + i]);
    step[i] = CosineAndSine(static_cast<float>(rows) * p.inv_freq[0][pair + i]);
  }
  const int first = p.interleaved ? 2 * pair : pair;
  const int second = p.interleaved ? first + 2 : first + p.rotary_dim / 2;
#pragma unroll 4
  for (int key = row; key < kKeys; key += rows) {
    T* x = tile + key * kStride;
    RotateTwo(x + first, x + second, angle[0], angle[1], p.interleaved);
    angle[0] = AddAngles(angle[0], step[0]);
    angle[1] = AddAngles(angle[1], step[1]);
  }
}

template <typename T, int kKeys, int kStride, int kThreads>
__device__ __forceinline__ void RotateKeys(const AttentionParams<T>& p, const RequestInfo& r,
                                           int request, int tile_begin, int end, T* tile) {
  if (p.k_positions != nullptr && p.same_frequencies && p.rotary_dim % 4 == 0) {
    RotateConsecutiveKeys<T, kKeys, kStride, kThreads>(p, p.k_positions[request] + tile_begin,
                                                       tile);
    return;
  }
  const int pairs = p.rotary_dim / 2;
  for (int i = threadIdx.x; i < kKeys * pairs; i += kThreads) {
    const int key = tile_begin + i / pairs, pair = i % pairs;
    if (key >= end) continue;
    const int position =
        p.k_positions != nullptr ? p.k_positions[request] + key : p.q_positions[r.kv_begin + key];
    RotatePair(p, position, pair, tile + i / pairs * kStride);
  }
}

/*!
 * \brief Rotates the keys of a warp in the registers that the tensor cores take them from.
 *
 * For heads of D dimensions that are rotated whole, in pairs (d, d + D / 2), and keys of
 * consecutive positions. Of 16 keys as LoadMatrices brings them, a lane has keys lane / 4 and lane
 * / 4 + 8, and both elements of each of its pairs. Their angles stay in registers and grow by one
 * tile at a time.
 */
template <typename T, int D, int kKeys>
class KeyRotation {
  static constexpr int kPairs = D / 2, kChunks = kPairs / 16;

 public:
  /*! \brief Shared memory that Start writes to. */
  static constexpr int kScratchBytes = (kKeys / 8 + 8 + 1) * kPairs * sizeof(float2);

  /*!
   * \brief Angles of the first tile, whose first key has this position; first_key is that of the
   * warp in the tile. All threads of the block call it, and wait for each other before the scratch
   * memory is used again.
   */
  __device__ __forceinline__ void Start(const AttentionParams<T>& p, int position, int first_key,
                                        int num_threads, float2* scratch) {
    // The angle of a key is that of the first of its eight and its place among them.
    constexpr int kEights = kKeys / 8, kRows = kEights + 8 + 1;
    for (int i = threadIdx.x; i < kRows * kPairs; i += num_threads) {
      const int row = i / kPairs;
      const float inv_freq = p.inv_freq[0][i % kPairs];
      if (row < kEights) {
        scratch[i] = RotaryAngle(p, position + 8 * row, inv_freq);
      } else {
        const int distance = row < kEights + 8 ? row - kEights : kKeys;
        scratch[i] = CosineAndSine(static_cast<float>(distance) * inv_freq);
      }
    }
    __syncthreads();
    const int lane = threadIdx.x % 32;
    const float2* eights = scratch + first_key / 8 * kPairs;
    const float2* places = scratch + (kEights + lane / 4) * kPairs;
#pragma unroll
    for (int i = 0; i < kChunks * 4; ++i) {
      const int pair = PairOf(i, lane);
      angle_[0][i] = AddAngles(eights[pair], places[pair]);
      angle_[1][i] = AddAngles(eights[kPairs + pair], places[pair]);
      step_[i] = scratch[(kEights + 8) * kPairs + pair];
    }
  }

  /*! \brief Rotate what LoadMatrices brought from columns 16 chunk and 16 chunk + D / 2. */
  __device__ __forceinline__ void Rotate(int chunk, uint32_t (&low)[4], uint32_t (&high)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 x = Unpack<T>(low[i]), y = Unpack<T>(high[i]);
      const float2 a = angle_[i / 2][chunk * 4 + i % 2 * 2];
      const float2 b = angle_[i / 2][chunk * 4 + i % 2 * 2 + 1];
      low[i] = Pack<T>(x.x * a.x - y.x * a.y, x.y * b.x - y.y * b.y);
      high[i] = Pack<T>(y.x * a.x + x.x * a.y, y.y * b.x + x.y * b.y);
    }
  }

  /*! \brief Go to the next tile. */
  __device__ __forceinline__ void Advance() {
#pragma unroll
    for (int i = 0; i < kChunks * 4; ++i) {
      angle_[0][i] = AddAngles(angle_[0][i], step_[i]);
      angle_[1][i] = AddAngles(angle_[1][i], step_[i]);
    }
  }

 private:
  __device__ __forceinline__ static int PairOf(int i, int lane) {
    return i / 4 * 16 + i / 2 % 2 * 8 + lane % 4 * 2 + i % 2;
  }

  float2 angle_[2][kChunks * 4];
  float2 step_[kChunks * 4];
};

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_ROTARY_CUH_

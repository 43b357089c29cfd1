// Split of a fused QKV tensor with rotary embedding.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ROTARY_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ROTARY_CUH_

#include <algorithm>

#include "angle.cuh"
#include "frequencies.cuh"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

template <typename T>
struct SplitRotaryParams {
  int num_qo_heads;
  int num_kv_heads;
  int head_dim;
  int rotary_dim;
  bool interleaved;
  bool apply_rope;
  bool has_second;  // the second elements of pairs have frequencies of their own, after the first
  float magnitude;
  int64_t qkv_stride_row;
  int64_t qkv_stride_head;
  const T* qkv;
  const int32_t* position_map;
  T* q;
  T* k;
  T* v;
};

/*!
 * \brief The blocks of one x have one row. Each computes the angles once; a thread keeps those of
 * kVec pairs in registers, and rotates these pairs of one head after the other.
 */
template <typename T, int kVec, int kCount>
__global__ void SplitRotaryKernel(SplitRotaryParams<T> p,
                                  const __grid_constant__ InverseFrequencies<kCount> inv_freq) {
  using Vec = Vector<T, kVec>;
  extern __shared__ float2 cos_sin[];
  const int64_t row = blockIdx.x;
  const int rotary_dim = p.apply_rope ? p.rotary_dim : 0, pairs = rotary_dim / 2;
  const int rotated_heads = p.num_qo_heads + p.num_kv_heads;
  const T* source = p.qkv + row * p.qkv_stride_row;
  auto load = [&](int head, int d) {
    return *reinterpret_cast<const Vec*>(source + head * p.qkv_stride_head + d);
  };
  auto store = [&](int head, int d, const Vec& x) {
    const bool is_q = head < p.num_qo_heads, is_k = head < rotated_heads;
    T* out = is_q ? p.q : is_k ? p.k : p.v;
    const int local = head - (is_q ? 0 : is_k ? p.num_qo_heads : rotated_heads);
    const int heads = is_q ? p.num_qo_heads : p.num_kv_heads;
    *reinterpret_cast<Vec*>(out + (row * heads + local) * p.head_dim + d) = x;
  };

  // A unit is kVec pairs: two vectors, side by side or half of the rotated dimensions apart. Those
  // of the first head are on their way while angles are computed.
  const int units = pairs / kVec, heads_of_block = units > 0 ? blockDim.x / units : 0;
  const int heads_at_once = heads_of_block * gridDim.y;
  const int unit = units > 0 ? threadIdx.x % units : 0;
  const int head_of_block = units > 0 ? threadIdx.x / units : 0;
  const int first_head = blockIdx.y * heads_of_block + head_of_block;
  const int low = p.interleaved ? 2 * unit * kVec : unit * kVec;
  const int high = p.interleaved ? low + kVec : low + pairs;
  int head = head_of_block < heads_of_block ? first_head : rotated_heads;
  Vec x, y;
  if (head < rotated_heads) {
    x = load(head, low);
    y = load(head, high);
  }
  if (rotary_dim > 0) {
    const float position = static_cast<float>(p.position_map[row]);
    // Through a generic address: parameters that lanes index apart are read one after the other.
    const float* frequencies = inv_freq.values;
    asm("" : "+l"(frequencies));
    for (int i = threadIdx.x; i < (p.has_second ? 2 * pairs : pairs); i += blockDim.x) {
      const float2 angle = CosineAndSine(position * frequencies[i]);
      cos_sin[i] = make_float2(p.magnitude * angle.x, p.magnitude * angle.y);
    }
  }
  // What is not rotated: values, and the dimensions behind rotary_dim. The last threads begin,
  // since they may have no head to rotate.
  const int pieces_of_v = p.head_dim / kVec, pieces_behind = (p.head_dim - rotary_dim) / kVec;
  const int num_v = p.num_kv_heads * pieces_of_v;
  const int num_copied = num_v + rotated_heads * pieces_behind;
  const int thread = blockIdx.y * blockDim.x + threadIdx.x, num_threads = blockDim.x * gridDim.y;
  for (int i = num_threads - 1 - thread; i < num_copied; i += num_threads) {
    const bool is_v = i < num_v;
    const int j = is_v ? i : i - num_v, pieces = is_v ? pieces_of_v : pieces_behind;
    const int copied_head = j / pieces + (is_v ? rotated_heads : 0);
    const int d = j % pieces * kVec + (is_v ? 0 : rotary_dim);
    store(copied_head, d, load(copied_head, d));
  }
  if (rotary_dim == 0) return;
  __syncthreads();
  if (head >= rotated_heads) return;

  float2 angle[kVec], second[kVec];  // of the first elements of the pairs, and of the second
#pragma unroll
  for (int j = 0; j < kVec; ++j) {
    angle[j] = cos_sin[unit * kVec + j];
    second[j] = p.has_second ? cos_sin[pairs + unit * kVec + j] : angle[j];
  }
  while (true) {
    const int next = head + heads_at_once;
    Vec next_x, next_y;
    if (next < rotated_heads) {
      next_x = load(next, low);
      next_y = load(next, high);
    }
    float a[2 * kVec];
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      a[j] = ToFloat(x.data[j]);
      a[kVec + j] = ToFloat(y.data[j]);
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      if (p.interleaved) {
        const float even = a[2 * j], odd = a[2 * j + 1];
        a[2 * j] = even * angle[j].x - odd * angle[j].y;
        a[2 * j + 1] = odd * second[j].x + even * second[j].y;
      } else {
        const float first = a[j], other = a[kVec + j];
        a[j] = first * angle[j].x - other * angle[j].y;
        a[kVec + j] = other * second[j].x + first * second[j].y;
      }
    }
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      x.data[j] = FromFloat<T>(a[j]);
      y.data[j] = FromFloat<T>(a[kVec + j]);
    }
    store(head, low, x);
    store(head, high, y);
    if (next >= rotated_heads) return;
    head = next, x = next_x, y = next_y;
  }
}

inline int SplitQKVRotary(const SplitRotaryArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchDType(args.dtype, [&](auto element) {
      using T = decltype(element);
      if (args.num_rows == 0) return cudaSuccess;
      SplitRotaryParams<T> params{args.num_qo_heads,
                                  args.num_kv_heads,
                                  args.head_dim,
                                  args.rotary_dim,
                                  args.interleaved,
                                  args.apply_rope,
                                  args.inv_freq_second != nullptr,
                                  args.magnitude,
                                  args.qkv_stride_row,
                                  args.qkv_stride_head,
                                  static_cast<const T*>(args.qkv),
                                  args.position_map,
                                  static_cast<T*>(args.q),
                                  static_cast<T*>(args.k),
                                  static_cast<T*>(args.v)};
      const int pairs = args.rotary_dim / 2;
      const int count = params.has_second ? 2 * pairs : pairs;
      if (count > kMaxRotaryPairs) {
        throw std::invalid_argument("rotary_dim is " + std::to_string(args.rotary_dim) +
                                    ", with this RoPE scaling it can be 512 at most");
      }
      constexpr int kVec = kWide<T>;
      // A wide piece must lie on one side of the boundary between the halves and of rotary_dim.
      const bool wide =
          CanVectorize(args.head_dim * sizeof(T), {args.qkv, args.q, args.k, args.v}) &&
          args.qkv_stride_row % kVec == 0 && args.qkv_stride_head % kVec == 0 &&
          args.rotary_dim % (2 * kVec) == 0;
      const int vec = wide ? kVec : 1, units = std::max(pairs / vec, 1);
      const int threads = std::max<int>(128, CeilDiv(units, 32) * 32);
      // Few rows: each thread has one head. Many: it has several, for which it reads angles once.
      const int64_t heads = args.num_qo_heads + args.num_kv_heads;
      const int64_t pieces = heads * units + args.num_kv_heads * int64_t{args.head_dim / vec};
      const int64_t parts =
          args.num_rows > 256 ? 1 : std::min<int64_t>(CeilDiv(pieces, threads), 8);
      auto launch = [&](auto most) {
        constexpr int kCount = decltype(most)::value;
        InverseFrequencies<kCount> inv_freq;
        std::copy_n(args.inv_freq, pairs, inv_freq.values);
        if (params.has_second) std::copy_n(args.inv_freq_second, pairs, inv_freq.values + pairs);
        auto kernel = wide ? SplitRotaryKernel<T, kVec, kCount> : SplitRotaryKernel<T, 1, kCount>;
        const dim3 blocks(static_cast<unsigned>(args.num_rows), static_cast<unsigned>(parts));
        return LaunchKernel(kernel, blocks, threads, count * sizeof(float2), handle, params,
                            inv_freq);
      };
      return count <= kFewFrequencies ? launch(std::integral_constant<int, kFewFrequencies>())
                                      : launch(std::integral_constant<int, kMaxRotaryPairs>());
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ROTARY_CUH_

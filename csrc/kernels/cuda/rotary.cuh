// Split of a fused QKV tensor with rotary embedding.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ROTARY_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ROTARY_CUH_

#include <algorithm>

#include "angle.cuh"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Frequencies as a kernel parameter: they reach the kernel without a device allocation. */
struct InverseFrequencies {
  float values[kMaxRotaryPairs];
};

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

/*! \brief One block a row: the angles are computed once and used by every head. */
template <typename T, int kVec>
__global__ void SplitRotaryKernel(SplitRotaryParams<T> p,
                                  const __grid_constant__ InverseFrequencies inv_freq) {
  extern __shared__ float2 cos_sin[];
  const int64_t row = blockIdx.x;
  const int pairs = p.rotary_dim / 2;
  if (p.apply_rope) {
    const float position = static_cast<float>(p.position_map[row]);
    for (int i = threadIdx.x; i < (p.has_second ? 2 * pairs : pairs); i += blockDim.x) {
      const float2 angle = CosineAndSine(position * inv_freq.values[i]);
      cos_sin[i] = make_float2(p.magnitude * angle.x, p.magnitude * angle.y);
    }
    __syncthreads();
  }
  const float2* second_cos_sin = p.has_second ? cos_sin + pairs : cos_sin;
  using Vec = Vector<T, kVec>;
  const int heads = p.num_qo_heads + 2 * p.num_kv_heads;
  const int vecs_per_head = p.head_dim / kVec;
  const T* source = p.qkv + row * p.qkv_stride_row;
  for (int index = threadIdx.x; index < heads * vecs_per_head; index += blockDim.x) {
    const int head = index / vecs_per_head;
    const int d = index % vecs_per_head * kVec;
    const T* in = source + head * p.qkv_stride_head;
    T* out;
    if (head < p.num_qo_heads) {
      out = p.q + (row * p.num_qo_heads + head) * p.head_dim;
    } else if (head < p.num_qo_heads + p.num_kv_heads) {
      out = p.k + (row * p.num_kv_heads + head - p.num_qo_heads) * p.head_dim;
    } else {
      out = p.v + (row * p.num_kv_heads + head - p.num_qo_heads - p.num_kv_heads) * p.head_dim;
    }
    Vec x = *reinterpret_cast<const Vec*>(in + d);
    const bool is_value = head >= p.num_qo_heads + p.num_kv_heads;
    if (p.apply_rope && !is_value && d < p.rotary_dim) {
      if (p.interleaved) {
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const int other = (d + j) ^ 1;
          const bool first = (d + j) % 2 == 0;
          const float2 c = (first ? cos_sin : second_cos_sin)[(d + j) / 2];
          const float partner = ToFloat(in[other]);
          const float rotated = first ? -partner : partner;
          x.data[j] = FromFloat<T>(ToFloat(x.data[j]) * c.x + rotated * c.y);
        }
      } else {
        const bool first = d < pairs;
        const Vec partner = *reinterpret_cast<const Vec*>(in + (first ? d + pairs : d - pairs));
#pragma unroll
        for (int j = 0; j < kVec; ++j) {
          const float2 c = first ? cos_sin[d + j] : second_cos_sin[d + j - pairs];
          const float y = ToFloat(partner.data[j]);
          x.data[j] = FromFloat<T>(ToFloat(x.data[j]) * c.x + (first ? -y : y) * c.y);
        }
      }
    }
    *reinterpret_cast<Vec*>(out + d) = x;
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
      InverseFrequencies inv_freq;
      const int pairs = args.rotary_dim / 2;
      std::copy_n(args.inv_freq, pairs, inv_freq.values);
      if (params.has_second) {
        if (2 * pairs > kMaxRotaryPairs) {
          throw std::invalid_argument("rotary_dim is " + std::to_string(args.rotary_dim) +
                                      ", with this RoPE scaling it can be 512 at most");
        }
        std::copy_n(args.inv_freq_second, pairs, inv_freq.values + pairs);
      }
      constexpr int kVec = kWide<T>;
      // A wide piece must lie on one side of the boundary between the halves and of rotary_dim.
      const bool wide =
          CanVectorize(args.head_dim * sizeof(T), {args.qkv, args.q, args.k, args.v}) &&
          args.qkv_stride_row % kVec == 0 && args.qkv_stride_head % kVec == 0 &&
          args.rotary_dim % (2 * kVec) == 0;
      const int pieces = (args.num_qo_heads + 2 * args.num_kv_heads) * args.head_dim;
      const int threads = std::min<int>(512, CeilDiv(wide ? pieces / kVec : pieces, 32) * 32);
      const size_t shared = (params.has_second ? 2 * pairs : pairs) * sizeof(float2);
      auto kernel = wide ? SplitRotaryKernel<T, kVec> : SplitRotaryKernel<T, 1>;
      kernel<<<static_cast<unsigned>(args.num_rows), threads, shared, handle>>>(params, inv_freq);
      return cudaGetLastError();
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ROTARY_CUH_

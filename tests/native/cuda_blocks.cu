#include "cuda_blocks.h"
#include "kernels/cuda/angle.cuh"
#include "kernels/cuda/float8.cuh"

namespace native {

namespace {

namespace cuda = tvm_flashinfer::kernels::cuda;

// One warp. Rows of shared memory are padded as those of the kernels are.
template <typename T, bool kTransposed>
__global__ void Multiply(const T* a, const T* b, float* c) {
  constexpr int kPitch = 24;
  __shared__ alignas(16) T a_tile[16 * kPitch];
  __shared__ alignas(16) T b_tile[16 * kPitch];
  for (int i = threadIdx.x; i < 256; i += 32) {
    a_tile[i / 16 * kPitch + i % 16] = a[i];
    b_tile[i / 16 * kPitch + i % 16] = b[i];
  }
  __syncwarp();
  const int lane = threadIdx.x, eighth = lane / 8;
  uint32_t a_part[4], b_part[4];
  cuda::LoadMatrices(a_part, a_tile + lane % 16 * kPitch + lane / 16 * 8);
  // Matrices 0 and 1 are the halves of the inner dimension for columns 0 to 7, 2 and 3 for the
  // rest.
  if (kTransposed) {
    const int inner = eighth % 2 * 8 + lane % 8;
    cuda::LoadMatricesTransposed(b_part, b_tile + inner * kPitch + eighth / 2 * 8);
  } else {
    const int column = eighth / 2 * 8 + lane % 8;
    cuda::LoadMatrices(b_part, b_tile + column * kPitch + eighth % 2 * 8);
  }
  for (int half_of_c = 0; half_of_c < 2; ++half_of_c) {
    float sums[4] = {};
    cuda::MultiplyAdd<T>(sums, a_part, b_part[2 * half_of_c], b_part[2 * half_of_c + 1]);
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = half_of_c * 8 + lane % 4 * 2 + i % 2;
      c[row * 16 + column] = sums[i];
    }
  }
}

__global__ void Copy(const uint4* from, const int* exists, uint4* to) {
  __shared__ uint4 pieces[64];
  const int i = threadIdx.x;
  for (int group = 0; group < 2; ++group) {
    cuda::CopyAsync16(pieces + group * 32 + i, from + group * 32 + i, exists[group * 32 + i]);
    cuda::CommitCopies();
  }
  cuda::WaitCopies<1>();
  to[i] = pieces[i];
  cuda::WaitCopies<0>();
  to[32 + i] = pieces[32 + i];
}

__device__ int ThreadIndex() { return blockIdx.x * blockDim.x + threadIdx.x; }

__global__ void Exp2All(const float* x, float* y, int n) {
  if (ThreadIndex() < n) y[ThreadIndex()] = cuda::Exp2(x[ThreadIndex()]);
}

__global__ void Angles(const float* angles, float2* pairs, int n) {
  if (ThreadIndex() < n) pairs[ThreadIndex()] = cuda::CosineAndSine(angles[ThreadIndex()]);
}

template <typename T>
__global__ void PackPairs(const float2* x, uint32_t* packed, float2* y, int pairs) {
  const int i = ThreadIndex();
  if (i >= pairs) return;
  packed[i] = cuda::Pack<T>(x[i].x, x[i].y);
  y[i] = cuda::Unpack<T>(packed[i]);
}

template <typename KV>
__global__ void QuantizeEach(const float* x, float scale, uint8_t* codes, int n) {
  if (ThreadIndex() < n) codes[ThreadIndex()] = cuda::Quantize<KV>(x[ThreadIndex()], scale);
}

template <typename T, typename KV>
__global__ void Widen(const char* codes, float factor, T* rows) {
  cuda::WidenRows<T, KV, kWidenedDim, kWidenedRows, 32>(codes, rows, factor);
}

int BlocksOf(int n) { return (n + 127) / 128; }

template <typename Body>
int Dispatch(Half16 type, const Body& body) {
  if (type == Half16::kFloat16) {
    body(half());
  } else {
    body(nv_bfloat16());
  }
  return cudaGetLastError();
}

}  // namespace

int MultiplyTiles(Half16 type, bool b_is_transposed, const void* a, const void* b, float* c) {
  return Dispatch(type, [&](auto element) {
    using T = decltype(element);
    const T* left = static_cast<const T*>(a);
    const T* right = static_cast<const T*>(b);
    if (b_is_transposed) {
      Multiply<T, true><<<1, 32>>>(left, right, c);
    } else {
      Multiply<T, false><<<1, 32>>>(left, right, c);
    }
  });
}

int CopyGroups(const void* from, const int* exists, void* to) {
  Copy<<<1, 32>>>(static_cast<const uint4*>(from), exists, static_cast<uint4*>(to));
  return cudaGetLastError();
}

int Exp2Of(const float* x, float* y, int n) {
  Exp2All<<<BlocksOf(n), 128>>>(x, y, n);
  return cudaGetLastError();
}

int CosinesAndSines(const float* angles, float* pairs, int n) {
  Angles<<<BlocksOf(n), 128>>>(angles, reinterpret_cast<float2*>(pairs), n);
  return cudaGetLastError();
}

int PackAndUnpack(Half16 type, const float* x, uint32_t* packed, float* y, int n) {
  return Dispatch(type, [&](auto element) {
    PackPairs<decltype(element)><<<BlocksOf(n / 2), 128>>>(
        reinterpret_cast<const float2*>(x), packed, reinterpret_cast<float2*>(y), n / 2);
  });
}

int QuantizeAll(bool is_e4m3, const float* x, float scale, uint8_t* codes, int n) {
  if (is_e4m3) {
    QuantizeEach<__nv_fp8_e4m3><<<BlocksOf(n), 128>>>(x, scale, codes, n);
  } else {
    QuantizeEach<__nv_fp8_e5m2><<<BlocksOf(n), 128>>>(x, scale, codes, n);
  }
  return cudaGetLastError();
}

int WidenAllRows(Half16 type, bool is_e4m3, const void* codes, float factor, void* rows) {
  return Dispatch(type, [&](auto element) {
    using T = decltype(element);
    const char* from = static_cast<const char*>(codes);
    if (is_e4m3) {
      Widen<T, __nv_fp8_e4m3><<<1, 32>>>(from, factor, static_cast<T*>(rows));
    } else {
      Widen<T, __nv_fp8_e5m2><<<1, 32>>>(from, factor, static_cast<T*>(rows));
    }
  });
}

}  // namespace native

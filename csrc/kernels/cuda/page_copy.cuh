// Copy of the pages of a batch to ragged keys and values, for a kernel that is faster over those.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_PAGE_COPY_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_PAGE_COPY_CUH_

#include "plan_buffer.h"
#include "token_slots.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Keys that a block copies, of all heads. */
constexpr int kCopiedKeys = 32;

struct PageCopyParams {
  const int32_t* page_indptr;
  const int32_t* key_indptr;
  const int32_t* page_indices;
  int batch_size;
  int num_heads;
  int page_size;
  int log_pieces;  // of 16 bytes in a head of a key
  int64_t num_keys;
  int64_t stride_page, stride_head, stride_slot;  // in pieces
  const uint4* source[2];                         // keys, values
  uint4* target[2];                               // (num_heads, num_keys, head_dim)
};

/*! \brief blockIdx.y tells keys from values. */
static __global__ void PageCopyKernel(const __grid_constant__ PageCopyParams p) {
  constexpr int kThreads = 256, kUnroll = 8;
  __shared__ int64_t slots[kCopiedKeys];
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kCopiedKeys;
  const int count = static_cast<int>(min(p.num_keys - first, static_cast<int64_t>(kCopiedKeys)));
  if (threadIdx.x < count) {
    const int64_t key = first + threadIdx.x;
    const int b = RequestOfRow(p.key_indptr, p.batch_size, key);
    const unsigned of_request = static_cast<unsigned>(key - p.key_indptr[b]);
    const unsigned page_size = static_cast<unsigned>(p.page_size);
    const int64_t page = p.page_indices[p.page_indptr[b] + of_request / page_size];
    slots[threadIdx.x] = page * p.stride_page + of_request % page_size * p.stride_slot;
  }
  __syncthreads();
  const uint4* __restrict__ source = p.source[blockIdx.y];
  uint4* __restrict__ target = p.target[blockIdx.y] + (first << p.log_pieces);
  const int pieces_of_head = count << p.log_pieces, total = pieces_of_head * p.num_heads;
  for (int begin = threadIdx.x; begin < total; begin += kThreads * kUnroll) {
    uint4 moved[kUnroll];
    uint4* to[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const int at = begin + i * kThreads;
      if (at >= total) break;
      const int head = at / pieces_of_head, in_head = at % pieces_of_head;
      const int piece = in_head & ((1 << p.log_pieces) - 1);
      moved[i] = __ldg(source + slots[in_head >> p.log_pieces] + head * p.stride_head + piece);
      to[i] = target + (static_cast<int64_t>(head) * p.num_keys << p.log_pieces) + in_head;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (begin + i * kThreads < total) *to[i] = moved[i];
    }
  }
}

inline int CopyPages(const AttentionArgs& args, const PagedKV& kv, const PlanView& view,
                     RaggedKV* ragged, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    const PrefillSM90Plan& plan = PrefillSM90Plan::From(view);
    const int64_t head_dim = args.head_dim_qk, in_piece = 8;
    const int64_t elements = plan.num_keys * args.num_kv_heads * head_dim;
    char* k = static_cast<char*>(view.float_workspace);
    char* v = k + elements * 2;
    *ragged = {k,      v, head_dim, plan.num_keys * head_dim, head_dim, plan.num_keys * head_dim,
               nullptr};
    if (plan.num_keys == 0) return cudaSuccess;
    int log_pieces = 0;
    while ((in_piece << log_pieces) < head_dim) ++log_pieces;
    const PageCopyParams params{At<int32_t>(view.int_workspace, plan.page_indptr),
                                At<int32_t>(view.int_workspace, plan.key_indptr),
                                kv.indices,
                                args.batch_size,
                                args.num_kv_heads,
                                kv.page_size,
                                log_pieces,
                                plan.num_keys,
                                kv.k_stride_page / in_piece,
                                kv.k_stride_head / in_piece,
                                kv.k_stride_slot / in_piece,
                                {static_cast<const uint4*>(kv.k), static_cast<const uint4*>(kv.v)},
                                {reinterpret_cast<uint4*>(k), reinterpret_cast<uint4*>(v)}};
    return LaunchKernel(PageCopyKernel,
                        dim3(static_cast<unsigned>(CeilDiv(plan.num_keys, kCopiedKeys)), 2), 256, 0,
                        handle, params);
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_PAGE_COPY_CUH_

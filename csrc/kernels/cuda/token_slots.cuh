// Where the new tokens of a step go, from the page table of its requests.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_TOKEN_SLOTS_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_TOKEN_SLOTS_CUH_

#include "../row_types.h"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief The last request that starts at a row or before it, by bisection. */
__device__ __forceinline__ int RequestOfRow(const int32_t* indptr, int batch_size, int64_t row) {
  int low = 0, high = batch_size;  // the request is in [low, high)
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (indptr[middle] <= row ? low : high) = middle;
  }
  return low;
}

/*! \brief One thread a row. A token that the pages have no place for gets the slot -1. */
static __global__ void TokenSlotsKernel(TokenSlotsArgs args) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (row >= args.num_rows) return;
  const int b = RequestOfRow(args.qo_indptr, args.batch_size, row);
  const int64_t first = args.page_indptr[b], pages = args.page_indptr[b + 1] - first;
  const int64_t keys = pages == 0 ? 0 : (pages - 1) * args.page_size + args.last_page_len[b];
  const int64_t position = keys - args.qo_indptr[b + 1] + row;
  const int64_t page = first + position / args.page_size;
  args.positions[row] = static_cast<int32_t>(position);
  const bool exists = position >= 0 && position < keys && page >= 0 && page < args.num_indices;
  args.slots[row] = exists ? args.page_indices[page] * args.page_size +
                                 static_cast<int32_t>(position % args.page_size)
                           : -1;
}

inline int FindTokenSlots(const TokenSlotsArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    if (args.num_rows == 0) return cudaSuccess;
    return LaunchKernel(TokenSlotsKernel, static_cast<unsigned>(CeilDiv(args.num_rows, 128)), 128,
                        0, handle, args);
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_TOKEN_SLOTS_CUH_

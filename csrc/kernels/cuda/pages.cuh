// Moves of keys and values between pages and plain tensors. They copy bytes, whatever the dtype,
// but for rows that become 8-bit ones.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_PAGES_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_PAGES_CUH_

#include <algorithm>

#include "float8.cuh"
#include "vector.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief A pool in units of Piece, the type that one thread moves. */
template <typename Piece>
struct PoolView {
  Piece* data;
  int64_t num_slots;  // num_pages * page_size
  int num_heads;
  int page_size;
  int pieces;  // of one head of one slot

  /*! \brief Start of a head in a slot; which is 0 for keys and 1 for values. */
  __device__ __forceinline__ Piece* At(int64_t slot, int which, int head) const {
    const int64_t page = slot / page_size, in_page = slot % page_size;
    return data + (((page * 2 + which) * num_heads + head) * page_size + in_page) * pieces;
  }
};

/*! \brief A pool of latent attention: its slots lie one after the other, whatever the page. */
template <typename Piece>
struct RowPoolView {
  Piece* data;
  int64_t num_slots;
  int64_t page_size;
  int pieces;  // of one slot
};

template <typename Piece>
PoolView<Piece> ViewOf(const PagePool& pool) {
  const int64_t row_bytes = static_cast<int64_t>(pool.head_dim) * ElementSize(pool.dtype);
  return {static_cast<Piece*>(pool.data), pool.num_pages * pool.page_size, pool.num_kv_heads,
          pool.page_size, static_cast<int>(row_bytes / sizeof(Piece))};
}

template <typename Piece>
RowPoolView<Piece> ViewOf(const RowPool& pool) {
  const int64_t row_bytes = static_cast<int64_t>(pool.head_dim) * ElementSize(pool.dtype);
  return {static_cast<Piece*>(pool.data), pool.num_pages * pool.page_size, pool.page_size,
          static_cast<int>(row_bytes / sizeof(Piece))};
}

/*! \brief Call body(Piece()) with 16-byte pieces where rows and addresses allow them, else 2 or 1.
 */
template <typename Pool, typename Body>
cudaError_t DispatchPiece(const Pool& pool, std::initializer_list<const void*> addresses,
                          const Body& body) {
  const int64_t row_bytes = static_cast<int64_t>(pool.head_dim) * ElementSize(pool.dtype);
  if (CanVectorize(row_bytes, {pool.data}) && CanVectorize(row_bytes, addresses)) {
    return body(uint4());
  }
  return IsFloat8(pool.dtype) ? body(uint8_t()) : body(uint16_t());
}

constexpr int kPageThreads = 256;

inline unsigned PageBlocks(int64_t work) {
  // The kernels stride over the grid; more blocks than this only wait.
  return static_cast<unsigned>(std::min<int64_t>(CeilDiv(work, kPageThreads), 132 * 32));
}

/*! \brief With kAppend rows go to the pool, else they are read from it. */
template <bool kAppend, typename Piece>
__global__ void MoveRowsKernel(PoolView<Piece> pool, int64_t num_rows, Piece* k, Piece* v,
                               const int32_t* position_map) {
  const int64_t work = num_rows * pool.num_heads * pool.pieces;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < work;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int piece = static_cast<int>(i % pool.pieces);
    const int64_t row_head = i / pool.pieces;
    const int head = static_cast<int>(row_head % pool.num_heads);
    const int64_t slot = position_map[row_head / pool.num_heads];
    const bool inside = slot >= 0 && slot < pool.num_slots;
    if constexpr (kAppend) {
      if (!inside) continue;
      pool.At(slot, 0, head)[piece] = k[i];
      pool.At(slot, 1, head)[piece] = v[i];
    } else {
      k[i] = inside ? pool.At(slot, 0, head)[piece] : Piece();
      v[i] = inside ? pool.At(slot, 1, head)[piece] : Piece();
    }
  }
}

/*! \brief Rows of T go to a pool of 8 bits; a thread rounds kVec neighbours, a Vector of bytes. */
template <typename T, typename KV, int kVec>
__global__ void AppendFloat8Kernel(PoolView<Vector<uint8_t, kVec>> pool, AppendArgs args) {
  const int64_t work = args.num_rows * pool.num_heads * pool.pieces;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < work;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int piece = static_cast<int>(i % pool.pieces);
    const int64_t row_head = i / pool.pieces;
    const int head = static_cast<int>(row_head % pool.num_heads);
    const int64_t slot = args.position_map[row_head / pool.num_heads];
    if (slot < 0 || slot >= pool.num_slots) continue;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const float scale = which == 0 ? args.k_scale : args.v_scale;
      const auto row = static_cast<const Vector<T, kVec>*>(which == 0 ? args.k : args.v)[i];
      Vector<uint8_t, kVec> codes;
#pragma unroll
      for (int j = 0; j < kVec; ++j) codes.data[j] = Quantize<KV>(ToFloat(row.data[j]), scale);
      pool.At(slot, which, head)[piece] = codes;
    }
  }
}

template <typename Piece>
__global__ void CopyPageKernel(PoolView<Piece> pool, int64_t src_page, int64_t tgt_page,
                               int64_t copy_length) {
  const int64_t per_head = copy_length * pool.pieces;
  const int64_t work = 2 * pool.num_heads * per_head;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < work;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int which = static_cast<int>(i / (pool.num_heads * per_head));
    const int head = static_cast<int>(i / per_head % pool.num_heads);
    const int64_t offset = i % per_head;
    pool.At(tgt_page * pool.page_size, which, head)[offset] =
        pool.At(src_page * pool.page_size, which, head)[offset];
  }
}

/*! \brief One thread moves its piece through all slots of a request, in order: slots may be reused.
 */
template <typename Piece>
__global__ void CompactCopyKernel(PoolView<Piece> pool, int batch_size, const int32_t* indptr,
                                  const int32_t* src_pos, const int32_t* dst_pos,
                                  int64_t num_moves) {
  const int64_t per_request = 2LL * pool.num_heads * pool.pieces;
  const int64_t work = batch_size * per_request;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < work;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int piece = static_cast<int>(i % pool.pieces);
    const int head = static_cast<int>(i / pool.pieces % pool.num_heads);
    const int which =
        static_cast<int>(i / (static_cast<int64_t>(pool.pieces) * pool.num_heads) % 2);
    const int64_t request = i / per_request;
    const int64_t begin = max(0, indptr[request]);
    const int64_t end = min(static_cast<int64_t>(indptr[request + 1]), num_moves);
    // Several moves are read at once: one at a time would wait for the memory twice each.
    constexpr int kAhead = 8;
    for (int64_t j = begin; j < end; j += kAhead) {
      int64_t src[kAhead], dst[kAhead];
      Piece data[kAhead];
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        src[k] = j + k < end ? __ldg(src_pos + j + k) : -1;
        dst[k] = j + k < end ? __ldg(dst_pos + j + k) : -1;
        if (src[k] < 0 || src[k] >= pool.num_slots || dst[k] >= pool.num_slots) dst[k] = -1;
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
        if (dst[k] >= 0) data[k] = pool.At(src[k], which, head)[piece];
      }
#pragma unroll
      for (int k = 0; k < kAhead; ++k) {
#pragma unroll
        for (int l = 0; l < k; ++l) {
          if (dst[l] >= 0 && dst[l] == src[k]) data[k] = data[l];  // moved just now
        }
        if (dst[k] >= 0) pool.At(dst[k], which, head)[piece] = data[k];
      }
    }
  }
}

template <typename T, typename KV>
cudaError_t AppendFloat8(const AppendArgs& args, cudaStream_t stream) {
  auto launch = [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    const auto pool = ViewOf<Vector<uint8_t, kVec>>(args.pool);
    const int64_t work = args.num_rows * pool.num_heads * pool.pieces;
    if (work == 0) return cudaSuccess;
    AppendFloat8Kernel<T, KV, kVec><<<PageBlocks(work), kPageThreads, 0, stream>>>(pool, args);
    return cudaGetLastError();
  };
  const bool wide = CanVectorize(args.pool.head_dim * sizeof(T), {args.k, args.v, args.pool.data});
  return wide ? launch(std::integral_constant<int, kWide<T>>())
              : launch(std::integral_constant<int, 1>());
}

/*! \brief AppendFloat8Kernel of a pool of latent attention. */
template <typename T, typename KV, int kVec>
__global__ void AppendFloat8LatentKernel(RowPoolView<Vector<uint8_t, kVec>> pool,
                                         AppendRowsArgs args) {
  const int64_t work = args.num_rows * pool.pieces;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < work;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t slot = args.position_map[i / pool.pieces];
    if (slot < 0 || slot >= pool.num_slots) continue;
    const auto row = static_cast<const Vector<T, kVec>*>(args.rows)[i];
    Vector<uint8_t, kVec> codes;
#pragma unroll
    for (int j = 0; j < kVec; ++j) codes.data[j] = Quantize<KV>(ToFloat(row.data[j]), args.scale);
    pool.data[slot * pool.pieces + i % pool.pieces] = codes;
  }
}

template <typename T, typename KV>
cudaError_t AppendFloat8(const AppendRowsArgs& args, cudaStream_t stream) {
  auto launch = [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    const auto pool = ViewOf<Vector<uint8_t, kVec>>(args.pool);
    const int64_t work = args.num_rows * pool.pieces;
    if (work == 0) return cudaSuccess;
    AppendFloat8LatentKernel<T, KV, kVec>
        <<<PageBlocks(work), kPageThreads, 0, stream>>>(pool, args);
    return cudaGetLastError();
  };
  const bool wide = CanVectorize(args.pool.head_dim * sizeof(T), {args.rows, args.pool.data});
  return wide ? launch(std::integral_constant<int, kWide<T>>())
              : launch(std::integral_constant<int, 1>());
}

/*! \brief MoveRowsKernel of a pool of latent attention. */
template <bool kAppend, typename Piece>
__global__ void MoveLatentRowsKernel(RowPoolView<Piece> pool, int64_t num_rows, Piece* rows,
                                     const int32_t* position_map) {
  const int64_t work = num_rows * pool.pieces;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < work;
       i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    const int64_t slot = position_map[i / pool.pieces];
    const bool inside = slot >= 0 && slot < pool.num_slots;
    const int64_t at = slot * pool.pieces + i % pool.pieces;
    if constexpr (kAppend) {
      if (inside) pool.data[at] = rows[i];
    } else {
      rows[i] = inside ? pool.data[at] : Piece();
    }
  }
}

inline int AppendPagedKVCache(const AppendArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    if (args.dtype != args.pool.dtype) {
      return DispatchDType(args.dtype, [&](auto element) {
        using T = decltype(element);
        return args.pool.dtype == DType::kFloat8E4M3 ? AppendFloat8<T, __nv_fp8_e4m3>(args, handle)
                                                     : AppendFloat8<T, __nv_fp8_e5m2>(args, handle);
      });
    }
    return DispatchPiece(args.pool, {args.k, args.v}, [&](auto piece) {
      using Piece = decltype(piece);
      const auto pool = ViewOf<Piece>(args.pool);
      const int64_t work = args.num_rows * pool.num_heads * pool.pieces;
      if (work == 0) return cudaSuccess;
      MoveRowsKernel<true><<<PageBlocks(work), kPageThreads, 0, handle>>>(
          pool, args.num_rows, static_cast<Piece*>(const_cast<void*>(args.k)),
          static_cast<Piece*>(const_cast<void*>(args.v)), args.position_map);
      return cudaGetLastError();
    });
  });
}

inline int ReadPages(const ReadPagesArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchPiece(args.pool, {args.k, args.v}, [&](auto piece) {
      using Piece = decltype(piece);
      const auto pool = ViewOf<Piece>(args.pool);
      const int64_t work = args.num_rows * pool.num_heads * pool.pieces;
      if (work == 0) return cudaSuccess;
      MoveRowsKernel<false><<<PageBlocks(work), kPageThreads, 0, handle>>>(
          pool, args.num_rows, static_cast<Piece*>(args.k), static_cast<Piece*>(args.v),
          args.position_map);
      return cudaGetLastError();
    });
  });
}

inline int CopySinglePage(const CopyPageArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchPiece(args.pool, {}, [&](auto piece) {
      const auto pool = ViewOf<decltype(piece)>(args.pool);
      const int64_t work = 2 * pool.num_heads * args.copy_length * pool.pieces;
      if (work == 0) return cudaSuccess;
      CopyPageKernel<<<PageBlocks(work), kPageThreads, 0, handle>>>(
          pool, args.src_page, args.tgt_page, args.copy_length);
      return cudaGetLastError();
    });
  });
}

inline int AppendRows(const AppendRowsArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    if (args.dtype != args.pool.dtype) {
      return DispatchDType(args.dtype, [&](auto element) {
        using T = decltype(element);
        return args.pool.dtype == DType::kFloat8E4M3 ? AppendFloat8<T, __nv_fp8_e4m3>(args, handle)
                                                     : AppendFloat8<T, __nv_fp8_e5m2>(args, handle);
      });
    }
    return DispatchPiece(args.pool, {args.rows}, [&](auto piece) {
      using Piece = decltype(piece);
      const auto pool = ViewOf<Piece>(args.pool);
      const int64_t work = args.num_rows * pool.pieces;
      if (work == 0) return cudaSuccess;
      MoveLatentRowsKernel<true><<<PageBlocks(work), kPageThreads, 0, handle>>>(
          pool, args.num_rows, static_cast<Piece*>(const_cast<void*>(args.rows)),
          args.position_map);
      return cudaGetLastError();
    });
  });
}

inline int ReadRows(const ReadRowsArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchPiece(args.pool, {args.rows}, [&](auto piece) {
      using Piece = decltype(piece);
      const auto pool = ViewOf<Piece>(args.pool);
      const int64_t work = args.num_rows * pool.pieces;
      if (work == 0) return cudaSuccess;
      MoveLatentRowsKernel<false><<<PageBlocks(work), kPageThreads, 0, handle>>>(
          pool, args.num_rows, static_cast<Piece*>(args.rows), args.position_map);
      return cudaGetLastError();
    });
  });
}

/*! \brief The first slots of a page are one piece of memory, and so one copy. */
inline int CopyRows(const CopyRowsArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    const auto pool = ViewOf<char>(args.pool);
    const int64_t page_bytes = pool.page_size * pool.pieces;
    return cudaMemcpyAsync(pool.data + args.tgt_page * page_bytes,
                           pool.data + args.src_page * page_bytes, args.copy_length * pool.pieces,
                           cudaMemcpyDeviceToDevice, handle);
  });
}

inline int CompactKVCopy(const CompactCopyArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchPiece(args.pool, {}, [&](auto piece) {
      const auto pool = ViewOf<decltype(piece)>(args.pool);
      const int64_t work = 2LL * args.batch_size * pool.num_heads * pool.pieces;
      if (work == 0 || args.num_moves == 0) return cudaSuccess;
      CompactCopyKernel<<<PageBlocks(work), kPageThreads, 0, handle>>>(
          pool, args.batch_size, args.indptr, args.src_pos, args.dst_pos, args.num_moves);
      return cudaGetLastError();
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_PAGES_CUH_

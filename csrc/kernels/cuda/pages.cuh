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

  /*!
   * \brief Start of a head in a slot; which is 0 for keys and 1 for values. Slots come from index
   * arrays, in 32 bits: a division of 64 would take longer than the memory does.
   */
  __device__ __forceinline__ Piece* At(int32_t slot, int which, int head) const {
    const unsigned page = static_cast<unsigned>(slot) / static_cast<unsigned>(page_size);
    const unsigned in_page = static_cast<unsigned>(slot) % static_cast<unsigned>(page_size);
    return HeadOfPage(page, which, head) + static_cast<int64_t>(in_page) * pieces;
  }
  __device__ __forceinline__ Piece* HeadOfPage(int64_t page, int which, int head) const {
    return data + ((page * 2 + which) * num_heads + head) * page_size * pieces;
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

/*! \brief A launch whose blocks have some rows each: threads (x, y) of a block work on row y. */
struct RowLaunch {
  RowLaunch(int64_t num_rows, int64_t pieces_of_row) {
    const int64_t x = std::min<int64_t>(CeilDiv(pieces_of_row, 32) * 32, kPageThreads);
    threads = dim3(static_cast<unsigned>(x), static_cast<unsigned>(kPageThreads / x));
    blocks = dim3(static_cast<unsigned>(CeilDiv(num_rows, threads.y)));
  }
  dim3 blocks, threads;
};

/*! \brief In a RowLaunch: call body(piece) for the pieces of this thread's row that are its own. */
template <typename Body>
__device__ __forceinline__ void ForPieces(int pieces_of_row, const Body& body) {
  for (int i = threadIdx.x; i < pieces_of_row; i += blockDim.x) body(i);
}

__device__ __forceinline__ int64_t RowOfThread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

/*! \brief With kAppend rows go to the pool, else they are read from it. */
template <bool kAppend, typename Piece>
__global__ void MoveRowsKernel(PoolView<Piece> pool, int64_t num_rows, Piece* k, Piece* v,
                               const int32_t* position_map) {
  const int64_t row = RowOfThread();
  if (row >= num_rows) return;
  const int32_t slot = position_map[row];
  const bool inside = slot >= 0 && slot < pool.num_slots;
  const int pieces_of_row = pool.num_heads * pool.pieces;
  k += row * pieces_of_row;
  v += row * pieces_of_row;
  ForPieces(pieces_of_row, [&](int i) {
    const int head = i / pool.pieces, piece = i % pool.pieces;
    if constexpr (kAppend) {
      const Piece of_k = k[i], of_v = v[i];  // before the slot is known
      if (!inside) return;
      pool.At(slot, 0, head)[piece] = of_k;
      pool.At(slot, 1, head)[piece] = of_v;
    } else {
      k[i] = inside ? pool.At(slot, 0, head)[piece] : Piece();
      v[i] = inside ? pool.At(slot, 1, head)[piece] : Piece();
    }
  });
}

/*! \brief Rows of T go to a pool of 8 bits; a thread rounds kVec neighbours, a Vector of bytes. */
template <typename T, typename KV, int kVec>
__global__ void AppendFloat8Kernel(PoolView<Vector<uint8_t, kVec>> pool, AppendArgs args) {
  const int64_t row = RowOfThread();
  if (row >= args.num_rows) return;
  const int32_t slot = args.position_map[row];
  if (slot < 0 || slot >= pool.num_slots) return;
  const int pieces_of_row = pool.num_heads * pool.pieces;
  ForPieces(pieces_of_row, [&](int i) {
    const int head = i / pool.pieces, piece = i % pool.pieces;
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      const float scale = which == 0 ? args.k_scale : args.v_scale;
      const auto* rows = static_cast<const Vector<T, kVec>*>(which == 0 ? args.k : args.v);
      const Vector<T, kVec> values = rows[row * pieces_of_row + i];
      Vector<uint8_t, kVec> codes;
#pragma unroll
      for (int j = 0; j < kVec; ++j) codes.data[j] = Quantize<KV>(ToFloat(values.data[j]), scale);
      pool.At(slot, which, head)[piece] = codes;
    }
  });
}

/*! \brief blockIdx.x counts keys and values of heads, blockIdx.y pieces of one of them. */
template <typename Piece>
__global__ void CopyPageKernel(PoolView<Piece> pool, int64_t src_page, int64_t tgt_page,
                               int64_t copy_length) {
  const int head = blockIdx.x / 2, which = blockIdx.x % 2;
  const Piece* source = pool.HeadOfPage(src_page, which, head);
  Piece* target = pool.HeadOfPage(tgt_page, which, head);
  for (int64_t i = static_cast<int64_t>(blockIdx.y) * blockDim.x + threadIdx.x;
       i < copy_length * pool.pieces; i += static_cast<int64_t>(gridDim.y) * blockDim.x) {
    target[i] = source[i];
  }
}

/*!
 * \brief One thread moves its piece through all slots of request blockIdx.x, in order: slots may be
 * reused. blockIdx.y counts pieces of all heads, of keys and of values.
 */
template <typename Piece>
__global__ void CompactCopyKernel(PoolView<Piece> pool, const int32_t* indptr,
                                  const int32_t* src_pos, const int32_t* dst_pos,
                                  int64_t num_moves) {
  // Several moves are read at once: one at a time would wait for the memory twice each.
  constexpr int kAhead = 16;
  __shared__ int32_t src[kAhead], dst[kAhead];
  const int i = blockIdx.y * blockDim.x + threadIdx.x;
  const int piece = i % pool.pieces, head = i / pool.pieces % pool.num_heads;
  const int which = i / pool.pieces / pool.num_heads;
  const int64_t begin = max(0, indptr[blockIdx.x]);
  const int64_t end = min(static_cast<int64_t>(indptr[blockIdx.x + 1]), num_moves);
  // Where the next moves go from and to, -1 for one that is not there: read while others move.
  int32_t next_src = -1, next_dst = -1;
  auto read_next = [&](int64_t first) {
    const int64_t j = first + threadIdx.x;
    const bool exists = threadIdx.x < kAhead && j < end;
    next_src = exists ? __ldg(src_pos + j) : -1;
    next_dst = exists ? __ldg(dst_pos + j) : -1;
    if (next_src < 0 || next_src >= pool.num_slots || next_dst >= pool.num_slots) next_dst = -1;
  };
  read_next(begin);
  for (int64_t j = begin; j < end; j += kAhead) {
    if (threadIdx.x < kAhead) {
      src[threadIdx.x] = next_src;
      dst[threadIdx.x] = next_dst;
    }
    __syncthreads();
    read_next(j + kAhead);
    if (which < 2) {
      Piece data[kAhead];
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
    __syncthreads();
  }
}

template <typename T, typename KV>
cudaError_t AppendFloat8(const AppendArgs& args, cudaStream_t stream) {
  auto launch = [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    const auto pool = ViewOf<Vector<uint8_t, kVec>>(args.pool);
    const int64_t pieces_of_row = int64_t{pool.num_heads} * pool.pieces;
    if (args.num_rows * pieces_of_row == 0) return cudaSuccess;
    const RowLaunch launch(args.num_rows, pieces_of_row);
    return LaunchKernel(AppendFloat8Kernel<T, KV, kVec>, launch.blocks, launch.threads, 0, stream,
                        pool, args);
  };
  const bool wide = CanVectorize(args.pool.head_dim * sizeof(T), {args.k, args.v, args.pool.data});
  return wide ? launch(std::integral_constant<int, kWide<T>>())
              : launch(std::integral_constant<int, 1>());
}

/*! \brief AppendFloat8Kernel of a pool of latent attention. */
template <typename T, typename KV, int kVec>
__global__ void AppendFloat8LatentKernel(RowPoolView<Vector<uint8_t, kVec>> pool,
                                         AppendRowsArgs args) {
  const int64_t row = RowOfThread();
  if (row >= args.num_rows) return;
  const int32_t slot = args.position_map[row];
  if (slot < 0 || slot >= pool.num_slots) return;
  ForPieces(pool.pieces, [&](int i) {
    const auto values = static_cast<const Vector<T, kVec>*>(args.rows)[row * pool.pieces + i];
    Vector<uint8_t, kVec> codes;
#pragma unroll
    for (int j = 0; j < kVec; ++j) {
      codes.data[j] = Quantize<KV>(ToFloat(values.data[j]), args.scale);
    }
    pool.data[static_cast<int64_t>(slot) * pool.pieces + i] = codes;
  });
}

template <typename T, typename KV>
cudaError_t AppendFloat8(const AppendRowsArgs& args, cudaStream_t stream) {
  auto launch = [&](auto vec) {
    constexpr int kVec = decltype(vec)::value;
    const auto pool = ViewOf<Vector<uint8_t, kVec>>(args.pool);
    if (args.num_rows * pool.pieces == 0) return cudaSuccess;
    const RowLaunch launch(args.num_rows, pool.pieces);
    return LaunchKernel(AppendFloat8LatentKernel<T, KV, kVec>, launch.blocks, launch.threads, 0,
                        stream, pool, args);
  };
  const bool wide = CanVectorize(args.pool.head_dim * sizeof(T), {args.rows, args.pool.data});
  return wide ? launch(std::integral_constant<int, kWide<T>>())
              : launch(std::integral_constant<int, 1>());
}

/*! \brief MoveRowsKernel of a pool of latent attention. */
template <bool kAppend, typename Piece>
__global__ void MoveLatentRowsKernel(RowPoolView<Piece> pool, int64_t num_rows, Piece* rows,
                                     const int32_t* position_map) {
  const int64_t row = RowOfThread();
  if (row >= num_rows) return;
  const int32_t slot = position_map[row];
  const bool inside = slot >= 0 && slot < pool.num_slots;
  Piece* stored = pool.data + static_cast<int64_t>(slot) * pool.pieces;
  rows += row * pool.pieces;
  ForPieces(pool.pieces, [&](int i) {
    if constexpr (kAppend) {
      if (inside) stored[i] = rows[i];
    } else {
      rows[i] = inside ? stored[i] : Piece();
    }
  });
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
      const int64_t pieces_of_row = int64_t{pool.num_heads} * pool.pieces;
      if (args.num_rows * pieces_of_row == 0) return cudaSuccess;
      const RowLaunch launch(args.num_rows, pieces_of_row);
      return LaunchKernel(MoveRowsKernel<true, Piece>, launch.blocks, launch.threads, 0, handle,
                          pool, args.num_rows, static_cast<Piece*>(const_cast<void*>(args.k)),
                          static_cast<Piece*>(const_cast<void*>(args.v)), args.position_map);
    });
  });
}

inline int ReadPages(const ReadPagesArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchPiece(args.pool, {args.k, args.v}, [&](auto piece) {
      using Piece = decltype(piece);
      const auto pool = ViewOf<Piece>(args.pool);
      const int64_t pieces_of_row = int64_t{pool.num_heads} * pool.pieces;
      if (args.num_rows * pieces_of_row == 0) return cudaSuccess;
      const RowLaunch launch(args.num_rows, pieces_of_row);
      return LaunchKernel(MoveRowsKernel<false, Piece>, launch.blocks, launch.threads, 0, handle,
                          pool, args.num_rows, static_cast<Piece*>(args.k),
                          static_cast<Piece*>(args.v), args.position_map);
    });
  });
}

inline int CopySinglePage(const CopyPageArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchPiece(args.pool, {}, [&](auto piece) {
      const auto pool = ViewOf<decltype(piece)>(args.pool);
      const int64_t pieces = args.copy_length * pool.pieces;
      if (pool.num_heads * pieces == 0) return cudaSuccess;
      const dim3 blocks(2u * pool.num_heads, std::min<int64_t>(CeilDiv(pieces, kPageThreads), 64));
      return LaunchKernel(CopyPageKernel<decltype(piece)>, blocks, kPageThreads, 0, handle, pool,
                          args.src_page, args.tgt_page, args.copy_length);
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
      if (args.num_rows * pool.pieces == 0) return cudaSuccess;
      const RowLaunch launch(args.num_rows, pool.pieces);
      return LaunchKernel(MoveLatentRowsKernel<true, Piece>, launch.blocks, launch.threads, 0,
                          handle, pool, args.num_rows,
                          static_cast<Piece*>(const_cast<void*>(args.rows)), args.position_map);
    });
  });
}

inline int ReadRows(const ReadRowsArgs& args, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    return DispatchPiece(args.pool, {args.rows}, [&](auto piece) {
      using Piece = decltype(piece);
      const auto pool = ViewOf<Piece>(args.pool);
      if (args.num_rows * pool.pieces == 0) return cudaSuccess;
      const RowLaunch launch(args.num_rows, pool.pieces);
      return LaunchKernel(MoveLatentRowsKernel<false, Piece>, launch.blocks, launch.threads, 0,
                          handle, pool, args.num_rows, static_cast<Piece*>(args.rows),
                          args.position_map);
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
      const int64_t pieces = 2LL * pool.num_heads * pool.pieces;
      if (args.batch_size * pieces == 0 || args.num_moves == 0) return cudaSuccess;
      const dim3 blocks(args.batch_size, CeilDiv(pieces, kPageThreads));
      return LaunchKernel(CompactCopyKernel<decltype(piece)>, blocks, kPageThreads, 0, handle, pool,
                          args.indptr, args.src_pos, args.dst_pos, args.num_moves);
    });
  });
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_PAGES_CUH_

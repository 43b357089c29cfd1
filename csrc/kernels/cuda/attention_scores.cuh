// What our own attention kernel does to scores between the product and the softmax: trees, packed
// masks, caps, slopes and biases.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCORES_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCORES_CUH_

#include "attention_params.cuh"
#include "mma.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Nodes of the tree of a request, as far as the index array may be trusted. */
template <typename T>
__device__ __forceinline__ int NumNodes(const AttentionParams<T>& p, int request) {
  const int64_t begin = p.tree_indptr[request], end = p.tree_indptr[request + 1];
  return begin < 0 || end > p.num_tree_nodes ? 0 : max(static_cast<int>(end - begin), 0);
}

/*! \brief The first key that is a node of the tree. */
template <typename T>
__device__ __forceinline__ int TreeStart(const AttentionParams<T>& p, const RequestInfo& r,
                                         int request) {
  return p.tree_indptr == nullptr ? 0x7fffffff : r.num_keys - NumNodes(p, request);
}

template <typename T>
__device__ __forceinline__ int TreeOrderOfRow(const AttentionParams<T>& p, const RequestInfo& r,
                                              int request, int row) {
  if (p.tree_indptr == nullptr) return 0;
  const int nodes = NumNodes(p, request), node = row + nodes - r.num_rows;
  if (node < 0 || node >= nodes) return -1;
  return p.tree_mask[2 * (static_cast<int64_t>(p.tree_indptr[request]) + node)];
}

/*! \brief The orders of the rows that see a node of the tree; none for a node that is not there. */
template <typename T>
__device__ __forceinline__ KeyRange OrdersOfNode(const AttentionParams<T>& p, int request,
                                                 int node) {
  if (node < 0 || node >= NumNodes(p, request)) return {0, 0};
  const int32_t* interval = p.tree_mask + 2 * (static_cast<int64_t>(p.tree_indptr[request]) + node);
  return {interval[0], interval[1]};
}

/*!
 * \brief Hide keys whose bits in the packed mask are not set, or not in its tensor. `packed` and
 * `key` are those of the thread's first score.
 */
template <typename T, int kBlocksQ, int kTilesS>
__device__ __forceinline__ void HideByBits(const AttentionParams<T>& p, const RequestInfo& r,
                                           int request, int packed, int key,
                                           float (&s)[kBlocksQ][kTilesS][4]) {
  const int64_t begin = p.mask_indptr[request];
  const int64_t end = min(static_cast<int64_t>(p.mask_indptr[request + 1]), p.num_mask_bytes);
  const uint8_t* bytes = p.packed_mask + begin;
  const int64_t num_bits = begin >= 0 ? 8 * (end - begin) : 0;
#pragma unroll
  for (int m = 0; m < kBlocksQ; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min((packed + m * 16 + 8 * h) / p.group_size, r.num_rows - 1);
      const int64_t first_bit = static_cast<int64_t>(row) * r.num_keys + key;
#pragma unroll
      for (int i = 0; i < kTilesS; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int64_t bit = first_bit + i * 8 + j;
          const bool visible = bit < num_bits && (bytes[bit / 8] >> (bit % 8) & 1) != 0;
          if (!visible) s[m][i][2 * h + j] = -INFINITY;
        }
      }
    }
  }
}

// What slopes multiply is the place of a key less that of a row: positions, or where they are not
// asked for, the key and the diagonal of the row.

template <typename T>
__device__ __forceinline__ int PlaceOfRow(const AttentionParams<T>& p, const RequestInfo& r,
                                          int row) {
  return p.alibi_by_position ? p.q_positions[r.row_begin + min(row, r.num_rows - 1)]
                             : row + r.num_keys - r.num_rows;
}

/*! \brief The place of key 0, where the places of keys are consecutive. */
template <typename T>
__device__ __forceinline__ int PlaceOfFirstKey(const AttentionParams<T>& p, int request) {
  return p.alibi_by_position && p.k_positions != nullptr ? p.k_positions[request] : 0;
}

/*! \brief The place of a key that is a row too. */
template <typename T>
__device__ __forceinline__ int PlaceOfTreeKey(const AttentionParams<T>& p, const RequestInfo& r,
                                              int key) {
  return p.q_positions[r.kv_begin + min(key, r.num_keys - 1)];
}

/*!
 * \brief Add the bias of type B, in units of log2, to the scores of rows and keys that there are.
 * `packed` and `key` are those of the thread's first score.
 */
template <typename B, typename T, int kBlocksQ, int kTilesS>
__device__ __forceinline__ void AddBias(const AttentionParams<T>& p, const RequestInfo& r,
                                        int request, int kv_head, int packed, int key,
                                        float (&s)[kBlocksQ][kTilesS][4]) {
  const ScoreBias& bias = p.bias;
  const B* of_request = static_cast<const B*>(bias.data) +
                        request / bias.heads_as_requests * bias.stride_sequence +
                        request % bias.heads_as_requests * bias.stride_head;
#pragma unroll
  for (int m = 0; m < kBlocksQ; ++m) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int own = packed + m * 16 + 8 * h;
      const int row = min(own / p.group_size, r.num_rows - 1);
      const int head = kv_head * p.group_size + own % p.group_size;
      const B* of_row = of_request + head * bias.stride_head + row * bias.stride_row;
#pragma unroll
      for (int i = 0; i < kTilesS; ++i) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int at = min(key + i * 8 + j, r.num_keys - 1);
          const float value = static_cast<float>(of_row[at * bias.stride_key]);
          s[m][i][2 * h + j] += value * 1.4426950408889634f;
        }
      }
    }
  }
}

/*!
 * \brief Scale, cap, slopes and bias: products become scores in units of log2. `packed` and `key`
 * are those of the thread's first score.
 */
template <typename T, int kBlocksQ, int kTilesS>
__device__ __forceinline__ void TransformScores(const AttentionParams<T>& p, const RequestInfo& r,
                                                int request, int kv_head, int packed, int key,
                                                float (&s)[kBlocksQ][kTilesS][4]) {
  const bool has_cap = p.cap_log2 != 0.f;
#pragma unroll
  for (int m = 0; m < kBlocksQ; ++m) {
#pragma unroll
    for (int i = 0; i < kTilesS; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) s[m][i][j] *= p.scale_log2;
    }
    if (has_cap) {
#pragma unroll
      for (int i = 0; i < kTilesS; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          // tanh by exp2: the fast tanh is off by 5e-4, which a cap of 50 makes 0.025.
          const float e = Exp2(2.f * 1.4426950408889634f * s[m][i][j]);
          s[m][i][j] = p.cap_log2 * (1.f - 2.f / (e + 1.f));
        }
      }
    }
    if (p.alibi_slopes != nullptr) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int own = packed + m * 16 + 8 * h;
        const int head = kv_head * p.group_size + own % p.group_size;
        const float slope =
            head < p.num_qo_heads ? p.alibi_slopes[head] * 1.4426950408889634f : 0.f;
        const int place = PlaceOfRow(p, r, own / p.group_size);
        if (p.alibi_by_position && p.k_positions == nullptr) {
#pragma unroll
          for (int i = 0; i < kTilesS; ++i) {
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              const int distance = PlaceOfTreeKey(p, r, key + i * 8 + j) - place;
              s[m][i][2 * h + j] += slope * static_cast<float>(distance);
            }
          }
        } else {
          const int distance = PlaceOfFirstKey(p, request) + key - place;
#pragma unroll
          for (int i = 0; i < kTilesS; ++i) {
            s[m][i][2 * h] += slope * static_cast<float>(distance + i * 8);
            s[m][i][2 * h + 1] += slope * static_cast<float>(distance + i * 8 + 1);
          }
        }
      }
    }
  }
  if (p.bias.data != nullptr) {
    if (p.bias.dtype == DType::kFloat32) {
      AddBias<float>(p, r, request, kv_head, packed, key, s);
    } else {
      AddBias<T>(p, r, request, kv_head, packed, key, s);
    }
  }
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_ATTENTION_SCORES_CUH_

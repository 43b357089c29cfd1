// Latent attention (MLA): attention whose keys and values are two parts of one row.
#include <algorithm>
#include <cstring>
#include <vector>

#include "../workspace.h"
#include "kernels.h"
#include "thread_pool.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {

namespace {

/*! \brief Whether the second part of each row follows the first one in memory. */
bool Follows(const void* first, const void* second, int64_t first_bytes) {
  return static_cast<const char*>(second) == static_cast<const char*>(first) + first_bytes;
}

double CopyCostNs(int64_t bytes) { return static_cast<double>(bytes) / 8; }

}  // namespace

void BatchMLA(const MLAArgs& args, const MLATable& table) {
  const int64_t size = ElementSize(args.dtype);
  const int64_t ckv_bytes = args.head_dim_ckv * size, kpe_bytes = args.head_dim_kpe * size;
  const int64_t row_bytes = ckv_bytes + kpe_bytes;
  const int32_t head_dim = args.head_dim_ckv + args.head_dim_kpe;

  AttentionArgs attention{};
  attention.dtype = args.dtype;
  attention.batch_size = args.batch_size;
  attention.num_qo_heads = args.num_heads;
  attention.num_kv_heads = 1;
  attention.head_dim_qk = head_dim;
  attention.head_dim_vo = args.head_dim_ckv;
  attention.num_rows = args.num_rows;
  attention.q = args.q_nope;
  attention.q_stride_row = args.q_nope_stride_row;
  attention.q_stride_head = args.q_nope_stride_head;
  attention.qo_indptr = table.qo_indptr;
  attention.o = args.o;
  attention.lse = args.lse;
  attention.causal = args.causal;
  attention.window_left = -1;
  attention.sm_scale = args.sm_scale;
  attention.kv_dtype = args.dtype;
  attention.v_scale = 1;
  PagedKV pages{};
  pages.k = pages.v = args.ckv;
  pages.k_stride_page = pages.v_stride_page = args.ckv_stride_page;
  pages.k_stride_slot = pages.v_stride_slot = args.ckv_stride_slot;
  pages.num_pages = args.num_pages;
  pages.page_size = args.page_size;
  pages.indptr = table.page_indptr;
  pages.indices = args.page_indices;
  pages.last_page_len = table.last_page_len;

  // TVM's cache passes slices of one tensor, which are read as that tensor. Parts that lie apart
  // are put together first: the kernel reads a key as one row.
  std::vector<char> packed_q, packed_pages;
  std::vector<int32_t> packed_indices;
  if (!Follows(args.q_nope, args.q_pe, ckv_bytes) ||
      args.q_nope_stride_row != args.q_pe_stride_row ||
      args.q_nope_stride_head != args.q_pe_stride_head) {
    CheckWorkspaceBytes(args.num_rows * args.num_heads * row_bytes);
    packed_q.resize(args.num_rows * args.num_heads * row_bytes);
    ParallelFor(args.num_rows, CopyCostNs(packed_q.size()), [&](int64_t row) {
      char* target = packed_q.data() + row * args.num_heads * row_bytes;
      for (int64_t head = 0; head < args.num_heads; ++head, target += row_bytes) {
        const int64_t nope = row * args.q_nope_stride_row + head * args.q_nope_stride_head;
        const int64_t pe = row * args.q_pe_stride_row + head * args.q_pe_stride_head;
        std::memcpy(target, static_cast<const char*>(args.q_nope) + nope * size, ckv_bytes);
        std::memcpy(target + ckv_bytes, static_cast<const char*>(args.q_pe) + pe * size, kpe_bytes);
      }
    });
    attention.q = packed_q.data();
    attention.q_stride_row = static_cast<int64_t>(args.num_heads) * head_dim;
    attention.q_stride_head = head_dim;
  }
  if (!Follows(args.ckv, args.kpe, ckv_bytes) || args.ckv_stride_page != args.kpe_stride_page ||
      args.ckv_stride_slot != args.kpe_stride_slot) {
    const int64_t num_indices = table.page_indptr[args.batch_size];
    CheckWorkspaceBytes(static_cast<int64_t>(packed_q.size()) +
                        num_indices * args.page_size * row_bytes);
    packed_pages.resize(num_indices * args.page_size * row_bytes);
    packed_indices.resize(num_indices);
    ParallelFor(num_indices, CopyCostNs(packed_pages.size()), [&](int64_t i) {
      packed_indices[i] = static_cast<int32_t>(i);
      const int64_t page = args.page_indices[i];
      char* target = packed_pages.data() + i * args.page_size * row_bytes;
      for (int64_t slot = 0; slot < args.page_size; ++slot, target += row_bytes) {
        const int64_t ckv = page * args.ckv_stride_page + slot * args.ckv_stride_slot;
        const int64_t kpe = page * args.kpe_stride_page + slot * args.kpe_stride_slot;
        std::memcpy(target, static_cast<const char*>(args.ckv) + ckv * size, ckv_bytes);
        std::memcpy(target + ckv_bytes, static_cast<const char*>(args.kpe) + kpe * size, kpe_bytes);
      }
    });
    pages.k = pages.v = packed_pages.data();
    pages.k_stride_slot = pages.v_stride_slot = head_dim;
    pages.k_stride_page = pages.v_stride_page = static_cast<int64_t>(args.page_size) * head_dim;
    pages.num_pages = num_indices;
    pages.indices = packed_indices.data();
  }
  BatchAttentionPaged(attention, pages);
}

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

// Movement of tokens between tensors and the pool of pages. All dtypes are copied byte by byte, but
// for rows that become 8-bit ones.
#include <cstring>

#include "attention_block.h"
#include "kernel_table.h"
#include "kernels.h"
#include "thread_pool.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace {

constexpr double kCopyNsPerByte = 0.2;
constexpr double kCopyNsPerRow = 5;

/*!
 * \brief Addresses inside a pool (num_pages, 2, num_kv_heads, page_size, head_dim), or one of rows,
 * which has a single plane.
 */
class Pool {
 public:
  explicit Pool(const PagePool& pool)
      : row_bytes_(pool.head_dim * ElementSize(pool.dtype)),
        page_size_(pool.page_size),
        num_planes_(2 * static_cast<int64_t>(pool.num_kv_heads)),
        num_slots_(pool.num_pages * pool.page_size),
        data_(static_cast<char*>(pool.data)) {}

  explicit Pool(const RowPool& pool)
      : row_bytes_(pool.head_dim * ElementSize(pool.dtype)),
        page_size_(pool.page_size),
        num_planes_(1),
        num_slots_(pool.num_pages * pool.page_size),
        data_(static_cast<char*>(pool.data)) {}

  int64_t row_bytes() const { return row_bytes_; }
  /*! \brief Planes are the heads of the keys and then those of the values. */
  int64_t num_planes() const { return num_planes_; }
  bool Contains(int64_t position) const { return position >= 0 && position < num_slots_; }
  double CopyCostNs(int64_t num_rows) const {
    return static_cast<double>(num_rows) * num_planes_ *
           (kCopyNsPerRow + kCopyNsPerByte * row_bytes_);
  }

  char* Slot(int64_t position, int64_t plane) const {
    const int64_t page = position / page_size_;
    return PageSlot(page, position - page * page_size_, plane);
  }

  char* PageSlot(int64_t page, int64_t slot, int64_t plane) const {
    return data_ + ((page * num_planes_ + plane) * page_size_ + slot) * row_bytes_;
  }

 private:
  int64_t row_bytes_;
  int64_t page_size_;
  int64_t num_planes_;
  int64_t num_slots_;
  char* data_;
};

/*! \brief How one row of a tensor comes into a slot. */
struct RowWriter {
  DType from;
  DType to;
  int64_t dim;

  int64_t source_bytes() const { return dim * ElementSize(from); }

  void Write(const char* source, float scale, char* target) const {
    if (from == to) {
      std::memcpy(target, source, source_bytes());
    } else {
      ActiveKernels().quantize_row(from, to, source, dim, scale,
                                   reinterpret_cast<uint8_t*>(target));
    }
  }
};

}  // namespace

void AppendPagedKVCache(const AppendArgs& args) {
  const Pool pool(args.pool);
  const RowWriter writer = {args.dtype, args.pool.dtype, args.pool.head_dim};
  const int64_t num_heads = args.pool.num_kv_heads;
  // Parallel over planes and not over rows: should two rows name the same slot, the later one wins.
  ParallelFor(pool.num_planes(), pool.CopyCostNs(args.num_rows), [&](int64_t plane) {
    const bool is_key = plane < num_heads;
    const char* source = static_cast<const char*>(is_key ? args.k : args.v) +
                         (is_key ? plane : plane - num_heads) * writer.source_bytes();
    const float scale = is_key ? args.k_scale : args.v_scale;
    for (int64_t row = 0; row < args.num_rows; ++row, source += num_heads * writer.source_bytes()) {
      const int64_t position = args.position_map[row];
      if (pool.Contains(position)) writer.Write(source, scale, pool.Slot(position, plane));
    }
  });
}

void CopySinglePage(const CopyPageArgs& args) {
  if (args.src_page == args.tgt_page || args.copy_length <= 0) return;
  const Pool pool(args.pool);
  ParallelFor(pool.num_planes(), pool.CopyCostNs(args.copy_length), [&](int64_t plane) {
    std::memcpy(pool.PageSlot(args.tgt_page, 0, plane), pool.PageSlot(args.src_page, 0, plane),
                args.copy_length * pool.row_bytes());
  });
}

void CompactKVCopy(const CompactCopyArgs& args) {
  const Pool pool(args.pool);
  const int64_t count = args.batch_size * pool.num_planes();
  ParallelFor(count, pool.CopyCostNs(args.num_moves), [&](int64_t item) {
    const int64_t request = item / pool.num_planes();
    const int64_t plane = item - request * pool.num_planes();
    // In order: a slot may be the target of one move and the source of a later one.
    for (int64_t i = args.indptr[request]; i < args.indptr[request + 1]; ++i) {
      const int64_t source = args.src_pos[i], target = args.dst_pos[i];
      if (!pool.Contains(source) || !pool.Contains(target) || source == target) continue;
      std::memcpy(pool.Slot(target, plane), pool.Slot(source, plane), pool.row_bytes());
    }
  });
}

void ReadPages(const ReadPagesArgs& args) {
  const Pool pool(args.pool);
  const int64_t num_heads = args.pool.num_kv_heads;
  ParallelFor(pool.num_planes(), pool.CopyCostNs(args.num_rows), [&](int64_t plane) {
    const bool is_key = plane < num_heads;
    char* target = static_cast<char*>(is_key ? args.k : args.v) +
                   (is_key ? plane : plane - num_heads) * pool.row_bytes();
    for (int64_t row = 0; row < args.num_rows; ++row, target += num_heads * pool.row_bytes()) {
      const int64_t position = args.position_map[row];
      if (pool.Contains(position)) {
        std::memcpy(target, pool.Slot(position, plane), pool.row_bytes());
      } else {
        std::memset(target, 0, pool.row_bytes());
      }
    }
  });
}

void AppendRows(const AppendRowsArgs& args) {
  const Pool pool(args.pool);
  const RowWriter writer = {args.dtype, args.pool.dtype, args.pool.head_dim};
  const char* source = static_cast<const char*>(args.rows);
  for (int64_t row = 0; row < args.num_rows; ++row, source += writer.source_bytes()) {
    const int64_t position = args.position_map[row];
    if (pool.Contains(position)) writer.Write(source, args.scale, pool.Slot(position, 0));
  }
}

void CopyRows(const CopyRowsArgs& args) {
  if (args.src_page == args.tgt_page || args.copy_length <= 0) return;
  const Pool pool(args.pool);
  std::memcpy(pool.PageSlot(args.tgt_page, 0, 0), pool.PageSlot(args.src_page, 0, 0),
              args.copy_length * pool.row_bytes());
}

void ReadRows(const ReadRowsArgs& args) {
  const Pool pool(args.pool);
  char* target = static_cast<char*>(args.rows);
  for (int64_t row = 0; row < args.num_rows; ++row, target += pool.row_bytes()) {
    const int64_t position = args.position_map[row];
    if (pool.Contains(position)) {
      std::memcpy(target, pool.Slot(position, 0), pool.row_bytes());
    } else {
      std::memset(target, 0, pool.row_bytes());
    }
  }
}

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

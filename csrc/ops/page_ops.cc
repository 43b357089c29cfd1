// Moves of keys and values between tensors and the pages of TVM's cache.
#include <sstream>

#include "../kernels/cpu/kernels.h"
#include "cuda_kernels.h"
#include "json_settings.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

kernels::PagePool ReadPool(const Checker& check, const TensorView& pages) {
  const char* meaning = "(num_pages, 2, num_kv_heads, page_size, head_dim)";
  check.Device("pages", pages);
  const kernels::DType dtype = check.StoredDType("pages", pages);
  check.Rank("pages", pages, 5, meaning);
  check.Shape("pages", pages, {pages.size(0), 2, pages.size(2), pages.size(3), pages.size(4)},
              meaning);
  check.Sizes32("pages", pages);
  check.Contiguous("pages", pages);
  check.Positive("page_size", pages.size(3));
  return {dtype,
          pages.size(0),
          static_cast<int32_t>(pages.size(2)),
          static_cast<int32_t>(pages.size(3)),
          static_cast<int32_t>(pages.size(4)),
          DataOf(pages)};
}

/*! \brief The pool of latent attention. */
kernels::RowPool ReadRowPool(const Checker& check, const TensorView& pages) {
  check.Device("pages", pages);
  const kernels::DType dtype = check.StoredDType("pages", pages);
  check.Rank("pages", pages, 3, "(num_pages, page_size, head_dim)");
  check.Sizes32("pages", pages);
  check.Contiguous("pages", pages);
  check.Positive("page_size", pages.size(1));
  return {dtype, pages.size(0), static_cast<int32_t>(pages.size(1)),
          static_cast<int32_t>(pages.size(2)), DataOf(pages)};
}

template <typename PoolOfPages>
int64_t NumSlots(const PoolOfPages& pool) {
  return pool.num_pages * pool.page_size;
}

/*! \brief Positions are checked where the host can read them, or is asked to. */
void CheckPositionTensor(const Checker& check, const char* name, const TensorView& positions,
                         int64_t num_slots, bool allow_skip) {
  if (IsCPU(positions.device())) {
    CheckPositions(check, name, DataOf<int32_t>(positions), positions.numel(), num_slots,
                   allow_skip);
  } else if (CheckDeviceContents()) {
    CheckPositions(check, name, ReadBack(check, positions).data(), positions.numel(), num_slots,
                   allow_skip);
  }
}

void CheckRange(const Checker& check, const char* name, int64_t value, int64_t limit,
                const char* meaning) {
  if (value >= 0 && value < limit) return;
  std::ostringstream message;
  message << "`" << name << "` is " << value << ", expected 0 or more and less than " << limit
          << ": " << meaning;
  check.FailValue(message.str());
}

/*! \brief The dtype of rows for pages: that of the pages, or a wider one where those are 8-bit. */
kernels::DType RowDType(const Checker& check, const char* name, const TensorView& rows,
                        const TensorView& pages, kernels::DType pool, bool is_scaled) {
  const bool same =
      rows.dtype().code == pages.dtype().code && rows.dtype().bits == pages.dtype().bits;
  if (!kernels::IsFloat8(pool)) {
    check.DType(name, rows, pages.dtype());
    if (is_scaled) {
      check.FailValue(Text("`pages` is ", DTypeText(pages.dtype()),
                           ", but scales are bound; they are for float8 pages, leave them out"));
    }
  } else if (same && is_scaled) {
    check.FailValue(Text("`", name, "` is ", DTypeText(rows.dtype()),
                         " as `pages` is, and such rows are copied as they are, but scales are "
                         "bound; leave them out, or pass the rows before they are made 8-bit"));
  }
  return same ? pool : check.FloatDType(name, rows);
}

struct KVScales {
  double k = 1;
  double v = 1;
};

void Append(const KVScales& scales, const TensorView& pages, const TensorView& k,
            const TensorView& v, const TensorView& position_map) {
  const Checker check("append_paged_kv_cache");
  const kernels::PagePool pool = ReadPool(check, pages);
  const DLDevice device = pages.device();
  const char* meaning = "(n, num_kv_heads, head_dim)";
  const kernels::DType dtype =
      RowDType(check, "k", k, pages, pool.dtype, scales.k != 1 || scales.v != 1);
  check.Rank("k", k, 3, meaning);
  const int64_t n = k.size(0);
  check.Data("k", k, device, k.dtype(), {n, pool.num_kv_heads, pool.head_dim}, meaning);
  check.Data("v", v, device, k.dtype(), {n, pool.num_kv_heads, pool.head_dim}, meaning);
  check.IndexVector("position_map", position_map, n, "(n,)");
  check.OnDevice("position_map", position_map, device);
  check.NoOverlap("pages", pages, {{"k", k}, {"v", v}, {"position_map", position_map}});
  CheckPositionTensor(check, "position_map", position_map, NumSlots(pool), /*allow_skip=*/true);
  const kernels::AppendArgs args{pool,
                                 n,
                                 DataOf(k),
                                 DataOf(v),
                                 DataOf<int32_t>(position_map),
                                 dtype,
                                 static_cast<float>(scales.k),
                                 static_cast<float>(scales.v)};
  if (IsCPU(device)) {
    kernels::cpu::AppendPagedKVCache(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::AppendFn>(check, "append_paged_kv_cache", device);
  Launch(check, run, args, CurrentStream(device));
}

void AppendMLA(double scale, const TensorView& pages, const TensorView& kv,
               const TensorView& position_map) {
  const Checker check("append_paged_mla_kv_cache");
  const kernels::RowPool pool = ReadRowPool(check, pages);
  const DLDevice device = pages.device();
  const kernels::DType dtype = RowDType(check, "kv", kv, pages, pool.dtype, scale != 1);
  check.Rank("kv", kv, 2, "(n, head_dim)");
  const int64_t n = kv.size(0);
  check.Data("kv", kv, device, kv.dtype(), {n, pool.head_dim}, "(n, head_dim)");
  check.IndexVector("position_map", position_map, n, "(n,)");
  check.OnDevice("position_map", position_map, device);
  check.NoOverlap("pages", pages, {{"kv", kv}, {"position_map", position_map}});
  CheckPositionTensor(check, "position_map", position_map, NumSlots(pool), /*allow_skip=*/true);
  const kernels::AppendRowsArgs args{
      pool, n, DataOf(kv), DataOf<int32_t>(position_map), dtype, static_cast<float>(scale)};
  if (IsCPU(device)) {
    kernels::cpu::AppendRows(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::AppendRowsFn>(check, "append_rows", device);
  Launch(check, run, args, CurrentStream(device));
}

}  // namespace

void AppendPagedKVCache(TensorView pages, TensorView k, TensorView v, TensorView position_map) {
  Append({}, pages, k, v, position_map);
}

Function BindAppendPagedKVCache(String options) {
  const Checker check("bind_append_paged_kv_cache");
  const JsonSettings settings(check, "options", options, "{\"k_scale\": 0.25}");
  settings.AllowOnly({"k_scale", "v_scale"});
  const KVScales scales{settings.Scale("k_scale"), settings.Scale("v_scale")};
  return Named("append_paged_kv_cache",
               [scales](TensorView pages, TensorView k, TensorView v, TensorView position_map) {
                 Append(scales, pages, k, v, position_map);
               });
}

void CopySinglePage(TensorView pages, int64_t src_page, int64_t tgt_page, int64_t copy_length) {
  const Checker check("copy_single_page");
  const kernels::PagePool pool = ReadPool(check, pages);
  CheckRange(check, "src_page", src_page, pool.num_pages, "the pages of `pages`");
  CheckRange(check, "tgt_page", tgt_page, pool.num_pages, "the pages of `pages`");
  CheckRange(check, "copy_length", copy_length, pool.page_size + 1LL,
             "it counts tokens, and a page of `pages` holds page_size of them");
  if (src_page == tgt_page) return;
  const kernels::CopyPageArgs args{pool, src_page, tgt_page, copy_length};
  if (IsCPU(pages.device())) {
    kernels::cpu::CopySinglePage(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::CopyPageFn>(check, "copy_single_page", pages.device());
  Launch(check, run, args, CurrentStream(pages.device()));
}

void CompactKVCopy(TensorView pages, TensorView copy_length_indptr, TensorView src_dst_pos,
                   int64_t batch_size) {
  const Checker check("compact_kv_copy");
  const kernels::PagePool pool = ReadPool(check, pages);
  const DLDevice device = pages.device();
  CheckRange(check, "batch_size", batch_size, INT32_MAX, "requests");
  check.IndexVector("copy_length_indptr", copy_length_indptr, batch_size + 1, "(batch_size + 1,)");
  check.OnDevice("copy_length_indptr", copy_length_indptr, device);
  check.DType("src_dst_pos", src_dst_pos, kInt32);
  check.Rank("src_dst_pos", src_dst_pos, 2, "(2, n)");
  const int64_t n = src_dst_pos.size(1);
  check.Shape("src_dst_pos", src_dst_pos, {2, n}, "(2, n)");
  check.Contiguous("src_dst_pos", src_dst_pos);
  check.OnDevice("src_dst_pos", src_dst_pos, device);
  check.NoOverlap("pages", pages,
                  {{"copy_length_indptr", copy_length_indptr}, {"src_dst_pos", src_dst_pos}});
  auto check_indptr = [&](const int32_t* indptr) {
    CheckIndptr(check, "copy_length_indptr", indptr, batch_size, n, "src_dst_pos");
  };
  if (IsCPU(device)) {
    check_indptr(DataOf<int32_t>(copy_length_indptr));
  } else if (CheckDeviceContents()) {
    check_indptr(ReadBack(check, copy_length_indptr).data());
  }
  CheckPositionTensor(check, "src_dst_pos", src_dst_pos, NumSlots(pool), /*allow_skip=*/false);
  const int32_t* positions = DataOf<int32_t>(src_dst_pos);
  const kernels::CompactCopyArgs args{pool,
                                      static_cast<int32_t>(batch_size),
                                      DataOf<int32_t>(copy_length_indptr),
                                      positions,
                                      positions + n,
                                      n};
  if (IsCPU(device)) {
    kernels::cpu::CompactKVCopy(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::CompactCopyFn>(check, "compact_kv_copy", device);
  Launch(check, run, args, CurrentStream(device));
}

void DebugGetKV(TensorView pages, TensorView position_map, TensorView k, TensorView v,
                int64_t layer_id) {
  const Checker check("debug_get_kv");
  const kernels::PagePool pool = ReadPool(check, pages);
  const DLDevice device = pages.device();
  const char* meaning = "(num_layers, n, num_kv_heads, head_dim)";
  check.Rank("position_map", position_map, 1, "(n,)");
  const int64_t n = position_map.size(0);
  check.IndexVector("position_map", position_map, n, "(n,)");
  check.OnDevice("position_map", position_map, device);
  check.Rank("k", k, 4, meaning);
  const int64_t layers = k.size(0);
  check.Data("k", k, device, pages.dtype(), {layers, n, pool.num_kv_heads, pool.head_dim}, meaning);
  check.Data("v", v, device, pages.dtype(), {layers, n, pool.num_kv_heads, pool.head_dim}, meaning);
  CheckRange(check, "layer_id", layer_id, layers, "the layers of `k` and `v`");
  check.NoOverlap("k", k, {{"pages", pages}, {"position_map", position_map}, {"v", v}});
  check.NoOverlap("v", v, {{"pages", pages}, {"position_map", position_map}});
  CheckPositionTensor(check, "position_map", position_map, NumSlots(pool), /*allow_skip=*/false);
  const int64_t element_bytes = (pages.dtype().bits + 7) / 8;
  const int64_t layer_bytes = layer_id * n * pool.num_kv_heads * pool.head_dim * element_bytes;
  const kernels::ReadPagesArgs args{pool, n, DataOf<int32_t>(position_map),
                                    DataOf<char>(k) + layer_bytes, DataOf<char>(v) + layer_bytes};
  if (IsCPU(device)) {
    kernels::cpu::ReadPages(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::ReadPagesFn>(check, "read_pages", device);
  Launch(check, run, args, CurrentStream(device));
}

void AppendPagedMLAKVCache(TensorView pages, TensorView kv, TensorView position_map) {
  AppendMLA(1, pages, kv, position_map);
}

Function BindAppendPagedMLAKVCache(String options) {
  const Checker check("bind_append_paged_mla_kv_cache");
  const JsonSettings settings(check, "options", options, "{\"kv_scale\": 0.25}");
  settings.AllowOnly({"kv_scale"});
  const double scale = settings.Scale("kv_scale");
  return Named("append_paged_mla_kv_cache",
               [scale](TensorView pages, TensorView kv, TensorView position_map) {
                 AppendMLA(scale, pages, kv, position_map);
               });
}

void CopySinglePageMLA(TensorView pages, int64_t src_page, int64_t tgt_page, int64_t copy_length) {
  const Checker check("copy_single_page_mla");
  const kernels::RowPool pool = ReadRowPool(check, pages);
  CheckRange(check, "src_page", src_page, pool.num_pages, "the pages of `pages`");
  CheckRange(check, "tgt_page", tgt_page, pool.num_pages, "the pages of `pages`");
  CheckRange(check, "copy_length", copy_length, pool.page_size + 1LL,
             "it counts tokens, and a page of `pages` holds page_size of them");
  if (src_page == tgt_page) return;
  const kernels::CopyRowsArgs args{pool, src_page, tgt_page, copy_length};
  if (IsCPU(pages.device())) {
    kernels::cpu::CopyRows(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::CopyRowsFn>(check, "copy_rows", pages.device());
  Launch(check, run, args, CurrentStream(pages.device()));
}

void DebugGetKVMLA(TensorView pages, TensorView position_map, TensorView kv, int64_t layer_id) {
  const Checker check("debug_get_kv_mla");
  const kernels::RowPool pool = ReadRowPool(check, pages);
  const DLDevice device = pages.device();
  const char* meaning = "(num_layers, n, head_dim)";
  check.Rank("position_map", position_map, 1, "(n,)");
  const int64_t n = position_map.size(0);
  check.IndexVector("position_map", position_map, n, "(n,)");
  check.OnDevice("position_map", position_map, device);
  check.Rank("kv", kv, 3, meaning);
  check.Data("kv", kv, device, pages.dtype(), {kv.size(0), n, pool.head_dim}, meaning);
  CheckRange(check, "layer_id", layer_id, kv.size(0), "the layers of `kv`");
  check.NoOverlap("kv", kv, {{"pages", pages}, {"position_map", position_map}});
  CheckPositionTensor(check, "position_map", position_map, NumSlots(pool), /*allow_skip=*/false);
  const int64_t layer_bytes = layer_id * n * pool.head_dim * ((pages.dtype().bits + 7) / 8);
  const kernels::ReadRowsArgs args{pool, n, DataOf<int32_t>(position_map),
                                   DataOf<char>(kv) + layer_bytes};
  if (IsCPU(device)) {
    kernels::cpu::ReadRows(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::ReadRowsFn>(check, "read_rows", device);
  Launch(check, run, args, CurrentStream(device));
}

}  // namespace ops
}  // namespace tvm_flashinfer

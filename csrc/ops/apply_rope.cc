// Rotary embedding outside of attention: in place, into other tensors, and on the way into pages.
#include "../kernels/cpu/kernels.h"
#include "cuda_kernels.h"
#include "head_rows.h"
#include "ops.h"
#include "rope_frequencies.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

void SetFrequencies(const RopeFrequencies& frequencies, kernels::RotaryMoveArgs* args) {
  args->rotary_dim = 2 * static_cast<int32_t>(frequencies.inv_freq.size());
  args->interleaved = frequencies.interleaved;
  args->magnitude = frequencies.magnitude;
  args->inv_freq = frequencies.inv_freq.data();
  args->inv_freq_second = frequencies.second();
}

void CheckRotaryDim(const Checker& check, int64_t rotary_dim, int64_t head_dim) {
  if (rotary_dim <= head_dim) return;
  check.FailValue(Text("`rotary_dim` is ", rotary_dim, ", head_dim is ", head_dim,
                       "; it can be head_dim at most"));
}

void Run(const Checker& check, const kernels::RotaryMoveArgs& args, DLDevice device) {
  if (IsCPU(device)) {
    kernels::cpu::MoveRotated(args);
    return;
  }
  LaunchOf<kernels::cuda::RotaryMoveFn>(check, kRopeUnit, "move_rotated", device, args);
}

HeadTensor ReadQuery(const Checker& check, const char* name, const TensorView& x) {
  check.Rank(name, x, 3, "(n, num_heads, head_dim)");
  return ReadHeads(check, name, x);
}

/*!
 * \brief Queries and keys, and where they go: q_out may be q, and k_out k. A function that works in
 * place has no other names for them.
 */
kernels::RotaryMoveArgs ReadQueriesAndKeys(const Checker& check, const TensorView& q,
                                           const TensorView& k, const TensorView& q_out,
                                           const TensorView& k_out, bool in_place = false) {
  kernels::RotaryMoveArgs args{};
  args.dtype = check.FloatDType("q", q);
  const HeadTensor queries = ReadQuery(check, "q", q);
  check.DType("k", k, q.dtype());
  check.OnDevice("k", k, q.device());
  const HeadTensor keys = ReadQuery(check, "k", k);
  if (keys.num_rows != queries.num_rows || keys.dim != queries.dim) {
    check.FailValue(Text("`k` has shape ", ShapeText(k), ", expected (", queries.num_rows,
                         ", num_kv_heads, ", queries.dim, "): the rows and head_dim of `q`"));
  }
  const HeadTensor q_target = ReadHeadsLike(check, in_place ? "q" : "q_out", q_out, queries);
  const HeadTensor k_target = ReadHeadsLike(check, in_place ? "k" : "k_out", k_out, keys);
  CheckHeadOutput(check, q_target, {&queries, &keys, &k_target}, &queries);
  CheckHeadOutput(check, k_target, {&queries, &keys}, &keys);
  args.num_rows = queries.num_rows;
  args.head_dim = static_cast<int32_t>(queries.dim);
  args.magnitude = 1;
  args.q = {static_cast<int32_t>(queries.num_heads), queries.rows, q_target.rows};
  args.k = {static_cast<int32_t>(keys.num_heads), keys.rows, k_target.rows};
  return args;
}

void SetPositions(const Checker& check, const TensorView& positions, const TensorView& q,
                  const TensorView& q_out, const TensorView& k_out, kernels::RotaryMoveArgs* args) {
  check.IndexVector("positions", positions, args->num_rows, "(n,)");
  check.OnDevice("positions", positions, q.device());
  check.NoOverlap("q_out", q_out, "positions", positions);
  check.NoOverlap("k_out", k_out, "positions", positions);
  args->positions = DataOf<int32_t>(positions);
}

kernels::HeadRows RowsOfPages(const TensorView& pages, int64_t which) {
  const int64_t head_stride = pages.size(3) * pages.size(4), half = pages.size(2) * head_stride;
  const int64_t size = (pages.dtype().bits + 7) / 8;
  return {DataOf<char>(pages) + which * half * size, 2 * half, head_stride};
}

}  // namespace

void ApplyRope(TensorView q, TensorView k, TensorView positions, double rope_theta,
               double rope_scale, int64_t rotary_dim, String rope_scaling, TensorView q_out,
               TensorView k_out) {
  const Checker check("apply_rope");
  const DLDevice device = check.Device("q", q);
  kernels::RotaryMoveArgs args = ReadQueriesAndKeys(check, q, k, q_out, k_out);
  SetPositions(check, positions, q, q_out, k_out, &args);
  const RopeFrequencies frequencies =
      MakeRopeFrequencies(check, rope_theta, rope_scale, rotary_dim, rope_scaling);
  CheckRotaryDim(check, rotary_dim, args.head_dim);
  SetFrequencies(frequencies, &args);
  Run(check, args, device);
}

void ApplyRopeCosSinCache(TensorView q, TensorView k, TensorView positions,
                          TensorView cos_sin_cache, int64_t interleaved, TensorView q_out,
                          TensorView k_out) {
  const Checker check("apply_rope_cos_sin_cache");
  const DLDevice device = check.Device("q", q);
  kernels::RotaryMoveArgs args = ReadQueriesAndKeys(check, q, k, q_out, k_out);
  SetPositions(check, positions, q, q_out, k_out, &args);
  check.Rank("cos_sin_cache", cos_sin_cache, 2, "(max_position, rotary_dim)");
  const int64_t num_positions = cos_sin_cache.size(0), rotary_dim = cos_sin_cache.size(1);
  check.Data("cos_sin_cache", cos_sin_cache, device, kFloat32, {num_positions, rotary_dim},
             "(max_position, rotary_dim)");
  if (rotary_dim % 2 != 0 || rotary_dim > 2 * kernels::kMaxRotaryPairs) {
    check.FailValue(Text("`cos_sin_cache` has shape ", ShapeText(cos_sin_cache),
                         ", expected an even rotary_dim of ", 2 * kernels::kMaxRotaryPairs,
                         " at most"));
  }
  CheckRotaryDim(check, rotary_dim, args.head_dim);
  check.Flag("interleaved", interleaved);
  check.NoOverlap("q_out", q_out, "cos_sin_cache", cos_sin_cache);
  check.NoOverlap("k_out", k_out, "cos_sin_cache", cos_sin_cache);
  auto check_positions = [&](const int32_t* values) {
    for (int64_t i = 0; i < args.num_rows; ++i) {
      if (values[i] >= 0 && values[i] < num_positions) continue;
      check.FailValue(Text("`positions`[", i, "] is ", values[i], ", but `cos_sin_cache` has only ",
                           num_positions, " positions"));
    }
  };
  if (IsCPU(device)) {
    check_positions(args.positions);
  } else if (CheckDeviceContents()) {
    check_positions(ReadBack(check, positions).data());
  }
  if (num_positions == 0 && args.num_rows > 0) {
    check.FailValue("`cos_sin_cache` has no positions");
  }
  args.rotary_dim = static_cast<int32_t>(rotary_dim);
  args.interleaved = interleaved == 1;
  args.cos_sin = DataOf<float>(cos_sin_cache);
  args.num_positions = num_positions;
  Run(check, args, device);
}

void BatchQKApplyRotaryInPlace(TensorView q, TensorView k, TensorView indptr, TensorView offsets,
                               int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                               int64_t head_dim, double rope_scale, double rope_theta) {
  const Checker check("batch_qk_apply_rotary_in_place");
  const DLDevice device = check.Device("q", q);
  kernels::RotaryMoveArgs args = ReadQueriesAndKeys(check, q, k, q, k, /*in_place=*/true);
  const int64_t n = args.num_rows;
  check.Shape("q", q, {n, num_qo_heads, head_dim}, "(n, num_qo_heads, head_dim)");
  check.Shape("k", k, {n, num_kv_heads, head_dim}, "(n, num_kv_heads, head_dim)");
  if (batch_size < 0 || batch_size > INT32_MAX) {
    check.FailValue(Text("`batch_size` is ", batch_size, ", expected 0 or more"));
  }
  check.IndexVector("indptr", indptr, batch_size + 1, "(batch_size + 1,)");
  check.IndexVector("offsets", offsets, batch_size, "(batch_size,)");
  check.OnDevice("indptr", indptr, device);
  check.OnDevice("offsets", offsets, device);
  check.NoOverlap("q", q, {{"indptr", indptr}, {"offsets", offsets}});
  check.NoOverlap("k", k, {{"indptr", indptr}, {"offsets", offsets}});
  auto check_indptr = [&](const int32_t* values) {
    CheckIndptr(check, "indptr", values, batch_size, n, "q");
    if (values[batch_size] != n) {
      check.FailValue(
          Text("`indptr` ends at ", values[batch_size], ", expected the rows of `q`, ", n));
    }
  };
  if (IsCPU(device)) {
    check_indptr(DataOf<int32_t>(indptr));
  } else if (CheckDeviceContents()) {
    check_indptr(ReadBack(check, indptr).data());
  }
  if (head_dim % 2 != 0) {
    check.FailValue(Text("`head_dim` is ", head_dim, ", expected an even number"));
  }
  const RopeFrequencies frequencies =
      MakeRopeFrequencies(check, rope_theta, rope_scale, head_dim, "{}");
  SetFrequencies(frequencies, &args);
  if (batch_size == 0) return;
  args.indptr = DataOf<int32_t>(indptr);
  args.offsets = DataOf<int32_t>(offsets);
  args.batch_size = static_cast<int32_t>(batch_size);
  Run(check, args, device);
}

void SplitQKVRotaryAppend(TensorView qkv, TensorView positions, TensorView slots, double rope_theta,
                          double rope_scale, int64_t rotary_dim, String rope_scaling,
                          TensorView pages, TensorView q) {
  const Checker check("split_qkv_rotary_append");
  const DLDevice device = check.Device("qkv", qkv);
  kernels::RotaryMoveArgs args{};
  args.dtype = check.FloatDType("qkv", qkv);
  const char* meaning = "(num_pages, 2, num_kv_heads, page_size, head_dim)";
  check.Rank("pages", pages, 5, meaning);
  const int64_t kv_heads = pages.size(2), page_size = pages.size(3), dim = pages.size(4);
  check.Sizes32("pages", pages);
  check.Data("pages", pages, device, qkv.dtype(), {pages.size(0), 2, kv_heads, page_size, dim},
             meaning);
  check.Positive("page_size", page_size);
  check.Rank("q", q, 3, "(n, num_qo_heads, head_dim)");
  check.Sizes32("q", q);
  const int64_t n = q.size(0), qo_heads = q.size(1), heads = qo_heads + 2 * kv_heads;
  check.Data("q", q, device, qkv.dtype(), {n, qo_heads, dim}, "(n, num_qo_heads, head_dim)");
  // Projections come with their heads apart, or as one dimension.
  const bool is_flat = qkv.ndim() == 2;
  if (is_flat) {
    check.Shape("qkv", qkv, {n, heads * dim}, "(n, (num_qo_heads + 2 * num_kv_heads) * head_dim)");
  } else {
    check.Shape("qkv", qkv, {n, heads, dim}, "(n, num_qo_heads + 2 * num_kv_heads, head_dim)");
  }
  check.UnitLastStride("qkv", qkv);
  check.IndexVector("positions", positions, n, "(n,)");
  check.OnDevice("positions", positions, device);
  check.IndexVector("slots", slots, n, "(n,)");
  check.OnDevice("slots", slots, device);
  check.NoOverlap("q", q,
                  {{"qkv", qkv}, {"positions", positions}, {"slots", slots}, {"pages", pages}});
  check.NoOverlap("pages", pages, {{"qkv", qkv}, {"positions", positions}, {"slots", slots}});
  const int64_t num_slots = pages.size(0) * page_size;
  if (IsCPU(device)) {
    CheckPositions(check, "slots", DataOf<int32_t>(slots), n, num_slots, /*allow_skip=*/true);
  } else if (CheckDeviceContents()) {
    CheckPositions(check, "slots", ReadBack(check, slots).data(), n, num_slots,
                   /*allow_skip=*/true);
  }
  const RopeFrequencies frequencies =
      MakeRopeFrequencies(check, rope_theta, rope_scale, rotary_dim, rope_scaling);
  CheckRotaryDim(check, rotary_dim, dim);
  SetFrequencies(frequencies, &args);
  args.num_rows = n;
  args.head_dim = static_cast<int32_t>(dim);
  args.positions = DataOf<int32_t>(positions);
  args.slots = DataOf<int32_t>(slots);
  args.num_slots = num_slots;
  args.page_size = static_cast<int32_t>(page_size);
  const int64_t stride_row = StrideOf(qkv, 0), stride_head = is_flat ? dim : StrideOf(qkv, 1);
  const int64_t size = (qkv.dtype().bits + 7) / 8;
  auto source = [&](int64_t first_head) {
    return kernels::HeadRows{DataOf<char>(qkv) + first_head * stride_head * size, stride_row,
                             stride_head};
  };
  args.q = {static_cast<int32_t>(qo_heads), source(0), {DataOf(q), qo_heads * dim, dim}};
  args.k = {static_cast<int32_t>(kv_heads), source(qo_heads), RowsOfPages(pages, 0)};
  args.v = {static_cast<int32_t>(kv_heads), source(qo_heads + kv_heads), RowsOfPages(pages, 1)};
  Run(check, args, device);
}

void FindTokenSlots(TensorView qo_indptr, TensorView page_indptr, TensorView page_indices,
                    TensorView last_page_len, int64_t page_size, TensorView positions,
                    TensorView slots) {
  const Checker check("token_slots");
  const DLDevice device = check.Device("qo_indptr", qo_indptr);
  check.Rank("qo_indptr", qo_indptr, 1, "(batch_size + 1,)");
  check.Positive("batch_size + 1, the size of `qo_indptr`,", qo_indptr.size(0));
  check.Positive("page_size", page_size);
  const int64_t batch_size = qo_indptr.size(0) - 1;
  check.IndexVector("qo_indptr", qo_indptr, batch_size + 1, "(batch_size + 1,)");
  check.IndexVector("page_indptr", page_indptr, batch_size + 1, "(batch_size + 1,)");
  check.Rank("page_indices", page_indices, 1, "(num_indices,)");
  check.IndexVector("page_indices", page_indices, page_indices.size(0), "(num_indices,)");
  check.IndexVector("last_page_len", last_page_len, batch_size, "(batch_size,)");
  check.Rank("positions", positions, 1, "(n,)");
  const int64_t n = positions.size(0);
  check.IndexVector("positions", positions, n, "(n,)");
  check.IndexVector("slots", slots, n, "(n,)");
  const std::pair<const char*, TensorView> inputs[] = {{"page_indptr", page_indptr},
                                                       {"page_indices", page_indices},
                                                       {"last_page_len", last_page_len},
                                                       {"qo_indptr", qo_indptr}};
  for (const auto& [name, tensor] : inputs) {
    check.OnDevice(name, tensor, device);
    check.NoOverlap("positions", positions, name, tensor);
    check.NoOverlap("slots", slots, name, tensor);
  }
  check.OnDevice("positions", positions, device);
  check.OnDevice("slots", slots, device);
  check.NoOverlap("positions", positions, "slots", slots);
  kernels::TokenSlotsArgs args{n,
                               static_cast<int32_t>(batch_size),
                               static_cast<int32_t>(page_size),
                               page_indices.size(0),
                               DataOf<int32_t>(qo_indptr),
                               DataOf<int32_t>(page_indptr),
                               DataOf<int32_t>(page_indices),
                               DataOf<int32_t>(last_page_len),
                               DataOf<int32_t>(positions),
                               DataOf<int32_t>(slots)};
  auto check_contents = [&](const int32_t* rows, const int32_t* pages, const int32_t* indices,
                            const int32_t* lengths) {
    CheckIndptr(check, "qo_indptr", rows, batch_size, n, "positions");
    if (rows[batch_size] != n) {
      check.FailValue(Text("`qo_indptr` ends at ", rows[batch_size],
                           ", expected the size of `positions`, ", n));
    }
    CheckIndptr(check, "page_indptr", pages, batch_size, args.num_indices, "page_indices");
    CheckPageTable(check, pages, indices, lengths, batch_size, INT32_MAX / page_size, page_size);
    for (int64_t b = 0; b < batch_size; ++b) {
      const int64_t held = pages[b + 1] - pages[b], count = rows[b + 1] - rows[b];
      const int64_t keys = held == 0 ? 0 : (held - 1) * page_size + lengths[b];
      if (count <= keys) continue;
      check.FailValue(Text("request ", b, " has ", count,
                           " rows by `qo_indptr`, but its pages hold ", keys,
                           " tokens; pages count the new tokens too"));
    }
  };
  if (IsCPU(device)) {
    check_contents(args.qo_indptr, args.page_indptr, args.page_indices, args.last_page_len);
    kernels::cpu::FindTokenSlots(args);
    return;
  }
  if (CheckDeviceContents()) {
    check_contents(ReadBack(check, qo_indptr).data(), ReadBack(check, page_indptr).data(),
                   ReadBack(check, page_indices).data(), ReadBack(check, last_page_len).data());
  }
  if (batch_size == 0) return;
  LaunchOf<kernels::cuda::TokenSlotsFn>(check, kRopeUnit, "find_token_slots", device, args);
}

}  // namespace ops
}  // namespace tvm_flashinfer

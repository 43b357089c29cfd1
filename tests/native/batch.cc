#include "batch.h"

#include <algorithm>
#include <map>
#include <numeric>

namespace native {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Function;

constexpr int64_t kHND = 1;
constexpr int64_t kNHD = 0;

struct Workspaces {
  Tensor of_floats, of_ints, pinned;
};

/*! \brief Workspaces full of 0xFF: what an earlier call left there must not matter. */
const Workspaces& DirtyWorkspaces(DLDevice device) {
  static std::map<int, Workspaces> all;
  const int64_t bytes = device.device_type == kDLCUDA ? 64 << 20 : 1 << 20;
  const int64_t int_bytes = device.device_type == kDLCUDA ? 8 << 20 : 1 << 20;
  const int type = device.device_type;
  if (all.count(type) == 0) {
    all[type] = {Placed(device, kUInt8, {bytes}).tensor(),
                 Placed(device, kUInt8, {int_bytes}).tensor(),
                 Placed(kCPU, kUInt8, {int_bytes}).tensor()};
  } else {
    const std::vector<uint8_t> fill(bytes, 0xff);
    const auto spoil = [&](const Tensor& tensor) {
      CopyTo(tensor.device(), static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset(),
             fill.data(), tensor.numel());
    };
    spoil(all[type].of_floats);
    spoil(all[type].of_ints);
    spoil(all[type].pinned);
  }
  return all[type];
}

/*! \brief The pages of a pool in an order of their own, with two that no request has. */
std::vector<int32_t> ShuffledPages(int count, std::mt19937* generator) {
  std::vector<int32_t> pages(count + 2);
  std::iota(pages.begin(), pages.end(), 0);
  std::shuffle(pages.begin(), pages.end(), *generator);
  pages.resize(count);
  return pages;
}

}  // namespace

Numbers HeadsFirst(const Numbers& rows, int64_t n, int64_t heads, int64_t d) {
  Numbers moved(rows.size());
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t h = 0; h < heads; ++h) {
      std::copy_n(rows.begin() + (i * heads + h) * d, d, moved.begin() + (h * n + i) * d);
    }
  }
  return moved;
}

Batch::Batch(const Spec& given, const Param& param, std::mt19937* generator)
    : spec(given), param_(param) {
  if (spec.qo_lens.empty()) spec.qo_lens.assign(spec.kv_lens.size(), 1);
  const DLDataType dtype = param.dtype;
  q = Normal(static_cast<int64_t>(num_rows()) * spec.num_qo_heads * spec.head_dim, dtype,
             generator);
  page_indptr = {0};
  for (int length : spec.kv_lens) {
    const int64_t count = static_cast<int64_t>(length) * spec.num_kv_heads * spec.head_dim;
    keys.push_back(Normal(count, dtype, generator));
    values.push_back(Normal(count, dtype, generator));
    const int pages = (length + spec.page_size - 1) / spec.page_size;
    page_indptr.push_back(page_indptr.back() + pages);
    last_page_len.push_back(pages == 0 ? 0 : length - (pages - 1) * spec.page_size);
  }
  page_indices = ShuffledPages(page_indptr.back(), generator);
}

double Batch::sm_scale() const {
  return spec.sm_scale != 0 ? spec.sm_scale : 1 / std::sqrt(static_cast<double>(spec.head_dim));
}

State Batch::Output() const {
  return {Placed(device(), param_.dtype, {num_rows(), spec.num_qo_heads, spec.head_dim}),
          Placed(device(), kFloat32, {num_rows(), spec.num_qo_heads})};
}

Tensor Batch::PlacedQueries() const {
  const int64_t heads = spec.num_qo_heads + 2 * spec.num_kv_heads, d = spec.head_dim;
  const int64_t used = spec.num_qo_heads * d;
  Numbers fused(num_rows() * heads * d, NAN);
  for (int64_t i = 0; i < num_rows(); ++i) {
    std::copy_n(q.begin() + i * used, used, fused.begin() + i * heads * d);
  }
  return Placed(device(), param_.dtype, {num_rows(), heads, d}, fused)
      .View({num_rows(), spec.num_qo_heads, d}, {heads * d, d, 1}, 0);
}

Placed Batch::Pool() const {
  const int64_t heads = spec.num_kv_heads, size = spec.page_size, d = spec.head_dim;
  const int64_t num_pages = static_cast<int64_t>(page_indices.size()) + 2;
  Numbers pool(num_pages * 2 * heads * size * d, NAN);
  for (int b = 0; b < batch_size(); ++b) {
    for (int64_t j = 0; j < spec.kv_lens[b]; ++j) {
      const int64_t page = page_indices[page_indptr[b] + j / size];
      for (int64_t h = 0; h < heads; ++h) {
        const int64_t from = (j * heads + h) * d;
        const int64_t to = ((page * 2 * heads + h) * size + j % size) * d;
        std::copy_n(keys[b].begin() + from, d, pool.begin() + to);
        std::copy_n(values[b].begin() + from, d, pool.begin() + to + heads * size * d);
      }
    }
  }
  return Placed(device(), param_.dtype, {num_pages, 2, heads, size, d}, pool);
}

Tensor Batch::Half(const Placed& pool, int which) const {
  const Shape& whole = pool.shape();
  const int64_t half = whole[2] * whole[3] * whole[4];
  return pool.View({whole[0], whole[2], whole[3], whole[4]},
                   {2 * half, whole[3] * whole[4], whole[4], 1}, which * half);
}

Tensor Batch::Ragged(const std::vector<Numbers>& parts) const {
  Numbers all;
  for (const Numbers& part : parts) all.insert(all.end(), part.begin(), part.end());
  return Placed(device(), param_.dtype,
                {Offsets(spec.kv_lens).back(), spec.num_kv_heads, spec.head_dim}, all)
      .tensor();
}

Batch::Planned Batch::PrefillPlan(const std::vector<int32_t>& kv_indptr, int page_size) const {
  const Workspaces& at = DirtyWorkspaces(device());
  const std::vector<int32_t> kv_lens(spec.kv_lens.begin(), spec.kv_lens.end());
  const Any plan = Get(names::kBatchPrefillPlan)(
      at.of_floats, at.of_ints, at.pinned, Indices(kCPU, Offsets(spec.qo_lens)),
      Indices(kCPU, kv_indptr), Indices(kCPU, kv_lens), num_rows(), batch_size(), spec.num_qo_heads,
      spec.num_kv_heads, page_size, /*enable_cuda_graph=*/false, spec.head_dim, spec.head_dim,
      spec.causal, spec.window_left, /*fixed_split_size=*/-1,
      /*disable_split_kv=*/false, /*num_colocated_ctas=*/0);
  return {at.of_floats, at.of_ints, plan};
}

State Batch::PagedPrefill() const {
  const Planned planned = PrefillPlan(page_indptr, spec.page_size);
  const State state = Output();
  const Placed pool = Pool();
  Get(names::kBatchPrefillPagedRun)(
      planned.float_workspace, planned.int_workspace, planned.plan, PlacedQueries(), Half(pool, 0),
      Half(pool, 1), Indices(device(), Offsets(spec.qo_lens)), Indices(device(), page_indptr),
      Indices(device(), page_indices), Indices(device(), last_page_len), state.o.tensor(),
      state.lse.tensor(), static_cast<int>(spec.causal), kHND, spec.window_left,
      /*enable_pdl=*/false, sm_scale(), NAN, NAN);
  return state;
}

State Batch::RaggedPrefill() const {
  const std::vector<int32_t> kv_indptr = Offsets(spec.kv_lens);
  const Planned planned = PrefillPlan(kv_indptr, 1);
  const State state = Output();
  Get(names::kBatchPrefillRaggedRun)(
      planned.float_workspace, planned.int_workspace, planned.plan, PlacedQueries(), Ragged(keys),
      Ragged(values), Indices(device(), Offsets(spec.qo_lens)), Indices(device(), kv_indptr),
      state.o.tensor(), state.lse.tensor(), static_cast<int>(spec.causal), kNHD, spec.window_left,
      /*enable_pdl=*/false, sm_scale(), NAN, NAN);
  return state;
}

State Batch::Decode() const {
  const Workspaces& at = DirtyWorkspaces(device());
  const Tensor empty = Placed(device(), param_.dtype, {0, spec.head_dim}).tensor();
  const Any plan = Get(names::kBatchDecodePlan)(
      at.of_floats, at.of_ints, at.pinned, Indices(kCPU, page_indptr), batch_size(),
      spec.num_qo_heads, spec.num_kv_heads, spec.page_size, /*enable_cuda_graph=*/false,
      spec.window_left, /*logits_soft_cap=*/0.0, spec.head_dim, spec.head_dim, empty, empty);
  const State state = Output();
  const Placed pool = Pool();
  Get(names::kBatchDecodeRun)(at.of_floats, at.of_ints, plan, PlacedQueries(), Half(pool, 0),
                              Half(pool, 1), Indices(device(), page_indptr),
                              Indices(device(), page_indices), Indices(device(), last_page_len),
                              state.o.tensor(), state.lse.tensor(), kHND, spec.window_left,
                              /*enable_pdl=*/false, sm_scale(), NAN, NAN);
  return state;
}

Function Batch::Bound(const char* slot) const {
  Any sinks = nullptr;
  if (!spec.sinks.empty()) {
    sinks = Placed(device(), kFloat32, {spec.num_qo_heads}, spec.sinks).tensor();
  }
  return Get(names::kBindAttention)(slot, spec.options, sinks, nullptr).cast<Function>();
}

State Batch::BoundPagedPrefill() const {
  const State state = Output();
  Bound("prefill_paged")(PlacedQueries(), Indices(device(), Offsets(spec.qo_lens)), Pool().tensor(),
                         Indices(device(), page_indptr), Indices(device(), page_indices),
                         Indices(device(), last_page_len), Indices(device(), FirstPositions()),
                         Indices(device(), RowPositions()), state.o.tensor(), state.lse.tensor(),
                         static_cast<int>(spec.causal), static_cast<int>(spec.has_rope),
                         spec.rope.scale, spec.rope.theta, sm_scale());
  return state;
}

State Batch::BoundRaggedPrefill() const {
  const State state = Output();
  Bound("prefill_ragged")(PlacedQueries(), Indices(device(), Offsets(spec.qo_lens)), Ragged(keys),
                          Ragged(values), Indices(device(), Offsets(spec.kv_lens)),
                          Indices(device(), RowPositions()), Indices(device(), FirstPositions()),
                          state.o.tensor(), state.lse.tensor(), static_cast<int>(spec.causal),
                          static_cast<int>(spec.has_rope), spec.rope.scale, spec.rope.theta,
                          sm_scale());
  return state;
}

State Batch::BoundDecode() const {
  const State state = Output();
  Bound("decode_paged")(PlacedQueries(), Pool().tensor(), Indices(device(), page_indptr),
                        Indices(device(), page_indices), Indices(device(), last_page_len),
                        Indices(device(), FirstPositions()), Indices(device(), RowPositions()),
                        state.o.tensor(), state.lse.tensor(), static_cast<int>(spec.has_rope),
                        spec.rope.scale, spec.rope.theta, sm_scale());
  return state;
}

std::vector<int32_t> Batch::FirstPositions() const {
  std::vector<int32_t> positions;
  for (int b = 0; b < batch_size(); ++b) positions.push_back(3 + 5 * b);
  return positions;
}

std::vector<int32_t> Batch::RowPositions() const {
  std::vector<int32_t> positions;
  for (int b = 0; b < batch_size(); ++b) {
    for (int i = 0; i < spec.qo_lens[b]; ++i) {
      positions.push_back(FirstPositions()[b] + spec.kv_lens[b] - spec.qo_lens[b] + i);
    }
  }
  return positions;
}

Numbers Batch::Rotated(const Numbers& heads, int num_heads,
                       const std::vector<int32_t>& positions) const {
  if (!spec.has_rope) return heads;
  Numbers rotated;
  const int d = spec.head_dim;
  for (size_t at = 0; at < heads.size(); at += d) {
    const std::vector<double> head =
        Rotate(heads.data() + at, d, positions[at / d / num_heads], spec.rope);
    rotated.insert(rotated.end(), head.begin(), head.end());
  }
  return rotated;
}

RowInput Batch::RowOf(int b, int i, int h) const {
  const int d = spec.head_dim, stride = spec.num_kv_heads * d;
  const int group = spec.num_qo_heads / spec.num_kv_heads, offset = h / group * d;
  RowInput in;
  in.head_dim_qk = in.head_dim_vo = d;
  in.num_keys = spec.kv_lens[b];
  in.sm_scale = sm_scale();
  in.value = [this, b, stride, offset](int j) { return values[b].data() + j * stride + offset; };
  in.sees = [this, b, i](int j) {
    return Sees(i, spec.qo_lens[b], j, spec.kv_lens[b], spec.causal, spec.window_left);
  };
  in.soft_cap = spec.soft_cap;
  if (!spec.sinks.empty()) in.sink = spec.sinks[h];
  return in;
}

void Batch::Expect(const State& state, const std::string& what, bool has_lse) const {
  EXPECT_TRUE(state.o.GuardsAreIntact()) << what << " wrote outside of o";
  EXPECT_TRUE(state.lse.GuardsAreIntact()) << what << " wrote outside of lse";
  const Numbers o = state.o.Read(), lse = state.lse.Read();
  const Numbers rows = Rotated(q, spec.num_qo_heads, RowPositions());
  const int d = spec.head_dim, stride = spec.num_kv_heads * d;
  Worst worst(param_.dtype, spec.has_rope);
  int row = 0;
  for (int b = 0; b < batch_size(); ++b) {
    std::vector<int32_t> positions(spec.kv_lens[b]);
    std::iota(positions.begin(), positions.end(), FirstPositions()[b]);
    const Numbers rotated = Rotated(keys[b], spec.num_kv_heads, positions);
    for (int i = 0; i < spec.qo_lens[b]; ++i, ++row) {
      for (int h = 0; h < spec.num_qo_heads; ++h) {
        const int at = row * spec.num_qo_heads + h;
        const int offset = h / (spec.num_qo_heads / spec.num_kv_heads) * d;
        RowInput in = RowOf(b, i, h);
        in.query = rows.data() + at * d;
        in.key = [&](int j) { return rotated.data() + j * stride + offset; };
        const RowResult exact = Attend(in);
        const double got_lse = has_lse ? lse[at] : exact.lse;
        worst.Add(exact, o.data() + at * d, got_lse,
                  "request " + std::to_string(b) + ", row " + std::to_string(i) + ", head " +
                      std::to_string(h));
      }
    }
  }
  EXPECT_TRUE(worst.IsWithinBounds()) << what << ": " << worst.text();
}

}  // namespace native

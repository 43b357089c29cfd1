// Latent attention: after a plan, and without one.
#include <algorithm>

#include "batch.h"

namespace native {
namespace {

constexpr int kCkv = 512, kKpe = 64, kWidth = kCkv + kKpe;

struct MLASpec {
  std::vector<int> kv_lens;
  std::vector<int> qo_lens;
  int page_size = 16;
  bool causal = false;
};

class MLA : public OnDevice {
 protected:
  static constexpr int kHeads = 16;

  std::string MissingUnits() const {
    const bool is_hopper = GetParam().is_cuda() && CudaIs(9, 0);
    const std::string kind = is_hopper ? "batch_mla_sm90" : "batch_mla";
    return MissingUnit(
        {Unit(kind, dtype(), kWidth) + "x" + std::to_string(kCkv), "batch_mla_plan"});
  }

  /*! \brief Random queries and keys of a spec, in pages whose unused slots are NaN. */
  void Make(const MLASpec& given) {
    spec = given;
    rows = Offsets(spec.qo_lens).back();
    q = Random(static_cast<int64_t>(rows) * kHeads * kWidth);
    keys.clear();
    page_indptr = {0};
    page_indices.clear();
    last_page_len.clear();
    for (int length : spec.kv_lens) {
      keys.push_back(Random(static_cast<int64_t>(length) * kWidth));
      const int pages = (length + spec.page_size - 1) / spec.page_size;
      page_indptr.push_back(page_indptr.back() + pages);
      last_page_len.push_back(pages == 0 ? 0 : length - (pages - 1) * spec.page_size);
    }
    const int count = page_indptr.back();
    for (int i = 0; i < count; ++i) page_indices.push_back(count - i);  // page 0 is nobody's
  }

  Placed Pool() const {
    const int64_t size = spec.page_size, num_pages = page_indptr.back() + 1;
    Numbers pool(num_pages * size * kWidth, NAN);
    for (size_t b = 0; b < keys.size(); ++b) {
      for (int64_t j = 0; j < spec.kv_lens[b]; ++j) {
        const int64_t page = page_indices[page_indptr[b] + j / size];
        std::copy_n(keys[b].begin() + j * kWidth, kWidth,
                    pool.begin() + (page * size + j % size) * kWidth);
      }
    }
    return Placed(device(), dtype(), {num_pages, size, kWidth}, pool);
  }

  State Output() const {
    return {Placed(device(), dtype(), {rows, kHeads, kCkv}),
            Placed(device(), kFloat32, {rows, kHeads})};
  }

  State Planned() const {
    const int64_t bytes = 32 << 20;
    const Placed floats(device(), kUInt8, {bytes}), ints(device(), kUInt8, {bytes / 4}),
        pinned(kCPU, kUInt8, {bytes / 4});
    const std::vector<int32_t> lengths(spec.kv_lens.begin(), spec.kv_lens.end());
    const tvm::ffi::Any plan = Get(names::kBatchMLAPlan)(
        floats.tensor(), ints.tensor(), pinned.tensor(), Indices(kCPU, Offsets(spec.qo_lens)),
        Indices(kCPU, page_indptr), Indices(kCPU, lengths), kHeads, kCkv, spec.causal);
    const State state = Output();
    const Placed queries(device(), dtype(), {rows, kHeads, kWidth}, q), pool = Pool();
    const int64_t pages = pool.shape()[0], size = spec.page_size;
    const Shape row_strides{kHeads * kWidth, kWidth, 1}, page_strides{size * kWidth, kWidth, 1};
    Get(names::kBatchMLARun)(floats.tensor(), ints.tensor(), plan,
                             queries.View({rows, kHeads, kCkv}, row_strides, 0),
                             queries.View({rows, kHeads, kKpe}, row_strides, kCkv),
                             pool.View({pages, size, kCkv}, page_strides, 0),
                             pool.View({pages, size, kKpe}, page_strides, kCkv),
                             Indices(device(), page_indices), state.o.tensor(), state.lse.tensor(),
                             static_cast<int>(spec.causal), kHeads, spec.page_size, kScale,
                             /*return_lse_base_on_e=*/false);
    return state;
  }

  State Bound() const {
    const State state = Output();
    Get(names::kBindAttentionMLA)("{}").cast<tvm::ffi::Function>()(
        Placed(device(), dtype(), {rows, kHeads, kWidth}, q).tensor(),
        Indices(device(), Offsets(spec.qo_lens)), Pool().tensor(), Indices(device(), page_indptr),
        Indices(device(), page_indices), Indices(device(), last_page_len), state.o.tensor(),
        state.lse.tensor(), static_cast<int>(spec.causal), kScale);
    return state;
  }

  void Expect(const State& state, const std::string& what) const {
    EXPECT_TRUE(state.o.GuardsAreIntact() && state.lse.GuardsAreIntact()) << what;
    const Numbers o = state.o.Read(), lse = state.lse.Read();
    Worst worst(dtype());
    int row = 0;
    for (size_t b = 0; b < keys.size(); ++b) {
      for (int i = 0; i < spec.qo_lens[b]; ++i, ++row) {
        for (int h = 0; h < kHeads; ++h) {
          const int at = row * kHeads + h;
          const auto key = [&](int j) { return keys[b].data() + j * kWidth; };
          const auto sees = [&](int j) {
            return Sees(i, spec.qo_lens[b], j, spec.kv_lens[b], spec.causal, -1);
          };
          const RowInput in{
              q.data() + at * kWidth, kWidth, kCkv, spec.kv_lens[b], kScale, key, key, sees};
          worst.Add(Attend(in), o.data() + at * kCkv, lse[at],
                    "request " + std::to_string(b) + ", row " + std::to_string(i) + ", head " +
                        std::to_string(h));
        }
      }
    }
    EXPECT_TRUE(worst.IsWithinBounds()) << what << ": " << worst.text();
  }

  void CheckAll(const MLASpec& given) {
    Make(given);
    Expect(Planned(), "batch_mla_run");
    // The slot of a cache runs without a plan on CPU alone.
    if (!GetParam().is_cuda()) Expect(Bound(), "bind_attention_mla");
  }

  static constexpr double kScale = 0.07216878364870322;  // 192 ^ -1/2, as DeepSeek scales
  MLASpec spec;
  int rows = 0;
  Numbers q;
  std::vector<Numbers> keys;
  std::vector<int32_t> page_indptr, page_indices, last_page_len;
};

TEST_P(MLA, Decode) {
  SKIP_IF(MissingUnits());
  CheckAll({{1, 17, 130}, {1, 1, 1}});
}

TEST_P(MLA, RequestsWithoutKeys) {
  SKIP_IF(MissingUnits());
  CheckAll({{0, 17, 0, 5}, {1, 1, 1, 1}});
  CheckAll({{0, 17, 0, 5}, {2, 3, 1, 4}, 16, true});
}

TEST_P(MLA, LastPageWithUnusedSlots) {
  SKIP_IF(MissingUnits());
  CheckAll({{13}, {1}, 4});
}

TEST_P(MLA, Prompts) {
  SKIP_IF(MissingUnits());
  for (bool causal : {false, true}) CheckAll({{40, 9}, {20, 9}, 16, causal});
}

RUN_ON_DEVICES(MLA, kAttentionOnCPU, kAttentionOnCUDA);

}  // namespace
}  // namespace native

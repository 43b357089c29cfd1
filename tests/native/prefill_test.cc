// Prefill: of a batch over ragged keys and over pages, after a plan and without one, and of one
// request.
#include "batch.h"

namespace native {
namespace {

/*! \brief Planned prefill, on CUDA by each of its kernels. */
class Prefill : public OnDevice {
 protected:
  void CheckAll(const Spec& spec) {
    const Batch batch(spec, GetParam(), &generator);
    batch.Expect(batch.PagedPrefill(), "batch_prefill_paged_run");
    batch.Expect(batch.RaggedPrefill(), "batch_prefill_ragged_run");
  }

  std::string MissingUnits(int head_dim) const {
    const std::string end = std::string(GetParam().prefill_kernel) == "fa3" ? "_sm90" : "";
    return MissingUnit({Unit("batch_prefill_paged" + end, dtype(), head_dim),
                        Unit("batch_prefill_ragged" + end, dtype(), head_dim),
                        Unit("batch_attention", dtype(), head_dim)});
  }
};

/*! \brief Prefill without a plan. */
class BoundPrefill : public OnDevice {
 protected:
  void CheckAll(const Spec& spec) {
    const Batch batch(spec, GetParam(), &generator);
    batch.Expect(batch.BoundPagedPrefill(), "prefill_paged");
    batch.Expect(batch.BoundRaggedPrefill(), "prefill_ragged");
  }

  std::string MissingUnits(int head_dim) const {
    return MissingUnit({Unit("batch_attention", dtype(), head_dim)});
  }
};

Spec Mixed(bool causal) {
  Spec spec;
  spec.qo_lens = {1, 7, 33, 16, 2};
  spec.kv_lens = {5, 40, 33, 100, 64};
  spec.causal = causal;
  return spec;
}

std::vector<Spec> HeadGroups() {
  std::vector<Spec> specs;
  const int shapes[][3] = {{28, 4, 128}, {24, 8, 128}, {9, 3, 64},  {64, 4, 128},
                           {32, 2, 64},  {32, 1, 64},  {64, 1, 64}, {71, 1, 64}};
  for (const auto& [qo_heads, kv_heads, head_dim] : shapes) {
    Spec spec;
    spec.qo_lens = {3, 20};
    spec.kv_lens = {19, 45};
    spec.causal = true;
    spec.num_qo_heads = qo_heads;
    spec.num_kv_heads = kv_heads;
    spec.head_dim = head_dim;
    specs.push_back(spec);
  }
  return specs;
}

std::string HeadsOf(const Spec& spec) {
  return std::to_string(spec.num_qo_heads) + "/" + std::to_string(spec.num_kv_heads);
}

TEST_P(Prefill, MixedLengths) {
  SKIP_IF(MissingUnits(64));
  CheckAll(Mixed(false));
  CheckAll(Mixed(true));
}

TEST_P(BoundPrefill, MixedLengths) {
  SKIP_IF(MissingUnits(64));
  CheckAll(Mixed(false));
  CheckAll(Mixed(true));
}

TEST_P(Prefill, HeadGroups) {
  SKIP_IF(MissingUnits(64) + MissingUnits(128));
  for (const Spec& spec : HeadGroups()) {
    SCOPED_TRACE(HeadsOf(spec));
    CheckAll(spec);
  }
}

TEST_P(BoundPrefill, HeadGroups) {
  SKIP_IF(MissingUnits(64) + MissingUnits(128));
  for (const Spec& spec : HeadGroups()) {
    SCOPED_TRACE(HeadsOf(spec));
    CheckAll(spec);
  }
}

// The last row sees the last key: row 0 of two sees two keys of three.
TEST_P(Prefill, CausalMaskIsAlignedAtTheEnds) {
  SKIP_IF(MissingUnits(64));
  Spec spec;
  spec.qo_lens = {2};
  spec.kv_lens = {3};
  spec.causal = true;
  spec.num_qo_heads = spec.num_kv_heads = 1;
  Batch batch(spec, GetParam(), &generator);
  // Equal scores, and values that tell which keys were averaged.
  std::fill(batch.q.begin(), batch.q.end(), 0.f);
  for (int j = 0; j < 3; ++j) std::fill_n(batch.values[0].begin() + j * 64, 64, 3.f * j);
  for (const State& state : {batch.PagedPrefill(), batch.RaggedPrefill()}) {
    const Numbers o = state.o.Read(), lse = state.lse.Read();
    EXPECT_NEAR(o[0], 1.5, 0.01);
    EXPECT_NEAR(o[64], 3.0, 0.02);
    EXPECT_NEAR(lse[0], 1.0, 1e-5);
    EXPECT_NEAR(lse[1], std::log2(3.0), 1e-5);
  }
}

Spec WithEmptyRequests() {
  Spec spec;
  spec.qo_lens = {4, 9, 3, 5, 0};
  spec.kv_lens = {0, 17, 0, 5, 20};
  return spec;
}

TEST_P(Prefill, RequestsWithoutKeysOrRows) {
  SKIP_IF(MissingUnits(64));
  for (bool causal : {false, true}) {
    Spec spec = WithEmptyRequests();
    spec.causal = causal;
    CheckAll(spec);
  }
}

TEST_P(BoundPrefill, RequestsWithoutKeysOrRows) {
  SKIP_IF(MissingUnits(64));
  for (bool causal : {false, true}) {
    Spec spec = WithEmptyRequests();
    spec.causal = causal;
    CheckAll(spec);
  }
}

TEST_P(Prefill, MoreRowsThanKeys) {
  SKIP_IF(MissingUnits(64));
  Spec spec;
  spec.qo_lens = {70, 5};
  spec.kv_lens = {3, 4};
  spec.causal = true;
  CheckAll(spec);
}

TEST_P(Prefill, NoRequests) {
  SKIP_IF(MissingUnits(64));
  const Batch batch(Spec{}, GetParam(), &generator);
  EXPECT_TRUE(batch.PagedPrefill().o.GuardsAreIntact());
  EXPECT_TRUE(batch.RaggedPrefill().o.GuardsAreIntact());
}

// Exactly one key, whose score is below -50000: its value is the output all the same.
TEST_P(Prefill, OneKeyOfALowScore) {
  SKIP_IF(MissingUnits(128));
  Spec spec;
  spec.qo_lens = {1};
  spec.kv_lens = {1};
  spec.head_dim = 128;
  spec.sm_scale = 1;
  for (bool causal : {false, true}) {
    spec.causal = causal;
    Batch batch(spec, GetParam(), &generator);
    std::fill(batch.q.begin(), batch.q.end(), -16.f);
    std::fill(batch.keys[0].begin(), batch.keys[0].end(), 32.f);  // -16 * 32 * 128 = -65536
    for (const State& state : {batch.RaggedPrefill(), batch.PagedPrefill()}) {
      const Numbers o = state.o.Read(), lse = state.lse.Read();
      for (size_t i = 0; i < o.size(); ++i) {
        ASSERT_EQ(o[i], batch.values[0][i / 128 / 2 * 128 + i % 128]) << "element " << i;
      }
      EXPECT_NEAR(lse[0], -65536 * kLog2E, 0.1);
    }
  }
}

TEST_P(Prefill, SevenRequestsOfUnequalLengths) {
  SKIP_IF(MissingUnits(128));
  Spec spec;
  spec.qo_lens = {33, 11, 11, 11, 11, 11, 12};
  spec.kv_lens = {17, 12, 15, 4, 18, 34, 28};
  spec.num_qo_heads = 64;
  spec.num_kv_heads = 16;
  spec.head_dim = 128;
  CheckAll(spec);
}

TEST_P(Prefill, Windows) {
  SKIP_IF(MissingUnits(64));
  for (int window_left : {0, 1, 15, 16, 100, 5000}) {
    for (bool causal : {false, true}) {
      SCOPED_TRACE("window_left " + std::to_string(window_left));
      Spec spec;
      spec.qo_lens = {65, 17, 1};
      spec.kv_lens = {150, 17, 64};
      spec.window_left = window_left;
      spec.causal = causal;
      CheckAll(spec);
    }
  }
}

TEST_P(Prefill, WindowOfALongPrompt) {
  SKIP_IF(MissingUnits(128));
  Spec spec;
  spec.qo_lens = {300};
  spec.kv_lens = {4096};
  spec.num_qo_heads = 8;
  spec.num_kv_heads = 2;
  spec.head_dim = 128;
  spec.window_left = 333;
  const Batch batch(spec, GetParam(), &generator);
  batch.Expect(batch.PagedPrefill(), "batch_prefill_paged_run");
}

TEST_P(BoundPrefill, Windows) {
  SKIP_IF(MissingUnits(64));
  for (int window_left : {0, 15, 16, 100}) {
    Spec spec;
    spec.qo_lens = {65, 17, 1};
    spec.kv_lens = {150, 17, 64};
    spec.window_left = window_left;
    spec.causal = true;
    spec.options = "{\"window_left\": " + std::to_string(window_left) + "}";
    CheckAll(spec);
  }
}

TEST_P(BoundPrefill, SoftCaps) {
  SKIP_IF(MissingUnits(128));
  for (double cap : {8.0, 30.0, 50.0}) {
    Spec spec;
    spec.qo_lens = {15};
    spec.kv_lens = {127};
    spec.num_qo_heads = 8;
    spec.num_kv_heads = 4;
    spec.head_dim = 128;
    spec.sm_scale = 2;  // scores far above the cap
    spec.soft_cap = cap;
    spec.options = "{\"logits_soft_cap\": " + std::to_string(cap) + "}";
    CheckAll(spec);
  }
}

TEST_P(BoundPrefill, Sinks) {
  SKIP_IF(MissingUnits(64));
  Spec spec = Mixed(true);
  spec.sinks = {0.5f, -2.f, 20.f, -INFINITY};
  CheckAll(spec);
}

TEST_P(BoundPrefill, RopeInsideAttention) {
  SKIP_IF(MissingUnits(64));
  const struct {
    Rope::Scaling scaling;
    const char* options;
  } cases[] = {{Rope::kNone, "{}"},
               {Rope::kInterleaved, R"({"rope_scaling": {"rope_type": "gptj"}})"},
               {Rope::kLinear, R"({"rope_scaling": {"rope_type": "linear", "factor": 4}})"}};
  for (const auto& [scaling, options] : cases) {
    SCOPED_TRACE(options);
    Spec spec = Mixed(true);
    spec.has_rope = true;
    spec.rope.rotary_dim = 64;
    spec.rope.scaling = scaling;
    spec.rope.factor = 4;
    spec.options = options;
    CheckAll(spec);
  }
}

TEST_P(BoundPrefill, OneRequest) {
  SKIP_IF(MissingUnits(128));
  const int64_t heads = 8, kv_heads = 2, n = 30, m = 70, d = 128;
  for (int64_t layout : {0, 1}) {  // NHD, HND
    for (bool causal : {false, true}) {
      Spec spec;
      spec.qo_lens = {n};
      spec.kv_lens = {m};
      spec.causal = causal;
      spec.num_qo_heads = heads;
      spec.num_kv_heads = kv_heads;
      spec.head_dim = d;
      const Batch batch(spec, GetParam(), &generator);
      const State state = batch.Output();
      const Placed scratch(device(), kUInt8, {1024});
      const auto place = [&](const Numbers& rows) {
        return layout == 0
                   ? Placed(device(), dtype(), {m, kv_heads, d}, rows)
                   : Placed(device(), dtype(), {kv_heads, m, d}, HeadsFirst(rows, m, kv_heads, d));
      };
      Get(names::kSinglePrefill)(
          Placed(device(), dtype(), {n, heads, d}, batch.q).tensor(), place(batch.keys[0]).tensor(),
          place(batch.values[0]).tensor(), scratch.tensor(), static_cast<int>(causal), layout,
          /*rotary_mode=*/0, /*allow_fp16_qk=*/false, 1.0, 1e4, state.o.tensor());
      batch.Expect(state, "layout " + std::to_string(layout), /*has_lse=*/false);
    }
  }
}

RUN_ON_DEVICES(Prefill, kAttentionOnCPU, kPrefillOnCUDA);
RUN_ON_DEVICES(BoundPrefill, kAttentionOnCPU, kAttentionOnCUDA);

}  // namespace
}  // namespace native

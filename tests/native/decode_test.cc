// Decode: of one request, of a batch after a plan, and without a plan.
#include "batch.h"

namespace native {
namespace {

class Decode : public OnDevice {
 protected:
  void CheckAll(const Spec& spec) {
    const Batch batch(spec, GetParam(), &generator);
    batch.Expect(batch.Decode(), "batch_decode_run");
    batch.Expect(batch.BoundDecode(), "decode_paged");
  }

  std::string MissingUnits(int head_dim) const {
    return MissingUnit({Unit("batch_decode", dtype(), head_dim),
                        Unit("batch_prefill_paged", dtype(), head_dim),
                        Unit("batch_attention", dtype(), head_dim)});
  }
};

TEST_P(Decode, HeadGroups) {
  SKIP_IF(MissingUnits(64) + MissingUnits(128));
  const int shapes[][3] = {{4, 2, 64},   {28, 4, 128}, {24, 8, 128}, {9, 3, 64},
                           {64, 4, 128}, {32, 32, 64}, {32, 1, 64},  {71, 1, 64}};
  for (const auto& [qo_heads, kv_heads, head_dim] : shapes) {
    SCOPED_TRACE(std::to_string(qo_heads) + "/" + std::to_string(kv_heads));
    Spec spec;
    spec.kv_lens = {1, 17, 150};
    spec.num_qo_heads = qo_heads;
    spec.num_kv_heads = kv_heads;
    spec.head_dim = head_dim;
    CheckAll(spec);
  }
}

TEST_P(Decode, RequestsWithoutKeys) {
  SKIP_IF(MissingUnits(64));
  for (int group : {1, 4}) {
    Spec spec;
    spec.kv_lens = {0, 17, 0, 5};
    spec.num_qo_heads = 2 * group;
    CheckAll(spec);
  }
}

TEST_P(Decode, NoRequests) {
  SKIP_IF(MissingUnits(64));
  Spec spec;
  const Batch batch(spec, GetParam(), &generator);
  EXPECT_TRUE(batch.Decode().o.GuardsAreIntact());
  EXPECT_TRUE(batch.BoundDecode().o.GuardsAreIntact());
}

TEST_P(Decode, PageSizes) {
  SKIP_IF(MissingUnits(64));
  for (int page_size : {1, 5, 32, 512}) {
    Spec spec;
    spec.kv_lens = {1, 31, 600, 32};
    spec.page_size = page_size;
    CheckAll(spec);
  }
}

TEST_P(Decode, Windows) {
  SKIP_IF(MissingUnits(64));
  for (int window_left : {0, 15, 16, 100, 5000}) {
    Spec spec;
    spec.kv_lens = {300, 17, 1};
    spec.window_left = window_left;
    const Batch batch(spec, GetParam(), &generator);
    batch.Expect(batch.Decode(), "window_left " + std::to_string(window_left));
  }
}

TEST_P(Decode, FourPartsOfManyKeysAreMergedRight) {
  SKIP_IF(MissingUnits(128));
  Spec spec;
  spec.kv_lens = {3000};
  spec.head_dim = 128;
  CheckAll(spec);
}

// A request that has a page says that its last page holds no token.
TEST_P(Decode, LastPageLengthOfZero) {
  SKIP_IF(MissingUnits(128));
  Spec spec;
  spec.kv_lens = {256};
  spec.num_qo_heads = 28;
  spec.num_kv_heads = 4;
  spec.head_dim = 128;
  Batch batch(spec, GetParam(), &generator);
  batch.Expect(batch.Decode(), "batch_decode_run");
  batch.last_page_len = {0};
  if (!GetParam().is_cuda()) {
    EXPECT_THROW(batch.Decode(), tvm::ffi::Error);
    EXPECT_THROW(batch.BoundDecode(), tvm::ffi::Error);
    return;
  }
  EXPECT_TRUE(batch.Decode().o.GuardsAreIntact());
  EXPECT_TRUE(batch.BoundDecode().o.GuardsAreIntact());
}

// However low the scores are, the key that is 5000 above the others has all of the weight.
TEST_P(Decode, LowScores) {
  SKIP_IF(MissingUnits(128));
  Spec spec;
  spec.kv_lens = {64};
  spec.num_qo_heads = 16;
  spec.num_kv_heads = 1;
  spec.head_dim = 128;
  spec.sm_scale = 1;
  Batch batch(spec, GetParam(), &generator);
  for (double low : {0.0, -1e3, -5e4, -7e4, -1e5, -6e5}) {
    // Scores of `low` in steps that float16 holds: 16 * (low / 16), and 5000 = 16 * 312.5.
    std::fill(batch.q.begin(), batch.q.end(), 0.f);
    std::fill(batch.keys[0].begin(), batch.keys[0].end(), 0.f);
    for (int h = 0; h < 16; ++h) batch.q[h * 128] = batch.q[h * 128 + 1] = 16;
    for (int j = 0; j < 64; ++j) {
      batch.keys[0][j * 128] = static_cast<float>(Rounded(low / 16, dtype()));
    }
    batch.keys[0][1] = static_cast<float>(Rounded(5000.0 / 16, dtype()));
    for (const State& state : {batch.Decode(), batch.BoundDecode()}) {
      const Numbers o = state.o.Read();
      for (size_t i = 0; i < o.size(); ++i) {
        const float expected = batch.values[0][i % 128];
        ASSERT_NEAR(o[i], expected, std::fabs(expected) * 1e-6)
            << "scores of " << low << ", head " << i / 128 << ", element " << i % 128;
      }
    }
  }
}

TEST_P(Decode, CapsAndSinks) {
  SKIP_IF(MissingUnits(64));
  for (double cap : {0.0, 8.0, 30.0}) {
    Spec spec;
    spec.kv_lens = {127, 1, 0, 40};
    spec.sm_scale = 3;
    spec.soft_cap = cap;
    spec.options = cap > 0 ? "{\"logits_soft_cap\": " + std::to_string(cap) + "}" : "{}";
    spec.sinks = {0.5f, -2.f, 20.f, 3.f};
    const Batch batch(spec, GetParam(), &generator);
    batch.Expect(batch.BoundDecode(), "cap " + std::to_string(cap));
  }
}

TEST_P(Decode, RopeInsideAttention) {
  SKIP_IF(MissingUnits(64));
  for (int rotary_dim : {64, 32}) {
    Spec spec;
    spec.kv_lens = {100, 1, 33};
    spec.has_rope = true;
    spec.rope.rotary_dim = rotary_dim;
    spec.rope.scale = 0.5;
    spec.options = "{\"rotary_dim\": " + std::to_string(rotary_dim) + "}";
    const Batch batch(spec, GetParam(), &generator);
    batch.Expect(batch.BoundDecode(), "rotary_dim " + std::to_string(rotary_dim));
  }
}

TEST_P(Decode, OneRequest) {
  SKIP_IF(MissingUnits(128));
  const int64_t heads = 8, kv_heads = 2, m = 200, d = 128;
  for (int64_t layout : {0, 1}) {  // NHD, HND
    Spec spec;
    spec.kv_lens = {static_cast<int>(m)};
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
    Get(names::kSingleDecode)(Placed(device(), dtype(), {1, heads, d}, batch.q).tensor(),
                              place(batch.keys[0]).tensor(), place(batch.values[0]).tensor(),
                              scratch.tensor(), layout, /*rotary_mode=*/0, 1.0, 1e4,
                              state.o.tensor());
    batch.Expect(state, "layout " + std::to_string(layout), /*has_lse=*/false);
  }
}

RUN_ON_DEVICES(Decode, kAttentionOnCPU, kAttentionOnCUDA);

}  // namespace
}  // namespace native

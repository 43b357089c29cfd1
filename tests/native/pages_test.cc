// The functions of pages: bytes move, and nothing else changes.
#include "fixture.h"

namespace native {
namespace {

using tvm::ffi::Function;

/*! \brief The pages of a cache in the dtype of the test, and rows to append. */
class Pages : public OnDevice {
 protected:
  static constexpr int64_t kPages = 6, kHeads = 2, kSize = 5, kDim = 80;
  static constexpr int64_t kTokens = kPages * kSize;

  /*! \brief Where dimension 0 of a head of a token lies: keys are part 0, values part 1. */
  static int64_t At(int64_t token, int64_t part, int64_t head) {
    return (((token / kSize * 2 + part) * kHeads + head) * kSize + token % kSize) * kDim;
  }

  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    before = Random(kPages * 2 * kHeads * kSize * kDim);
    pool =
        std::make_unique<Placed>(device(), dtype(), Shape{kPages, 2, kHeads, kSize, kDim}, before);
  }

  Placed Rows(const Numbers& values) const {
    const int64_t count = static_cast<int64_t>(values.size()) / (kHeads * kDim);
    return Placed(device(), dtype(), {count, kHeads, kDim}, values);
  }

  /*! \brief What the pool holds after `count` tokens were put to their places, in order. */
  void Move(Numbers* pages, int64_t from, int64_t to) const {
    for (int64_t part = 0; part < 2; ++part) {
      for (int64_t head = 0; head < kHeads; ++head) {
        std::copy_n(pages->begin() + At(from, part, head), kDim,
                    pages->begin() + At(to, part, head));
      }
    }
  }

  void Expect(const Numbers& expected) const {
    EXPECT_TRUE(pool->GuardsAreIntact());
    const Numbers got = pool->Read();
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) ASSERT_EQ(got[i], expected[i]) << "element " << i;
  }

  Numbers before;
  std::unique_ptr<Placed> pool;
};

TEST_P(Pages, AppendWritesRowsWithAPosition) {
  SKIP_IF(MissingUnit({"append_paged_kv_cache"}));
  const std::vector<int32_t> positions{7, -1, 0, kTokens - 1, 12, -1, 13};
  const int64_t count = static_cast<int64_t>(positions.size());
  const Numbers k = Random(count * kHeads * kDim), v = Random(count * kHeads * kDim);
  Get(names::kAppendPagedKVCache)(pool->tensor(), Rows(k).tensor(), Rows(v).tensor(),
                                  Indices(device(), positions));
  Numbers expected = before;
  for (int64_t i = 0; i < count; ++i) {
    if (positions[i] < 0) continue;
    for (int64_t head = 0; head < kHeads; ++head) {
      const int64_t row = (i * kHeads + head) * kDim;
      std::copy_n(k.begin() + row, kDim, expected.begin() + At(positions[i], 0, head));
      std::copy_n(v.begin() + row, kDim, expected.begin() + At(positions[i], 1, head));
    }
  }
  Expect(expected);
}

TEST_P(Pages, CopyOfAPage) {
  SKIP_IF(MissingUnit({"copy_single_page"}));
  for (int64_t length : {int64_t{0}, int64_t{3}, kSize}) {
    pool->Write(before);
    Get(names::kCopySinglePage)(pool->tensor(), 1, 4, length);
    Numbers expected = before;
    for (int64_t i = 0; i < length; ++i) Move(&expected, kSize + i, 4 * kSize + i);
    Expect(expected);
  }
}

// Slots move in order: one that is written by a move may be what a later move of its request reads.
TEST_P(Pages, Compaction) {
  SKIP_IF(MissingUnit({"compact_kv_copy"}));
  const std::vector<int32_t> indptr{0, 3, 3, 5};
  const std::vector<int32_t> from{4, 6, 9, 22, 23}, to{2, 4, 6, 20, 22};
  std::vector<int32_t> both = from;
  both.insert(both.end(), to.begin(), to.end());
  const int64_t count = static_cast<int64_t>(from.size());
  const Placed moves(device(), kInt32, {2, count}, Numbers(both.begin(), both.end()));
  Get(names::kCompactKVCopy)(pool->tensor(), Indices(device(), indptr), moves.tensor(), 3);
  Numbers expected = before;
  for (int64_t i = 0; i < count; ++i) Move(&expected, from[i], to[i]);
  Expect(expected);
}

TEST_P(Pages, ReadBackOfALayer) {
  SKIP_IF(MissingUnit({"read_pages"}));
  const std::vector<int32_t> positions{kTokens - 1, 0, 7, 7};
  const int64_t layers = 3, count = static_cast<int64_t>(positions.size());
  const int64_t layer_size = count * kHeads * kDim;
  const Numbers zeros(layers * layer_size, 0.f);
  const Shape shape{layers, count, kHeads, kDim};
  const Placed k(device(), dtype(), shape, zeros), v(device(), dtype(), shape, zeros);
  Get(names::kDebugGetKV)(pool->tensor(), Indices(device(), positions), k.tensor(), v.tensor(), 1);
  for (int64_t part = 0; part < 2; ++part) {
    Numbers expected = zeros;
    for (int64_t i = 0; i < count; ++i) {
      for (int64_t head = 0; head < kHeads; ++head) {
        std::copy_n(before.begin() + At(positions[i], part, head), kDim,
                    expected.begin() + layer_size + (i * kHeads + head) * kDim);
      }
    }
    EXPECT_EQ((part == 0 ? k : v).Read(), expected) << "part " << part;
  }
  Expect(before);
}

// Rows that 8 bits cannot hold are divided by the scale, rounded to even and saturated.
TEST_P(Pages, AppendToEightBits) {
  SKIP_IF(MissingUnit({"append_paged_kv_cache"}));
  const std::vector<int32_t> positions{3, -1, kTokens - 1, 11};
  const int64_t count = static_cast<int64_t>(positions.size());
  for (const DLDataType stored : {kE4M3, kE5M2}) {
    Numbers k = Random(count * kHeads * kDim), v = Random(count * kHeads * kDim);
    for (size_t i = 0; i < k.size(); i += 7) {
      k[i] = static_cast<float>(Rounded(k[i] * 1e3, dtype()));
      v[i] = static_cast<float>(Rounded(v[i] * 1e-3, dtype()));
    }
    k[0] = INFINITY;
    k[1] = NAN;
    const Shape shape{kPages, 2, kHeads, kSize, kDim};
    const Numbers zeros(Count(shape), 0.f);
    const Placed pages(device(), stored, shape, zeros);
    Get(names::kBindAppendPagedKVCache)(R"({"k_scale": 0.25, "v_scale": 0.3})")
        .cast<Function>()(pages.tensor(), Rows(k).tensor(), Rows(v).tensor(),
                          Indices(device(), positions));
    std::vector<uint8_t> expected = ToBytes(zeros, stored);
    for (int64_t i = 0; i < count; ++i) {
      if (positions[i] < 0) continue;
      for (int64_t j = 0; j < kHeads * kDim; ++j) {
        const int64_t at = At(positions[i], 0, j / kDim) + j % kDim;
        const int64_t row = i * kHeads * kDim + j;
        // The division is in float32, as the reference of the functions says.
        expected[at] = Encode(k[row] / 0.25f, stored, /*saturate=*/true);
        expected[at + kHeads * kSize * kDim] = Encode(v[row] / 0.3f, stored, /*saturate=*/true);
      }
    }
    const std::vector<uint8_t> got = pages.Bytes();
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], expected[i]) << Name(stored) << ", element " << i;
    }
  }
}

/*! \brief Pages of latent attention, one row a token. */
class LatentPages : public OnDevice {
 protected:
  static constexpr int64_t kPages = 5, kSize = 4, kDim = 72;

  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    before = Random(kPages * kSize * kDim);
    pool = std::make_unique<Placed>(device(), dtype(), Shape{kPages, kSize, kDim}, before);
  }

  Numbers before;
  std::unique_ptr<Placed> pool;
};

TEST_P(LatentPages, Append) {
  SKIP_IF(MissingUnit({"append_rows"}));
  const std::vector<int32_t> positions{19, -1, 6};
  const Numbers rows = Random(3 * kDim);
  Get(names::kAppendPagedMLAKVCache)(pool->tensor(),
                                     Placed(device(), dtype(), {3, kDim}, rows).tensor(),
                                     Indices(device(), positions));
  Numbers expected = before;
  for (int64_t i : {0, 2}) {
    std::copy_n(rows.begin() + i * kDim, kDim, expected.begin() + positions[i] * kDim);
  }
  EXPECT_EQ(pool->Read(), expected);
  EXPECT_TRUE(pool->GuardsAreIntact());
}

TEST_P(LatentPages, CopyOfAPage) {
  SKIP_IF(MissingUnit({"copy_rows"}));
  Get(names::kCopySinglePageMLA)(pool->tensor(), 3, 0, 2);
  Numbers expected = before;
  std::copy_n(before.begin() + 3 * kSize * kDim, 2 * kDim, expected.begin());
  EXPECT_EQ(pool->Read(), expected);
}

TEST_P(LatentPages, ReadBackOfALayer) {
  SKIP_IF(MissingUnit({"read_rows"}));
  const std::vector<int32_t> positions{17, 0, 5};
  const Placed rows(device(), dtype(), {2, 3, kDim}, Numbers(2 * 3 * kDim, 0.f));
  Get(names::kDebugGetKVMLA)(pool->tensor(), Indices(device(), positions), rows.tensor(), 1);
  Numbers expected(2 * 3 * kDim, 0.f);
  for (int64_t i = 0; i < 3; ++i) {
    std::copy_n(before.begin() + positions[i] * kDim, kDim, expected.begin() + (3 + i) * kDim);
  }
  EXPECT_EQ(rows.Read(), expected);
}

RUN_ON_DEVICES(Pages, kAttentionOnCPU, kMovesOnCUDA);
RUN_ON_DEVICES(LatentPages, kAttentionOnCPU, kMovesOnCUDA);

}  // namespace
}  // namespace native

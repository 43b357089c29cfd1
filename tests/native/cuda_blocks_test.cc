// The pieces that our own CUDA kernels are made of, against plain loops. They are compiled with the
// tests, where there is nvcc, by the flags of the kernels.
#include "cuda_blocks.h"

#include "fixture.h"

namespace native {
namespace {

class CudaBlocks : public OnDevice {
 protected:
  Half16 type() const { return Same(dtype(), kFloat16) ? Half16::kFloat16 : Half16::kBFloat16; }

  template <typename T = void>
  static T* Data(const Placed& placed) {
    const Tensor tensor = placed.tensor();
    return static_cast<T*>(tensor.data_ptr());
  }
};

TEST_P(CudaBlocks, MatrixCoresMultiplyTiles) {
  const Numbers a = Random(256), b = Random(256);
  const Placed placed_a(device(), dtype(), {16, 16}, a), placed_b(device(), dtype(), {16, 16}, b);
  for (bool transposed : {false, true}) {
    const Placed c(device(), kFloat32, {16, 16});
    ASSERT_EQ(MultiplyTiles(type(), transposed, Data(placed_a), Data(placed_b), Data<float>(c)), 0);
    const Numbers got = c.Read();
    for (int row = 0; row < 16; ++row) {
      for (int column = 0; column < 16; ++column) {
        double sum = 0, magnitude = 0;
        for (int i = 0; i < 16; ++i) {
          const double product = static_cast<double>(a[row * 16 + i]) *
                                 (transposed ? b[i * 16 + column] : b[column * 16 + i]);
          sum += product;
          magnitude += std::fabs(product);
        }
        ASSERT_NEAR(got[row * 16 + column], sum, 1e-6 * magnitude)
            << (transposed ? "values" : "keys") << ", row " << row << ", column " << column;
      }
    }
  }
}

TEST_P(CudaBlocks, CopiesOf16Bytes) {
  Numbers from, exists;
  for (int i = 0; i < 64 * 4; ++i) from.push_back(static_cast<float>(i + 1));
  for (int i = 0; i < 64; ++i) exists.push_back(i % 3 == 1 ? 0.f : 1.f);
  const Placed to(device(), kFloat32, {64 * 4});
  ASSERT_EQ(CopyGroups(Data(Placed(device(), kFloat32, {64 * 4}, from)),
                       Data<int>(Placed(device(), kInt32, {64}, exists)), Data(to)),
            0);
  const Numbers got = to.Read();
  for (int i = 0; i < 64 * 4; ++i) EXPECT_EQ(got[i], exists[i / 4] * from[i]) << "float " << i;
}

TEST_P(CudaBlocks, PowersOfTwo) {
  Numbers x{-INFINITY, 0.f, -200.f};
  for (int i = 0; i < 4000; ++i) x.push_back(-126.f * static_cast<float>(i) / 4000);
  const int64_t n = static_cast<int64_t>(x.size());
  const Placed y(device(), kFloat32, {n});
  ASSERT_EQ(
      Exp2Of(Data<float>(Placed(device(), kFloat32, {n}, x)), Data<float>(y), static_cast<int>(n)),
      0);
  const Numbers got = y.Read();
  EXPECT_EQ(got[0], 0.f);
  EXPECT_EQ(got[1], 1.f);
  EXPECT_EQ(got[2], 0.f);
  for (int64_t i = 3; i < n; ++i) {
    const double exact = std::exp2(static_cast<double>(x[i]));
    ASSERT_NEAR(got[i], exact, 4e-7 * exact) << "2 ^ " << x[i];
  }
}

// Also at positions of a million, where the fast sine of a float is wrong.
TEST_P(CudaBlocks, CosinesAndSinesOfLargeAngles) {
  Numbers angles{0.f, 1e6f, -1e6f, 123456.7f};
  for (int i = 0; i < 2000; ++i) angles.push_back(1.37f * static_cast<float>(i) * i);
  const int64_t n = static_cast<int64_t>(angles.size());
  const Placed pairs(device(), kFloat32, {n, 2});
  ASSERT_EQ(CosinesAndSines(Data<float>(Placed(device(), kFloat32, {n}, angles)),
                            Data<float>(pairs), static_cast<int>(n)),
            0);
  const Numbers got = pairs.Read();
  for (int64_t i = 0; i < n; ++i) {
    const double angle = angles[i];
    ASSERT_NEAR(got[2 * i], std::cos(angle), 1e-6) << "cosine of " << angle;
    ASSERT_NEAR(got[2 * i + 1], std::sin(angle), 1e-6) << "sine of " << angle;
  }
}

TEST_P(CudaBlocks, PairsAreRoundedToNearest) {
  Numbers x = Normal(2000, kFloat32, &generator);
  const int64_t n = static_cast<int64_t>(x.size());
  const Placed packed(device(), dtype(), {n}), y(device(), kFloat32, {n});
  ASSERT_EQ(PackAndUnpack(type(), Data<float>(Placed(device(), kFloat32, {n}, x)),
                          Data<uint32_t>(packed), Data<float>(y), static_cast<int>(n)),
            0);
  const Numbers stored = packed.Read(), unpacked = y.Read();
  for (int64_t i = 0; i < n; ++i) {
    ASSERT_EQ(stored[i], Rounded(x[i], dtype())) << "element " << i;
    ASSERT_EQ(unpacked[i], stored[i]) << "element " << i;
  }
}

TEST_P(CudaBlocks, RowsAreQuantized) {
  const float scale = 0.3f;
  Numbers x{INFINITY, -INFINITY, 1e9f, -1e9f, 0.f, -0.f};
  for (int exponent = -20; exponent < 20; ++exponent) {
    for (int i = 0; i < 50; ++i) {
      x.push_back(static_cast<float>(std::ldexp(1 + i / 50.0, exponent)));
      x.push_back(-x.back());
    }
  }
  const int64_t n = static_cast<int64_t>(x.size());
  for (const DLDataType stored : {kE4M3, kE5M2}) {
    const Placed codes(device(), stored, {n});
    ASSERT_EQ(QuantizeAll(Same(stored, kE4M3), Data<float>(Placed(device(), kFloat32, {n}, x)),
                          scale, Data<uint8_t>(codes), static_cast<int>(n)),
              0);
    const std::vector<uint8_t> got = codes.Bytes();
    for (int64_t i = 0; i < n; ++i) {
      ASSERT_EQ(got[i], Encode(x[i] / scale, stored, /*saturate=*/true))
          << Name(stored) << ", " << x[i];
    }
  }
}

TEST_P(CudaBlocks, EightBitsAreWidened) {
  const int64_t count = kWidenedRows * kWidenedDim;
  for (const DLDataType stored : {kE4M3, kE5M2}) {
    Numbers values;
    for (int64_t i = 0; i < count; ++i) {
      const double value = Decode(static_cast<uint32_t>(i % 256), stored);
      values.push_back(std::isfinite(value) ? static_cast<float>(value) : 0.f);
    }
    const Placed rows(device(), dtype(), {kWidenedRows, kWidenedPitch});
    ASSERT_EQ(WidenAllRows(type(), Same(stored, kE4M3),
                           Data(Placed(device(), stored, {count}, values)), 0.0625f, Data(rows)),
              0);
    const Numbers got = rows.Read();
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = i / kWidenedDim * kWidenedPitch + i % kWidenedDim;
      // What float16 is too small for is rounded: a sixteenth of the least number of e5m2.
      ASSERT_EQ(got[at], Rounded(values[i] * 0.0625, dtype())) << Name(stored) << ", element " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Cuda, CudaBlocks, testing::ValuesIn(kAttentionOnCUDA), ParamName);

}  // namespace
}  // namespace native

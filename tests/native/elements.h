// The elements of tensors, written from their definitions: a sign, an exponent, a mantissa.
#ifndef TESTS_NATIVE_ELEMENTS_H_
#define TESTS_NATIVE_ELEMENTS_H_

#include <tvm/ffi/dtype.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

namespace native {

constexpr DLDataType kFloat32{kDLFloat, 32, 1};
constexpr DLDataType kFloat16{kDLFloat, 16, 1};
constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};
constexpr DLDataType kE4M3{kDLFloat8_e4m3fn, 8, 1};
constexpr DLDataType kE5M2{kDLFloat8_e5m2, 8, 1};
constexpr DLDataType kInt32{kDLInt, 32, 1};
constexpr DLDataType kUInt8{kDLUInt, 8, 1};

inline bool Same(DLDataType a, DLDataType b) { return a.code == b.code && a.bits == b.bits; }

/*! \brief A float format: bits of the exponent and the mantissa, and the largest number. */
struct Format {
  int exponent;
  int mantissa;
  double largest;
  bool has_infinity;
};

inline Format FormatOf(DLDataType dtype) {
  if (Same(dtype, kFloat16)) return {5, 10, 65504, true};
  if (Same(dtype, kBFloat16)) return {8, 7, 0x1.fep127, true};
  if (Same(dtype, kE4M3)) return {4, 3, 448, false};
  if (Same(dtype, kE5M2)) return {5, 2, 57344, true};
  return {8, 23, std::numeric_limits<float>::max(), true};
}

/*! \brief The largest relative error of rounding to nearest. */
inline double RoundingError(DLDataType dtype) {
  return std::ldexp(1.0, -FormatOf(dtype).mantissa - 1);
}

/*! \brief How far rounding may move x: relative, or half a step of the least numbers. */
inline double RoundingBound(double x, DLDataType dtype) {
  const Format f = FormatOf(dtype);
  const int least = 2 - (1 << (f.exponent - 1)) - f.mantissa;
  return std::max(RoundingError(dtype) * std::fabs(x), std::ldexp(0.5, least));
}

/*! \brief The number that the bits stand for. */
inline double Decode(uint32_t bits, DLDataType dtype) {
  const Format f = FormatOf(dtype);
  const uint32_t mantissa = bits & ((1u << f.mantissa) - 1);
  const uint32_t all_ones = (1u << f.exponent) - 1;
  const uint32_t exponent = bits >> f.mantissa & all_ones;
  const double sign = bits >> (f.mantissa + f.exponent) & 1 ? -1 : 1;
  const int bias = static_cast<int>(all_ones / 2);
  if (exponent == all_ones && f.has_infinity) {
    return mantissa == 0 ? sign * INFINITY : std::nan("");
  }
  if (!f.has_infinity && exponent == all_ones && mantissa == (1u << f.mantissa) - 1) {
    return std::nan("");
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, 1 - bias - f.mantissa);
  return sign *
         std::ldexp((1u << f.mantissa) + mantissa, static_cast<int>(exponent) - bias - f.mantissa);
}

/*!
 * \brief The bits of x rounded to nearest, ties to even. What is too large becomes infinity, or the
 * largest number when `saturate` is set.
 */
inline uint32_t Encode(double x, DLDataType dtype, bool saturate = false) {
  const Format f = FormatOf(dtype);
  const int bias = (1 << (f.exponent - 1)) - 1;
  const uint32_t all_ones = ((1u << f.exponent) - 1) << f.mantissa;
  if (std::isnan(x)) return all_ones | ((1u << f.mantissa) - 1);
  const uint32_t sign = std::signbit(x) ? 1u << (f.exponent + f.mantissa) : 0;
  const double magnitude = std::fabs(x);
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  // The exponent of the last bit; subnormal numbers share that of the least normal ones.
  const int last = std::max(exponent - 1, 1 - bias) - f.mantissa;
  double steps = std::isinf(magnitude) ? INFINITY : std::nearbyint(std::ldexp(magnitude, -last));
  if (std::ldexp(steps, last) > f.largest) {
    if (!saturate) return sign | all_ones;
    return sign | (f.has_infinity ? all_ones - 1 : all_ones | ((1u << f.mantissa) - 2));
  }
  // Adding to the exponent what the mantissa carries over gives the right bits.
  const uint32_t whole = static_cast<uint32_t>(steps);
  const uint32_t hidden = 1u << f.mantissa;
  if (whole < hidden) return sign | whole;
  return sign | (static_cast<uint32_t>(last + f.mantissa + bias - 1) << f.mantissa) + whole;
}

inline double Rounded(double x, DLDataType dtype) {
  if (Same(dtype, kFloat32)) return static_cast<float>(x);
  return Decode(Encode(x, dtype), dtype);
}

/*! \brief Numbers as the bytes of a tensor. */
inline std::vector<uint8_t> ToBytes(const std::vector<float>& values, DLDataType dtype) {
  const size_t size = dtype.bits / 8;
  std::vector<uint8_t> bytes(values.size() * size);
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t code = 0;
    if (dtype.code == kDLInt) {
      code = static_cast<uint32_t>(static_cast<int32_t>(values[i]));
    } else if (Same(dtype, kFloat32)) {
      std::memcpy(&code, &values[i], 4);
    } else {
      code = Encode(values[i], dtype);
    }
    std::memcpy(bytes.data() + i * size, &code, size);  // the machine is little-endian
  }
  return bytes;
}

inline std::vector<float> FromBytes(const std::vector<uint8_t>& bytes, DLDataType dtype) {
  const size_t size = dtype.bits / 8;
  std::vector<float> values(bytes.size() / size);
  for (size_t i = 0; i < values.size(); ++i) {
    uint32_t code = 0;
    std::memcpy(&code, bytes.data() + i * size, size);
    if (Same(dtype, kFloat32)) {
      std::memcpy(&values[i], &code, 4);
    } else {
      values[i] = static_cast<float>(Decode(code, dtype));
    }
  }
  return values;
}

}  // namespace native

#endif  // TESTS_NATIVE_ELEMENTS_H_

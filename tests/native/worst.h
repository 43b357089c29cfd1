// The element that errs most, for one failure with its place in the place of thousands.
#ifndef TESTS_NATIVE_WORST_H_
#define TESTS_NATIVE_WORST_H_

#include <sstream>
#include <string>

#include "elements.h"
#include "oracle.h"

namespace native {

class Worst {
 public:
  explicit Worst(DLDataType dtype, bool has_rope = false)
      : rounding_(RoundingError(dtype)),
        // RoPE inside attention rounds what it turned to the dtype.
        score_error_(has_rope ? 2 * rounding_ : 0),
        is_float16_(Same(dtype, kFloat16)) {}

  /*! \brief Compare one head of one row. */
  void Add(const RowResult& exact, const float* o, double lse, const std::string& where) {
    ++count_;
    if (std::isinf(exact.lse)) {
      bool is_zero = lse == -INFINITY;
      for (size_t i = 0; i < exact.o.size(); ++i) is_zero &= o[i] == 0;
      if (!is_zero) Keep(INFINITY, where + " sees no key and is not 0 with LSE -inf");
      return;
    }
    const double scores = score_error_ * exact.score_magnitude;
    Compare(lse, exact.lse, LseBoundOf(exact, rounding_) + kLog2E * scores, where + ", LSE");
    for (size_t i = 0; i < exact.o.size(); ++i) {
      const double bound = BoundOf(exact, static_cast<int>(i), rounding_, is_float16_) +
                           2 * scores * exact.magnitude[i];
      Compare(o[i], exact.o[i], bound, where + ", element ", static_cast<int>(i));
    }
  }

  /*! \brief Compare a number. */
  void Compare(double got, double expected, double bound, const std::string& where, int at = -1) {
    ++count_;
    const double error = std::fabs(got - expected);
    const double excess = std::isfinite(error) ? error / bound : INFINITY;
    if (excess <= excess_) return;
    std::ostringstream text;
    text << where;
    if (at >= 0) text << at;
    text << " is " << got << ", expected " << expected << " within " << bound;
    Keep(excess, text.str());
  }

  /*! \brief Whether something was compared, and nothing was out of its bound. */
  bool IsWithinBounds() const { return count_ > 0 && excess_ <= 1; }
  std::string text() const { return count_ == 0 ? "nothing was compared" : text_; }

 private:
  void Keep(double excess, const std::string& text) {
    excess_ = excess;
    text_ = text;
  }

  double rounding_, score_error_;
  bool is_float16_;
  double excess_ = -1;
  int64_t count_ = 0;
  std::string text_;
};

}  // namespace native

#endif  // TESTS_NATIVE_WORST_H_

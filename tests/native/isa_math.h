// The helpers of the CPU kernels on vectors, compiled for each instruction set as these are.
#ifndef TESTS_NATIVE_ISA_MATH_H_
#define TESTS_NATIVE_ISA_MATH_H_

#include <stdint.h>

#include "kernels/types.h"

namespace native {

/*! \brief Each takes n elements, a multiple of `lanes`; reductions take one vector. */
struct IsaMath {
  int lanes;
  void (*exp2)(const float* in, float* out, int n);
  void (*to_float)(tvm_flashinfer::kernels::DType dtype, const void* in, float* out, int n);
  void (*from_float)(tvm_flashinfer::kernels::DType dtype, const float* in, void* out, int n);
  float (*reduce_sum)(const float* vector);
  float (*reduce_max)(const float* vector);
  /*! \brief Of `lanes` vectors to one. */
  void (*sum_of_each)(const float* vectors, float* out);
  void (*swap_pairs)(const float* vector, float* out);
};

namespace math_baseline {
extern const IsaMath kMath;
}
namespace math_v3 {
extern const IsaMath kMath;
}
namespace math_v4 {
extern const IsaMath kMath;
}

}  // namespace native

#endif  // TESTS_NATIVE_ISA_MATH_H_

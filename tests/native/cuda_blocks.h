// Launches of the pieces that our own CUDA kernels are made of. All pointers are of the device;
// what comes back is an error of the CUDA runtime, or 0.
#ifndef TESTS_NATIVE_CUDA_BLOCKS_H_
#define TESTS_NATIVE_CUDA_BLOCKS_H_

#include <cstdint>

namespace native {

enum class Half16 { kFloat16, kBFloat16 };

/*!
 * \brief c (16, 16) = a (16, 16) * b by ldmatrix and mma. b comes as keys do, (columns, inner), or
 * as values do, (inner, columns), which are loaded transposed.
 */
int MultiplyTiles(Half16 type, bool b_is_transposed, const void* a, const void* b, float* c);

/*! \brief Two groups of 32 pieces of 16 bytes by cp.async; zeros come where `exists` is 0. */
int CopyGroups(const void* from, const int* exists, void* to);

int Exp2Of(const float* x, float* y, int n);
/*! \brief Pairs (cosine, sine). */
int CosinesAndSines(const float* angles, float* pairs, int n);
/*! \brief Pairs of floats to packed 16-bit numbers and back. */
int PackAndUnpack(Half16 type, const float* x, uint32_t* packed, float* y, int n);
int QuantizeAll(bool is_e4m3, const float* x, float scale, uint8_t* codes, int n);
/*! \brief Rows of 64 codes of 8 bits to 16-bit rows with 8 elements of padding, times a factor. */
int WidenAllRows(Half16 type, bool is_e4m3, const void* codes, float factor, void* rows);
constexpr int kWidenedRows = 8, kWidenedDim = 64, kWidenedPitch = kWidenedDim + 8;

}  // namespace native

#endif  // TESTS_NATIVE_CUDA_BLOCKS_H_

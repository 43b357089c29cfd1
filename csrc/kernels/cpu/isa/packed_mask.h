// Packed masks: a bit for every row and key of a request.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_PACKED_MASK_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_PACKED_MASK_H_

#include "../attention_block.h"
#include "elements.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

static_assert(kKeyTile <= 64, "the bits of a row and a tile are one 64-bit word");

TFI_INLINE bool HasPackedMask(const AttentionBlock& block) {
  return block.extras != nullptr && block.extras->args.mask_indptr != nullptr;
}

/*! \brief Bit i says whether row `row` of the request sees key begin + i, for count keys. */
TFI_INLINE uint64_t SeenKeys(const AttentionBlock& block, int64_t row, int64_t begin,
                             int64_t count) {
  const AttentionExtras& args = block.extras->args;
  const int64_t first = row / block.group * block.kv_len + begin;
  const uint8_t* bytes = args.packed_mask + args.mask_indptr[block.request] + first / 8;
  const int64_t shift = first % 8;
  // Up to 9 bytes hold the bits; not one more may be read.
  const int64_t num_bytes = (shift + count + 7) / 8;
  uint64_t bits = 0;
  for (int64_t i = 0; i < num_bytes && i < 8; ++i) bits |= static_cast<uint64_t>(bytes[i]) << 8 * i;
  bits >>= shift;
  if (num_bytes > 8) bits |= static_cast<uint64_t>(bytes[8]) << (64 - shift);
  return bits;
}

/*! \brief SeenKeys of num_rows rows from `row` on; rows past the block see what the last one sees.
 */
void FindSeenKeys(const AttentionBlock& block, int64_t row, int64_t num_rows, int64_t begin,
                  int64_t count, uint64_t* seen) {
  for (int64_t r = 0; r < num_rows; ++r) {
    const int64_t inside = row + r < block.row_end ? row + r : block.row_end - 1;
    // Heads of one token have the same bits.
    const bool same = r > 0 && inside % block.group != 0;
    seen[r] =
        same || (r > 0 && inside != row + r) ? seen[r - 1] : SeenKeys(block, inside, begin, count);
  }
}

/*! \brief Hide from one row the keys whose bits are not set. */
TFI_INLINE void MaskRowByBits(uint64_t seen, int64_t padded, float* s) {
  const IVec lane_bit = BroadcastInt(1) << LaneIndex();
  for (int64_t i = 0; i < padded; i += kLanes) {
    const IVec hidden = (BroadcastInt(static_cast<int32_t>(seen >> i)) & lane_bit) == 0;
    Store(s + i, hidden ? Broadcast(-__builtin_inff()) : Load(s + i));
  }
}

/*! \brief The same for a panel and its count keys. */
template <int kVecs>
void MaskPanelByBits(const uint64_t* seen, int64_t count, float* s) {
  constexpr int64_t kWidth = kVecs * kLanes;
  int32_t words[2][kWidth];
  for (int64_t r = 0; r < kWidth; ++r) {
    words[0][r] = static_cast<int32_t>(seen[r]);
    words[1][r] = static_cast<int32_t>(seen[r] >> 32);
  }
  for (int64_t i = 0; i < count; ++i, s += kWidth) {
    const IVec bit = BroadcastInt(static_cast<int32_t>(uint32_t{1} << i % 32));
    TFI_UNROLL for (int v = 0; v < kVecs; ++v) {
      const IVec hidden = (LoadInt(words[i / 32] + v * kLanes) & bit) == 0;
      Store(s + v * kLanes, hidden ? Broadcast(-__builtin_inff()) : Load(s + v * kLanes));
    }
  }
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_PACKED_MASK_H_

// Rotary embedding of heads that lie anywhere, to where they belong.
#ifndef TVM_FLASHINFER_KERNELS_CPU_ISA_ROTARY_MOVE_H_
#define TVM_FLASHINFER_KERNELS_CPU_ISA_ROTARY_MOVE_H_

#include "norm.h"
#include "rotary.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {
namespace {

/*! \brief The angles of a position from a table of cosines and sines. */
void ReadAngles(const RotaryMoveArgs& args, int64_t position, RowAngles* out) {
  const int64_t pairs = args.rotary_dim / 2;
  if (position >= args.num_positions) position = args.num_positions - 1;
  if (position < 0) position = 0;
  const float* table = args.cos_sin + position * args.rotary_dim;
  for (int64_t i = 0; i < pairs; ++i) {
    const float cosine = table[i], sine = table[pairs + i];
    out->cosine[i] = cosine;
    out->sine[i] = sine;
    out->signed_sines[2 * i] = -sine;
    out->signed_sines[2 * i + 1] = sine;
    out->cosines[2 * i] = out->cosines[2 * i + 1] = cosine;
  }
}

template <typename Element>
TFI_INLINE void RotateHead(const RotaryMoveArgs& args, const RowAngles& angles,
                           const typename Element::Raw* source, typename Element::Raw* target) {
  const int64_t pairs = args.rotary_dim / 2, rest = args.rotary_dim;
  if (args.interleaved) {
    RotateInterleaved<Element>(source, pairs, angles, target);
  } else if (args.inv_freq_second != nullptr) {
    RotateHalves<Element, true>(source, pairs, angles, target);
  } else {
    RotateHalves<Element, false>(source, pairs, angles, target);
  }
  if (rest < args.head_dim && target != source) {
    memcpy(target + rest, source + rest, (args.head_dim - rest) * sizeof(*target));
  }
}

/*! \brief The position of a row whose request is the first from *request on that has it. */
TFI_INLINE int32_t PositionOfRow(const RotaryMoveArgs& args, int64_t row, int32_t* request) {
  if (args.indptr == nullptr) return args.positions[row];
  while (*request + 1 < args.batch_size && args.indptr[*request + 1] <= row) ++*request;
  return args.offsets[*request] + static_cast<int32_t>(row - args.indptr[*request]);
}

template <typename Element>
void MoveRotatedOf(const RotaryMoveArgs& args, int64_t begin, int64_t end) {
  typedef typename Element::Raw Raw;
  const int64_t row_bytes = args.head_dim * sizeof(Raw);
  RowAngles angles;
  memset(&angles, 0, sizeof(angles));
  int32_t request = 0;
  for (int64_t row = begin; row < end; ++row) {
    if (args.rotary_dim > 0) {
      const int32_t position = PositionOfRow(args, row, &request);
      if (args.cos_sin != nullptr) {
        ReadAngles(args, position, &angles);
      } else {
        ComputeAngles(args, position, &angles);
      }
    }
    auto move = [&](const HeadMove& part, int64_t target_offset, bool rotated) {
      for (int64_t head = 0; head < part.num_heads; ++head) {
        const Raw* source = HeadOf<const Raw>(part.source, row, head);
        Raw* target = HeadOf<Raw>(part.target, 0, head) + target_offset;
        if (rotated && args.rotary_dim > 0) {
          RotateHead<Element>(args, angles, source, target);
        } else if (target != source) {
          memcpy(target, source, row_bytes);
        }
      }
    };
    move(args.q, row * args.q.target.stride_row, true);
    int64_t k_offset = row * args.k.target.stride_row, v_offset = row * args.v.target.stride_row;
    if (args.slots != nullptr) {
      const int64_t slot = args.slots[row];
      if (slot < 0 || slot >= args.num_slots) continue;
      const int64_t page = slot / args.page_size, in_page = slot % args.page_size * args.head_dim;
      k_offset = page * args.k.target.stride_row + in_page;
      v_offset = page * args.v.target.stride_row + in_page;
    }
    move(args.k, k_offset, true);
    move(args.v, v_offset, false);
  }
}

void MoveRotated(const RotaryMoveArgs& args, int64_t begin, int64_t end) {
  DispatchFloat(args.dtype,
                [&](auto element) { MoveRotatedOf<decltype(element)>(args, begin, end); });
}

}  // namespace
}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_ISA_ROTARY_MOVE_H_

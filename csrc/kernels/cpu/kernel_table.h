// The functions that are compiled once per instruction set, behind plain function pointers.
#ifndef TVM_FLASHINFER_KERNELS_CPU_KERNEL_TABLE_H_
#define TVM_FLASHINFER_KERNELS_CPU_KERNEL_TABLE_H_

#include <stdint.h>

#include "../row_types.h"
#include "../types.h"
#include "attention_block.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {

struct KernelTable {
  const char* name;

  // scratch is aligned to 64 bytes and has ScratchFloats floats.

  /*! \brief Attend to all keys of the block and write o and lse. */
  void (*attend_block)(const AttentionBlock& block, float* scratch);
  /*! \brief Attend to the keys of one chunk and write its state. */
  void (*attend_chunk)(const AttentionBlock& block, int64_t chunk, float* state, float* scratch);
  /*!
   * \brief Fold the states of the chunks, StateFloats apart, and write o and lse: bit for bit what
   * attend_block writes.
   */
  void (*fold_chunks)(const AttentionBlock& block, const float* states, float* scratch);

  /*! \brief Fill a table of offset_angles for the offsets [0, count). */
  void (*rotary_offsets)(const AttentionExtras& args, int64_t count, float* table);

  /*! \brief Merge the pairs (row, head) numbered [begin, end). */
  void (*merge_states)(const MergeStateArgs& args, int64_t begin, int64_t end);
  /*! \brief Apply the sinks to the pairs (row, head) numbered [begin, end). */
  void (*apply_sinks)(const ApplySinksArgs& args, int64_t begin, int64_t end);
  /*! \brief Split and rotate the rows [begin, end). */
  void (*split_rotary)(const SplitRotaryArgs& args, int64_t begin, int64_t end);
  /*! \brief Write n elements divided by scale as 8-bit ones, saturated. */
  void (*quantize_row)(DType from, DType to, const void* source, int64_t n, float scale,
                       uint8_t* target);

  /*! \brief Norm of the pairs (row, head) numbered [begin, end). */
  void (*norm_rows)(const NormArgs& args, int64_t begin, int64_t end);
  /*! \brief Gated activation of the rows [begin, end). */
  void (*gate_rows)(const GatedArgs& args, int64_t begin, int64_t end);
  /*! \brief Merge many states of the pairs (row, head) numbered [begin, end). */
  void (*merge_many_states)(const MergeStatesArgs& args, int64_t begin, int64_t end);
  /*! \brief Rotate and move the heads of the rows [begin, end). */
  void (*move_rotated)(const RotaryMoveArgs& args, int64_t begin, int64_t end);
};

namespace baseline {
extern const KernelTable kKernelTable;
}
#ifdef TVM_FLASHINFER_CPU_V3
namespace v3 {
extern const KernelTable kKernelTable;
}
#endif
#ifdef TVM_FLASHINFER_CPU_V4
namespace v4 {
extern const KernelTable kKernelTable;
}
#endif

/*!
 * \brief The table of the best instruction set that this CPU has, or of the one that the
 * environment variable TVM_FLASHINFER_CPU_ISA (baseline, v3, v4) names if the CPU has it.
 */
const KernelTable& ActiveKernels();

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_KERNEL_TABLE_H_

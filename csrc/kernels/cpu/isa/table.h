// The kernel table of one instruction set. isa/*.cc define TVM_FLASHINFER_ISA and include this.
#include "../kernel_table.h"
#include "activation.h"
#include "attention.h"
#include "float8.h"
#include "merge.h"
#include "norm.h"
#include "rotary.h"
#include "rotary_move.h"
#include "sinks.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace TVM_FLASHINFER_ISA {

const KernelTable kKernelTable = {TVM_FLASHINFER_ISA_NAME,
                                  AttendBlock,
                                  AttendChunk,
                                  FoldChunks,
                                  RotaryOffsets,
                                  MergeStates,
                                  ApplySinks,
                                  SplitRotary,
                                  QuantizeRow,
                                  NormRows,
                                  GateRows,
                                  MergeManyStates,
                                  MoveRotated};

}  // namespace TVM_FLASHINFER_ISA
}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

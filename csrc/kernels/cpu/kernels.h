// The portable kernels: threaded, vectorised by the compiler, for float32, float16 and bfloat16,
// any head_dim and any page size. Index arrays have been checked by the caller.
#ifndef TVM_FLASHINFER_KERNELS_CPU_KERNELS_H_
#define TVM_FLASHINFER_KERNELS_CPU_KERNELS_H_

#include <string>

#include "../row_types.h"
#include "../sampling_types.h"
#include "../types.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {

void BatchAttentionPaged(const AttentionArgs& args, const PagedKV& kv,
                         const AttentionExtras& extras = {});
void BatchAttentionRagged(const AttentionArgs& args, const RaggedKV& kv,
                          const AttentionExtras& extras = {});
void BatchMLA(const MLAArgs& args, const MLATable& table);
void MergeState(const MergeStateArgs& args);
void ApplySinks(const ApplySinksArgs& args);
void SplitQKVRotary(const SplitRotaryArgs& args);
void AppendPagedKVCache(const AppendArgs& args);
void CopySinglePage(const CopyPageArgs& args);
void CompactKVCopy(const CompactCopyArgs& args);
void ReadPages(const ReadPagesArgs& args);
void AppendRows(const AppendRowsArgs& args);
void CopyRows(const CopyRowsArgs& args);
void ReadRows(const ReadRowsArgs& args);
void SampleFromProbs(const SampleArgs& args);
void DrawFiltered(const FilterDrawArgs& args);
void RenormFiltered(const FilterRenormArgs& args);
void DrawSorted(const SortedArgs& args);
void RenormSorted(const SortedArgs& args);
void SoftmaxRows(const SoftmaxArgs& args);
void VerifyDrafts(const SpeculativeArgs& args);
void NormRows(const NormArgs& args);
void GateRows(const GatedArgs& args);
void MergeManyStates(const MergeStatesArgs& args);
void MoveRotated(const RotaryMoveArgs& args);
void FindTokenSlots(const TokenSlotsArgs& args);

/*! \brief Worker threads in use, the caller's included. */
int NumThreads();

/*! \brief What is wrong with TVM_FLASHINFER_NUM_THREADS; empty when nothing is. */
const std::string& ThreadSettingError();

/*! \brief Name of the instruction set that was chosen at run time, such as "x86-64-v4". */
const char* InstructionSet();

/*! \brief What is wrong with TVM_FLASHINFER_CPU_ISA; empty when nothing is. */
const std::string& InstructionSetError();

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CPU_KERNELS_H_

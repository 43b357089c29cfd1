// Which kernel a planned call runs on: the words for it, the rules where nothing was measured for
// the shape, and the printing of choices. Files of tuning, in tuning.h, go before the rules.
#ifndef TVM_FLASHINFER_OPS_KERNEL_CHOICE_H_
#define TVM_FLASHINFER_OPS_KERNEL_CHOICE_H_

#include <cstdint>
#include <string>

#include "checks.h"
#include "gpus.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief The functions with a plan; each has more than one kernel. */
enum class PlannedSlot : int32_t { kDecodePaged, kPrefillPaged, kPrefillRagged, kMLA };

/*! \brief The kernels under the names that users know. */
enum class Kernel : int32_t { kCudaCore, kFA2, kFA3, kFA3Copy, kSM90, kBatchAttention };

const char* NameOf(PlannedSlot slot);
const char* NameOf(Kernel kernel);
/*! \brief Whether the slot has such a kernel, on any GPU. */
bool Serves(Kernel kernel, PlannedSlot slot);

/*! \brief A kernel, and of how many keys the chunks are that it splits requests into. */
struct Tactic {
  Kernel kernel;
  int32_t split_keys = 0;  // 0: as the plan finds best
};

/*! \brief What a choice depends on. The counts are those of the whole batch. */
struct ChoiceShape {
  PlannedSlot slot;
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim_qk;
  int64_t head_dim_vo;
  bool causal;
  int64_t window_left;
  int64_t batch_size;
  int64_t num_rows;
  int64_t num_keys;

  int64_t group() const { return num_qo_heads / num_kv_heads; }
};

/*! \brief ceil(log2(value)): sizes between two powers of two are measured as the larger one. */
int Bucket(int64_t value);
/*! \brief The same of a mean over the requests. */
int BucketOfMean(int64_t total, int64_t batch_size);

/*! \brief A choice and what it was made by, in words: only what prints or answers needs it. */
struct Choice {
  Tactic tactic;
  std::string source;  // "default", "tuned" or "environment"
  std::string reason;
};

/*!
 * \brief The rule for decode. Query heads that share a KV head fill the rows of a tensor-core tile,
 * so from four of them on the prefill kernel with one row per request is the faster one; the
 * CUDA-core kernel is compiled for few group sizes anyway (benchmarks/ has the figures).
 */
inline Kernel DecodeRule(int64_t group) { return group >= 4 ? Kernel::kFA2 : Kernel::kCudaCore; }
std::string ReasonOfDecodeRule(int64_t group);

/*! \brief The rule for MLA. */
inline Kernel MLARule(bool is_hopper) { return is_hopper ? Kernel::kSM90 : Kernel::kFA2; }
inline const char* ReasonOfMLARule(Kernel kernel) {
  return kernel == Kernel::kSM90 ? "the kernel for Hopper is the faster one there"
                                 : "the other kernel runs on Hopper alone";
}

/*! \brief A choice in one line; `slot` is that of the shape, or a function without a plan. */
std::string LineOf(const char* slot, const std::string& where, const Gpu* gpu,
                   const ChoiceShape& shape, const Choice& choice);

/*! \brief Whether TVM_FLASHINFER_DEBUG asks for the choices of kernels; it is read once. */
bool PrintsChoices(const Checker& check);

/*!
 * \brief Print a choice to stderr, once for each class of shapes: the sizes of a batch go by powers
 * of two.
 */
void PrintChoice(const char* slot, DLDevice device, const ChoiceShape& shape, const Choice& choice);
inline void PrintChoice(DLDevice device, const ChoiceShape& shape, const Choice& choice) {
  PrintChoice(NameOf(shape.slot), device, shape, choice);
}

/*! \brief Whether figures of this compute capability stand behind the rules. */
bool IsMeasured(int major, int minor);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_KERNEL_CHOICE_H_

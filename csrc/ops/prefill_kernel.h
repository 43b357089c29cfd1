// Which kernel serves prefill with a plan: FA2 everywhere, or FA3 on Hopper.
#ifndef TVM_FLASHINFER_OPS_PREFILL_KERNEL_H_
#define TVM_FLASHINFER_OPS_PREFILL_KERNEL_H_

#include <optional>
#include <vector>

#include "attention_plan.h"
#include "cuda_kernels.h"
#include "kernel_choice.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief Whether a plan may be for FA3, and why not or why it must. */
struct AllowedSM90 {
  kernels::cuda::Use sm90;
  kernels::cuda::Use page_copy = kernels::cuda::Use::kNever;
  const char* reason = "";
  bool by_environment = false;
};

/*!
 * \brief FA3 may run on Hopper, where its units are loaded.
 *
 * A plan is made before the dtype of the run is known. So FA3 is for the head dimensions whose
 * every loaded FA2 unit has its FA3 unit beside it; and where none is loaded yet, since FA3 is then
 * built on request as FA2 would be. Pages may be copied to ragged keys where FA3 has the units for
 * those too. TVM_FLASHINFER_PREFILL_KERNEL, "fa2", "fa3" or "fa3_copy", overrides all of this.
 */
AllowedSM90 AllowPrefillSM90(const Checker& check, DLDevice device, int64_t head_dim_qk,
                             int64_t head_dim_vo, int64_t page_size);

/*! \brief What TVM_FLASHINFER_PREFILL_KERNEL says; nothing where it is not set. */
std::optional<Kernel> PrefillKernelOfEnvironment(const Checker& check);

/*! \brief Whether some request has rows that see no key under a causal mask, and others that do. */
bool HasRowsBeforeKeys(const int32_t* qo_indptr, const int32_t* kv_len, int64_t batch_size);

/*! \brief Why a rule chose a kernel of prefill for a batch on a GPU that has both. */
const char* ReasonOfPrefillRule(Kernel kernel);
constexpr const char* kNoFA3 = "FA3 runs on Hopper alone";
constexpr const char* kRowsBeforeKeys =
    "FA2 has no rows that see no key, and a causal request has more rows than keys";

/*! \brief Choose the kernel for a batch, and make its part of the plan. */
std::vector<int64_t> PlanPrefill(const Checker& check, DLDevice device,
                                 kernels::cuda::PlanArgs args);

/*!
 * \brief Pages of the chunks that a tactic splits requests into; -1 for what the plan finds best,
 * also where the workspaces do not hold the parts.
 */
int64_t SplitPages(const Tactic& tactic, const kernels::cuda::PlanArgs& args);

/*! \brief Run the kernel that the plan was made for, of prefill or of decode; one of paged and
 * ragged is null. */
void RunPlanned(const Checker& check, const PlanReader& reader, const kernels::AttentionArgs& args,
                const kernels::PagedKV* paged, const kernels::RaggedKV* ragged, int64_t kv_length,
                const kernels::cuda::PlanView& view, DLDevice device);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_PREFILL_KERNEL_H_

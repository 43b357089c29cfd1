// Which kernel serves prefill with a plan: FA2 everywhere, or FA3 on Hopper.
#ifndef TVM_FLASHINFER_OPS_PREFILL_KERNEL_H_
#define TVM_FLASHINFER_OPS_PREFILL_KERNEL_H_

#include "attention_plan.h"
#include "cuda_kernels.h"

namespace tvm_flashinfer {
namespace ops {

/*!
 * \brief Whether a plan may be for FA3: on Hopper, where its units are loaded.
 *
 * A plan is made before the dtype of the run is known. So FA3 is for the head dimensions whose
 * every loaded FA2 unit has its FA3 unit beside it; and where none is loaded yet, since FA3 is then
 * built on request as FA2 would be. TVM_FLASHINFER_PREFILL_KERNEL, "fa2" or "fa3", overrides all of
 * this.
 */
kernels::cuda::PrefillSM90 AllowPrefillSM90(const Checker& check, DLDevice device,
                                            int64_t head_dim_qk, int64_t head_dim_vo,
                                            int64_t page_size);

/*! \brief Whether some request has rows that see no key under a causal mask, and others that do. */
bool HasRowsBeforeKeys(const int32_t* qo_indptr, const int32_t* kv_len, int64_t batch_size);

/*! \brief Run the kernel that the plan was made for; one of paged and ragged is null. */
void RunPrefill(const Checker& check, const PlanReader& reader, const kernels::AttentionArgs& args,
                const kernels::PagedKV* paged, const kernels::RaggedKV* ragged, int64_t kv_length,
                const kernels::cuda::PlanView& view, DLDevice device);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_PREFILL_KERNEL_H_

// The kernel that applies sinks to a finished state.
#ifndef TVM_FLASHINFER_OPS_ATTENTION_SINKS_H_
#define TVM_FLASHINFER_OPS_ATTENTION_SINKS_H_

#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief Launch it; the arguments are checked. */
void RunApplySinks(const Checker& check, const kernels::ApplySinksArgs& args, DLDevice device);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_ATTENTION_SINKS_H_

// How often each op was called in this library, so that it can be shown which kernels ran.
#ifndef TVM_FLASHINFER_OPS_CALL_COUNTS_H_
#define TVM_FLASHINFER_OPS_CALL_COUNTS_H_

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/string.h>

#include <cstdint>

namespace tvm_flashinfer {
namespace ops {

using tvm::ffi::Map;
using tvm::ffi::String;

/*!
 * \brief Count a call of an op. Threads may do so at once; it takes a few nanoseconds.
 * \param op The name, a literal: its address stands for it.
 */
void CountCall(const char* op, bool on_cuda);

/*! \brief By "cpu" and "cuda", the ops that were called there with the number of calls. */
Map<String, Map<String, int64_t>> CallCounts();

/*! \brief Start again at 0. Calls that run meanwhile may be counted or not. */
void ResetCallCounts();

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_CALL_COUNTS_H_

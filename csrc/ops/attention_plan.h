// Plans: what a plan function returns and the run functions take. A plan is a list of integers, as
// TVM's cache passes it along: a header of ours, and then the kernel's part (empty on CPU).
#ifndef TVM_FLASHINFER_OPS_ATTENTION_PLAN_H_
#define TVM_FLASHINFER_OPS_ATTENTION_PLAN_H_

#include <tvm/ffi/container/array.h>

#include <vector>

#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief What a plan was made for. A run with other values would compute something else. */
struct PlanHeader {
  int64_t kind;
  int64_t device_type;
  int64_t device_id;
  int64_t batch_size;
  int64_t num_rows;
  int64_t num_qo_heads;
  int64_t num_kv_heads;
  int64_t head_dim_qk;
  int64_t head_dim_vo;
  int64_t page_size;
  int64_t causal;
  int64_t window_left;
  int64_t float_workspace_bytes;
  int64_t int_workspace_bytes;
  int64_t num_kv_entries;  // page indices, or tokens of ragged keys
  int64_t int_workspace;   // its address: the kernel's part has arrays there
  int64_t seal;            // a hash of all other values; set by MakePlan

  static constexpr int64_t kSize = 17;
};

enum PlanHeaderKind : int64_t {
  kPrefillHeader = 0x70726531,
  kDecodeHeader = 0x64656331,
  kMLAHeader = 0x6d6c6131
};

/*! \brief Address of a workspace, for the header. */
inline int64_t AddressOf(const TensorView& workspace) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(DataOf(workspace)));
}

tvm::ffi::Array<int64_t> MakePlan(PlanHeader header, const std::vector<int64_t>& kernel);

/*! \brief A plan taken apart, and checked against what the run is given. */
class PlanReader {
 public:
  PlanReader(const Checker& check, const tvm::ffi::Array<int64_t>& plan, int64_t expected_kind);

  const PlanHeader& header() const { return header_; }
  const std::vector<int64_t>& kernel() const { return kernel_; }

  /*! \brief The run's value of one field, under the name that the user knows, equals the plan's. */
  void Require(const char* name, int64_t planned, int64_t got) const;
  void RequireDevice(DLDevice device) const;
  /*! \brief The run has as many page indices or tokens as the plan counted; kernels read so many.
   */
  void RequireEntries(const char* name, int64_t got) const;
  /*! \brief The workspaces are those of the plan, or as large where nothing is kept in them. */
  void RequireWorkspaces(const TensorView& float_workspace, const TensorView& int_workspace) const;

 private:
  void RequireBytes(const char* name, int64_t planned, const TensorView& workspace) const;

  const Checker& check_;
  PlanHeader header_;
  std::vector<int64_t> kernel_;
};

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_ATTENTION_PLAN_H_

// How the ops layer finds CUDA kernels. A unit (one .cu file compiled for one spec) registers its
// launchers under a name that spells the spec; the ops layer looks the name up. Nothing here needs
// the CUDA headers, so a library built without nvcc has the same table, only empty.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_KERNEL_TABLE_H_
#define TVM_FLASHINFER_KERNELS_CUDA_KERNEL_TABLE_H_

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include "../row_types.h"
#include "../sampling_types.h"
#include "../types.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief Room for the message of a launcher that failed. */
constexpr size_t kErrorSize = 1024;

/*!
 * \brief One launcher. `function` points to one of the function types below. `archs` is a
 * comma-separated list such as "80,90a": what the unit was compiled for.
 */
struct KernelEntry {
  const char* name;
  void* function;
  const char* archs;
  const KernelEntry* next;
};

/*! \brief The entries that are linked into this library or were added by AddEntries, newest first.
 */
const KernelEntry* Entries();

/*! \brief Called by the static initialisers of units. The entry must live as long as the library.
 */
void Register(KernelEntry* entry);

/*!
 * \brief Load a shared library of units and add its entries. Loading one twice does nothing.
 * \return An empty string, or why it could not be loaded.
 */
std::string LoadLibrary(const std::string& path);

/*!
 * \brief The launcher `name` that runs on compute capability major.minor, or null.
 *
 * A unit for "90a" runs on 9.0 alone; one for "80" runs on 8.0 to 8.9.
 */
void* Find(const std::string& name, int major, int minor);

/*! \brief Whether code compiled for arch (such as "80" or "90a") runs on major.minor. */
bool ArchRunsOn(const std::string& arch, int major, int minor);

/*!
 * \brief What launchers return. When it is not kOk, error (kErrorSize bytes) holds a message:
 * kBadArgument for what the user passed, kFailed for what CUDA or the kernel library reported.
 */
enum LaunchStatus : int { kOk = 0, kFailed = 1, kBadArgument = 2 };

/*!
 * \brief Names of launchers: "<op>", or "<op>:<dtype>:d<head_dim>" as spelt by KernelName, with
 * the dtype of keys and values after that of queries where it is another.
 */
std::string KernelName(const char* op, DType dtype, DType kv_dtype, int head_dim_qk,
                       int head_dim_vo);
inline std::string KernelName(const char* op, DType dtype, int head_dim_qk, int head_dim_vo) {
  return KernelName(op, dtype, dtype, head_dim_qk, head_dim_vo);
}

/*! \brief Where the next plan goes in int workspaces. */
struct PlanCursor {
  std::mutex mutex;
  int64_t position = 0;  // bytes that were planned so far
};

/*! \brief The cursor of this library; the library with the ops hands its own to all units. */
PlanCursor* SharedPlanCursor();

/*! \brief Whether a plan takes one of the ways that only some GPUs and units have. */
enum class Use : int32_t { kNever, kWhereFaster, kAlways };

/*! \brief What a plan is made from; the index arrays are in host memory and were checked. */
struct PlanArgs {
  void* float_workspace;
  int64_t float_workspace_bytes;
  void* int_workspace;
  int64_t int_workspace_bytes;
  const int32_t* qo_indptr;  // null for decode
  const int32_t* kv_indptr;  // counts pages
  int64_t num_rows;
  int32_t batch_size;
  int32_t num_qo_heads;
  int32_t num_kv_heads;
  int32_t head_dim_qk;
  int32_t head_dim_vo;
  int32_t page_size;
  bool causal;
  int32_t window_left;
  int64_t fixed_split_size;
  bool disable_split_kv;
  const int32_t* kv_len = nullptr;  // keys of each request; not of decode
  PlanCursor* cursor = SharedPlanCursor();
  Use sm90 = Use::kNever;       // of the prefill kernel for Hopper
  Use page_copy = Use::kNever;  // of that kernel over a copy of the pages
};

/*! \brief The schedule: fields of FlashInfer's plan, offsets included. Its first value is the kind.
 */
using PlanFn = int (*)(const PlanArgs& args, CudaStream stream, std::vector<int64_t>* plan,
                       char* error);

/*! \brief The first value of a plan: which kernels it is for. */
enum PlanKind : int64_t {
  kPrefillPlan = 1,
  kDecodePlan = 2,
  kMLAPlan = 3,
  kPrefillSM90Plan = 4,
  kDeviceSchedulePlan = 5,  // nothing is planned: batch_attention makes its schedule on the device
  kPrefillSM90CopyPlan = 6  // kPrefillSM90Plan for ragged keys, which copy_pages makes of the pages
};

/*! \brief How many values a plan of latent attention has. */
constexpr int64_t kMLAPlanSize = 20;

/*! \brief Workspaces as given to plan, and the plan that came back. */
struct PlanView {
  void* float_workspace;
  void* int_workspace;
  const int64_t* values;
  int64_t size;
  bool enable_pdl;
};

using PagedAttentionFn = int (*)(const AttentionArgs& args, const PagedKV& kv, const PlanView& plan,
                                 CudaStream stream, char* error);
using RaggedAttentionFn = int (*)(const AttentionArgs& args, const RaggedKV& kv,
                                  const PlanView& plan, CudaStream stream, char* error);
/*!
 * \brief Attention that is scheduled on the device, for calls without a plan. One of paged and
 * ragged is null. All index arrays are read on the device alone, so that a call can be captured in
 * a graph. kv_length is that of paged->indices, or of ragged keys: it bounds what is read of them.
 */
using AttentionFn = int (*)(const AttentionArgs& args, const PagedKV* paged, const RaggedKV* ragged,
                            const AttentionExtras& extras, int64_t kv_length, CudaStream stream,
                            char* error);
/*! \brief Latent attention after a plan that was made for it. */
using MLAFn = int (*)(const MLAArgs& args, const PlanView& plan, CudaStream stream, char* error);
/*!
 * \brief Copy keys and values of the pages of a batch to the float workspace of its plan, a
 * kPrefillSM90CopyPlan. `ragged` is where they are then; the plan has the offsets, so its indptr is
 * null.
 */
using CopyPagesFn = int (*)(const AttentionArgs& args, const PagedKV& kv, const PlanView& plan,
                            RaggedKV* ragged, CudaStream stream, char* error);
using MergeStateFn = int (*)(const MergeStateArgs& args, CudaStream stream, char* error);
using ApplySinksFn = int (*)(const ApplySinksArgs& args, CudaStream stream, char* error);
using SplitRotaryFn = int (*)(const SplitRotaryArgs& args, CudaStream stream, char* error);
using AppendFn = int (*)(const AppendArgs& args, CudaStream stream, char* error);
using CopyPageFn = int (*)(const CopyPageArgs& args, CudaStream stream, char* error);
using CompactCopyFn = int (*)(const CompactCopyArgs& args, CudaStream stream, char* error);
using SampleFn = int (*)(const SampleArgs& args, CudaStream stream, char* error);
using ReadPagesFn = int (*)(const ReadPagesArgs& args, CudaStream stream, char* error);
using AppendRowsFn = int (*)(const AppendRowsArgs& args, CudaStream stream, char* error);
using CopyRowsFn = int (*)(const CopyRowsArgs& args, CudaStream stream, char* error);
using ReadRowsFn = int (*)(const ReadRowsArgs& args, CudaStream stream, char* error);

using NormFn = int (*)(const NormArgs& args, CudaStream stream, char* error);
using GateFn = int (*)(const GatedArgs& args, CudaStream stream, char* error);
using MergeStatesFn = int (*)(const MergeStatesArgs& args, CudaStream stream, char* error);
using RotaryMoveFn = int (*)(const RotaryMoveArgs& args, CudaStream stream, char* error);
using FilterDrawFn = int (*)(const FilterDrawArgs& args, CudaStream stream, char* error);
using FilterRenormFn = int (*)(const FilterRenormArgs& args, CudaStream stream, char* error);
using SortedFn = int (*)(const SortedArgs& args, CudaStream stream, char* error);
using SoftmaxFn = int (*)(const SoftmaxArgs& args, CudaStream stream, char* error);
using SpeculativeFn = int (*)(const SpeculativeArgs& args, CudaStream stream, char* error);
using TokenSlotsFn = int (*)(const TokenSlotsArgs& args, CudaStream stream, char* error);

/*! \brief Compute capability of a device, for the choice of units. */
using DeviceArchFn = int (*)(int32_t device_id, int* major, int* minor, char* error);

/*! \brief Copy of num_bytes from device memory to host memory, after all work of the stream. */
using ReadBackFn = int (*)(const void* src, void* dst, int64_t num_bytes, CudaStream stream,
                           char* error);

/*! \brief Whether what is put on the stream goes into a CUDA graph, to be run later. */
using IsCapturingFn = int (*)(CudaStream stream, bool* is_capturing, char* error);

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_KERNEL_TABLE_H_

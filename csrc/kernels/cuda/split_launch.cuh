// Launch of FlashInfer's kernels whose requests may be split into chunks of keys, and of the merge
// of those chunks. FlashInfer's launchers ask the driver for the same facts in each call, and let
// the merge wait until the last block of attention has ended.
#ifndef TVM_FLASHINFER_KERNELS_CUDA_SPLIT_LAUNCH_CUH_
#define TVM_FLASHINFER_KERNELS_CUDA_SPLIT_LAUNCH_CUH_

#include <algorithm>
#include <flashinfer/attention/cascade.cuh>
#include <vector>

#include "plan_buffer.h"
#include "unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {

/*! \brief What launches depend on. */
struct GpuFacts {
  int num_sm = 0;
  int shared_of_sm = 0;     // bytes of shared memory
  int shared_of_block = 0;  // at most
  bool has_triggers = false;
};

/*! \brief The facts of a GPU, asked once by each thread. */
inline const GpuFacts& FactsOf(int device_id) {
  thread_local std::vector<GpuFacts> known;
  if (device_id >= static_cast<int>(known.size())) known.resize(device_id + 1);
  GpuFacts& facts = known[device_id];
  if (facts.num_sm != 0) return facts;
  const auto ask = [&](cudaDeviceAttr attribute) {
    int value = 0;
    const cudaError_t status = cudaDeviceGetAttribute(&value, attribute, device_id);
    if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
    return value;
  };
  facts.shared_of_sm = ask(cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  facts.shared_of_block = ask(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  facts.has_triggers = ask(cudaDevAttrComputeCapabilityMajor) >= 9;
  facts.num_sm = ask(cudaDevAttrMultiProcessorCount);
  return facts;
}

/*!
 * \brief Let blocks of a kernel have so much shared memory, once on each device and thread.
 * \return How many of them run on an SM at a time.
 */
template <typename Kernel>
int BlocksOnSM(Kernel* kernel, int threads, size_t shared, int device_id) {
  struct Known {
    Kernel* kernel;
    int device_id, blocks;
  };
  thread_local std::vector<Known> known;
  for (const Known& entry : known) {
    if (entry.kernel == kernel && entry.device_id == device_id) return entry.blocks;
  }
  int blocks = 0;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            static_cast<int>(shared));
  if (status == cudaSuccess) {
    status = cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, kernel, threads, shared);
  }
  if (status == cudaSuccess && blocks == 0) status = cudaErrorLaunchOutOfResources;
  if (status != cudaSuccess) throw std::runtime_error(cudaGetErrorString(status));
  known.push_back({kernel, device_id, blocks});
  return blocks;
}

/*! \brief Merge of the chunks [indptr[i], indptr[i + 1]) of each row i. */
template <typename T, int kHeadDim>
cudaError_t MergeChunks(T* v, float* s, int32_t* indptr, T* o, float* lse, uint32_t num_rows,
                        uint32_t num_heads, int device_id, cudaStream_t stream) {
  constexpr uint32_t kVec = std::max<uint32_t>(16 / sizeof(T), kHeadDim / 32);
  constexpr uint32_t kLanes = kHeadDim / kVec, kThreads = 128, kStages = 4;
  constexpr size_t kShared =
      kStages * (kThreads / kLanes) * kHeadDim * sizeof(T) + kThreads * sizeof(float);
  auto* kernel =
      flashinfer::PersistentVariableLengthMergeStatesKernel<kVec, kLanes, kThreads / kLanes,
                                                            kStages, T, T, int32_t>;
  const GpuFacts& gpu = FactsOf(device_id);
  const int64_t states = static_cast<int64_t>(num_rows) * num_heads;
  const int64_t most =
      static_cast<int64_t>(gpu.num_sm) * BlocksOnSM(kernel, kThreads, kShared, device_id);
  uint32_t* num_rows_on_device = nullptr;
  void* params[] = {&v, &s, &indptr, &o, &lse, &num_rows, &num_rows_on_device, &num_heads};
  return LaunchByAddresses(reinterpret_cast<const void*>(kernel),
                           static_cast<unsigned>(std::min(most, states)),
                           dim3(kLanes, kThreads / kLanes), kShared, stream, params,
                           gpu.has_triggers ? Start::kAfterTrigger : Start::kAfterKernel);
}

/*!
 * \brief Launch attention as planned, and the merge where it is planned to split requests.
 * `chunks_indptr` counts the chunks of each row of the output.
 */
template <int kHeadDim, typename Kernel, typename Params>
cudaError_t LaunchSplit(Kernel* kernel, dim3 blocks, dim3 threads, size_t shared, Params params,
                        const Plan& plan, const PlanView& view, int32_t* chunks_indptr,
                        int64_t num_rows, int device_id, cudaStream_t stream) {
  using T = typename Params::DTypeO;
  T* const o = params.o;
  float* const lse = params.lse;
  params.partition_kv = plan.split_kv != 0;
  if (plan.split_kv) {
    params.o = At<T>(view.float_workspace, plan.tmp_v);
    params.lse = At<float>(view.float_workspace, plan.tmp_s);
  }
  BlocksOnSM(kernel, threads.x * threads.y * threads.z, shared, device_id);
  void* addresses[] = {&params};
  const bool overlaps = view.enable_pdl && FactsOf(device_id).has_triggers;
  const cudaError_t status =
      LaunchByAddresses(reinterpret_cast<const void*>(kernel), blocks, threads, shared, stream,
                        addresses, overlaps ? Start::kAfterTrigger : Start::kAfterKernel);
  if (status != cudaSuccess || !plan.split_kv) return status;
  return MergeChunks<T, kHeadDim>(params.o, params.lse, chunks_indptr, o, lse,
                                  static_cast<uint32_t>(num_rows), params.num_qo_heads, device_id,
                                  stream);
}

}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_CUDA_SPLIT_LAUNCH_CUH_

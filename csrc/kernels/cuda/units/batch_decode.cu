// CUDA-core decode over paged keys, for one dtype and head_dim. It is the faster kernel for few
// query heads per KV head; larger groups are decoded by the FA2 prefill kernel, on tensor cores.
#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>

#include "../split_launch.cuh"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

using T = TVM_FLASHINFER_DTYPE;
constexpr int kHeadDim = TVM_FLASHINFER_HEAD_DIM_QK;
static_assert(kHeadDim == TVM_FLASHINFER_HEAD_DIM_VO, "paged kernels have one head_dim");

using Params = flashinfer::BatchDecodeParams<T, T, T, int32_t>;
using Variant = flashinfer::DefaultAttention</*use_custom_mask=*/false, /*use_sliding_window=*/true,
                                             /*use_logits_soft_cap=*/false, /*use_alibi=*/false>;
constexpr auto kNoRoPE = flashinfer::PosEncodingMode::kNone;

int BatchDecodePlan(const PlanArgs& args, CudaStream stream, std::vector<int64_t>* out,
                    char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) -> cudaError_t {
    using namespace flashinfer;  // NOLINT: the dispatch macro needs it
    auto* indptr = const_cast<int32_t*>(args.kv_indptr);
    bool split_kv = false;
    uint32_t max_grid_size = 0, chunk_pages = 0, num_blocks = 0, grid_y = 0;
    DISPATCH_GQA_GROUP_SIZE(args.num_qo_heads / args.num_kv_heads, GROUP_SIZE, {
      cudaError_t status =
          BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP_SIZE, kHeadDim, kNoRoPE,
                                                              Variant, Params>(
              split_kv, max_grid_size, chunk_pages, num_blocks, grid_y, args.batch_size, indptr,
              args.num_qo_heads, args.page_size, /*enable_cuda_graph=*/false, handle);
      if (status != cudaSuccess) return status;
    });
    auto [request_indices, kv_tile_indices, o_indptr] =
        DecodeSplitKVIndptr(indptr, args.batch_size, chunk_pages);

    Plan plan{};
    plan.kind = kDecodePlan;
    plan.num_blocks = static_cast<int64_t>(request_indices.size());
    plan.split_kv = split_kv;
    plan.num_rows = args.batch_size;
    plan.qo_indptr = -1;
    if (split_kv) {
      const int64_t partial_rows = plan.num_blocks * args.num_qo_heads;
      plan.tmp_v = 0;
      plan.tmp_s = partial_rows * kHeadDim * sizeof(float);
      PlanBuffer::CheckFloatWorkspace(plan.tmp_s + partial_rows * sizeof(float), args);
    }
    PlanBuffer buffer;
    plan.request_indices = buffer.Add(request_indices);
    plan.kv_tile_indices = buffer.Add(kv_tile_indices);
    plan.o_indptr = buffer.Add(o_indptr);
    plan.kv_chunk_size = buffer.Add({static_cast<int32_t>(chunk_pages * args.page_size)});
    const int64_t base = buffer.Commit(args, handle);
    for (int64_t* offset :
         {&plan.request_indices, &plan.kv_tile_indices, &plan.o_indptr, &plan.kv_chunk_size}) {
      *offset += base;
    }
    *out = plan.ToVector();
    return cudaSuccess;
  });
}

int BatchDecode(const AttentionArgs& args, const PagedKV& kv, const PlanView& view,
                CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) -> cudaError_t {
    using namespace flashinfer;  // NOLINT: the dispatch macro needs it
    namespace fi = flashinfer;
    const Plan& plan = Plan::From(view);
    fi::paged_kv_t<T, int32_t> paged_kv(
        args.num_kv_heads, kv.page_size, kHeadDim, args.batch_size, fi::QKVLayout::kHND,
        static_cast<T*>(const_cast<void*>(kv.k)), static_cast<T*>(const_cast<void*>(kv.v)),
        const_cast<int32_t*>(kv.indices), const_cast<int32_t*>(kv.indptr),
        const_cast<int32_t*>(kv.last_page_len));
    paged_kv.stride_page = paged_kv.v_stride_page = kv.k_stride_page;
    paged_kv.stride_h = paged_kv.v_stride_h = kv.k_stride_head;
    paged_kv.stride_n = paged_kv.v_stride_n = kv.k_stride_slot;
    Params params(static_cast<T*>(const_cast<void*>(args.q)), /*q_rope_offset=*/nullptr, paged_kv,
                  static_cast<T*>(args.o), args.lse, /*maybe_alibi_slopes=*/nullptr,
                  args.num_qo_heads, args.q_stride_row, args.q_stride_head, args.window_left,
                  /*logits_soft_cap=*/0.f, args.sm_scale, /*rope_scale=*/1.f, /*rope_theta=*/1.f);
    params.request_indices = At<int32_t>(view.int_workspace, plan.request_indices);
    params.kv_tile_indices = At<int32_t>(view.int_workspace, plan.kv_tile_indices);
    params.o_indptr = At<int32_t>(view.int_workspace, plan.o_indptr);
    params.kv_chunk_size_ptr = At<int32_t>(view.int_workspace, plan.kv_chunk_size);
    params.padded_batch_size = plan.num_blocks;
    DISPATCH_GQA_GROUP_SIZE(args.num_qo_heads / args.num_kv_heads, kGroup, {
      // The sizes of FlashInfer's launcher, for GPUs from 8.0 on.
      constexpr uint32_t kVec = std::max<uint32_t>(16 / sizeof(T), kHeadDim / 32), kStages = 2;
      constexpr uint32_t kX = kHeadDim / kVec, kY = kGroup;
      constexpr uint32_t kThreads = std::max<uint32_t>(128, kX * kY), kZ = kThreads / (kX * kY);
      constexpr uint32_t kTile = kGroup == 1 ? 4 : 1;
      constexpr size_t kShared =
          std::max<size_t>(2 * kStages * kTile * kY * kZ * kHeadDim * sizeof(T),
                           kZ * kY * kHeadDim * sizeof(float)) +
          std::max<size_t>(kTile * kThreads * sizeof(T*), 2 * kY * kZ * sizeof(float));
      auto* kernel = &fi::BatchDecodeWithPagedKVCacheKernel<kNoRoPE, kStages, kTile, kVec, kX, kY,
                                                            kZ, Variant, Params>;
      return LaunchSplit<kHeadDim>(
          kernel, dim3(static_cast<unsigned>(plan.num_blocks), args.num_kv_heads), dim3(kX, kY, kZ),
          kShared, params, plan, view, params.o_indptr, args.batch_size, stream.device_id, handle);
    });
  });
}

const std::string& PlanName() {
  static const std::string name = KernelName("batch_decode_plan", DTypeOf<T>(), kHeadDim, kHeadDim);
  return name;
}

const std::string& RunName() {
  static const std::string name = KernelName("batch_decode", DTypeOf<T>(), kHeadDim, kHeadDim);
  return name;
}

TVM_FLASHINFER_REGISTER(batch_decode_plan, PlanName().c_str(), &BatchDecodePlan);
TVM_FLASHINFER_REGISTER(batch_decode, RunName().c_str(), &BatchDecode);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

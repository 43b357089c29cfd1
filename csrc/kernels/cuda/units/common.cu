// What every CUDA build needs, whatever the dtype and head_dim: the plan of the FA2 prefill
// kernels, the kernels around attention, and the questions the ops layer asks of a device.
#include <flashinfer/attention/scheduler.cuh>
#include <limits>
#include <numeric>

#include "../merge.cuh"
#include "../mla_schedule.h"
#include "../page_copy.cuh"
#include "../pages.cuh"
#include "../plan_buffer.h"
#include "../prefill_schedule.h"
#include "../rotary.cuh"
#include "../sampling.cuh"
#include "../sinks.cuh"
#include "../unit.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cuda {
namespace {

/*! \brief Up to so many keys of a KV head for each SM, decode has one block on it. */
constexpr int64_t kKeysOfOneBlock = 384;

std::vector<int32_t> DecodeRowOffsets(int32_t batch_size) {
  std::vector<int32_t> offsets(batch_size + 1);
  for (int32_t b = 0; b <= batch_size; ++b) offsets[b] = b;
  return offsets;
}

/*! \brief The plan of the Hopper kernel; false when it is not to run. */
bool PlanPrefillSM90(const PlanArgs& args, int num_sm, cudaStream_t stream,
                     std::vector<int64_t>* out) {
  if (args.sm90 == Use::kNever) return false;
  PrefillBatch batch{args.qo_indptr,    args.kv_indptr,    args.kv_len,      args.batch_size,
                     args.num_qo_heads, args.num_kv_heads, args.head_dim_qk, args.head_dim_vo,
                     args.causal,       args.window_left};
  const bool must = args.sm90 == Use::kAlways;
  if (!must && !PreferPrefillSM90(num_sm, batch)) return false;
  const int32_t size = args.batch_size;
  PlanBuffer buffer;
  PrefillSM90Plan plan{};
  std::vector<int32_t> key_indptr(size + 1, 0);
  std::partial_sum(args.kv_len, args.kv_len + size, key_indptr.begin() + 1);
  const int64_t copied =
      BytesOfCopy(key_indptr[size], args.num_kv_heads, args.head_dim_qk, args.head_dim_vo);
  const bool copies = args.page_copy == Use::kAlways ||
                      (args.page_copy == Use::kWhereFaster &&
                       copied <= args.float_workspace_bytes && PreferCopyOfPages(num_sm, batch));
  if (copies) {
    PlanBuffer::CheckFloatWorkspace(copied, args);
    plan.page_indptr = buffer.Add(std::vector<int32_t>(args.kv_indptr, args.kv_indptr + size + 1));
    plan.key_indptr = buffer.Add(key_indptr);
    batch.kv_indptr = key_indptr.data();
  }
  const PrefillSchedule s = MakePrefillSchedule(num_sm, batch);
  plan.kind = copies ? kPrefillSM90CopyPlan : kPrefillSM90Plan;
  plan.num_blocks = num_sm;
  plan.num_groups = s.num_groups;
  plan.num_keys = batch.kv_indptr[size];
  plan.tiles = buffer.Add(s.tiles);
  plan.work_indptr = buffer.Add(s.work_indptr);
  plan.work_tile = buffer.Add(s.work_tile);
  plan.work_head = buffer.Add(s.work_head);
  // FA2 needs less of the workspace.
  if (!must && buffer.size() > args.int_workspace_bytes) return false;
  const int64_t base = buffer.Commit(args, stream);
  for (int64_t* offset : {&plan.tiles, &plan.work_indptr, &plan.work_tile, &plan.work_head,
                          &plan.page_indptr, &plan.key_indptr}) {
    *offset += base;
  }
  *out = plan.ToVector();
  return true;
}

int BatchPrefillPlan(const PlanArgs& args, CudaStream stream, std::vector<int64_t>* out,
                     char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) -> cudaError_t {
    int num_sm = 0;
    cudaError_t status =
        cudaDeviceGetAttribute(&num_sm, cudaDevAttrMultiProcessorCount, stream.device_id);
    if (status != cudaSuccess) return status;
    if (PlanPrefillSM90(args, num_sm, handle, out)) return cudaSuccess;
    // Two blocks run on one SM at a time; splitting keys further than that only adds merge work.
    // In short steps of decode that work weighs more than a second block.
    const int64_t num_keys = int64_t{args.kv_indptr[args.batch_size]} * args.page_size;
    const bool is_short = args.num_rows == args.batch_size &&
                          num_keys * args.num_kv_heads <= kKeysOfOneBlock * num_sm;
    const uint32_t max_blocks_if_split = (is_short ? 1 : 2) * num_sm / args.num_kv_heads;

    const bool is_decode = args.qo_indptr == nullptr;
    std::vector<int32_t> decode_rows;
    if (is_decode) decode_rows = DecodeRowOffsets(args.batch_size);
    auto* qo_indptr = is_decode ? decode_rows.data() : const_cast<int32_t*>(args.qo_indptr);

    // FlashInfer counts the chunks of a windowed tile as if its rows saw nothing past the diagonal;
    // without the causal mask they see all later keys, so such a batch is not split.
    const bool disable_split_kv = args.disable_split_kv || (args.window_left >= 0 && !args.causal);

    auto [split_kv, num_blocks, padded_blocks, cta_tile_q, kv_chunk_size, request_indices,
          qo_tile_indices, kv_tile_indices, merge_indptr, o_indptr] =
        flashinfer::PrefillSplitQOKVIndptr(
            qo_indptr, const_cast<int32_t*>(args.kv_indptr), args.num_rows, args.batch_size,
            args.num_qo_heads, args.num_kv_heads, args.head_dim_vo, args.page_size,
            max_blocks_if_split, /*enable_cuda_graph=*/false, args.window_left,
            static_cast<int32_t>(args.fixed_split_size), disable_split_kv,
            /*uniform_q_len=*/0, /*fixed_uniform_q_len=*/false, args.head_dim_qk);
    (void)padded_blocks;  // equal to num_blocks without CUDA graphs

    Plan plan{};
    plan.kind = kPrefillPlan;
    plan.num_blocks = num_blocks;
    plan.split_kv = split_kv;
    plan.cta_tile_q = cta_tile_q;
    plan.num_rows = args.num_rows;
    if (split_kv) {
      // One partial output per row and chunk of keys; the kernel numbers them by o_indptr.
      const int64_t partial_rows = static_cast<int64_t>(o_indptr.back()) * args.num_qo_heads;
      plan.tmp_v = 0;
      plan.tmp_s = partial_rows * args.head_dim_vo * sizeof(float);
      PlanBuffer::CheckFloatWorkspace(plan.tmp_s + partial_rows * sizeof(float), args);
    }
    PlanBuffer buffer;
    plan.request_indices = buffer.Add(request_indices);
    plan.qo_tile_indices = buffer.Add(qo_tile_indices);
    plan.kv_tile_indices = buffer.Add(kv_tile_indices);
    plan.o_indptr = buffer.Add(o_indptr);
    plan.merge_indptr = split_kv ? buffer.Add(merge_indptr) : 0;
    // Without a split FlashInfer's value overflows; the kernel does not use it then.
    const int64_t chunk = split_kv ? kv_chunk_size : std::numeric_limits<int32_t>::max();
    plan.kv_chunk_size = buffer.Add({static_cast<int32_t>(chunk)});
    plan.qo_indptr = is_decode ? buffer.Add(decode_rows) : -1;
    const int64_t base = buffer.Commit(args, handle);
    for (int64_t* offset : {&plan.request_indices, &plan.qo_tile_indices, &plan.kv_tile_indices,
                            &plan.o_indptr, &plan.merge_indptr, &plan.kv_chunk_size}) {
      *offset += base;
    }
    if (is_decode) plan.qo_indptr += base;
    *out = plan.ToVector();
    return cudaSuccess;
  });
}

int BatchMLAPlan(const PlanArgs& args, CudaStream stream, std::vector<int64_t>* out, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) -> cudaError_t {
    int num_sm = 0;
    cudaError_t status =
        cudaDeviceGetAttribute(&num_sm, cudaDevAttrMultiProcessorCount, stream.device_id);
    if (status != cudaSuccess) return status;
    const MLASchedule s = MakeMLASchedule(num_sm, args.qo_indptr, args.kv_indptr, args.kv_len,
                                          args.batch_size, args.num_qo_heads, args.causal);
    MLAPlan plan{};
    plan.kind = kMLAPlan;
    plan.blocks_per_cluster = s.blocks_per_cluster;
    plan.num_clusters = s.num_clusters;
    plan.causal = s.causal;
    // Parts have the dtype of the output, 2 bytes.
    plan.partial_o = 0;
    plan.partial_lse = s.num_partial_rows * args.head_dim_vo * 2;
    PlanBuffer::CheckFloatWorkspace(
        plan.partial_lse + s.num_partial_rows * static_cast<int64_t>(sizeof(float)), args);
    const std::pair<int64_t*, const std::vector<int32_t>*> arrays[] = {
        {&plan.work_indptr, &s.work_indptr},
        {&plan.first_row, &s.first_row},
        {&plan.num_rows, &s.num_rows},
        {&plan.first_page, &s.first_page},
        {&plan.num_keys, &s.num_keys},
        {&plan.tile_start, &s.tile_start},
        {&plan.key_begin, &s.key_begin},
        {&plan.key_end, &s.key_end},
        {&plan.partial_start, &s.partial_start},
        {&plan.merge_begin, &s.merge_begin},
        {&plan.merge_end, &s.merge_end},
        {&plan.merge_part_begin, &s.merge_part_begin},
        {&plan.merge_part_end, &s.merge_part_end},
        {&plan.merge_stride, &s.merge_stride}};
    PlanBuffer buffer;
    for (const auto& [offset, values] : arrays) *offset = buffer.Add(*values);
    const int64_t base = buffer.Commit(args, handle);
    for (const auto& [offset, values] : arrays) *offset += base;
    *out = plan.ToVector();
    return cudaSuccess;
  });
}

int DeviceArch(int32_t device_id, int* major, int* minor, char* error) {
  cudaError_t status = cudaDeviceGetAttribute(major, cudaDevAttrComputeCapabilityMajor, device_id);
  if (status == cudaSuccess) {
    status = cudaDeviceGetAttribute(minor, cudaDevAttrComputeCapabilityMinor, device_id);
  }
  return status == cudaSuccess ? 0 : FailCuda(error, status);
}

int ReadBack(const void* src, void* dst, int64_t num_bytes, CudaStream stream, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    cudaError_t status = cudaMemcpyAsync(dst, src, num_bytes, cudaMemcpyDeviceToHost, handle);
    return status == cudaSuccess ? cudaStreamSynchronize(handle) : status;
  });
}

int IsCapturing(CudaStream stream, bool* is_capturing, char* error) {
  return Guarded(stream, error, [&](cudaStream_t handle) {
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    const cudaError_t status = cudaStreamIsCapturing(handle, &capture);
    *is_capturing = capture != cudaStreamCaptureStatusNone;
    return status;
  });
}

TVM_FLASHINFER_REGISTER(batch_prefill_plan, "batch_prefill_plan", &BatchPrefillPlan);
TVM_FLASHINFER_REGISTER(copy_pages, "copy_pages", &CopyPages);
TVM_FLASHINFER_REGISTER(batch_mla_plan, "batch_mla_plan", &BatchMLAPlan);
TVM_FLASHINFER_REGISTER(merge_state, "merge_state", &MergeState);
TVM_FLASHINFER_REGISTER(apply_sinks, "apply_sinks", &ApplySinks);
TVM_FLASHINFER_REGISTER(split_qkv_rotary, "split_qkv_rotary", &SplitQKVRotary);
TVM_FLASHINFER_REGISTER(append_paged_kv_cache, "append_paged_kv_cache", &AppendPagedKVCache);
TVM_FLASHINFER_REGISTER(copy_single_page, "copy_single_page", &CopySinglePage);
TVM_FLASHINFER_REGISTER(compact_kv_copy, "compact_kv_copy", &CompactKVCopy);
TVM_FLASHINFER_REGISTER(sample_from_probs, "sample_from_probs", &SampleFromProbs);
TVM_FLASHINFER_REGISTER(read_pages, "read_pages", &ReadPages);
TVM_FLASHINFER_REGISTER(append_rows, "append_rows", &AppendRows);
TVM_FLASHINFER_REGISTER(copy_rows, "copy_rows", &CopyRows);
TVM_FLASHINFER_REGISTER(read_rows, "read_rows", &ReadRows);
TVM_FLASHINFER_REGISTER(device_arch, "device_arch", &DeviceArch);
TVM_FLASHINFER_REGISTER(read_back, "read_back", &ReadBack);
TVM_FLASHINFER_REGISTER(is_capturing, "is_capturing", &IsCapturing);

}  // namespace
}  // namespace cuda
}  // namespace kernels
}  // namespace tvm_flashinfer

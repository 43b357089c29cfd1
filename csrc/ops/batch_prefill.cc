// Attention of ragged queries over ragged or paged keys.
#include <sstream>

#include "../kernels/cpu/kernels.h"
#include "attention_args.h"
#include "cache_scope.h"
#include "cuda_kernels.h"
#include "ops.h"
#include "prefill_kernel.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief The key counts fit the page counts: that is what the schedule is made from. */
void CheckKVLen(const Checker& check, const int32_t* kv_indptr, const int32_t* kv_len,
                int64_t batch_size, int64_t page_size) {
  for (int64_t b = 0; b < batch_size; ++b) {
    const int64_t pages = static_cast<int64_t>(kv_indptr[b + 1]) - kv_indptr[b];
    const int64_t high = pages * page_size;
    const int64_t low = pages == 0 ? 0 : high - page_size + 1;
    if (kv_len[b] < low || kv_len[b] > high) {
      std::ostringstream message;
      message << "`kv_len`[" << b << "] is " << kv_len[b] << ", expected " << low << " to " << high
              << ": request " << b << " has " << pages << " pages of " << page_size << " tokens";
      check.FailValue(message.str());
    }
  }
}

/*! \brief qo_indptr of a run: as many rows as the plan, in order. */
void CheckRowOffsets(const Checker& check, const TensorView& qo_indptr, DLDevice device,
                     const PlanHeader& header) {
  check.IndexVector("qo_indptr", qo_indptr, header.batch_size + 1, "(batch_size + 1,)");
  check.OnDevice("qo_indptr", qo_indptr, device);
  const auto check_contents = [&](const int32_t* offsets) {
    CheckIndptr(check, "qo_indptr", offsets, header.batch_size, header.num_rows, "q");
    if (offsets[header.batch_size] != header.num_rows) {
      std::ostringstream message;
      message << "`qo_indptr` ends at " << offsets[header.batch_size] << ", but q has "
              << header.num_rows << " rows; every row must belong to a request";
      check.FailValue(message.str());
    }
  };
  if (IsCPU(device)) {
    check_contents(DataOf<int32_t>(qo_indptr));
  } else if (CheckDeviceContents()) {
    check_contents(ReadBack(check, qo_indptr).data());
  }
}

kernels::cuda::PlanView ViewOf(const RunInputs& in, const PlanReader& plan, bool enable_pdl) {
  return {DataOf(in.float_workspace), DataOf(in.int_workspace), plan.kernel().data(),
          static_cast<int64_t>(plan.kernel().size()), enable_pdl};
}

}  // namespace

Array<int64_t> BatchPrefillPlan(TensorView float_workspace, TensorView int_workspace,
                                TensorView pinned_int_workspace, TensorView qo_indptr,
                                TensorView kv_indptr, TensorView kv_len, int64_t total_num_rows,
                                int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                                int64_t page_size, bool enable_cuda_graph, int64_t head_dim_qk,
                                int64_t head_dim_vo, bool causal, int64_t window_left,
                                int64_t fixed_split_size, bool disable_split_kv,
                                int64_t num_colocated_ctas) {
  const Checker check("batch_prefill_plan");
  const DLDevice device = BeginPlan(
      check, {float_workspace, int_workspace, pinned_int_workspace, batch_size, num_qo_heads,
              num_kv_heads, page_size, head_dim_qk, head_dim_vo, window_left, enable_cuda_graph});
  if (num_colocated_ctas != 0) {
    check.FailValue("`num_colocated_ctas` is " + std::to_string(num_colocated_ctas) +
                    ", expected 0: no kernel here shares the GPU with another");
  }
  if (fixed_split_size != -1 && (fixed_split_size < 1 || fixed_split_size > INT32_MAX)) {
    check.FailValue(Text("`fixed_split_size` is ", fixed_split_size,
                         ", expected a positive 32-bit number of pages, or -1"));
  }
  check.OnHost("qo_indptr", qo_indptr);
  check.OnHost("kv_indptr", kv_indptr);
  check.OnHost("kv_len", kv_len);
  check.IndexVector("qo_indptr", qo_indptr, batch_size + 1, "(batch_size + 1,)");
  check.IndexVector("kv_indptr", kv_indptr, batch_size + 1, "(batch_size + 1,)");
  check.IndexVector("kv_len", kv_len, batch_size, "(batch_size,)");
  const int32_t* rows = DataOf<int32_t>(qo_indptr);
  const int32_t* pages = DataOf<int32_t>(kv_indptr);
  CheckIndptr(check, "qo_indptr", rows, batch_size, total_num_rows, "total_num_rows");
  if (rows[batch_size] != total_num_rows) {
    std::ostringstream message;
    message << "`qo_indptr` ends at " << rows[batch_size] << ", but total_num_rows is "
            << total_num_rows << "; they must be equal";
    check.FailValue(message.str());
  }
  CheckIndptr(check, "kv_indptr", pages, batch_size, INT32_MAX, "a 32-bit page count");
  CheckKVLen(check, pages, DataOf<int32_t>(kv_len), batch_size, page_size);

  const PlanHeader header{kPrefillHeader,
                          device.device_type,
                          device.device_id,
                          batch_size,
                          total_num_rows,
                          num_qo_heads,
                          num_kv_heads,
                          head_dim_qk,
                          head_dim_vo,
                          page_size,
                          causal ? 1 : 0,
                          window_left,
                          float_workspace.numel(),
                          int_workspace.numel(),
                          pages[batch_size],
                          AddressOf(int_workspace),
                          /*seal=*/0};
  std::vector<int64_t> kernel;
  if (IsCUDA(device) && total_num_rows > 0) {
    kernels::AttentionArgs shape{};
    shape.dtype = kernels::DType::kFloat16;  // dtype and scale are known at the run
    shape.head_dim_qk = static_cast<int32_t>(head_dim_qk);
    shape.head_dim_vo = static_cast<int32_t>(head_dim_vo);
    shape.sm_scale = 1;
    RequireCudaAttention(check, shape, /*ragged=*/page_size == 1);
    const kernels::cuda::PlanArgs args{DataOf(float_workspace),
                                       float_workspace.numel(),
                                       DataOf(int_workspace),
                                       int_workspace.numel(),
                                       rows,
                                       pages,
                                       total_num_rows,
                                       static_cast<int32_t>(batch_size),
                                       static_cast<int32_t>(num_qo_heads),
                                       static_cast<int32_t>(num_kv_heads),
                                       static_cast<int32_t>(head_dim_qk),
                                       static_cast<int32_t>(head_dim_vo),
                                       static_cast<int32_t>(page_size),
                                       causal,
                                       static_cast<int32_t>(window_left),
                                       fixed_split_size,
                                       disable_split_kv,
                                       DataOf<int32_t>(kv_len)};
    RefuseCapture(check, device, kPlansAreNotCaptured);
    kernel = PlanPrefill(check, device, args);
  }
  return MakePlan(header, kernel);
}

void BatchPrefillPagedRun(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                          TensorView q, TensorView k_pages, TensorView v_pages,
                          TensorView qo_indptr, TensorView page_indptr, TensorView page_indices,
                          TensorView last_page_len, TensorView o, Optional<TensorView> lse,
                          int64_t mask_mode, int64_t layout, int64_t window_left, bool enable_pdl,
                          double sm_scale, double rope_rcp_scale, double rope_rcp_theta) {
  (void)rope_rcp_scale;
  (void)rope_rcp_theta;
  const Checker check("batch_prefill_paged_run");
  const PlanReader reader(check, plan, kPrefillHeader);
  const PlanHeader& header = reader.header();
  const RunInputs in{float_workspace, int_workspace, q,           o,       lse,
                     mask_mode,       layout,        window_left, sm_scale};
  const DLDevice device = BeginRun(check, in, reader);
  KVOperand k{};
  const kernels::PagedKV kv = MakePagedKV(check, q, k_pages, v_pages, page_indptr, page_indices,
                                          last_page_len, header.batch_size, layout, &k);
  kernels::AttentionArgs args = MakeAttentionArgs(check, in, reader, k.num_heads, k.head_dim);
  reader.Require("page_size", header.page_size, k.length);
  reader.RequireEntries("page_indices", page_indices.numel());
  CheckOutputs(check, in,
               {{"k_pages", k_pages},
                {"v_pages", v_pages},
                {"qo_indptr", qo_indptr},
                {"page_indptr", page_indptr},
                {"page_indices", page_indices},
                {"last_page_len", last_page_len}});
  CheckRowOffsets(check, qo_indptr, device, header);
  CheckPagedContents(check, page_indptr, page_indices, last_page_len, header.batch_size, k.outer,
                     k.length);
  args.qo_indptr = DataOf<int32_t>(qo_indptr);
  RecordState(o, lse);
  if (args.num_rows == 0) return;
  if (IsCPU(device)) {
    check.Run([&] { kernels::cpu::BatchAttentionPaged(args, kv); });
    return;
  }
  RequireCudaAttention(check, args);
  CheckCudaPages(check, args, kv);
  RefuseCapture(check, device, kPlansAreNotCaptured);
  RunPlanned(check, reader, args, &kv, nullptr, page_indices.numel(),
             ViewOf(in, reader, enable_pdl), device);
}

void BatchPrefillRaggedRun(TensorView float_workspace, TensorView int_workspace,
                           Array<int64_t> plan, TensorView q, TensorView k, TensorView v,
                           TensorView qo_indptr, TensorView kv_indptr, TensorView o,
                           Optional<TensorView> lse, int64_t mask_mode, int64_t layout,
                           int64_t window_left, bool enable_pdl, double sm_scale,
                           double rope_rcp_scale, double rope_rcp_theta) {
  (void)rope_rcp_scale;
  (void)rope_rcp_theta;
  const Checker check("batch_prefill_ragged_run");
  const PlanReader reader(check, plan, kPrefillHeader);
  const PlanHeader& header = reader.header();
  const RunInputs in{float_workspace, int_workspace, q,           o,       lse,
                     mask_mode,       layout,        window_left, sm_scale};
  const DLDevice device = BeginRun(check, in, reader);
  const KVOperand keys = ReadRagged(check, "k", k, layout);
  const KVOperand values = ReadRagged(check, "v", v, layout);
  check.PlannedKVDType("k", k, q.dtype());
  check.PlannedKVDType("v", v, q.dtype());
  check.OnDevice("k", k, device);
  check.OnDevice("v", v, device);
  if (values.num_heads != keys.num_heads || values.length != keys.length) {
    check.FailValue("`v` has shape " + ShapeText(v) + ", `k` has " + ShapeText(k) +
                    "; they must have the same heads and tokens");
  }
  kernels::AttentionArgs args =
      MakeAttentionArgs(check, in, reader, keys.num_heads, values.head_dim);
  if (keys.head_dim != args.head_dim_qk) {
    check.FailValue("`k` has shape " + ShapeText(k) + ", `q` has " + ShapeText(q) +
                    "; the last dimension is head_dim and must be equal");
  }
  reader.Require("page_size (1 for ragged keys)", header.page_size, 1);
  reader.RequireEntries("k", keys.length);
  CheckOutputs(check, in, {{"k", k}, {"v", v}, {"qo_indptr", qo_indptr}, {"kv_indptr", kv_indptr}});
  CheckRowOffsets(check, qo_indptr, device, header);
  check.IndexVector("kv_indptr", kv_indptr, header.batch_size + 1, "(batch_size + 1,)");
  check.OnDevice("kv_indptr", kv_indptr, device);
  if (IsCPU(device)) {
    CheckIndptr(check, "kv_indptr", DataOf<int32_t>(kv_indptr), header.batch_size, keys.length,
                "k");
  } else if (CheckDeviceContents()) {
    CheckIndptr(check, "kv_indptr", ReadBack(check, kv_indptr).data(), header.batch_size,
                keys.length, "k");
  }
  args.qo_indptr = DataOf<int32_t>(qo_indptr);
  const kernels::RaggedKV kv{DataOf(k),
                             DataOf(v),
                             keys.stride_length,
                             keys.stride_head,
                             values.stride_length,
                             values.stride_head,
                             DataOf<int32_t>(kv_indptr)};
  RecordState(o, lse);
  if (args.num_rows == 0) return;
  if (IsCPU(device)) {
    check.Run([&] { kernels::cpu::BatchAttentionRagged(args, kv); });
    return;
  }
  RequireCudaAttention(check, args, /*ragged=*/true);
  CheckCudaStrides(check, args, kv.k, kv.v,
                   {kv.k_stride_token, kv.k_stride_head, kv.v_stride_token, kv.v_stride_head,
                    keys.length * kv.k_stride_token, keys.length * kv.v_stride_token});
  RefuseCapture(check, device, kPlansAreNotCaptured);
  RunPlanned(check, reader, args, nullptr, &kv, keys.length, ViewOf(in, reader, enable_pdl),
             device);
}

}  // namespace ops
}  // namespace tvm_flashinfer

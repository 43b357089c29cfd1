// Attention of one query row per request over paged keys.
#include <sstream>

#include "../kernels/cpu/kernels.h"
#include "attention_args.h"
#include "cache_scope.h"
#include "cuda_kernels.h"
#include "ops.h"
#include "prefill_kernel.h"
#include "tuning.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

using kernels::cuda::PlanArgs;
using kernels::cuda::PlanFn;

PlanFn PlanOfCudaCore(const Checker& check, DLDevice device, kernels::DType dtype,
                      const PlanArgs& args) {
  const UnitSpec unit{"batch_decode", dtype, args.head_dim_qk, args.head_dim_vo};
  return reinterpret_cast<PlanFn>(RequireKernel(check, "batch_decode_plan", unit, device));
}

/*!
 * \brief Whether a file's choice can be followed. Models with four or more query heads per KV head
 * do without the CUDA-core kernel, and a file must not make one fail that its rule would serve.
 */
bool CanFollow(const Checker& check, DLDevice device, kernels::DType dtype, const PlanArgs& args,
               const Tuned& tuned, Kernel rule) {
  if (!tuned || tuned.tactic->kernel != Kernel::kCudaCore || rule == Kernel::kCudaCore) {
    return bool(tuned);
  }
  if (tuned.file->lacks_cuda_core()) return false;
  try {
    PlanOfCudaCore(check, device, dtype, args);
    return true;
  } catch (const tvm::ffi::Error& error) {
    if (tuned.file->NoteLacksCudaCore()) {
      Warn(Text(tuned.file->source(), " asks for cuda_core, and ", error.message()));
    }
    return false;
  }
}

/*! \brief Choose the kernel for a batch, and make its part of the plan. */
std::vector<int64_t> PlanDecode(const Checker& check, DLDevice device, kernels::DType dtype,
                                PlanArgs args) {
  const ChoiceShape shape{PlannedSlot::kDecodePaged,
                          args.num_qo_heads,
                          args.num_kv_heads,
                          args.head_dim_qk,
                          args.head_dim_vo,
                          /*causal=*/false,
                          args.window_left,
                          args.batch_size,
                          args.batch_size,
                          int64_t{args.kv_indptr[args.batch_size]} * args.page_size};
  const Tuned tuned = FindTuned(CurrentTuning(check), device, shape);
  const Kernel rule = DecodeRule(shape.group());
  const bool follows = CanFollow(check, device, dtype, args, tuned, rule);
  const Tactic tactic = follows ? *tuned.tactic : Tactic{rule};
  if (PrintsChoices(check)) {
    PrintChoice(device, shape,
                follows ? TunedChoice(tuned)
                        : DefaultChoice(rule, ReasonOfDecodeRule(shape.group()), tuned));
  }
  if (tactic.kernel == Kernel::kBatchAttention) return {kernels::cuda::kDeviceSchedulePlan};
  PlanFn plan;
  if (tactic.kernel == Kernel::kFA2) {
    plan = RequireCommon<PlanFn>(check, "batch_prefill_plan", device);
    args.fixed_split_size = SplitPages(tactic, args);
  } else {
    plan = PlanOfCudaCore(check, device, dtype, args);
  }
  std::vector<int64_t> kernel;
  Launch(check, plan, args, CurrentStream(device), &kernel);
  return kernel;
}

}  // namespace

Array<int64_t> BatchDecodePlan(TensorView float_workspace, TensorView int_workspace,
                               TensorView pinned_int_workspace, TensorView page_indptr,
                               int64_t batch_size, int64_t num_qo_heads, int64_t num_kv_heads,
                               int64_t page_size, bool enable_cuda_graph, int64_t window_left,
                               double logits_soft_cap, int64_t head_dim_qk, int64_t head_dim_vo,
                               TensorView empty_q, TensorView empty_kv) {
  const Checker check("batch_decode_plan");
  const DLDevice device = BeginPlan(
      check, {float_workspace, int_workspace, pinned_int_workspace, batch_size, num_qo_heads,
              num_kv_heads, page_size, head_dim_qk, head_dim_vo, window_left, enable_cuda_graph});
  if (head_dim_vo != head_dim_qk) {
    check.FailValue("`head_dim_vo` is " + std::to_string(head_dim_vo) + ", head_dim_qk is " +
                    std::to_string(head_dim_qk) + "; decode needs them equal");
  }
  if (logits_soft_cap != 0) {
    check.FailValue("`logits_soft_cap` is " + std::to_string(logits_soft_cap) +
                    ", expected 0: the kernels with a plan do not cap logits; "
                    "flashinfer.bind_attention_decode_paged does, with the option logits_soft_cap");
  }
  const kernels::DType dtype = check.FloatDType("empty_q", empty_q);
  check.PlannedKVDType("empty_kv", empty_kv, empty_q.dtype());
  check.OnHost("page_indptr", page_indptr);
  check.IndexVector("page_indptr", page_indptr, batch_size + 1, "(batch_size + 1,)");
  const int32_t* pages = DataOf<int32_t>(page_indptr);
  CheckIndptr(check, "page_indptr", pages, batch_size, INT32_MAX, "a 32-bit page count");
  for (int64_t b = 0; b < batch_size; ++b) {
    const int64_t full = static_cast<int64_t>(pages[b + 1]) - pages[b] - 1;
    if (full * page_size >= INT32_MAX) {
      check.FailValue("request " + std::to_string(b) + " has " + std::to_string(full + 1) +
                      " pages of " + std::to_string(page_size) +
                      " tokens; a request holds less than 2^31 tokens");
    }
  }

  const PlanHeader header{kDecodeHeader,
                          device.device_type,
                          device.device_id,
                          batch_size,
                          batch_size,
                          num_qo_heads,
                          num_kv_heads,
                          head_dim_qk,
                          head_dim_vo,
                          page_size,
                          /*causal=*/0,
                          window_left,
                          float_workspace.numel(),
                          int_workspace.numel(),
                          pages[batch_size],
                          AddressOf(int_workspace),
                          /*seal=*/0};
  std::vector<int64_t> kernel;
  if (IsCUDA(device) && batch_size > 0) {
    kernels::AttentionArgs shape{};
    shape.dtype = dtype;
    shape.head_dim_qk = static_cast<int32_t>(head_dim_qk);
    shape.head_dim_vo = static_cast<int32_t>(head_dim_vo);
    shape.sm_scale = 1;  // known at the run
    RequireCudaAttention(check, shape);
    RefuseCapture(check, device, kPlansAreNotCaptured);
    const PlanArgs args{DataOf(float_workspace),
                        float_workspace.numel(),
                        DataOf(int_workspace),
                        int_workspace.numel(),
                        /*qo_indptr=*/nullptr,
                        pages,
                        batch_size,
                        static_cast<int32_t>(batch_size),
                        static_cast<int32_t>(num_qo_heads),
                        static_cast<int32_t>(num_kv_heads),
                        shape.head_dim_qk,
                        shape.head_dim_vo,
                        static_cast<int32_t>(page_size),
                        /*causal=*/true,  // one row: the same keys either way
                        static_cast<int32_t>(window_left),
                        /*fixed_split_size=*/-1,
                        /*disable_split_kv=*/false};
    kernel = PlanDecode(check, device, dtype, args);
  }
  return MakePlan(header, kernel);
}

void BatchDecodeRun(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                    TensorView q, TensorView k_pages, TensorView v_pages, TensorView page_indptr,
                    TensorView page_indices, TensorView last_page_len, TensorView o,
                    Optional<TensorView> lse, int64_t layout, int64_t window_left, bool enable_pdl,
                    double sm_scale, double rope_rcp_scale, double rope_rcp_theta) {
  (void)rope_rcp_scale;
  (void)rope_rcp_theta;
  const Checker check("batch_decode_run");
  const PlanReader reader(check, plan, kDecodeHeader);
  const PlanHeader& header = reader.header();
  const RunInputs in{float_workspace, int_workspace, q,           o,       lse,
                     /*mask_mode=*/0, layout,        window_left, sm_scale};
  const DLDevice device = BeginRun(check, in, reader);
  KVOperand k{};
  const kernels::PagedKV kv = MakePagedKV(check, q, k_pages, v_pages, page_indptr, page_indices,
                                          last_page_len, header.batch_size, layout, &k);
  const kernels::AttentionArgs args = MakeAttentionArgs(check, in, reader, k.num_heads, k.head_dim);
  reader.Require("page_size", header.page_size, k.length);
  reader.RequireEntries("page_indices", page_indices.numel());
  CheckOutputs(check, in,
               {{"k_pages", k_pages},
                {"v_pages", v_pages},
                {"page_indptr", page_indptr},
                {"page_indices", page_indices},
                {"last_page_len", last_page_len}});
  CheckPagedContents(check, page_indptr, page_indices, last_page_len, header.batch_size, k.outer,
                     k.length);
  RecordState(o, lse);
  if (args.num_rows == 0) return;
  if (IsCPU(device)) {
    check.Run([&] { kernels::cpu::BatchAttentionPaged(args, kv); });
    return;
  }
  RequireCudaAttention(check, args);
  CheckCudaPages(check, args, kv);
  RefuseCapture(check, device, kPlansAreNotCaptured);
  const kernels::cuda::PlanView view{DataOf(float_workspace), DataOf(int_workspace),
                                     reader.kernel().data(),
                                     static_cast<int64_t>(reader.kernel().size()), enable_pdl};
  RunPlanned(check, reader, args, &kv, nullptr, page_indices.numel(), view, device);
}

}  // namespace ops
}  // namespace tvm_flashinfer

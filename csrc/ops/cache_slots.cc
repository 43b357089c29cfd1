// What TVM's cache is given for one attention slot: a kind, which names the calling convention, and
// the functions. The cache learns only when it is created whether sequences may slide, so the
// choice is made here, at run time.
#include <tvm/ffi/any.h>
#include <tvm/ffi/function.h>

#include <algorithm>
#include <memory>
#include <string>

#include "cache_call.h"
#include "cache_scope.h"
#include "checks.h"
#include "json_settings.h"
#include "ops.h"
#include "tuning.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

using tvm::ffi::PackedArgs;

Array<Any> Planned(Function run, Function plan) {
  return {String("flashinfer"), std::move(run), std::move(plan)};
}

/*! \brief "tirx" names a convention of arguments; any function may stand there. */
Array<Any> Unplanned(Function run) { return {String("tirx"), std::move(run)}; }

/*!
 * \brief Planned self-attention of MLA, over new tokens as they are before compression.
 *
 * TVM makes no plan for a step in which every sequence has one token, and calls the run all the
 * same when the model wants self-attention, with the plan of an earlier step or with none. Such a
 * step needs no plan.
 */
Function LatentRaggedRun(const String& options) {
  auto bound =
      std::make_shared<const BoundAttention>("attention_prefill_ragged", CacheSlot::kPrefillRagged,
                                             options, Optional<Tensor>(), Optional<Tensor>());
  return Named(
      "batch_prefill_ragged_run",
      [bound](Optional<TensorView> float_workspace, Optional<TensorView> int_workspace,
              Optional<Array<int64_t>> plan, TensorView q, TensorView k, TensorView v,
              TensorView qo_indptr, TensorView kv_indptr, TensorView o, TensorView lse,
              int64_t mask_mode, int64_t layout, int64_t window_left, bool enable_pdl,
              double sm_scale, double rope_rcp_scale, double rope_rcp_theta) {
        const Checker check("batch_prefill_ragged_run");
        check.Rank("q", q, 3, "(n, num_qo_heads, head_dim)");
        check.Rank("qo_indptr", qo_indptr, 1, "(batch_size + 1,)");
        if (q.size(0) == qo_indptr.size(0) - 1) {
          CacheCall call(*bound, q, o, lse, sm_scale);
          call.SetRows(qo_indptr);
          call.SetCausal(mask_mode);
          call.SetRaggedKeys(k, v, kv_indptr);
          call.Run();
          return;
        }
        if (!float_workspace.has_value() || !int_workspace.has_value() || !plan.has_value()) {
          check.FailValue(
              "`plan` is None, but the step has requests of more than one row; plan it");
        }
        BatchPrefillRaggedRun(float_workspace.value(), int_workspace.value(), plan.value(), q, k, v,
                              qo_indptr, kv_indptr, o, lse, mask_mode, layout, window_left,
                              enable_pdl, sm_scale, rope_rcp_scale, rope_rcp_theta);
      });
}

/*! \brief A plan with the rows of the longest request behind it. */
Function PlanWithLongest() {
  const Function plan = Named("batch_prefill_plan", BatchPrefillPlan);
  return Function::FromPacked([plan](PackedArgs args, Any* result) {
    plan.CallPacked(args, result);
    const auto qo_indptr = args[3].cast<TensorView>();
    const int32_t* rows = DataOf<int32_t>(qo_indptr);
    int64_t longest = 0;
    for (int64_t b = 1; b < qo_indptr.size(0); ++b) {
      longest = std::max<int64_t>(longest, rows[b] - rows[b - 1]);
    }
    auto numbers = result->cast<Array<int64_t>>();
    numbers.push_back(longest);
    *result = std::move(numbers);
  });
}

/*!
 * \brief Attention over the new tokens in a cache with sliding layers, with a plan of
 * PlanWithLongest where no window cuts a request. TVM plans nothing for a stage of a pipeline whose
 * layers all slide.
 */
Function SlidingRaggedRun(const String& options, int64_t layer_window) {
  auto bound =
      std::make_shared<const BoundAttention>("attention_prefill_ragged", CacheSlot::kPrefillRagged,
                                             options, Optional<Tensor>(), Optional<Tensor>());
  return Named("batch_prefill_ragged_run",
               [bound, layer_window](
                   Optional<TensorView> float_workspace, Optional<TensorView> int_workspace,
                   Optional<Array<int64_t>> plan, TensorView q, TensorView k, TensorView v,
                   TensorView qo_indptr, TensorView kv_indptr, TensorView o, TensorView lse,
                   int64_t mask_mode, int64_t layout, int64_t window_left, bool enable_pdl,
                   double sm_scale, double rope_rcp_scale, double rope_rcp_theta) {
                 const bool planned = float_workspace.has_value() && int_workspace.has_value() &&
                                      plan.has_value() && !plan.value().empty();
                 if (planned) {
                   Array<int64_t> numbers = plan.value();
                   const int64_t longest = numbers.back();
                   numbers.pop_back();
                   const Checker check("batch_prefill_ragged_run");
                   if (NewTokensWindow(check, layer_window, longest, /*exact=*/true) < 0) {
                     BatchPrefillRaggedRun(float_workspace.value(), int_workspace.value(), numbers,
                                           q, k, v, qo_indptr, kv_indptr, o, lse, mask_mode, layout,
                                           window_left, enable_pdl, sm_scale, rope_rcp_scale,
                                           rope_rcp_theta);
                     return;
                   }
                 }
                 CacheCall call(*bound, q, o, lse, sm_scale);
                 call.SetRows(qo_indptr);
                 call.SetCausal(mask_mode);
                 call.SetNewTokensWindow();
                 call.SetRaggedKeys(k, v, kv_indptr);
                 call.Run();
               });
}

/*! \brief Head dimensions of MLA before compression, for which TVM plans; 0 in other caches. */
struct LatentHeadDims {
  int64_t qk;
  int64_t vo;

  LatentHeadDims(const Checker& check, const JsonSettings& settings)
      : qk(settings.PositiveInteger("head_dim_qk", 0)),
        vo(settings.PositiveInteger("head_dim_vo", 0)) {
    if ((qk == 0) == (vo == 0)) return;
    check.FailValue("`options` has one of `head_dim_qk` and `head_dim_vo`; give both or none");
  }
};

/*!
 * \brief What every attention slot needs, whichever functions it holds: the function without a plan
 * is made in any case, so that what is wrong with the options shows now.
 */
Function BindSlot(const Checker& check, const JsonSettings& settings, const String& slot,
                  const String& options, int64_t support_sliding_window,
                  Optional<Tensor> alibi_slopes) {
  // The Python package registers it. The model may have been compiled with another TVM, and what
  // this one calls must show here and not in a request.
  check.Flag("support_sliding_window", support_sliding_window);
  if (auto check_tvm = Function::GetGlobal("flashinfer.check_tvm")) (*check_tvm)();
  Function bound = BindAttention(slot, options, Optional<Tensor>(), std::move(alibi_slopes));
  for (const char* scale : {"k_scale", "v_scale", "kv_scale"}) {
    if (!settings.Has(scale)) continue;
    check.FailValue(Text("`options` has `", scale,
                         "`, which is for float8 keys and values; TVM's "
                         "cache has the dtype of its queries and no such pages: leave it out"));
  }
  // TVM rotates the pages of layers with a window by theta 10000, whatever the model's is, and with
  // RoPE inside attention the new tokens by the model's: the two would not fit.
  if (support_sliding_window != 0 && settings.Has("layer_window")) {
    check.FailValue(
        "a cache with windows of single layers cannot slide as a whole too; create it with "
        "support_sliding_window 0");
  }
  return bound;
}

constexpr const char* kExample = "{\"logits_soft_cap\": 50}";

}  // namespace

Array<Any> MakeCacheSlot(String slot, String options, bool planned,
                         int64_t support_sliding_window) {
  const Checker check("cache_slot");
  const JsonSettings settings(check, "options", options, kExample);
  Function unplanned =
      BindSlot(check, settings, slot, options, support_sliding_window, Optional<Tensor>());
  // The planned kernels have no soft cap, and TVM asks them for no window. A sliding cache applies
  // RoPE inside attention, and tells only functions without a plan so. It also wants no plan for
  // any slot: TVM would plan for tables that it does not use then.
  const bool has_extras = settings.Has("logits_soft_cap") || settings.Has("window_left");
  if (planned && !has_extras && support_sliding_window == 0) {
    const std::string name = slot;
    const LatentHeadDims latent(check, settings);
    if (latent.qk != 0) {
      return {String("flashinfer"), LatentRaggedRun(options),
              Named("batch_prefill_plan", BatchPrefillPlan), latent.qk, latent.vo};
    }
    if (name == "mla") {
      return Planned(Named("batch_mla_run", BatchMLARun), Named("batch_mla_plan", BatchMLAPlan));
    }
    if (name == "prefill_ragged" && settings.Has("layer_window")) {
      const int64_t layer_window = settings.PositiveInteger("layer_window", 0);
      return Planned(SlidingRaggedRun(options, layer_window), PlanWithLongest());
    }
    if (name == "prefill_ragged") {
      return Planned(Named("batch_prefill_ragged_run", BatchPrefillRaggedRun),
                     Named("batch_prefill_plan", BatchPrefillPlan));
    }
    if (name == "prefill_paged") {
      return Planned(Named("batch_prefill_paged_run", BatchPrefillPagedRun),
                     Named("batch_prefill_plan", BatchPrefillPlan));
    }
    if (name == "decode_paged") {
      return Planned(Named("batch_decode_run", BatchDecodeRun),
                     Named("batch_decode_plan", BatchDecodePlan));
    }
  }
  return Unplanned(std::move(unplanned));
}

Array<Any> MakeCacheSlotWithTuning(String slot, String options, bool planned,
                                   int64_t support_sliding_window, String tuning) {
  UseModelTuning(Checker("cache_slot_with_tuning"), tuning);
  return MakeCacheSlot(slot, options, planned, support_sliding_window);
}

Array<Any> MakeCacheSlotWithSlopes(String slot, String options, int64_t support_sliding_window,
                                   Tensor alibi_slopes) {
  const Checker check("cache_slot_with_slopes");
  check.Defined("alibi_slopes", alibi_slopes);
  const JsonSettings settings(check, "options", options, kExample);
  return Unplanned(BindSlot(check, settings, slot, options, support_sliding_window, alibi_slopes));
}

}  // namespace ops
}  // namespace tvm_flashinfer

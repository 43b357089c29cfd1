#include "prefill_kernel.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <tuple>

#include "tuning.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

using kernels::DType;
using kernels::cuda::PrefillSM90;

/*! \brief Prefill over ragged keys or over pages. */
enum class PrefillKeys { kRagged, kPaged };

struct Kinds {
  const char* fa2;
  const char* fa3;
};

Kinds KindsOf(PrefillKeys keys) {
  return keys == PrefillKeys::kRagged ? Kinds{"batch_prefill_ragged", "batch_prefill_ragged_sm90"}
                                      : Kinds{"batch_prefill_paged", "batch_prefill_paged_sm90"};
}

/*! \brief Whether FA3 units stand beside the FA2 units that are loaded. */
bool LoadedBeside(const Checker& check, DLDevice device, int head_dim_qk, int head_dim_vo,
                  int64_t page_size) {
  for (PrefillKeys keys : {PrefillKeys::kRagged, PrefillKeys::kPaged}) {
    if (keys == PrefillKeys::kRagged && page_size != 1) continue;
    const Kinds kinds = KindsOf(keys);
    for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      const auto loaded = [&](const char* kind) {
        return FindLoaded(check, UnitSpec{kind, dtype, head_dim_qk, head_dim_vo}, device);
      };
      if (loaded(kinds.fa2) != nullptr && loaded(kinds.fa3) == nullptr) return false;
    }
  }
  return true;
}

}  // namespace

std::optional<Kernel> PrefillKernelOfEnvironment(const Checker& check) {
  const char* value = std::getenv("TVM_FLASHINFER_PREFILL_KERNEL");
  const std::string wanted = value == nullptr ? "" : value;
  if (wanted.empty()) return std::nullopt;
  if (wanted == "fa2") return Kernel::kFA2;
  if (wanted == "fa3") return Kernel::kFA3;
  check.FailValue("TVM_FLASHINFER_PREFILL_KERNEL is \"" + wanted +
                  "\", expected fa2 or fa3, or leave it unset");
}

AllowedSM90 AllowPrefillSM90(const Checker& check, DLDevice device, int64_t head_dim_qk,
                             int64_t head_dim_vo, int64_t page_size) {
  constexpr const char* kByVariable = "TVM_FLASHINFER_PREFILL_KERNEL says so";
  const std::optional<Kernel> wanted = PrefillKernelOfEnvironment(check);
  if (wanted == Kernel::kFA2) return {PrefillSM90::kNever, kByVariable, true};
  if (!RunsOnArch(check, device, 9, 0)) {
    if (!wanted.has_value()) return {PrefillSM90::kNever, kNoFA3};
    check.FailValue("TVM_FLASHINFER_PREFILL_KERNEL is \"fa3\", and " + DeviceText(device) +
                    " is no Hopper GPU (compute capability 9.0); fa2 is the kernel for it");
  }
  if (wanted == Kernel::kFA3) return {PrefillSM90::kAlways, kByVariable, true};
  // The answer changes only when units are loaded.
  using Shape = std::tuple<int, int64_t, int64_t, bool>;
  thread_local const kernels::cuda::KernelEntry* asked_with = nullptr;
  thread_local std::map<Shape, bool> known;
  if (asked_with != kernels::cuda::Entries()) known.clear();
  asked_with = kernels::cuda::Entries();
  const auto [found, is_new] =
      known.insert({{device.device_id, head_dim_qk, head_dim_vo, page_size == 1}, false});
  if (is_new) {
    found->second = LoadedBeside(check, device, static_cast<int>(head_dim_qk),
                                 static_cast<int>(head_dim_vo), page_size);
  }
  if (found->second) return {PrefillSM90::kWhereFaster};
  return {PrefillSM90::kNever, "a unit of FA2 is loaded without its unit of FA3"};
}

bool HasRowsBeforeKeys(const int32_t* qo_indptr, const int32_t* kv_len, int64_t batch_size) {
  for (int64_t b = 0; b < batch_size; ++b) {
    if (kv_len[b] > 0 && qo_indptr[b + 1] - qo_indptr[b] > kv_len[b]) return true;
  }
  return false;
}

const char* ReasonOfPrefillRule(Kernel kernel) {
  return kernel == Kernel::kFA3
             ? "the rows fill its tiles, and the tiles fill the GPU"
             : "few rows or few tiles, for which FA2 packs heads and splits keys";
}

int64_t SplitPages(const Tactic& tactic, const kernels::cuda::PlanArgs& args) {
  if (tactic.split_keys <= 0) return -1;
  const int64_t pages = std::max<int64_t>(tactic.split_keys / args.page_size, 1);
  const int64_t group = args.num_qo_heads / args.num_kv_heads;
  int64_t parts = 0, blocks = 0;  // rows of partial outputs; blocks of a KV head, at most
  for (int32_t b = 0; b < args.batch_size; ++b) {
    const int64_t rows = args.qo_indptr == nullptr ? 1 : args.qo_indptr[b + 1] - args.qo_indptr[b];
    const int64_t chunks = (args.kv_indptr[b + 1] - args.kv_indptr[b] + pages - 1) / pages;
    parts += rows * std::max<int64_t>(chunks, 1);
    blocks += (rows * group + 15) / 16 * std::max<int64_t>(chunks, 1);
  }
  const int64_t floats = parts * args.num_qo_heads * (args.head_dim_vo + 1);
  const int64_t ints = 3 * blocks + args.num_rows + 2 * int64_t{args.batch_size} + 64;
  const bool fits = floats * static_cast<int64_t>(sizeof(float)) <= args.float_workspace_bytes &&
                    ints * static_cast<int64_t>(sizeof(int32_t)) <= args.int_workspace_bytes;
  return fits ? pages : -1;
}

namespace {

ChoiceShape ShapeOf(const kernels::cuda::PlanArgs& args) {
  int64_t num_keys = 0;
  for (int32_t b = 0; b < args.batch_size; ++b) num_keys += args.kv_len[b];
  return {args.page_size == 1 ? PlannedSlot::kPrefillRagged : PlannedSlot::kPrefillPaged,
          args.num_qo_heads,
          args.num_kv_heads,
          args.head_dim_qk,
          args.head_dim_vo,
          args.causal,
          args.window_left,
          args.batch_size,
          args.num_rows,
          num_keys};
}

/*! \brief Whether the int workspace holds a plan of FA3, by the most that it can need. */
bool HoldsSM90Plan(const kernels::cuda::PlanArgs& args) {
  constexpr int64_t kTileRows = 128, kTileBytes = 32, kMostBlocks = 4096;
  const int64_t tiles = args.num_rows / kTileRows + args.batch_size;
  return tiles * (kTileBytes + 8 * int64_t{args.num_qo_heads}) + 4 * kMostBlocks <=
         args.int_workspace_bytes;
}

/*! \brief Let the plan follow a tactic; false where the tactic has no kernel here. */
bool Follow(const Tactic& tactic, kernels::cuda::PlanArgs* args) {
  if (tactic.kernel == Kernel::kFA3) {
    if (args->sm90 == PrefillSM90::kNever || !HoldsSM90Plan(*args)) return false;
    args->sm90 = PrefillSM90::kAlways;
  } else if (tactic.kernel == Kernel::kFA2) {
    args->sm90 = PrefillSM90::kNever;
    args->fixed_split_size = SplitPages(tactic, *args);
  }
  return true;
}

Kernel KernelOf(const std::vector<int64_t>& plan) {
  return plan[0] == kernels::cuda::kPrefillPlan       ? Kernel::kFA2
         : plan[0] == kernels::cuda::kPrefillSM90Plan ? Kernel::kFA3
                                                      : Kernel::kBatchAttention;
}

}  // namespace

std::vector<int64_t> PlanPrefill(const Checker& check, DLDevice device,
                                 kernels::cuda::PlanArgs args) {
  const AllowedSM90 allowed =
      AllowPrefillSM90(check, device, args.head_dim_qk, args.head_dim_vo, args.page_size);
  args.sm90 = allowed.sm90;
  const Tuning* tuning = CurrentTuning(check);
  const bool prints = PrintsChoices(check);
  ChoiceShape shape{};
  Tuned tuned;
  if (tuning != nullptr || prints) shape = ShapeOf(args);
  // Who says how keys are split wants results that do not depend on the GPU.
  const bool splits_by_user = args.fixed_split_size != -1 || args.disable_split_kv;
  if (!allowed.by_environment && !splits_by_user) tuned = FindTuned(tuning, device, shape);
  const bool follows = tuned && Follow(*tuned.tactic, &args);

  std::vector<int64_t> plan;
  if (follows && tuned.tactic->kernel == Kernel::kBatchAttention) {
    plan = {kernels::cuda::kDeviceSchedulePlan};
  } else {
    auto make = RequireCommon<kernels::cuda::PlanFn>(check, "batch_prefill_plan", device);
    Launch(check, make, args, CurrentStream(device), &plan);
  }
  // FA2 counts the first masked tile of keys in unsigned numbers, which are less than 0 then.
  const bool before_keys = plan[0] == kernels::cuda::kPrefillPlan && args.causal &&
                           HasRowsBeforeKeys(args.qo_indptr, args.kv_len, args.batch_size);
  if (before_keys) plan = {kernels::cuda::kDeviceSchedulePlan};

  if (prints) {
    const Kernel kernel = KernelOf(plan);
    if (before_keys) {
      PrintChoice(device, shape, DefaultChoice(kernel, kRowsBeforeKeys, {}));
    } else if (allowed.by_environment) {
      PrintChoice(device, shape, {{kernel}, "environment", allowed.reason});
    } else if (follows) {
      PrintChoice(device, shape, TunedChoice(tuned));
    } else {
      const bool both = allowed.sm90 == PrefillSM90::kWhereFaster;
      const std::string reason = both ? ReasonOfPrefillRule(kernel) : allowed.reason;
      PrintChoice(device, shape, DefaultChoice(kernel, reason, tuned));
    }
  }
  return plan;
}

void RunPlanned(const Checker& check, const PlanReader& reader, const kernels::AttentionArgs& args,
                const kernels::PagedKV* paged, const kernels::RaggedKV* ragged, int64_t kv_length,
                const kernels::cuda::PlanView& view, DLDevice device) {
  const int64_t kind = reader.kernel()[0];
  UnitSpec unit{"batch_attention", args.dtype, args.head_dim_qk, args.head_dim_vo};
  if (kind == kernels::cuda::kDeviceSchedulePlan) {
    auto run = reinterpret_cast<kernels::cuda::AttentionFn>(RequireKernel(check, unit, device));
    Launch(check, run, args, paged, ragged, kernels::AttentionExtras{}, kv_length,
           CurrentStream(device));
    return;
  }
  const bool is_fa3 = kind == kernels::cuda::kPrefillSM90Plan;
  const bool is_decode = kind == kernels::cuda::kDecodePlan;
  const Kinds kinds = KindsOf(paged == nullptr ? PrefillKeys::kRagged : PrefillKeys::kPaged);
  unit.kind = is_decode ? "batch_decode" : is_fa3 ? kinds.fa3 : kinds.fa2;
  void* found = RequireKernel(check, unit, device);
  if (paged != nullptr) {
    auto run = reinterpret_cast<kernels::cuda::PagedAttentionFn>(found);
    Launch(check, run, args, *paged, view, CurrentStream(device));
  } else {
    auto run = reinterpret_cast<kernels::cuda::RaggedAttentionFn>(found);
    Launch(check, run, args, *ragged, view, CurrentStream(device));
  }
}

}  // namespace ops
}  // namespace tvm_flashinfer

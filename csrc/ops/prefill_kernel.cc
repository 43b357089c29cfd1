#include "prefill_kernel.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <tuple>

#include "../kernels/cuda/prefill_schedule.h"
#include "tuning.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

using kernels::DType;
using kernels::cuda::Use;

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

/*! \brief Which kernels the units that are loaded allow. */
struct LoadedUnits {
  bool fa3 = true;   // beside each unit of FA2
  bool copy = true;  // FA3 for ragged keys, beside each unit of FA3 for pages
};

LoadedUnits FindUnits(const Checker& check, DLDevice device, int head_dim_qk, int head_dim_vo,
                      int64_t page_size) {
  LoadedUnits units;
  for (DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const auto loaded = [&](const char* kind) {
      return FindLoaded(check, UnitSpec{kind, dtype, head_dim_qk, head_dim_vo}, device) != nullptr;
    };
    const Kinds ragged = KindsOf(PrefillKeys::kRagged), paged = KindsOf(PrefillKeys::kPaged);
    if (loaded(paged.fa2) && !loaded(paged.fa3)) units.fa3 = false;
    if (page_size == 1 && loaded(ragged.fa2) && !loaded(ragged.fa3)) units.fa3 = false;
    if (loaded(paged.fa3) && !loaded(ragged.fa3)) units.copy = false;
  }
  return units;
}

}  // namespace

std::optional<Kernel> PrefillKernelOfEnvironment(const Checker& check) {
  const char* value = std::getenv("TVM_FLASHINFER_PREFILL_KERNEL");
  const std::string wanted = value == nullptr ? "" : value;
  if (wanted.empty()) return std::nullopt;
  if (wanted == "fa2") return Kernel::kFA2;
  if (wanted == "fa3") return Kernel::kFA3;
  if (wanted == "fa3_copy") return Kernel::kFA3Copy;
  check.FailValue("TVM_FLASHINFER_PREFILL_KERNEL is \"" + wanted +
                  "\", expected fa2, fa3 or fa3_copy, or leave it unset");
}

AllowedSM90 AllowPrefillSM90(const Checker& check, DLDevice device, int64_t head_dim_qk,
                             int64_t head_dim_vo, int64_t page_size) {
  constexpr const char* kByVariable = "TVM_FLASHINFER_PREFILL_KERNEL says so";
  const std::optional<Kernel> wanted = PrefillKernelOfEnvironment(check);
  if (wanted == Kernel::kFA2) return {Use::kNever, Use::kNever, kByVariable, true};
  if (!RunsOnArch(check, device, 9, 0)) {
    if (!wanted.has_value()) return {Use::kNever, Use::kNever, kNoFA3};
    check.FailValue(Text("TVM_FLASHINFER_PREFILL_KERNEL is \"", NameOf(*wanted), "\", and ",
                         DeviceText(device),
                         " is no Hopper GPU (compute capability 9.0); fa2 is the kernel for it"));
  }
  // A plan for pages of one token may be for ragged keys: there is nothing to copy.
  const bool has_pages = page_size != 1;
  if (wanted.has_value()) {
    const bool copies = wanted == Kernel::kFA3Copy && has_pages;
    return {Use::kAlways, copies ? Use::kAlways : Use::kNever, kByVariable, true};
  }
  // The answer changes only when units are loaded.
  using Shape = std::tuple<int, int64_t, int64_t, bool>;
  thread_local const kernels::cuda::KernelEntry* asked_with = nullptr;
  thread_local std::map<Shape, LoadedUnits> known;
  if (asked_with != kernels::cuda::Entries()) known.clear();
  asked_with = kernels::cuda::Entries();
  const auto [found, is_new] =
      known.insert({{device.device_id, head_dim_qk, head_dim_vo, has_pages}, LoadedUnits()});
  if (is_new) {
    found->second = FindUnits(check, device, static_cast<int>(head_dim_qk),
                              static_cast<int>(head_dim_vo), page_size);
  }
  if (!found->second.fa3) {
    return {Use::kNever, Use::kNever, "a unit of FA2 is loaded without its unit of FA3"};
  }
  return {Use::kWhereFaster, has_pages && found->second.copy ? Use::kWhereFaster : Use::kNever};
}

bool HasRowsBeforeKeys(const int32_t* qo_indptr, const int32_t* kv_len, int64_t batch_size) {
  for (int64_t b = 0; b < batch_size; ++b) {
    if (kv_len[b] > 0 && qo_indptr[b + 1] - qo_indptr[b] > kv_len[b]) return true;
  }
  return false;
}

const char* ReasonOfPrefillRule(Kernel kernel) {
  switch (kernel) {
    case Kernel::kFA3:
      return "the rows fill its tiles, and the tiles fill the GPU";
    case Kernel::kFA3Copy:
      return "the rows fill its tiles, and ragged keys gain more time than it takes to copy pages";
    default:
      return "few rows or few tiles, for which FA2 packs heads and splits keys";
  }
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
  const int64_t offsets = 8 * (int64_t{args.batch_size} + 1) + 32;  // of a copy
  return tiles * (kTileBytes + 8 * int64_t{args.num_qo_heads}) + 4 * kMostBlocks + offsets <=
         args.int_workspace_bytes;
}

/*! \brief The same of the float workspace and the copy of the pages. */
bool HoldsCopy(const kernels::cuda::PlanArgs& args) {
  int64_t num_keys = 0;
  for (int32_t b = 0; b < args.batch_size; ++b) num_keys += args.kv_len[b];
  return kernels::cuda::BytesOfCopy(num_keys, args.num_kv_heads, args.head_dim_qk,
                                    args.head_dim_vo) <= args.float_workspace_bytes;
}

/*! \brief Let the plan follow a tactic; false where the tactic has no kernel here. */
bool Follow(const Tactic& tactic, kernels::cuda::PlanArgs* args) {
  if (tactic.kernel == Kernel::kFA3 || tactic.kernel == Kernel::kFA3Copy) {
    const bool copies = tactic.kernel == Kernel::kFA3Copy;
    if (args->sm90 == Use::kNever || !HoldsSM90Plan(*args)) return false;
    if (copies && (args->page_copy == Use::kNever || !HoldsCopy(*args))) return false;
    args->sm90 = Use::kAlways;
    args->page_copy = copies ? Use::kAlways : Use::kNever;
  } else if (tactic.kernel == Kernel::kFA2) {
    args->sm90 = Use::kNever;
    args->fixed_split_size = SplitPages(tactic, *args);
  }
  return true;
}

Kernel KernelOf(const std::vector<int64_t>& plan) {
  switch (plan[0]) {
    case kernels::cuda::kPrefillPlan:
      return Kernel::kFA2;
    case kernels::cuda::kPrefillSM90Plan:
      return Kernel::kFA3;
    case kernels::cuda::kPrefillSM90CopyPlan:
      return Kernel::kFA3Copy;
    default:
      return Kernel::kBatchAttention;
  }
}

}  // namespace

std::vector<int64_t> PlanPrefill(const Checker& check, DLDevice device,
                                 kernels::cuda::PlanArgs args) {
  const AllowedSM90 allowed =
      AllowPrefillSM90(check, device, args.head_dim_qk, args.head_dim_vo, args.page_size);
  args.sm90 = allowed.sm90;
  args.page_copy = allowed.page_copy;
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
      const bool both = allowed.sm90 == Use::kWhereFaster;
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
  const bool is_decode = kind == kernels::cuda::kDecodePlan;
  const bool copies = kind == kernels::cuda::kPrefillSM90CopyPlan;
  const bool is_fa3 = kind == kernels::cuda::kPrefillSM90Plan || copies;
  const bool is_ragged = paged == nullptr || copies;
  const Kinds kinds = KindsOf(is_ragged ? PrefillKeys::kRagged : PrefillKeys::kPaged);
  unit.kind = is_decode ? "batch_decode" : is_fa3 ? kinds.fa3 : kinds.fa2;
  void* found = RequireKernel(check, unit, device);
  if (!is_ragged) {
    auto run = reinterpret_cast<kernels::cuda::PagedAttentionFn>(found);
    Launch(check, run, args, *paged, view, CurrentStream(device));
    return;
  }
  kernels::RaggedKV copied{};
  if (copies) {
    auto copy = RequireCommon<kernels::cuda::CopyPagesFn>(check, "copy_pages", device);
    Launch(check, copy, args, *paged, view, &copied, CurrentStream(device));
    ragged = &copied;
  }
  auto run = reinterpret_cast<kernels::cuda::RaggedAttentionFn>(found);
  Launch(check, run, args, *ragged, view, CurrentStream(device));
}

}  // namespace ops
}  // namespace tvm_flashinfer

// Questions about choices of kernels, which need no GPU: the same rules and the same files of
// tuning as in plans.
#include <numeric>

#include "../kernels/cuda/prefill_schedule.h"
#include "ops.h"
#include "prefill_kernel.h"
#include "tuning.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

PlannedSlot SlotOf(const Checker& check, const std::string& name) {
  std::string names;
  for (PlannedSlot slot : {PlannedSlot::kDecodePaged, PlannedSlot::kPrefillPaged,
                           PlannedSlot::kPrefillRagged, PlannedSlot::kMLA}) {
    if (name == NameOf(slot)) return slot;
    names += (names.empty() ? "" : ", ") + std::string(NameOf(slot));
  }
  check.FailValue("`slot` is \"" + name + "\", expected one of " + names);
}

/*! \brief Lengths that fit the 32 bits of the plans' tensors. */
std::vector<int32_t> Lengths(const Checker& check, const char* name,
                             const Array<int64_t>& lengths) {
  std::vector<int32_t> values;
  int64_t sum = 0;
  for (int64_t length : lengths) {
    sum += length;
    if (length < 0 || sum > INT32_MAX) {
      check.FailValue(Text("`", name, "` has a length of ", length,
                           "; lengths are 0 or more and come to less than 2^31"));
    }
    values.push_back(static_cast<int32_t>(length));
  }
  return values;
}

std::vector<int32_t> Offsets(const std::vector<int32_t>& lengths) {
  std::vector<int32_t> offsets(lengths.size() + 1, 0);
  std::partial_sum(lengths.begin(), lengths.end(), offsets.begin() + 1);
  return offsets;
}

/*! \brief The rule for prefill, where all units are loaded. */
Choice PrefillByRule(const Gpu& gpu, const ChoiceShape& shape, const std::vector<int32_t>& rows,
                     const std::vector<int32_t>& keys, const Tuned& tuned) {
  Kernel kernel = Kernel::kFA2;
  const char* reason = kNoFA3;
  const std::vector<int32_t> qo_indptr = Offsets(rows), kv_indptr = Offsets(keys);
  if (gpu.major == 9 && gpu.minor == 0) {
    const kernels::cuda::PrefillBatch batch{qo_indptr.data(),
                                            kv_indptr.data(),
                                            keys.data(),
                                            static_cast<int32_t>(shape.batch_size),
                                            static_cast<int32_t>(shape.num_qo_heads),
                                            static_cast<int32_t>(shape.num_kv_heads),
                                            static_cast<int32_t>(shape.head_dim_qk),
                                            static_cast<int32_t>(shape.head_dim_vo),
                                            shape.causal,
                                            static_cast<int32_t>(shape.window_left)};
    if (kernels::cuda::PreferPrefillSM90(gpu.num_sm, batch)) {
      const bool copies = shape.slot == PlannedSlot::kPrefillPaged &&
                          kernels::cuda::PreferCopyOfPages(gpu.num_sm, batch);
      kernel = copies ? Kernel::kFA3Copy : Kernel::kFA3;
    }
    reason = ReasonOfPrefillRule(kernel);
  }
  return DefaultChoice(kernel, reason, tuned);
}

Choice ChoiceOf(const Checker& check, const Gpu& gpu, const ChoiceShape& shape,
                const std::vector<int32_t>& rows, const std::vector<int32_t>& keys) {
  const bool is_hopper = gpu.major == 9 && gpu.minor == 0;
  const bool of_prefill =
      shape.slot == PlannedSlot::kPrefillPaged || shape.slot == PlannedSlot::kPrefillRagged;
  const Tuning* tuning = CurrentTuning(check);
  Tuned tuned = tuning == nullptr ? Tuned() : tuning->Find(gpu, shape);
  if (of_prefill) {
    if (const std::optional<Kernel> wanted = PrefillKernelOfEnvironment(check)) {
      return {{*wanted}, "environment", "TVM_FLASHINFER_PREFILL_KERNEL says so"};
    }
  }
  Choice choice;
  if (tuned) {
    choice = TunedChoice(tuned);
  } else if (of_prefill) {
    choice = PrefillByRule(gpu, shape, rows, keys, tuned);
  } else if (shape.slot == PlannedSlot::kMLA) {
    const Kernel kernel = MLARule(is_hopper);
    choice = DefaultChoice(kernel, ReasonOfMLARule(kernel), tuned);
  } else {
    choice = DefaultChoice(DecodeRule(shape.group()), ReasonOfDecodeRule(shape.group()), tuned);
  }
  if (of_prefill && choice.tactic.kernel == Kernel::kFA2 && shape.causal &&
      HasRowsBeforeKeys(Offsets(rows).data(), keys.data(), shape.batch_size)) {
    choice = DefaultChoice(Kernel::kBatchAttention, kRowsBeforeKeys, {});
  }
  return choice;
}

}  // namespace

Map<String, Any> KernelChoice(String slot, String gpu_name, int64_t arch, int64_t num_sm,
                              int64_t num_qo_heads, int64_t num_kv_heads, int64_t head_dim_qk,
                              int64_t head_dim_vo, bool causal, int64_t window_left,
                              Array<int64_t> qo_lens, Array<int64_t> kv_lens) {
  const Checker check("kernel_choice");
  const auto fits = [&](const char* name, int64_t value, int64_t low) {
    if (value >= low && value <= INT32_MAX) return;
    check.FailValue(
        Text("`", name, "` is ", value, ", expected a 32-bit number from ", low, " on"));
  };
  fits("arch", arch, 10);
  fits("num_sm", num_sm, 1);
  fits("num_qo_heads", num_qo_heads, 1);
  fits("num_kv_heads", num_kv_heads, 1);
  check.HeadRatio(num_qo_heads, num_kv_heads);
  fits("head_dim_qk", head_dim_qk, 1);
  fits("head_dim_vo", head_dim_vo, 1);
  fits("window_left", window_left, -1);
  if (qo_lens.size() != kv_lens.size()) {
    check.FailValue(Text("`qo_lens` has ", qo_lens.size(), " requests, `kv_lens` has ",
                         kv_lens.size(), "; give one length of each for every request"));
  }
  const std::vector<int32_t> rows = Lengths(check, "qo_lens", qo_lens);
  const std::vector<int32_t> keys = Lengths(check, "kv_lens", kv_lens);
  const Gpu gpu{gpu_name, static_cast<int>(arch / 10), static_cast<int>(arch % 10),
                static_cast<int>(num_sm)};
  const ChoiceShape shape{SlotOf(check, slot),
                          num_qo_heads,
                          num_kv_heads,
                          head_dim_qk,
                          head_dim_vo,
                          causal,
                          window_left,
                          static_cast<int64_t>(rows.size()),
                          std::accumulate(rows.begin(), rows.end(), int64_t{0}),
                          std::accumulate(keys.begin(), keys.end(), int64_t{0})};
  const Choice choice = ChoiceOf(check, gpu, shape, rows, keys);
  return {{"kernel", String(NameOf(choice.tactic.kernel))},
          {"split_keys", static_cast<int64_t>(choice.tactic.split_keys)},
          {"line", String(LineOf(NameOf(shape.slot), gpu.ToText(), &gpu, shape, choice))},
          {"source", String(choice.source)},
          {"reason", String(choice.reason)},
          {"measured", choice.source == "tuned" || IsMeasured(gpu.major, gpu.minor)}};
}

}  // namespace ops
}  // namespace tvm_flashinfer

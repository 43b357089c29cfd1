#include "attention_plan.h"

#include <sstream>

namespace tvm_flashinfer {
namespace ops {

static_assert(sizeof(PlanHeader) == PlanHeader::kSize * sizeof(int64_t),
              "PlanHeader is a plain list of integers");

tvm::ffi::Array<int64_t> MakePlan(const PlanHeader& header, const std::vector<int64_t>& kernel) {
  const int64_t* first = reinterpret_cast<const int64_t*>(&header);
  std::vector<int64_t> values(first, first + PlanHeader::kSize);
  values.insert(values.end(), kernel.begin(), kernel.end());
  return tvm::ffi::Array<int64_t>(values.begin(), values.end());
}

PlanReader::PlanReader(const Checker& check, const tvm::ffi::Array<int64_t>& plan,
                       int64_t expected_kind)
    : check_(check) {
  const char* maker = expected_kind == kPrefillHeader  ? "flashinfer.batch_prefill_plan"
                      : expected_kind == kDecodeHeader ? "flashinfer.batch_decode_plan"
                                                       : "flashinfer.batch_mla_plan";
  const int64_t size = static_cast<int64_t>(plan.size());
  if (size < PlanHeader::kSize || plan[0] != expected_kind) {
    check.FailValue(std::string("`plan` was not made by ") + maker);
  }
  int64_t* field = reinterpret_cast<int64_t*>(&header_);
  for (int64_t i = 0; i < PlanHeader::kSize; ++i) field[i] = plan[i];
  for (int64_t i = PlanHeader::kSize; i < size; ++i) kernel_.push_back(plan[i]);
  // A plan is a list of integers in the user's hands; what kernels index with must be sound.
  const auto in_range = [](int64_t value, int64_t low) {
    return value >= low && value <= INT32_MAX;
  };
  if (!in_range(header_.batch_size, 0) || header_.batch_size == INT32_MAX ||
      !in_range(header_.num_qo_heads, 1) || !in_range(header_.num_kv_heads, 1) ||
      !in_range(header_.head_dim_qk, 1) || !in_range(header_.head_dim_vo, 1) ||
      !in_range(header_.page_size, 1) || !in_range(header_.window_left, -1) ||
      !in_range(header_.num_kv_entries, 0) ||
      (expected_kind == kDecodeHeader && header_.num_rows != header_.batch_size)) {
    FailChanged();
  }
}

void PlanReader::FailChanged() const {
  check_.FailValue("`plan` was changed after it was made; pass it on as the plan function gave it");
}

void PlanReader::Require(const char* name, int64_t planned, int64_t got) const {
  if (planned == got) return;
  std::ostringstream message;
  message << "`plan` was made for " << name << " " << planned << ", this run has " << got
          << "; make a plan for this batch";
  check_.FailValue(message.str());
}

void PlanReader::RequireEntries(const char* name, int64_t got) const {
  if (got >= header_.num_kv_entries) return;
  check_.FailValue(Text("`", name, "` has ", got, ", `plan` was made for ", header_.num_kv_entries,
                        "; pass what the plan counted"));
}

void PlanReader::RequireBytes(const char* name, int64_t planned,
                              const TensorView& workspace) const {
  if (workspace.numel() >= planned) return;
  std::ostringstream message;
  message << "`" << name << "` has " << workspace.numel() << " bytes, the one that `plan` was made "
          << "with had " << planned << "; pass the same workspaces to the plan and to the run";
  check_.FailValue(message.str());
}

void PlanReader::RequireDevice(DLDevice device) const {
  const DLDevice planned{static_cast<DLDeviceType>(header_.device_type),
                         static_cast<int32_t>(header_.device_id)};
  if (IsCPU(planned) == IsCPU(device) && (IsCPU(device) || planned.device_id == device.device_id)) {
    return;
  }
  check_.FailValue("`plan` was made for " + DeviceText(planned) + ", this run is on " +
                   DeviceText(device) + "; make the plan with workspaces on that device");
}

}  // namespace ops
}  // namespace tvm_flashinfer

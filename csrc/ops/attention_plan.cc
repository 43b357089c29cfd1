#include "attention_plan.h"

#include <sstream>

namespace tvm_flashinfer {
namespace ops {

static_assert(sizeof(PlanHeader) == PlanHeader::kSize * sizeof(int64_t),
              "PlanHeader is a plain list of integers");

namespace {

/*! \brief A hash of the values of a plan. It finds what was changed by mistake, not forgeries. */
int64_t SealOf(PlanHeader header, const std::vector<int64_t>& kernel) {
  uint64_t hash = kernel.size();
  const auto add = [&hash](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x9e3779b97f4a7c15;
    hash ^= hash >> 32;
  };
  header.seal = 0;
  const int64_t* fields = reinterpret_cast<const int64_t*>(&header);
  for (int64_t i = 0; i < PlanHeader::kSize; ++i) add(fields[i]);
  for (int64_t value : kernel) add(value);
  return static_cast<int64_t>(hash);
}

}  // namespace

tvm::ffi::Array<int64_t> MakePlan(PlanHeader header, const std::vector<int64_t>& kernel) {
  header.seal = SealOf(header, kernel);
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
  // Kernels index with these numbers, which are a list in the user's hands.
  if (SealOf(header_, kernel_) != header_.seal) {
    check.FailValue(
        "`plan` was changed after it was made; pass it on as the plan function gave it");
  }
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

void PlanReader::RequireWorkspaces(const TensorView& float_workspace,
                                   const TensorView& int_workspace) const {
  RequireBytes("float_workspace", header_.float_workspace_bytes, float_workspace);
  RequireBytes("int_workspace", header_.int_workspace_bytes, int_workspace);
  if (AddressOf(int_workspace) == header_.int_workspace) return;
  check_.FailValue(
      "`int_workspace` is another tensor than the one that `plan` was made with, which holds what "
      "was planned; pass the same workspaces to the plan and to the run");
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

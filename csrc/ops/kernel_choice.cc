#include "kernel_choice.h"

#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <set>

#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

struct Capability {
  int major;
  int minor;
};

// What benchmarks/results has figures of. Elsewhere the rules are carried over.
constexpr Capability kMeasured[] = {{9, 0}};

constexpr const char* kSlotNames[] = {"decode_paged", "prefill_paged", "prefill_ragged", "mla"};
constexpr const char* kKernelNames[] = {"cuda_core", "fa2",  "fa3",
                                        "fa3_copy",  "sm90", "batch_attention"};

/*! \brief "heads 32/8, head_dim 128, batch <= 64, rows <= 1, keys <= 4096". */
std::string ClassText(const ChoiceShape& shape) {
  const auto up_to = [](int bucket) { return int64_t{1} << bucket; };
  std::string text =
      Text("heads ", shape.num_qo_heads, "/", shape.num_kv_heads, ", head_dim ", shape.head_dim_qk);
  if (shape.head_dim_vo != shape.head_dim_qk) text += Text("/", shape.head_dim_vo);
  if (shape.causal) text += ", causal";
  if (shape.window_left >= 0) text += ", with a window";
  text += Text(", batch <= ", up_to(Bucket(shape.batch_size)),
               ", rows <= ", up_to(BucketOfMean(shape.num_rows, shape.batch_size)));
  // A schedule that is made on the device leaves the host without the lengths.
  if (shape.num_keys >= 0) {
    text += Text(", keys <= ", up_to(BucketOfMean(shape.num_keys, shape.batch_size)));
  }
  return text;
}

}  // namespace

const char* NameOf(PlannedSlot slot) { return kSlotNames[static_cast<int>(slot)]; }
const char* NameOf(Kernel kernel) { return kKernelNames[static_cast<int>(kernel)]; }

bool Serves(Kernel kernel, PlannedSlot slot) {
  switch (slot) {
    case PlannedSlot::kDecodePaged:
      return kernel == Kernel::kCudaCore || kernel == Kernel::kFA2 ||
             kernel == Kernel::kBatchAttention;
    case PlannedSlot::kPrefillPaged:
      if (kernel == Kernel::kFA3Copy) return true;
      [[fallthrough]];
    case PlannedSlot::kPrefillRagged:
      return kernel == Kernel::kFA2 || kernel == Kernel::kFA3 || kernel == Kernel::kBatchAttention;
    case PlannedSlot::kMLA:
      return kernel == Kernel::kFA2 || kernel == Kernel::kSM90;
  }
  return false;
}

int Bucket(int64_t value) {
  return value <= 1 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(value - 1));
}

int BucketOfMean(int64_t total, int64_t batch_size) {
  return batch_size <= 0 ? 0 : Bucket((total + batch_size - 1) / batch_size);
}

std::string ReasonOfDecodeRule(int64_t group) {
  if (DecodeRule(group) == Kernel::kFA2) {
    return Text(group, " query heads per KV head fill the rows of tensor-core tiles");
  }
  return Text("tensor-core tiles pay from 4 query heads per KV head on, here ",
              group == 1 ? "there is " : "there are ", group);
}

bool PrintsChoices(const Checker& check) {
  static const bool prints = [&check] {
    const char* value = std::getenv("TVM_FLASHINFER_DEBUG");
    const std::string wanted = value == nullptr ? "" : value;
    if (!wanted.empty() && wanted != "0" && wanted != "kernels") {
      check.FailValue("TVM_FLASHINFER_DEBUG is \"" + wanted +
                      "\", expected kernels, which prints the choices of kernels, or leave it "
                      "unset");
    }
    return wanted == "kernels";
  }();
  return prints;
}

std::string LineOf(const char* slot, const std::string& where, const Gpu* gpu,
                   const ChoiceShape& shape, const Choice& choice) {
  std::string line = Text(slot, " on ", where, ": ", NameOf(choice.tactic.kernel));
  if (choice.tactic.split_keys > 0) {
    line += Text(" in chunks of ", choice.tactic.split_keys, " keys");
  }
  line += Text(", ", choice.source, ": ", choice.reason, "; ", ClassText(shape));
  if (choice.source == "default" && gpu != nullptr && !IsMeasured(gpu->major, gpu->minor)) {
    line += Text("; sm_", gpu->major, gpu->minor, " was never measured, the rule is that of sm_",
                 kMeasured[0].major, kMeasured[0].minor);
  }
  return line;
}

void PrintChoice(const char* slot, DLDevice device, const ChoiceShape& shape,
                 const Choice& choice) {
  static std::mutex mutex;
  static std::set<std::string>* printed = new std::set<std::string>();
  const Gpu* gpu = FindGpu(device.device_id);
  std::string where = DeviceText(device);
  if (gpu != nullptr) where += ", " + gpu->ToText();
  const std::string line = LineOf(slot, where, gpu, shape, choice);
  std::lock_guard<std::mutex> lock(mutex);
  if (printed->insert(line).second) std::fprintf(stderr, "tvm_flashinfer: %s\n", line.c_str());
}

bool IsMeasured(int major, int minor) {
  for (const Capability& known : kMeasured) {
    if (known.major == major && known.minor == minor) return true;
  }
  return false;
}

Array<String> MeasuredArchs() {
  Array<String> archs;
  for (const Capability& known : kMeasured) archs.push_back(Text(known.major, known.minor));
  return archs;
}

}  // namespace ops
}  // namespace tvm_flashinfer

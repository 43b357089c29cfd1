#include "prefill_kernel.h"

#include <cstdlib>
#include <map>
#include <tuple>

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

PrefillSM90 AllowPrefillSM90(const Checker& check, DLDevice device, int64_t head_dim_qk,
                             int64_t head_dim_vo, int64_t page_size) {
  const char* value = std::getenv("TVM_FLASHINFER_PREFILL_KERNEL");
  const std::string wanted = value == nullptr ? "" : value;
  if (wanted == "fa2") return PrefillSM90::kNever;
  if (!wanted.empty() && wanted != "fa3") {
    check.FailValue("TVM_FLASHINFER_PREFILL_KERNEL is \"" + wanted +
                    "\", expected fa2 or fa3, or leave it unset");
  }
  if (!RunsOnArch(check, device, 9, 0)) {
    if (wanted.empty()) return PrefillSM90::kNever;
    check.FailValue("TVM_FLASHINFER_PREFILL_KERNEL is \"fa3\", and " + DeviceText(device) +
                    " is no Hopper GPU (compute capability 9.0); fa2 is the kernel for it");
  }
  if (wanted == "fa3") return PrefillSM90::kAlways;
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
  return found->second ? PrefillSM90::kWhereFaster : PrefillSM90::kNever;
}

bool HasRowsBeforeKeys(const int32_t* qo_indptr, const int32_t* kv_len, int64_t batch_size) {
  for (int64_t b = 0; b < batch_size; ++b) {
    if (kv_len[b] > 0 && qo_indptr[b + 1] - qo_indptr[b] > kv_len[b]) return true;
  }
  return false;
}

void RunPrefill(const Checker& check, const PlanReader& reader, const kernels::AttentionArgs& args,
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
  const Kinds kinds = KindsOf(paged == nullptr ? PrefillKeys::kRagged : PrefillKeys::kPaged);
  unit.kind = is_fa3 ? kinds.fa3 : kinds.fa2;
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

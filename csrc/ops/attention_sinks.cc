// Attention sinks, applied to finished states: what merges parts of attention applies them once,
// after the last merge.
#include "attention_sinks.h"

#include "../kernels/cpu/kernels.h"
#include "cuda_kernels.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

void RunApplySinks(const Checker& check, const kernels::ApplySinksArgs& args, DLDevice device) {
  if (IsCPU(device)) {
    kernels::cpu::ApplySinks(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::ApplySinksFn>(check, "apply_sinks", device);
  Launch(check, run, args, CurrentStream(device));
}

void ApplyAttentionSinks(TensorView o, TensorView lse, TensorView sinks) {
  const Checker check("apply_attention_sinks");
  const DLDevice device = check.Device("o", o);
  const kernels::DType dtype = check.FloatDType("o", o);
  check.Rank("o", o, 3, "(n, num_heads, head_dim)");
  const int64_t n = o.size(0), heads = o.size(1), dim = o.size(2);
  check.Sizes32("o", o);
  check.Contiguous("o", o);
  check.Data("lse", lse, device, kFloat32, {n, heads}, "(n, num_heads)");
  check.Data("sinks", sinks, device, kFloat32, {heads}, "(num_heads,)");
  check.NoOverlap("o", o, {{"lse", lse}, {"sinks", sinks}});
  check.NoOverlap("lse", lse, "sinks", sinks);
  RunApplySinks(check,
                {dtype, n, static_cast<int32_t>(heads), static_cast<int32_t>(dim), DataOf(o),
                 DataOf<float>(lse), DataOf<float>(sinks)},
                device);
}

}  // namespace ops
}  // namespace tvm_flashinfer

// Split of a fused QKV tensor, with rotary embedding of queries and keys.
#include <sstream>
#include <utility>

#include "../kernels/cpu/kernels.h"
#include "cuda_kernels.h"
#include "ops.h"
#include "rope_frequencies.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

void Run(const Checker& check, const RopeFrequencies& frequencies, const TensorView& qkv,
         const TensorView& position_map, const TensorView& q, const TensorView& k,
         const TensorView& v, bool apply_rope) {
  const DLDevice device = check.Device("qkv", qkv);
  kernels::SplitRotaryArgs args{};
  args.dtype = check.FloatDType("qkv", qkv);
  check.Rank("qkv", qkv, 3, "(n, num_qo_heads + 2 * num_kv_heads, head_dim)");
  check.UnitLastStride("qkv", qkv);
  check.Rank("q", q, 3, "(n, num_qo_heads, head_dim)");
  check.Rank("k", k, 3, "(n, num_kv_heads, head_dim)");
  const int64_t n = qkv.size(0), dim = qkv.size(2), qo_heads = q.size(1), kv_heads = k.size(1);
  if (qkv.size(1) != qo_heads + 2 * kv_heads) {
    std::ostringstream message;
    message << "`qkv` has " << qkv.size(1) << " heads, expected " << qo_heads + 2 * kv_heads
            << ": those of q, k and v, " << qo_heads << " + 2 * " << kv_heads;
    check.FailValue(message.str());
  }
  check.IndexVector("position_map", position_map, n, "(n,)");
  check.OnDevice("position_map", position_map, device);
  check.Data("q", q, device, qkv.dtype(), {n, qo_heads, dim}, "(n, num_qo_heads, head_dim)");
  check.Data("k", k, device, qkv.dtype(), {n, kv_heads, dim}, "(n, num_kv_heads, head_dim)");
  check.Data("v", v, device, qkv.dtype(), {n, kv_heads, dim}, "(n, num_kv_heads, head_dim)");
  const int64_t rotary_dim = 2 * static_cast<int64_t>(frequencies.inv_freq.size());
  if (rotary_dim > dim) {
    std::ostringstream message;
    message << "`rotary_dim` is " << rotary_dim << ", head_dim is " << dim
            << "; it can be head_dim at most";
    check.FailValue(message.str());
  }
  args.num_rows = n;
  args.num_qo_heads = static_cast<int32_t>(qo_heads);
  args.num_kv_heads = static_cast<int32_t>(kv_heads);
  args.head_dim = static_cast<int32_t>(dim);
  args.rotary_dim = static_cast<int32_t>(rotary_dim);
  args.interleaved = frequencies.interleaved;
  args.apply_rope = apply_rope;
  args.magnitude = 1.f;
  args.inv_freq = frequencies.inv_freq.data();
  args.qkv = DataOf(qkv);
  args.qkv_stride_row = StrideOf(qkv, 0);
  args.qkv_stride_head = StrideOf(qkv, 1);
  args.position_map = DataOf<int32_t>(position_map);
  args.q = DataOf(q);
  args.k = DataOf(k);
  args.v = DataOf(v);
  if (IsCPU(device)) {
    kernels::cpu::SplitQKVRotary(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::SplitRotaryFn>(check, "split_qkv_rotary", device);
  Launch(check, run, args, CurrentStream(device));
}

}  // namespace

void SplitQKVRotary(TensorView qkv, TensorView position_map, TensorView q, TensorView k,
                    TensorView v, int64_t apply_rope, double rope_theta, double rope_scale,
                    int64_t rotary_dim, String rope_scaling) {
  const Checker check("split_qkv_rotary");
  Run(check, MakeRopeFrequencies(check, rope_theta, rope_scale, rotary_dim, rope_scaling), qkv,
      position_map, q, k, v, apply_rope != 0);
}

Function BindSplitQKVRotary(double rope_theta, double rope_scale, int64_t rotary_dim,
                            String rope_scaling, int64_t support_sliding_window) {
  const Checker check("bind_split_qkv_rotary");
  if (support_sliding_window != 0) {
    // TVM then rotates inside attention, and does not tell functions of kind "flashinfer" so.
    check.FailValue("this KV cache does not serve sliding windows (support_sliding_window is " +
                    std::to_string(support_sliding_window) +
                    "); create it with support_sliding_window 0, or use create_tir_paged_kv_cache");
  }
  auto frequencies = MakeRopeFrequencies(check, rope_theta, rope_scale, rotary_dim, rope_scaling);
  return Function::FromTyped(
      [frequencies = std::move(frequencies)](TensorView qkv, TensorView position_map, TensorView q,
                                             TensorView k, TensorView v, int64_t apply_rope) {
        Run(Checker("split_qkv_rotary"), frequencies, qkv, position_map, q, k, v, apply_rope != 0);
      });
}

}  // namespace ops
}  // namespace tvm_flashinfer

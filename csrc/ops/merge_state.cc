// Merge of attention states over disjoint keys.
#include "../kernels/cpu/kernels.h"
#include "cache_scope.h"
#include "cuda_kernels.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

void Merge(const Checker& check, const kernels::MergeStateArgs& args, DLDevice device) {
  if (IsCPU(device)) {
    kernels::cpu::MergeState(args);
    return;
  }
  auto run = RequireCommon<kernels::cuda::MergeStateFn>(check, "merge_state", device);
  Launch(check, run, args, CurrentStream(device));
}

/*! \brief Elements are merged one by one: an output may be one of the states, but not shifted. */
void CheckMerged(const Checker& check, const char* name, const TensorView& merged,
                 std::initializer_list<std::pair<const char*, TensorView>> states) {
  for (const auto& [state_name, state] : states) {
    if (DataOf(merged) != DataOf(state)) check.NoOverlap(name, merged, state_name, state);
  }
}

}  // namespace

void MergeState(TensorView v_a, TensorView s_a, TensorView v_b, TensorView s_b, TensorView v_merged,
                TensorView s_merged) {
  const Checker check("merge_state");
  const DLDevice device = check.Device("v_a", v_a);
  const kernels::DType dtype = check.FloatDType("v_a", v_a);
  check.Rank("v_a", v_a, 3, "(n, num_heads, head_dim)");
  const int64_t n = v_a.size(0), heads = v_a.size(1), dim = v_a.size(2);
  const char* values = "(n, num_heads, head_dim)";
  const char* logs = "(n, num_heads)";
  check.Sizes32("v_a", v_a);
  check.Contiguous("v_a", v_a);
  check.Data("s_a", s_a, device, kFloat32, {n, heads}, logs);
  check.Data("v_b", v_b, device, v_a.dtype(), {n, heads, dim}, values);
  check.Data("s_b", s_b, device, kFloat32, {n, heads}, logs);
  check.Data("v_merged", v_merged, device, v_a.dtype(), {n, heads, dim}, values);
  check.Data("s_merged", s_merged, device, kFloat32, {n, heads}, logs);
  CheckMerged(check, "v_merged", v_merged, {{"v_a", v_a}, {"v_b", v_b}});
  CheckMerged(check, "s_merged", s_merged, {{"s_a", s_a}, {"s_b", s_b}});
  check.NoOverlap("v_merged", v_merged, {{"s_a", s_a}, {"s_b", s_b}, {"s_merged", s_merged}});
  check.NoOverlap("s_merged", s_merged, {{"v_a", v_a}, {"v_b", v_b}});
  RecordState(v_merged, s_merged);
  Merge(check,
        {dtype, n, static_cast<int32_t>(heads), static_cast<int32_t>(dim), DataOf(v_a),
         DataOf<float>(s_a), DataOf(v_b), DataOf<float>(s_b), DataOf(v_merged),
         DataOf<float>(s_merged)},
        device);
}

void MergeStateInPlace(TensorView v, TensorView s, TensorView v_other, TensorView s_other) {
  const Checker check("merge_state_in_place");
  const DLDevice device = check.Device("v", v);
  const kernels::DType dtype = check.FloatDType("v", v);
  check.Rank("v", v, 3, "(n, num_heads, head_dim)");
  const int64_t n = v.size(0), heads = v.size(1), dim = v.size(2);
  check.Sizes32("v", v);
  check.Contiguous("v", v);
  check.Data("s", s, device, kFloat32, {n, heads}, "(n, num_heads)");
  check.Data("v_other", v_other, device, v.dtype(), {n, heads, dim}, "(n, num_heads, head_dim)");
  check.Data("s_other", s_other, device, kFloat32, {n, heads}, "(n, num_heads)");
  CheckMerged(check, "v", v, {{"v_other", v_other}});
  CheckMerged(check, "s", s, {{"s_other", s_other}});
  check.NoOverlap("v", v, {{"s", s}, {"s_other", s_other}});
  check.NoOverlap("s", s, "v_other", v_other);
  RecordState(v, s);
  Merge(check,
        {dtype, n, static_cast<int32_t>(heads), static_cast<int32_t>(dim), DataOf(v),
         DataOf<float>(s), DataOf(v_other), DataOf<float>(s_other), DataOf(v), DataOf<float>(s)},
        device);
}

void MergeStates(TensorView v, TensorView s, TensorView v_merged, TensorView s_merged) {
  const Checker check("merge_states");
  const DLDevice device = check.Device("v", v);
  const kernels::DType dtype = check.FloatDType("v", v);
  const char* values = "(n, num_heads, head_dim)";
  check.Rank("v", v, 4, "(n, num_states, num_heads, head_dim)");
  const int64_t n = v.size(0), states = v.size(1), heads = v.size(2), dim = v.size(3);
  check.Sizes32("v", v);
  check.Contiguous("v", v);
  check.Data("s", s, device, kFloat32, {n, states, heads}, "(n, num_states, num_heads)");
  check.Data("v_merged", v_merged, device, v.dtype(), {n, heads, dim}, values);
  check.Data("s_merged", s_merged, device, kFloat32, {n, heads}, "(n, num_heads)");
  check.NoOverlap("v_merged", v_merged, {{"v", v}, {"s", s}, {"s_merged", s_merged}});
  check.NoOverlap("s_merged", s_merged, {{"v", v}, {"s", s}});
  const kernels::MergeStatesArgs args{dtype,
                                      n,
                                      states,
                                      static_cast<int32_t>(heads),
                                      static_cast<int32_t>(dim),
                                      DataOf(v),
                                      DataOf<float>(s),
                                      DataOf(v_merged),
                                      DataOf<float>(s_merged)};
  if (IsCPU(device)) {
    kernels::cpu::MergeManyStates(args);
    return;
  }
  LaunchOf<kernels::cuda::MergeStatesFn>(check, kCascadeUnit, "merge_many_states", device, args);
}

}  // namespace ops
}  // namespace tvm_flashinfer

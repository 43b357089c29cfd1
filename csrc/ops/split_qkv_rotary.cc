// Split of a fused QKV tensor, with rotary embedding of queries and keys.
#include <cstring>
#include <memory>
#include <mutex>
#include <sstream>
#include <utility>

#include "../kernels/cpu/kernels.h"
#include "cuda_kernels.h"
#include "json_settings.h"
#include "ops.h"
#include "rope_frequencies.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

using tvm::ffi::AnyView;

void Run(const Checker& check, const RopeFrequencies& frequencies, const TensorView& qkv,
         const TensorView& position_map, const TensorView& q, const TensorView& k,
         const TensorView& v, bool apply_rope) {
  const DLDevice device = check.Device("qkv", qkv);
  kernels::SplitRotaryArgs args{};
  args.dtype = check.FloatDType("qkv", qkv);
  check.Rank("qkv", qkv, 3, "(n, num_qo_heads + 2 * num_kv_heads, head_dim)");
  check.Sizes32("qkv", qkv);
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
  check.NoOverlap("q", q, {{"qkv", qkv}, {"position_map", position_map}, {"k", k}, {"v", v}});
  check.NoOverlap("k", k, {{"qkv", qkv}, {"position_map", position_map}, {"v", v}});
  check.NoOverlap("v", v, {{"qkv", qkv}, {"position_map", position_map}});
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
  args.magnitude = frequencies.magnitude;
  args.inv_freq = frequencies.inv_freq.data();
  args.inv_freq_second = frequencies.second();
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

bool ApplyRope(const Checker& check, int64_t apply_rope) {
  check.Flag("apply_rope", apply_rope);
  return apply_rope == 1;
}

/*! \brief Frequencies of longrope: TVM's cache passes their factors in every call. */
class LongropeFrequencies {
 public:
  LongropeFrequencies(double theta, double scale, int64_t rotary_dim, std::string rope_scaling,
                      int64_t original_length)
      : theta_(theta),
        scale_(scale),
        rotary_dim_(rotary_dim),
        rope_scaling_(std::move(rope_scaling)),
        original_length_(original_length) {}

  /*! \brief For a call with num_rows rows; its count, not its positions, is what TVM goes by. */
  RopeFrequencies Get(const Checker& check, const TensorView& ext_factors, int64_t num_rows) {
    check.Data("ext_factors", ext_factors, ext_factors.device(), kFloat32, {rotary_dim_},
               "(rotary_dim,): the factors of long inputs, then those of short ones");
    const float* factors =
        IsCPU(ext_factors.device()) ? DataOf<float>(ext_factors) : HostCopy(check, ext_factors);
    if (num_rows <= original_length_) factors += rotary_dim_ / 2;
    return MakeRopeFrequencies(check, theta_, scale_, rotary_dim_, rope_scaling_, factors);
  }

 private:
  /*! \brief Read from the device once, which waits for it: factors belong to the model. */
  const float* HostCopy(const Checker& check, const TensorView& ext_factors) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (copied_from_ != DataOf(ext_factors)) {
      copy_.resize(rotary_dim_);
      const std::vector<int32_t> bits = ReadBack(check, ext_factors);
      std::memcpy(copy_.data(), bits.data(), bits.size() * sizeof(float));
      copied_from_ = DataOf(ext_factors);
    }
    return copy_.data();
  }

  double theta_;
  double scale_;
  int64_t rotary_dim_;
  std::string rope_scaling_;
  int64_t original_length_;
  std::mutex mutex_;
  void* copied_from_ = nullptr;
  std::vector<float> copy_;
};

Function BindLongrope(const Checker& check, double rope_theta, double rope_scale,
                      int64_t rotary_dim, const std::string& rope_scaling) {
  // What is wrong with the settings shows now.
  const std::vector<float> ones(kernels::kMaxRotaryPairs, 1.f);
  MakeRopeFrequencies(check, rope_theta, rope_scale, rotary_dim, rope_scaling, ones.data());
  const int64_t original_length = JsonSettings(check, "rope_scaling", rope_scaling, "{}")
                                      .PositiveInteger("original_max_position_embeddings", 0);
  auto frequencies = std::make_shared<LongropeFrequencies>(rope_theta, rope_scale, rotary_dim,
                                                           rope_scaling, original_length);
  return Named("split_qkv_rotary", [frequencies](TensorView qkv, TensorView position_map,
                                                 TensorView q, TensorView k, TensorView v,
                                                 AnyView ext_factors) {
    const Checker check("split_qkv_rotary");
    const auto factors = ext_factors.try_cast<TensorView>();
    if (!factors.has_value()) {
      const auto apply_rope = ext_factors.try_cast<int64_t>();
      if (apply_rope != 0) {
        check.FailType("the sixth argument is a " + ext_factors.GetTypeKey() +
                       ", expected the ext_factors tensor of longrope, or 0 to rotate nothing");
      }
      Run(check, RopeFrequencies{{}, {}, false, 1.f}, qkv, position_map, q, k, v, false);
      return;
    }
    check.OnDevice("ext_factors", *factors, check.Device("qkv", qkv));
    check.Rank("qkv", qkv, 3, "(n, num_qo_heads + 2 * num_kv_heads, head_dim)");
    Run(check, frequencies->Get(check, *factors, qkv.size(0)), qkv, position_map, q, k, v, true);
  });
}

}  // namespace

void SplitQKVRotary(TensorView qkv, TensorView position_map, TensorView q, TensorView k,
                    TensorView v, int64_t apply_rope, double rope_theta, double rope_scale,
                    int64_t rotary_dim, String rope_scaling) {
  const Checker check("split_qkv_rotary");
  Run(check, MakeRopeFrequencies(check, rope_theta, rope_scale, rotary_dim, rope_scaling), qkv,
      position_map, q, k, v, ApplyRope(check, apply_rope));
}

Function BindSplitQKVRotary(double rope_theta, double rope_scale, int64_t rotary_dim,
                            String rope_scaling) {
  const Checker check("bind_split_qkv_rotary");
  if (NeedsExtFactors(check, rope_scaling)) {
    return BindLongrope(check, rope_theta, rope_scale, rotary_dim, rope_scaling);
  }
  auto frequencies = MakeRopeFrequencies(check, rope_theta, rope_scale, rotary_dim, rope_scaling);
  return Named("split_qkv_rotary", [frequencies = std::move(frequencies)](
                                       TensorView qkv, TensorView position_map, TensorView q,
                                       TensorView k, TensorView v, AnyView apply_rope) {
    const Checker check("split_qkv_rotary");
    const auto apply = apply_rope.try_cast<int64_t>();
    if (!apply.has_value()) {
      check.FailType("the sixth argument, apply_rope, is a " + apply_rope.GetTypeKey() +
                     ", expected an integer: only rope_type \"longrope\" takes factors");
    }
    Run(check, frequencies, qkv, position_map, q, k, v, ApplyRope(check, *apply));
  });
}

}  // namespace ops
}  // namespace tvm_flashinfer

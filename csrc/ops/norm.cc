// Norms and gated activations.
#include "../kernels/cpu/kernels.h"
#include "cuda_kernels.h"
#include "head_rows.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief What a norm has besides its rows. */
struct Scale {
  TensorView weight;
  float bias;  // added to the weight: 1 in Gemma's models
  double eps;
};

kernels::NormArgs MakeNorm(const Checker& check, kernels::DType dtype, const HeadTensor& x,
                           const HeadTensor& out, const Scale& scale) {
  check.Data("weight", scale.weight, x.tensor.device(), x.tensor.dtype(), {x.dim}, "(dim,)");
  check.NoOverlap(out.name, out.tensor, "weight", scale.weight);
  check.Finite("eps", scale.eps);
  if (scale.eps < 0) check.FailValue(Text("`eps` is ", scale.eps, ", expected 0 or more"));
  kernels::NormArgs args{};
  args.dtype = dtype;
  args.num_rows = x.num_rows;
  args.num_heads = static_cast<int32_t>(x.num_heads);
  args.dim = static_cast<int32_t>(x.dim);
  args.x = x.rows;
  args.weight = DataOf(scale.weight);
  args.weight_bias = scale.bias;
  args.eps = static_cast<float>(scale.eps);
  args.out = out.rows;
  return args;
}

void RunNorm(const Checker& check, const kernels::NormArgs& args, DLDevice device) {
  if (args.dim == 0) return;
  if (IsCPU(device)) {
    kernels::cpu::NormRows(args);
    return;
  }
  LaunchOf<kernels::cuda::NormFn>(check, kNormUnit, "norm_rows", device, args);
}

void Norm(const char* op, const TensorView& x, const Scale& scale, const TensorView& out) {
  const Checker check(op);
  const DLDevice device = check.Device("x", x);
  const kernels::DType dtype = check.FloatDType("x", x);
  const HeadTensor source = ReadHeads(check, "x", x);
  const HeadTensor target = ReadHeadsLike(check, "out", out, source);
  CheckHeadOutput(check, target, {&source}, &source);
  RunNorm(check, MakeNorm(check, dtype, source, target, scale), device);
}

void AddNorm(const char* op, const TensorView& x, const TensorView& residual, const Scale& scale,
             const TensorView& out, const TensorView& sum) {
  const Checker check(op);
  const DLDevice device = check.Device("x", x);
  const kernels::DType dtype = check.FloatDType("x", x);
  const HeadTensor source = ReadHeads(check, "x", x);
  const HeadTensor added = ReadHeadsLike(check, "residual", residual, source);
  const HeadTensor target = ReadHeadsLike(check, "out", out, source);
  const HeadTensor total = ReadHeadsLike(check, "sum", sum, source);
  // The sum is written before the norm, so that it may be the residual, and the norm x.
  CheckHeadOutput(check, target, {&source, &added, &total}, &source);
  CheckHeadOutput(check, total, {&source, &added}, &added);
  kernels::NormArgs args = MakeNorm(check, dtype, source, target, scale);
  check.NoOverlap("sum", sum, "weight", scale.weight);
  args.residual = added.rows;
  args.sum = total.rows;
  RunNorm(check, args, device);
}

void Gate(const char* op, kernels::Activation activation, const TensorView& x,
          const TensorView& out) {
  const Checker check(op);
  const DLDevice device = check.Device("x", x);
  const kernels::DType dtype = check.FloatDType("x", x);
  check.Rank("x", x, 2, "(n, 2 * dim)");
  check.Sizes32("x", x);
  check.UnitLastStride("x", x);
  if (x.size(1) % 2 != 0) {
    check.FailValue(Text("`x` has shape ", ShapeText(x),
                         ", expected an even size of its last dimension: (n, 2 * dim)"));
  }
  const int64_t n = x.size(0), dim = x.size(1) / 2;
  check.Data("out", out, device, x.dtype(), {n, dim}, "(n, dim)");
  check.NoOverlap("out", out, "x", x);
  const kernels::GatedArgs args{dtype,     activation,     n,          static_cast<int32_t>(dim),
                                DataOf(x), StrideOf(x, 0), DataOf(out)};
  if (IsCPU(device)) {
    kernels::cpu::GateRows(args);
    return;
  }
  LaunchOf<kernels::cuda::GateFn>(check, kNormUnit, "gate_rows", device, args);
}

}  // namespace

void RMSNorm(TensorView x, TensorView weight, double eps, TensorView out) {
  Norm("rmsnorm", x, {weight, 0.f, eps}, out);
}

void GemmaRMSNorm(TensorView x, TensorView weight, double eps, TensorView out) {
  Norm("gemma_rmsnorm", x, {weight, 1.f, eps}, out);
}

void FusedAddRMSNorm(TensorView x, TensorView residual, TensorView weight, double eps,
                     TensorView out, TensorView sum) {
  AddNorm("fused_add_rmsnorm", x, residual, {weight, 0.f, eps}, out, sum);
}

void GemmaFusedAddRMSNorm(TensorView x, TensorView residual, TensorView weight, double eps,
                          TensorView out, TensorView sum) {
  AddNorm("gemma_fused_add_rmsnorm", x, residual, {weight, 1.f, eps}, out, sum);
}

void SiluAndMul(TensorView x, TensorView out) {
  Gate("silu_and_mul", kernels::Activation::kSilu, x, out);
}

void GeluAndMul(TensorView x, TensorView out) {
  Gate("gelu_and_mul", kernels::Activation::kGelu, x, out);
}

void GeluTanhAndMul(TensorView x, TensorView out) {
  Gate("gelu_tanh_and_mul", kernels::Activation::kGeluTanh, x, out);
}

}  // namespace ops
}  // namespace tvm_flashinfer

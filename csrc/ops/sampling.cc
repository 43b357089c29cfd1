// Draws of token ids.
#include "../kernels/cpu/kernels.h"
#include "cuda_kernels.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

void CheckRowIndices(const Checker& check, const int32_t* indices, int64_t size, int64_t num_rows) {
  for (int64_t i = 0; i < size; ++i) {
    if (indices[i] >= 0 && indices[i] < num_rows) continue;
    check.FailValue(Text("`sample_indices[", i, "]` is ", indices[i],
                         "; it must be a row of `probs`, from 0 to ", num_rows - 1));
  }
}

}  // namespace

Tensor ParallelSamplingFromProb(TensorView probs, TensorView uniform, TensorView sample_indices,
                                Tensor out_ids) {
  const Checker check("sampling.parallel_sampling_from_prob");
  const DLDevice device = check.Device("probs", probs);
  check.Rank("probs", probs, 2, "(n, vocab_size)");
  const int64_t rows = probs.size(0), vocab = probs.size(1);
  check.Sizes32("probs", probs);
  check.Data("probs", probs, device, kFloat32, {rows, vocab}, "(n, vocab_size)");
  check.Rank("uniform", uniform, 1, "(m)");
  const int64_t samples = uniform.size(0);
  check.Data("uniform", uniform, device, kFloat32, {samples}, "(m)");
  check.Data("sample_indices", sample_indices, device, kInt32, {samples}, "(m)");
  check.Defined("out_ids", out_ids);
  const TensorView ids(out_ids);
  check.Data("out_ids", ids, device, kInt32, {samples}, "(m)");
  const kernels::SampleArgs args{samples,
                                 rows,
                                 static_cast<int32_t>(vocab),
                                 DataOf<float>(probs),
                                 DataOf<float>(uniform),
                                 DataOf<int32_t>(sample_indices),
                                 DataOf<int32_t>(ids)};
  if (IsCPU(device)) {
    CheckRowIndices(check, args.row_indices, samples, rows);
    kernels::cpu::SampleFromProbs(args);
    return out_ids;
  }
  if (CheckDeviceContents()) {
    const auto indices = ReadBack(check, sample_indices);
    CheckRowIndices(check, indices.data(), samples, rows);
  }
  Launch(check, RequireCommon<kernels::cuda::SampleFn>(check, "sample_from_probs", device), args,
         CurrentStream(device));
  return out_ids;
}

}  // namespace ops
}  // namespace tvm_flashinfer

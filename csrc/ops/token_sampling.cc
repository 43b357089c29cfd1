// Filters of tokens, draws of what they leave, softmax with a temperature, verification of drafts.
#include "../kernels/cpu/kernels.h"
#include "cuda_kernels.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

namespace cuda = kernels::cuda;

/*! \brief A matrix of numbers for each token of some rows. */
struct Rows {
  int64_t num_rows;
  int32_t vocab_size;
  const float* data;
};

Rows ReadRows(const Checker& check, const char* name, const TensorView& tensor, DLDevice device) {
  check.Rank(name, tensor, 2, "(n, vocab_size)");
  check.Sizes32(name, tensor);
  check.Data(name, tensor, device, kFloat32, {tensor.size(0), tensor.size(1)}, "(n, vocab_size)");
  return {tensor.size(0), static_cast<int32_t>(tensor.size(1)), DataOf<float>(tensor)};
}

const float* ReadNumbers(const Checker& check, const char* name, const TensorView& tensor,
                         DLDevice device, int64_t size) {
  check.Data(name, tensor, device, kFloat32, {size}, "(n,): one for each row");
  return DataOf<float>(tensor);
}

const int32_t* ReadTopK(const Checker& check, const TensorView& tensor, DLDevice device,
                        int64_t size) {
  check.Data("top_k", tensor, device, kInt32, {size}, "(n,): one for each row");
  return DataOf<int32_t>(tensor);
}

void CheckRowsExist(const Checker& check, const int32_t* rows, int64_t size, int64_t num_rows) {
  for (int64_t i = 0; i < size; ++i) {
    if (rows[i] >= 0 && rows[i] < num_rows) continue;
    check.FailValue(Text("`sample_indices[", i, "]` is ", rows[i],
                         "; it must be a row of the probabilities, from 0 to ", num_rows - 1));
  }
}

using NamedTensor = std::pair<const char*, TensorView>;

kernels::Draws ReadDraws(const Checker& check, const TensorView& uniform,
                         const TensorView& sample_indices, const TensorView& out_ids,
                         DLDevice device, int64_t num_rows,
                         std::initializer_list<NamedTensor> inputs) {
  check.Rank("uniform", uniform, 1, "(m,)");
  const int64_t m = uniform.size(0);
  check.Data("uniform", uniform, device, kFloat32, {m}, "(m,)");
  check.Data("sample_indices", sample_indices, device, kInt32, {m}, "(m,)");
  check.Data("out_ids", out_ids, device, kInt32, {m}, "(m,)");
  check.NoOverlap("out_ids", out_ids, {{"uniform", uniform}, {"sample_indices", sample_indices}});
  check.NoOverlap("out_ids", out_ids, inputs);
  if (IsCPU(device)) {
    CheckRowsExist(check, DataOf<int32_t>(sample_indices), m, num_rows);
  } else if (CheckDeviceContents()) {
    CheckRowsExist(check, ReadBack(check, sample_indices).data(), m, num_rows);
  }
  return {m, DataOf<float>(uniform), DataOf<int32_t>(sample_indices), DataOf<int32_t>(out_ids)};
}

/*! \brief Which of the filters a function has. */
struct Filters {
  Optional<TensorView> top_k;
  Optional<TensorView> top_p;
  Optional<TensorView> min_p;
  bool joint = false;
};

kernels::TokenFilter ReadFilters(const Checker& check, const Filters& filters, DLDevice device,
                                 int64_t num_rows, const char* output_name,
                                 const TensorView& output) {
  kernels::TokenFilter filter{nullptr, nullptr, nullptr, filters.joint};
  if (filters.top_k.has_value()) {
    filter.top_k = ReadTopK(check, *filters.top_k, device, num_rows);
    check.NoOverlap(output_name, output, "top_k", *filters.top_k);
  }
  if (filters.top_p.has_value()) {
    filter.top_p = ReadNumbers(check, "top_p", *filters.top_p, device, num_rows);
    check.NoOverlap(output_name, output, "top_p", *filters.top_p);
  }
  if (filters.min_p.has_value()) {
    filter.min_p = ReadNumbers(check, "min_p", *filters.min_p, device, num_rows);
    check.NoOverlap(output_name, output, "min_p", *filters.min_p);
  }
  return filter;
}

void Draw(const Checker& check, const TensorView& probs, const TensorView& uniform,
          const TensorView& sample_indices, const Filters& filters, const TensorView& out_ids) {
  const DLDevice device = check.Device("probs", probs);
  const Rows rows = ReadRows(check, "probs", probs, device);
  const kernels::TokenFilter filter =
      ReadFilters(check, filters, device, rows.num_rows, "out_ids", out_ids);
  const kernels::FilterDrawArgs args{rows.num_rows, rows.vocab_size, rows.data, filter,
                                     ReadDraws(check, uniform, sample_indices, out_ids, device,
                                               rows.num_rows, {{"probs", probs}})};
  if (IsCPU(device)) {
    kernels::cpu::DrawFiltered(args);
    return;
  }
  LaunchOf<cuda::FilterDrawFn>(check, kSamplingUnit, "draw_filtered", device, args);
}

void Renorm(const Checker& check, const TensorView& probs, const Filters& filters,
            const TensorView& out) {
  const DLDevice device = check.Device("probs", probs);
  const Rows rows = ReadRows(check, "probs", probs, device);
  check.Data("out", out, device, kFloat32, {rows.num_rows, rows.vocab_size}, "(n, vocab_size)");
  check.NoOverlap("out", out, "probs", probs);
  const kernels::TokenFilter filter =
      ReadFilters(check, filters, device, rows.num_rows, "out", out);
  const kernels::FilterRenormArgs args{rows.num_rows, rows.vocab_size, rows.data, filter,
                                       DataOf<float>(out)};
  if (rows.vocab_size == 0) return;
  if (IsCPU(device)) {
    kernels::cpu::RenormFiltered(args);
    return;
  }
  LaunchOf<cuda::FilterRenormFn>(check, kSamplingUnit, "renorm_filtered", device, args);
}

kernels::SortedArgs ReadSorted(const Checker& check, const TensorView& sorted_probs,
                               const TensorView& top_p, const TensorView& top_k, DLDevice device) {
  const Rows rows = ReadRows(check, "sorted_probs", sorted_probs, device);
  if (rows.vocab_size == 0 && rows.num_rows > 0) {
    check.FailValue(
        Text("`sorted_probs` has shape ", ShapeText(sorted_probs), ", expected a token at least"));
  }
  kernels::SortedArgs args{};
  args.num_rows = rows.num_rows;
  args.vocab_size = rows.vocab_size;
  args.sorted_probs = rows.data;
  args.top_p = ReadNumbers(check, "top_p", top_p, device, rows.num_rows);
  args.top_k = ReadTopK(check, top_k, device, rows.num_rows);
  return args;
}

}  // namespace

void TopKFromProbs(TensorView probs, TensorView uniform, TensorView sample_indices,
                   TensorView top_k, TensorView out_ids) {
  const Checker check("sampling.top_k_from_probs");
  Filters filters;
  filters.top_k = top_k;
  Draw(check, probs, uniform, sample_indices, filters, out_ids);
}

void TopPFromProbs(TensorView probs, TensorView uniform, TensorView sample_indices,
                   TensorView top_p, TensorView out_ids) {
  const Checker check("sampling.top_p_from_probs");
  Filters filters;
  filters.joint = true;  // there is no other filter
  filters.top_p = top_p;
  Draw(check, probs, uniform, sample_indices, filters, out_ids);
}

void TopKTopPFromProbs(TensorView probs, TensorView uniform, TensorView sample_indices,
                       TensorView top_k, TensorView top_p, int64_t joint, TensorView out_ids) {
  const Checker check("sampling.top_k_top_p_from_probs");
  check.Flag("joint", joint);
  Filters filters;
  filters.top_k = top_k;
  filters.top_p = top_p;
  filters.joint = joint == 1;
  Draw(check, probs, uniform, sample_indices, filters, out_ids);
}

void MinPFromProbs(TensorView probs, TensorView uniform, TensorView sample_indices,
                   TensorView min_p, TensorView out_ids) {
  const Checker check("sampling.min_p_from_probs");
  Filters filters;
  filters.min_p = min_p;
  Draw(check, probs, uniform, sample_indices, filters, out_ids);
}

void TopKRenormProbs(TensorView probs, TensorView top_k, TensorView out) {
  const Checker check("sampling.top_k_renorm_probs");
  Filters filters;
  filters.top_k = top_k;
  Renorm(check, probs, filters, out);
}

void TopPRenormProbs(TensorView probs, TensorView top_p, TensorView out) {
  const Checker check("sampling.top_p_renorm_probs");
  Filters filters;
  filters.joint = true;  // there is no other filter
  filters.top_p = top_p;
  Renorm(check, probs, filters, out);
}

void TopKTopPRenormProbs(TensorView probs, TensorView top_k, TensorView top_p, int64_t joint,
                         TensorView out) {
  const Checker check("sampling.top_k_top_p_renorm_probs");
  check.Flag("joint", joint);
  Filters filters;
  filters.top_k = top_k;
  filters.top_p = top_p;
  filters.joint = joint == 1;
  Renorm(check, probs, filters, out);
}

void SampleFromSorted(TensorView sorted_probs, TensorView sorted_indices, TensorView top_p,
                      TensorView top_k, TensorView uniform, TensorView sample_indices,
                      TensorView out_ids) {
  const Checker check("sampling.sample_from_sorted");
  const DLDevice device = check.Device("sorted_probs", sorted_probs);
  kernels::SortedArgs args = ReadSorted(check, sorted_probs, top_p, top_k, device);
  check.Data("sorted_indices", sorted_indices, device, kInt32, {args.num_rows, args.vocab_size},
             "(n, vocab_size)");
  args.sorted_indices = DataOf<int32_t>(sorted_indices);
  args.draws = ReadDraws(check, uniform, sample_indices, out_ids, device, args.num_rows,
                         {{"sorted_probs", sorted_probs},
                          {"sorted_indices", sorted_indices},
                          {"top_p", top_p},
                          {"top_k", top_k}});
  if (IsCPU(device)) {
    kernels::cpu::DrawSorted(args);
    return;
  }
  LaunchOf<cuda::SortedFn>(check, kSamplingUnit, "draw_sorted", device, args);
}

void RenormFromSorted(TensorView probs, TensorView sorted_probs, TensorView top_p, TensorView top_k,
                      TensorView out) {
  const Checker check("sampling.renorm_from_sorted");
  const DLDevice device = check.Device("probs", probs);
  const Rows rows = ReadRows(check, "probs", probs, device);
  check.Data("sorted_probs", sorted_probs, device, kFloat32, {rows.num_rows, rows.vocab_size},
             "(n, vocab_size)");
  kernels::SortedArgs args = ReadSorted(check, sorted_probs, top_p, top_k, device);
  check.Data("out", out, device, kFloat32, {rows.num_rows, rows.vocab_size}, "(n, vocab_size)");
  check.NoOverlap(
      "out", out,
      {{"probs", probs}, {"sorted_probs", sorted_probs}, {"top_p", top_p}, {"top_k", top_k}});
  args.probs = rows.data;
  args.out = DataOf<float>(out);
  if (IsCPU(device)) {
    kernels::cpu::RenormSorted(args);
    return;
  }
  LaunchOf<cuda::SortedFn>(check, kSamplingUnit, "renorm_sorted", device, args);
}

void SoftmaxWithTemperature(TensorView logits, TensorView temperature, int64_t active_vocab_size,
                            TensorView out) {
  const Checker check("sampling.softmax");
  const DLDevice device = check.Device("logits", logits);
  const Rows rows = ReadRows(check, "logits", logits, device);
  const float* temperatures = ReadNumbers(check, "temperature", temperature, device, rows.num_rows);
  check.Data("out", out, device, kFloat32, {rows.num_rows, rows.vocab_size}, "(n, vocab_size)");
  check.NoOverlap("out", out, {{"logits", logits}, {"temperature", temperature}});
  if (active_vocab_size < 1 || active_vocab_size > rows.vocab_size) {
    check.FailValue(Text("`active_vocab_size` is ", active_vocab_size, ", expected 1 to ",
                         rows.vocab_size, ", the tokens of `logits`"));
  }
  const kernels::SoftmaxArgs args{
      rows.num_rows, rows.vocab_size, static_cast<int32_t>(active_vocab_size),
      rows.data,     temperatures,    DataOf<float>(out)};
  if (IsCPU(device)) {
    kernels::cpu::SoftmaxRows(args);
    return;
  }
  LaunchOf<cuda::SoftmaxFn>(check, kSamplingUnit, "softmax_rows", device, args);
}

void ChainSpeculative(TensorView draft_probs, TensorView draft_ids, TensorView target_probs,
                      TensorView uniform, TensorView out_ids, TensorView num_accepted) {
  const Checker check("sampling.chain_speculative");
  const DLDevice device = check.Device("draft_probs", draft_probs);
  check.Rank("draft_probs", draft_probs, 3, "(batch_size, num_drafts, vocab_size)");
  check.Sizes32("draft_probs", draft_probs);
  const int64_t batch = draft_probs.size(0), drafts = draft_probs.size(1),
                vocab = draft_probs.size(2);
  check.Data("draft_probs", draft_probs, device, kFloat32, {batch, drafts, vocab},
             "(batch_size, num_drafts, vocab_size)");
  check.Data("draft_ids", draft_ids, device, kInt32, {batch, drafts}, "(batch_size, num_drafts)");
  check.Data("target_probs", target_probs, device, kFloat32, {batch, drafts + 1, vocab},
             "(batch_size, num_drafts + 1, vocab_size)");
  check.Data("uniform", uniform, device, kFloat32, {batch, drafts + 1},
             "(batch_size, num_drafts + 1)");
  check.Data("out_ids", out_ids, device, kInt32, {batch, drafts + 1},
             "(batch_size, num_drafts + 1)");
  check.Data("num_accepted", num_accepted, device, kInt32, {batch}, "(batch_size,)");
  for (const auto& [name, tensor] :
       {NamedTensor{"out_ids", out_ids}, NamedTensor{"num_accepted", num_accepted}}) {
    check.NoOverlap(name, tensor,
                    {{"draft_probs", draft_probs},
                     {"draft_ids", draft_ids},
                     {"target_probs", target_probs},
                     {"uniform", uniform}});
  }
  check.NoOverlap("out_ids", out_ids, "num_accepted", num_accepted);
  const kernels::SpeculativeArgs args{
      static_cast<int32_t>(batch), static_cast<int32_t>(drafts), static_cast<int32_t>(vocab),
      DataOf<float>(draft_probs),  DataOf<int32_t>(draft_ids),   DataOf<float>(target_probs),
      DataOf<float>(uniform),      DataOf<int32_t>(out_ids),     DataOf<int32_t>(num_accepted)};
  if (IsCPU(device)) {
    kernels::cpu::VerifyDrafts(args);
    return;
  }
  LaunchOf<cuda::SpeculativeFn>(check, kSamplingUnit, "verify_drafts", device, args);
}

}  // namespace ops
}  // namespace tvm_flashinfer

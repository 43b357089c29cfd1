#include "cache_call.h"

#include <algorithm>
#include <cmath>

#include "../kernels/cpu/kernels.h"
#include "attention_args.h"
#include "cache_scope.h"
#include "cuda_kernels.h"
#include "json_settings.h"
#include "kernel_choice.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief What can be said of one number for each head before there is a call. */
void CheckPerHead(const Checker& check, const char* name, const Optional<Tensor>& values) {
  if (!values.has_value()) return;
  const Tensor tensor = values.value();
  const TensorView view(tensor);
  check.DType(name, view, kFloat32);
  check.Rank(name, view, 1, "(num_qo_heads,)");
  check.Contiguous(name, view);
}

/*! \brief Kernels divide by the cap in float32, where it must be neither 0 nor infinite. */
void CheckSoftCap(const Checker& check, double cap) {
  if (cap == 0 || (cap > 0 && std::isnormal(static_cast<float>(cap)))) return;
  check.FailValue(Text("`logits_soft_cap` is ", cap, ", expected a positive number that float32 ",
                       "holds, or 0 for none"));
}

}  // namespace

BoundAttention::BoundAttention(const char* op, CacheSlot slot, const std::string& options,
                               Optional<Tensor> sinks, Optional<Tensor> alibi_slopes)
    : op_(op), slot_(slot), sinks_(std::move(sinks)), alibi_slopes_(std::move(alibi_slopes)) {
  const Checker check(op);
  const JsonSettings settings(check, "options", options, "{\"logits_soft_cap\": 50}");
  if (slot == CacheSlot::kMLA) {
    settings.AllowOnly({"logits_soft_cap", "kv_scale"});
  } else if (slot == CacheSlot::kDense) {
    settings.AllowOnly({"window_left", "logits_soft_cap", "k_scale", "v_scale"});
  } else {
    settings.AllowOnly({"layer_window", "window_left", "rotary_dim", "rope_scaling",
                        "logits_soft_cap", "k_scale", "v_scale", "alibi_by_position", "head_dim_qk",
                        "head_dim_vo"});
    // Of the plan that cache_slot gives a cache of MLA; here the tensors have them.
    if (slot != CacheSlot::kPrefillRagged &&
        (settings.Has("head_dim_qk") || settings.Has("head_dim_vo"))) {
      settings.Fail("has a `head_dim_qk` or `head_dim_vo`, which are for prefill_ragged alone");
    }
  }
  k_scale_ = settings.Scale(slot == CacheSlot::kMLA ? "kv_scale" : "k_scale");
  v_scale_ = settings.Scale(slot == CacheSlot::kMLA ? "kv_scale" : "v_scale");
  layer_window_ = settings.PositiveInteger("layer_window", 0);
  if (layer_window_ != 0 && (slot == CacheSlot::kMaskPaged || slot == CacheSlot::kMaskRagged)) {
    settings.Fail(
        "has a `layer_window`, which only the slots of a cache with sliding layers take; leave it "
        "out");
  }
  window_left_ = settings.IntegerFromZero("window_left", -1);
  if (window_left_ >= 0 && layer_window_ != 0) {
    settings.Fail("has a `layer_window` and a `window_left`; a call has one window");
  }
  if (window_left_ >= 0 && (slot == CacheSlot::kTreePaged || slot == CacheSlot::kTreeRagged)) {
    settings.Fail("has a `window_left`, which trees have not; leave it out");
  }
  rotary_dim_ = settings.PositiveInteger("rotary_dim", 0);
  if (rotary_dim_ % 2 != 0) settings.Fail("has an odd `rotary_dim`");
  logits_soft_cap_ = settings.NumberFromZero("logits_soft_cap", 0);
  CheckSoftCap(check, logits_soft_cap_);
  CheckPerHead(check, "sinks", sinks_);
  CheckPerHead(check, "alibi_slopes", alibi_slopes_);
  alibi_by_position_ = settings.Flag("alibi_by_position");
  if (alibi_by_position_ && !alibi_slopes_.has_value()) {
    settings.Fail("has an `alibi_by_position` without `alibi_slopes`, which bind_attention takes");
  }
  const std::string rope_scaling = settings.ObjectText("rope_scaling");
  frequencies_ = std::make_unique<RopeFrequencyCache>(rope_scaling);
  // What is wrong with the settings shows now and not in the first call; longrope has factors,
  // which no call of attention brings, but its calls do not rotate either.
  if (!NeedsExtFactors(check, rope_scaling)) frequencies_->Get(check, 10000, 1, 2);
}

BoundAttention::BoundAttention(const char* op, CacheSlot slot, int64_t window_left,
                               double logits_soft_cap)
    : op_(op), slot_(slot), window_left_(window_left), logits_soft_cap_(logits_soft_cap) {
  const Checker check(op);
  if (window_left < -1 || window_left > INT32_MAX) {
    check.FailValue(Text("`window_left` is ", window_left, ", expected -1 for no window, or W - 1 ",
                         "for one of W keys, at most ", INT32_MAX));
  }
  CheckSoftCap(check, logits_soft_cap);
}

CacheCall::CacheCall(const BoundAttention& bound, const TensorView& q, const TensorView& o,
                     const Optional<TensorView>& lse, double sm_scale)
    : bound_(bound), check_(bound.op()), device_(check_.Device("q", q)), q_(q), o_(o), lse_(lse) {
  args_.dtype = check_.FloatDType("q", q);
  check_.Rank("q", q, 3, "(n, num_qo_heads, head_dim)");
  check_.Sizes32("q", q);
  check_.UnitLastStride("q", q);
  check_.Rank("o", o, 3, "(n, num_qo_heads, head_dim)");
  check_.Data("o", o, device_, q.dtype(), {q.size(0), q.size(1), o.size(2)},
              "(n, num_qo_heads, head_dim)");
  check_.Finite("sm_scale", sm_scale);
  if (lse.has_value()) {
    check_.Data("lse", lse.value(), device_, kFloat32, {q.size(0), q.size(1)}, "(n, num_qo_heads)");
    check_.NoOverlap("o", o, "lse", lse.value());
    args_.lse = DataOf<float>(lse.value());
  }
  KeepFromOutputs("q", q);
  args_.num_rows = q.size(0);
  args_.num_qo_heads = static_cast<int32_t>(q.size(1));
  args_.batch_size = static_cast<int32_t>(q.size(0));
  args_.q = DataOf(q);
  args_.q_stride_row = StrideOf(q, 0);
  args_.q_stride_head = StrideOf(q, 1);
  args_.o = DataOf(o);
  args_.window_left = static_cast<int32_t>(bound.window_left());
  args_.sm_scale = sm_scale;
  extras_.magnitude = 1;
  extras_.logits_soft_cap = bound.logits_soft_cap();
  extras_.sinks = PerHead("sinks", bound.sinks());
  extras_.alibi_slopes = PerHead("alibi_slopes", bound.alibi_slopes());
  if (bound.layer_window() != 0) {
    MeetWindow(check_, bound.layer_window(), bound.pages_are_window());
  }
}

const float* CacheCall::PerHead(const char* name, const Optional<Tensor>& values) const {
  if (!values.has_value()) return nullptr;
  const Tensor tensor = values.value();
  const TensorView view(tensor);
  check_.Data(name, view, device_, kFloat32, {args_.num_qo_heads}, "(num_qo_heads,)");
  KeepFromOutputs(name, view);
  return DataOf<float>(view);
}

CacheCall::HostInts CacheCall::ReadInts(const TensorView& tensor) const {
  HostInts ints;
  if (IsCPU(tensor.device())) {
    ints.data = DataOf<int32_t>(tensor);
  } else if (CheckDeviceContents()) {
    ints.copy = ReadBack(check_, tensor);
    ints.copy.push_back(0);  // also an empty array is there
    ints.data = ints.copy.data();
  }
  return ints;
}

void CacheCall::IndexVector(const char* name, const TensorView& tensor, int64_t size,
                            const char* meaning) {
  check_.IndexVector(name, tensor, size, meaning);
  check_.OnDevice(name, tensor, device_);
  KeepFromOutputs(name, tensor);
}

void CacheCall::KeepFromOutputs(const char* name, const TensorView& input) const {
  check_.NoOverlap("o", o_, name, input);
  if (lse_.has_value()) check_.NoOverlap("lse", lse_.value(), name, input);
}

void CacheCall::SetBatchSize(const char* indptr_name, const TensorView& indptr) {
  check_.Rank(indptr_name, indptr, 1, "(batch_size + 1,)");
  if (indptr.size(0) < 1) {
    check_.FailValue(Text("`", indptr_name, "` is empty, expected batch_size + 1 offsets"));
  }
  args_.batch_size = static_cast<int32_t>(indptr.size(0) - 1);
}

void CacheCall::SetRows(const TensorView& qo_indptr) {
  SetBatchSize("qo_indptr", qo_indptr);
  IndexVector("qo_indptr", qo_indptr, args_.batch_size + 1, "(batch_size + 1,)");
  args_.qo_indptr = DataOf<int32_t>(qo_indptr);
  qo_indptr_ = ReadInts(qo_indptr);
  if (!qo_indptr_) return;
  CheckIndptr(check_, "qo_indptr", qo_indptr_.data, args_.batch_size, args_.num_rows, "q");
  if (qo_indptr_.data[args_.batch_size] != args_.num_rows) {
    check_.FailValue(Text("`qo_indptr` ends at ", qo_indptr_.data[args_.batch_size], ", but q has ",
                          args_.num_rows, " rows; they must be equal"));
  }
}

void CacheCall::SetCausal(int64_t causal) {
  if (causal != 0 && causal != 1) {
    check_.FailValue(Text("`causal` is ", causal, ", expected 0 or 1"));
  }
  if (!bound_.pages_are_window()) {
    args_.causal = causal == 1;
  } else if (causal == 1) {
    // TVM's way to say that the pages hold the past alone: row r sees its last W - r - 1 keys.
    extras_.rows_after_keys = true;
    args_.window_left = static_cast<int32_t>(bound_.layer_window() - 1);
  }
}

int64_t CacheCall::LongestRequest() const {
  int64_t longest = 0;
  for (int64_t b = 0; b < args_.batch_size; ++b) {
    longest = std::max<int64_t>(longest, qo_indptr_.data[b + 1] - qo_indptr_.data[b]);
  }
  return longest;
}

void CacheCall::SetNewTokensWindow() {
  if (bound_.layer_window() == 0) return;
  const bool exact = static_cast<bool>(qo_indptr_);
  const int64_t longest = exact ? LongestRequest() : args_.num_rows;
  args_.window_left =
      static_cast<int32_t>(NewTokensWindow(check_, bound_.layer_window(), longest, exact));
}

void CacheCall::SetKVDType(const char* keys, const TensorView& k, const char* values,
                           const TensorView& v) {
  args_.kv_dtype = check_.KVDType(keys, k, q_.dtype());
  check_.DType(values, v, k.dtype());
  if (!kernels::IsFloat8(args_.kv_dtype) && (bound_.k_scale() != 1 || bound_.v_scale() != 1)) {
    check_.FailValue(Text("`", keys, "` is ", DTypeText(k.dtype()),
                          ", but the options scale keys by ", bound_.k_scale(), " and values by ",
                          bound_.v_scale(),
                          "; scales are for float8 keys and values, leave them out"));
  }
  args_.sm_scale *= bound_.k_scale();
  check_.Finite("sm_scale times the scale of the keys", args_.sm_scale);
  args_.v_scale = bound_.v_scale();
}

void CacheCall::SetHeads(int64_t num_kv_heads, int64_t head_dim_qk, int64_t head_dim_vo,
                         const char* keys) {
  check_.HeadRatio(args_.num_qo_heads, num_kv_heads);
  if (head_dim_qk != q_.size(2)) {
    check_.FailValue(Text("`", keys, "` has head_dim ", head_dim_qk, ", `q` has shape ",
                          ShapeText(q_), "; the last dimension is head_dim and must be equal"));
  }
  if (head_dim_vo != o_.size(2)) {
    check_.FailValue(Text("`o` has shape ", ShapeText(o_), ", but the values have ", head_dim_vo,
                          " columns; they must be equal"));
  }
  check_.Positive("head_dim", head_dim_qk);
  check_.Positive("head_dim of the values", head_dim_vo);
  args_.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  args_.head_dim_qk = static_cast<int32_t>(head_dim_qk);
  args_.head_dim_vo = static_cast<int32_t>(head_dim_vo);
}

void CacheCall::SetPages(const TensorView& pages, const TensorView& page_indptr,
                         const TensorView& page_indices, const TensorView& length_info) {
  is_paged_ = true;
  SetKVDType("pages", pages, "pages", pages);
  check_.OnDevice("pages", pages, device_);
  KeepFromOutputs("pages", pages);
  const bool is_mla = bound_.slot() == CacheSlot::kMLA;
  if (is_mla) {
    check_.UnitLastStride("pages", pages);
    if (o_.size(2) > pages.size(2)) {
      check_.FailValue(Text("`o` has shape ", ShapeText(o_), ", but a slot of `pages` holds only ",
                            pages.size(2), " elements, of which the first are the value"));
    }
    SetHeads(1, pages.size(2), o_.size(2), "pages");
    paged_.k = paged_.v = DataOf(pages);
    paged_.k_stride_page = StrideOf(pages, 0);
    paged_.k_stride_slot = StrideOf(pages, 1);
  } else {
    const char* meaning = "(num_pages, 2, num_kv_heads, page_size, head_dim)";
    check_.Rank("pages", pages, 5, meaning);
    check_.Shape("pages", pages, {pages.size(0), 2, pages.size(2), pages.size(3), pages.size(4)},
                 meaning);
    check_.UnitLastStride("pages", pages);
    SetHeads(pages.size(2), pages.size(4), pages.size(4), "pages");
    const int64_t element_bytes = (pages.dtype().bits + 7) / 8;
    paged_.k = DataOf(pages);
    paged_.v = DataOf<char>(pages) + StrideOf(pages, 1) * element_bytes;
    paged_.k_stride_page = StrideOf(pages, 0);
    paged_.k_stride_head = StrideOf(pages, 2);
    paged_.k_stride_slot = StrideOf(pages, 3);
  }
  paged_.v_stride_page = paged_.k_stride_page;
  paged_.v_stride_head = paged_.k_stride_head;
  paged_.v_stride_slot = paged_.k_stride_slot;
  const int64_t page_size = pages.size(is_mla ? 1 : 3);
  check_.Positive("page_size", page_size);
  paged_.num_pages = pages.size(0);
  paged_.page_size = static_cast<int32_t>(page_size);

  IndexVector("page_indptr", page_indptr, args_.batch_size + 1, "(batch_size + 1,)");
  check_.Rank("page_indices", page_indices, 1, "(num_indices,)");
  IndexVector("page_indices", page_indices, page_indices.size(0), "(num_indices,)");
  num_indices_ = page_indices.size(0);
  const bool sliding = length_info.ndim() == 2;
  check_.DType("length_info", length_info, kInt32);
  check_.OnDevice("length_info", length_info, device_);
  if (sliding) {
    check_.Shape("length_info", length_info, {3, args_.batch_size},
                 "(3, batch_size): last_page_len, window offset, sink size");
  } else {
    check_.Shape("length_info", length_info, {args_.batch_size},
                 "(batch_size,), or (3, batch_size) in a sliding window");
  }
  check_.Contiguous("length_info", length_info);
  KeepFromOutputs("length_info", length_info);
  paged_.indptr = DataOf<int32_t>(page_indptr);
  paged_.indices = DataOf<int32_t>(page_indices);
  paged_.last_page_len = DataOf<int32_t>(length_info);
  if (sliding) {
    extras_.window_offset = paged_.last_page_len + args_.batch_size;
    extras_.sink_size = extras_.window_offset + args_.batch_size;
  }
  const HostInts indptr = ReadInts(page_indptr), lengths = ReadInts(length_info);
  if (indptr) CheckPageContents(indptr, ReadInts(page_indices), lengths, sliding);
}

void CacheCall::CheckPageContents(const HostInts& indptr, const HostInts& indices,
                                  const HostInts& lengths, bool sliding) {
  const int64_t batch_size = args_.batch_size;
  CheckIndptr(check_, "page_indptr", indptr.data, batch_size, num_indices_, "page_indices");
  CheckPageTable(check_, indptr.data, indices.data, lengths.data, batch_size, paged_.num_pages,
                 paged_.page_size);
  for (int64_t b = 0; b < batch_size; ++b) {
    const int64_t pages = indptr.data[b + 1] - indptr.data[b];
    const int64_t slots = pages == 0 ? 0 : (pages - 1) * paged_.page_size + lengths.data[b];
    int64_t kv_len = slots;
    if (sliding && pages > 0) {
      const int64_t offset = lengths.data[batch_size + b];
      const int64_t sink = lengths.data[2 * batch_size + b];
      if (sink < 0 || offset < sink || offset > slots) {
        check_.FailValue(Text("`length_info` gives request ", b, " a sink of ", sink,
                              " tokens and a window from slot ", offset,
                              " on; expected 0 <= sink <= window offset <= ", slots,
                              ", its number of slots"));
      }
      kv_len = slots - offset + sink;
    }
    kv_lens_.push_back(kv_len);
  }
}

void CacheCall::SetRaggedTensors(const TensorView& k, const TensorView& v) {
  const KVOperand keys = ReadRagged(check_, "k", k, /*layout=*/0);
  const KVOperand values = ReadRagged(check_, "v", v, /*layout=*/0);
  SetKVDType("k", k, "v", v);
  for (auto [name, tensor] : {std::pair<const char*, const TensorView*>{"k", &k}, {"v", &v}}) {
    check_.OnDevice(name, *tensor, device_);
    KeepFromOutputs(name, *tensor);
  }
  if (values.num_heads != keys.num_heads || values.length != keys.length) {
    check_.FailValue("`v` has shape " + ShapeText(v) + ", `k` has " + ShapeText(k) +
                     "; they must have the same tokens and heads");
  }
  SetHeads(keys.num_heads, keys.head_dim, values.head_dim, "k");
  ragged_ = {
      DataOf(k),          DataOf(v), keys.stride_length, keys.stride_head, values.stride_length,
      values.stride_head, nullptr};
  num_kv_tokens_ = keys.length;
}

void CacheCall::SetEqualRows(int64_t batch_size) {
  args_.batch_size = static_cast<int32_t>(batch_size);
  if (args_.num_rows % std::max<int64_t>(batch_size, 1) != 0) {
    check_.FailValue(Text("`q` has ", args_.num_rows, " rows, which are no multiple of ",
                          batch_size, " requests"));
  }
}

void CacheCall::SetEqualKeys(const TensorView& k, const TensorView& v) {
  SetRaggedTensors(k, v);
  if (args_.batch_size == 0) return;
  const int64_t each = num_kv_tokens_ / args_.batch_size;
  kv_lens_.assign(args_.batch_size, each);
  if (!IsCPU(device_)) return;
  for (int64_t b = 0; b <= args_.batch_size; ++b) {
    equal_keys_.push_back(static_cast<int32_t>(b * each));
  }
  ragged_.indptr = equal_keys_.data();
}

void CacheCall::SetRaggedKeys(const TensorView& k, const TensorView& v,
                              const TensorView& kv_indptr) {
  SetRaggedTensors(k, v);
  IndexVector("kv_indptr", kv_indptr, args_.batch_size + 1, "(batch_size + 1,)");
  ragged_.indptr = DataOf<int32_t>(kv_indptr);
  const HostInts indptr = ReadInts(kv_indptr);
  if (!indptr) return;
  CheckIndptr(check_, "kv_indptr", indptr.data, args_.batch_size, num_kv_tokens_, "k");
  for (int64_t b = 0; b < args_.batch_size; ++b) {
    kv_lens_.push_back(indptr.data[b + 1] - indptr.data[b]);
  }
}

void CacheCall::SetRotary(const RotaryInputs& rotary) {
  IndexVector("q_rope_position", rotary.q_positions, args_.num_rows, "(n,)");
  if (rotary.k_positions.has_value()) {
    IndexVector("k_rope_pos_offset", rotary.k_positions.value(), args_.batch_size, "(batch_size,)");
  }
  if (rotary.rotary_mode != 0 && rotary.rotary_mode != 1) {
    check_.FailValue(Text("`rotary_mode` is ", rotary.rotary_mode,
                          ", expected 0 (queries and keys come rotated) or 1 (inside attention)"));
  }
  extras_.alibi_by_position = bound_.alibi_by_position();
  if (extras_.alibi_by_position && bound_.slot() == CacheSlot::kTreePaged) {
    check_.FailValue(
        "a token tree over pages has nodes of earlier steps, whose positions no argument tells, "
        "and "
        "`alibi_by_position` needs them; give the whole tree in one step");
  }
  if (rotary.rotary_mode == 0 && !extras_.alibi_by_position) return;
  if (!rotary.k_positions.has_value() && num_kv_tokens_ > args_.num_rows) {
    check_.FailValue(Text("`k` has ", num_kv_tokens_, " tokens, but there are positions of ",
                          args_.num_rows, " rows only; in a tree every key is a row"));
  }
  extras_.q_positions = DataOf<int32_t>(rotary.q_positions);
  extras_.k_positions =
      rotary.k_positions.has_value() ? DataOf<int32_t>(rotary.k_positions.value()) : nullptr;
  if (rotary.rotary_mode == 0) return;
  const int64_t rotary_dim = bound_.rotary_dim() == 0 ? args_.head_dim_qk : bound_.rotary_dim();
  if (rotary_dim > args_.head_dim_qk) {
    check_.FailValue(Text("`rotary_dim` is ", rotary_dim, ", head_dim is ", args_.head_dim_qk,
                          "; it can be head_dim at most"));
  }
  frequencies_ = bound_.frequencies().Get(check_, rotary.rope_theta, rotary.rope_scale, rotary_dim);
  extras_.rotary_dim = static_cast<int32_t>(rotary_dim);
  extras_.interleaved = frequencies_->interleaved;
  extras_.magnitude = frequencies_->magnitude;
  extras_.inv_freq = frequencies_->inv_freq.data();
  extras_.inv_freq_second = frequencies_->second();
}

void CacheCall::Run() {
  RecordState(o_, lse_);
  if (args_.num_rows == 0 || args_.batch_size == 0) return;
  if (!IsCPU(device_)) {
    RunOnCuda();
  } else if (is_paged_) {
    check_.Run([&] { kernels::cpu::BatchAttentionPaged(args_, paged_, extras_); });
  } else {
    check_.Run([&] { kernels::cpu::BatchAttentionRagged(args_, ragged_, extras_); });
  }
}

void CacheCall::PrintKernel() const {
  const ChoiceShape shape{PlannedSlot::kPrefillPaged,  // which stands for the name alone
                          args_.num_qo_heads,
                          args_.num_kv_heads,
                          args_.head_dim_qk,
                          args_.head_dim_vo,
                          args_.causal,
                          args_.window_left,
                          args_.batch_size,
                          args_.num_rows,
                          /*num_keys=*/-1};
  PrintChoice(bound_.op(), device_, shape,
              {{Kernel::kBatchAttention}, "default", "the only kernel without a plan"});
}

void CacheCall::RunOnCuda() {
  constexpr int kMaxHeadDim = 256, kMaxRotaryDim = 256;
  auto fits = [](int head_dim) { return head_dim % 16 == 0 && head_dim <= kMaxHeadDim; };
  std::string reason;
  if (args_.dtype == kernels::DType::kFloat32) {
    reason = "CUDA attention runs in float16 and bfloat16; float32 is served on CPU alone";
  } else if (!fits(args_.head_dim_qk) || !fits(args_.head_dim_vo)) {
    reason = Text("head_dim ", args_.head_dim_qk, " with values of ", args_.head_dim_vo,
                  " has no CUDA kernel", bound_.slot() == CacheSlot::kMLA ? " without a plan" : "",
                  "; multiples of 16 up to ", kMaxHeadDim, " have",
                  bound_.slot() == CacheSlot::kMLA
                      ? ", and batch_mla_plan and batch_mla_run serve 576 with values of 512"
                      : "");
  } else if (!(args_.sm_scale > 0)) {
    reason = Text("`sm_scale` is ", args_.sm_scale,
                  "; the CUDA kernels need a positive one (negate q for a negative scale)");
  } else if (extras_.rotary_dim > kMaxRotaryDim) {
    reason = Text("`rotary_dim` is ", extras_.rotary_dim, "; on CUDA it can be ", kMaxRotaryDim,
                  " at most inside attention");
  }
  const int64_t num_products = args_.num_rows * (args_.num_qo_heads / args_.num_kv_heads);
  if (reason.empty() && (num_products > INT32_MAX || num_kv_tokens_ > INT32_MAX)) {
    reason = Text("a call of ", args_.num_rows, " rows with ", args_.num_qo_heads,
                  " query heads on ", args_.num_kv_heads, " KV heads and ", num_kv_tokens_,
                  " ragged keys is too large; rows times heads of a group, and keys, can be ",
                  INT32_MAX, " at most: split the batch");
  }
  if (!reason.empty()) check_.FailValue(reason);
  if (is_paged_) {
    CheckCudaAlignment(check_, args_, paged_.k, paged_.v,
                       {paged_.k_stride_page, paged_.k_stride_head, paged_.k_stride_slot});
  } else {
    CheckCudaAlignment(check_, args_, ragged_.k, ragged_.v,
                       {ragged_.k_stride_token, ragged_.k_stride_head, ragged_.v_stride_token,
                        ragged_.v_stride_head});
  }
  const UnitSpec unit{"batch_attention", args_.dtype, args_.head_dim_qk, args_.head_dim_vo,
                      args_.kv_dtype};
  if (PrintsChoices(check_)) PrintKernel();
  auto run = reinterpret_cast<kernels::cuda::AttentionFn>(RequireKernel(check_, unit, device_));
  Launch(check_, run, args_, is_paged_ ? &paged_ : nullptr, is_paged_ ? nullptr : &ragged_, extras_,
         is_paged_ ? num_indices_ : num_kv_tokens_, CurrentStream(device_));
}

}  // namespace ops
}  // namespace tvm_flashinfer

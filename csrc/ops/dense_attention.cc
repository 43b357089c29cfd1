#include "dense_attention.h"

#include <cmath>

#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief The memory of a tensor under another shape. It must outlive the views it gives. */
class Reshaped {
 public:
  Reshaped(const TensorView& tensor, std::initializer_list<int64_t> shape,
           std::initializer_list<int64_t> strides)
      : shape_(shape), strides_(strides) {
    tensor_.data = tensor.data_ptr();
    tensor_.device = tensor.device();
    tensor_.ndim = static_cast<int>(shape_.size());
    tensor_.dtype = tensor.dtype();
    tensor_.shape = shape_.data();
    tensor_.strides = strides_.data();
    tensor_.byte_offset = tensor.byte_offset();
  }
  Reshaped(const Reshaped&) = delete;
  Reshaped& operator=(const Reshaped&) = delete;
  TensorView view() { return TensorView(&tensor_); }

 private:
  std::vector<int64_t> shape_;
  std::vector<int64_t> strides_;
  DLTensor tensor_{};
};

/*! \brief The rows of all requests, one after the other. */
class Rows {
 public:
  Rows(const Checker& check, const char* name, const TensorView& x)
      : rows_(x, {x.size(0) * x.size(1), x.size(2), x.size(3)},
              {StrideOf(x, 1), StrideOf(x, 2), StrideOf(x, 3)}) {
    if (x.size(0) > 1 && x.size(1) > 0 && StrideOf(x, 0) != x.size(1) * StrideOf(x, 1)) {
      check.FailValue(Text("`", name, "` has shape ", ShapeText(x), " and a stride of ",
                           StrideOf(x, 0), " between requests; expected ",
                           x.size(1) * StrideOf(x, 1),
                           ", so that their rows follow each other. Copy it to a contiguous "
                           "tensor"));
    }
  }
  TensorView view() { return rows_.view(); }

 private:
  Reshaped rows_;
};

void CheckBatch(const Checker& check, const char* name, const TensorView& x, const DenseInputs& in,
                int64_t length) {
  if (x.size(0) == in.q.size(0) && x.size(1) == length) return;
  check.FailValue(Text("`", name, "` has shape ", ShapeText(x), "; with `q` ", ShapeText(in.q),
                       " and `k` ", ShapeText(in.k), " it must start with (", in.q.size(0), ", ",
                       length, ")"));
}

}  // namespace

void RunDense(const BoundAttention& bound, const DenseInputs& in) {
  const Checker check(bound.op());
  check.Rank("q", in.q, 4, "(batch_size, n, num_qo_heads, head_dim)");
  check.Rank("k", in.k, 4, "(batch_size, m, num_kv_heads, head_dim)");
  check.Rank("v", in.v, 4, "(batch_size, m, num_kv_heads, head_dim)");
  check.Rank("o", in.o, 4, "(batch_size, n, num_qo_heads, head_dim)");
  check.Contiguous("o", in.o);
  CheckBatch(check, "k", in.k, in, in.k.size(1));
  CheckBatch(check, "v", in.v, in, in.k.size(1));
  CheckBatch(check, "o", in.o, in, in.q.size(1));
  Rows q(check, "q", in.q), k(check, "k", in.k), v(check, "v", in.v), o(check, "o", in.o);
  std::unique_ptr<Reshaped> lse;
  Optional<TensorView> lse_rows;
  if (in.lse.has_value()) {
    const TensorView& given = in.lse.value();
    check.Shape("lse", given, {in.q.size(0), in.q.size(1), in.q.size(2)},
                "(batch_size, n, num_qo_heads)");
    check.Contiguous("lse", given);
    lse = std::make_unique<Reshaped>(
        given, std::initializer_list<int64_t>{in.q.size(0) * in.q.size(1), in.q.size(2)},
        std::initializer_list<int64_t>{in.q.size(2), 1});
    lse_rows = lse->view();
  }
  CacheCall call(bound, q.view(), o.view(), lse_rows, in.sm_scale);
  call.SetEqualRows(in.q.size(0));
  call.SetCausal(in.causal);
  call.SetEqualKeys(k.view(), v.view());
  if (in.packed_mask.has_value()) {
    call.SetPackedMask(in.mask_indptr.value(), in.packed_mask.value());
  }
  if (in.bias.has_value()) call.SetBias(in.bias.value(), in.heads_as_requests);
  call.Run();
}

namespace {

/*! \brief One request, (n, H, d) or (1, n, H, d), in layout NHD or HND, as (1, n, H, d). */
class OneRequest {
 public:
  OneRequest(const Checker& check, const char* name, const TensorView& x, int64_t layout)
      : reshaped_(Make(check, name, x, layout)) {}
  TensorView view() { return reshaped_->view(); }

 private:
  static std::unique_ptr<Reshaped> Make(const Checker& check, const char* name, const TensorView& x,
                                        int64_t layout) {
    const int ndim = x.ndim();
    if ((ndim != 3 && ndim != 4) || (ndim == 4 && x.size(0) != 1)) {
      check.FailValue(Text("`", name, "` has shape ", ShapeText(x),
                           "; expected one request, (length, num_heads, head_dim), with or "
                           "without a first dimension of 1"));
    }
    const int token = layout == 1 ? ndim - 2 : ndim - 3, head = layout == 1 ? ndim - 3 : ndim - 2;
    return std::make_unique<Reshaped>(
        x, std::initializer_list<int64_t>{1, x.size(token), x.size(head), x.size(ndim - 1)},
        std::initializer_list<int64_t>{x.size(token) * StrideOf(x, token), StrideOf(x, token),
                                       StrideOf(x, head), StrideOf(x, ndim - 1)});
  }

  std::unique_ptr<Reshaped> reshaped_;
};

void RunSingle(const BoundAttention& bound, const TensorView& q, const TensorView& k,
               const TensorView& v, int64_t causal, int64_t layout, int64_t rotary_mode,
               const TensorView& o) {
  const Checker check(bound.op());
  if (layout != 0 && layout != 1) {
    check.FailValue(Text("`layout` is ", layout, ", expected 0 (NHD) or 1 (HND) of k and v"));
  }
  if (rotary_mode != 0) {
    check.FailValue(Text("`rotary_mode` is ", rotary_mode,
                         "; queries and keys must come with their positions applied, which is 0"));
  }
  OneRequest queries(check, "q", q, 0), keys(check, "k", k, layout), values(check, "v", v, layout);
  const TensorView rows = queries.view();
  const int64_t n = rows.size(1), heads = rows.size(2), dim = values.view().size(3);
  check.Contiguous("o", o);
  int64_t elements = 1;
  for (int i = 0; i < o.ndim(); ++i) elements *= o.size(i);
  if (elements != n * heads * dim) {
    check.FailValue(Text("`o` has shape ", ShapeText(o), "; expected the ", n, " x ", heads, " x ",
                         dim, " elements of the output, in any shape"));
  }
  Reshaped out(o, {1, n, heads, dim}, {n * heads * dim, heads * dim, dim, 1});
  const double sm_scale = 1.0 / std::sqrt(static_cast<double>(std::max<int64_t>(rows.size(3), 1)));
  RunDense(bound, {rows, keys.view(), values.view(), out.view(), std::nullopt, causal, sm_scale,
                   std::nullopt, std::nullopt, std::nullopt});
}

}  // namespace

void SinglePrefill(TensorView q, TensorView k, TensorView v, TensorView /*scratch*/, int64_t causal,
                   int64_t layout, int64_t rotary_mode, bool /*allow_fp16_qk*/,
                   double /*rope_scale*/, double /*rope_theta*/, TensorView o) {
  static const BoundAttention bound("single_prefill", CacheSlot::kDense, "{}", std::nullopt,
                                    std::nullopt);
  RunSingle(bound, q, k, v, causal, layout, rotary_mode, o);
}

void SingleDecode(TensorView q, TensorView k, TensorView v, TensorView /*scratch*/, int64_t layout,
                  int64_t rotary_mode, double /*rope_scale*/, double /*rope_theta*/, TensorView o) {
  static const BoundAttention bound("single_decode", CacheSlot::kDense, "{}", std::nullopt,
                                    std::nullopt);
  RunSingle(bound, q, k, v, /*causal=*/0, layout, rotary_mode, o);
}

}  // namespace ops
}  // namespace tvm_flashinfer

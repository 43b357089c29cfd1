#include "attention_args.h"

#include <algorithm>
#include <sstream>

#include "cuda_kernels.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief FlashInfer's kernels load 16 bytes at a time. */
constexpr int64_t kCudaAlignment = 16;

bool Aligned(const void* address) {
  return reinterpret_cast<uintptr_t>(address) % kCudaAlignment == 0;
}

}  // namespace

DLDevice BeginPlan(const Checker& check, const PlanInputs& in) {
  check.Workspace("float_workspace", in.float_workspace);
  check.Workspace("int_workspace", in.int_workspace);
  check.Workspace("pinned_int_workspace", in.pinned_int_workspace);
  const DLDevice device = check.Device("float_workspace", in.float_workspace);
  check.OnDevice("int_workspace", in.int_workspace, device);
  check.OnHost("pinned_int_workspace", in.pinned_int_workspace);
  check.HeadRatio(in.num_qo_heads, in.num_kv_heads);
  check.Positive("page_size", in.page_size);
  check.Positive("head_dim_qk", in.head_dim_qk);
  check.Positive("head_dim_vo", in.head_dim_vo);
  if (in.batch_size < 0 || in.batch_size >= INT32_MAX) {
    check.FailValue(Text("`batch_size` is ", in.batch_size, ", expected 0 or more"));
  }
  if (in.window_left < -1 || in.window_left > INT32_MAX) {
    check.FailValue(Text("`window_left` is ", in.window_left,
                         ", expected -1 (no window) or the window's tokens less one"));
  }
  if (in.enable_cuda_graph) {
    check.FailValue("`enable_cuda_graph` is not served yet; pass False and plan every step");
  }
  return device;
}

DLDevice BeginRun(const Checker& check, const RunInputs& in, const PlanReader& plan) {
  check.Workspace("float_workspace", in.float_workspace);
  check.Workspace("int_workspace", in.int_workspace);
  const DLDevice device = check.Device("float_workspace", in.float_workspace);
  check.OnDevice("int_workspace", in.int_workspace, device);
  plan.RequireDevice(device);
  plan.RequireWorkspaces(in.float_workspace, in.int_workspace);
  check.OnDevice("q", in.q, device);
  check.FloatDType("q", in.q);
  check.Rank("q", in.q, 3, "(n, num_qo_heads, head_dim)");
  return device;
}

kernels::AttentionArgs MakeAttentionArgs(const Checker& check, const RunInputs& in,
                                         const PlanReader& plan, int64_t num_kv_heads,
                                         int64_t head_dim_vo) {
  const PlanHeader& header = plan.header();
  const DLDevice device = in.float_workspace.device();
  if (in.mask_mode != 0 && in.mask_mode != 1) {
    std::ostringstream message;
    message << "`mask_mode` is " << in.mask_mode << ", expected 0 (no mask) or 1 (causal)";
    if (in.mask_mode == 2) {
      message << "; packed masks are served without a plan, by flashinfer.bind_attention_mask_paged"
                 " and flashinfer.bind_attention_mask_ragged";
    }
    check.FailValue(message.str());
  }
  if (in.layout != 0 && in.layout != 1) {
    std::ostringstream message;
    message << "`layout` is " << in.layout << ", expected 0 (NHD) or 1 (HND)";
    check.FailValue(message.str());
  }
  check.Finite("sm_scale", in.sm_scale);

  kernels::AttentionArgs args{};
  args.dtype = check.FloatDType("q", in.q);
  check.UnitLastStride("q", in.q);
  check.HeadRatio(in.q.size(1), num_kv_heads);
  plan.Require("num_rows (rows of q)", header.num_rows, in.q.size(0));
  plan.Require("num_qo_heads", header.num_qo_heads, in.q.size(1));
  plan.Require("num_kv_heads", header.num_kv_heads, num_kv_heads);
  plan.Require("head_dim_qk", header.head_dim_qk, in.q.size(2));
  plan.Require("head_dim_vo", header.head_dim_vo, head_dim_vo);
  plan.Require("mask_mode", header.causal, in.mask_mode);
  plan.Require("window_left", header.window_left, in.window_left);
  check.Data("o", in.o, device, in.q.dtype(), {in.q.size(0), in.q.size(1), head_dim_vo},
             "(n, num_qo_heads, head_dim)");
  if (in.lse.has_value()) {
    check.Data("lse", in.lse.value(), device, kFloat32, {in.q.size(0), in.q.size(1)},
               "(n, num_qo_heads)");
  }
  args.batch_size = static_cast<int32_t>(header.batch_size);
  args.num_qo_heads = static_cast<int32_t>(in.q.size(1));
  args.num_kv_heads = static_cast<int32_t>(num_kv_heads);
  args.head_dim_qk = static_cast<int32_t>(in.q.size(2));
  args.head_dim_vo = static_cast<int32_t>(head_dim_vo);
  args.num_rows = in.q.size(0);
  args.q = DataOf(in.q);
  args.q_stride_row = StrideOf(in.q, 0);
  args.q_stride_head = StrideOf(in.q, 1);
  args.qo_indptr = nullptr;
  args.o = DataOf(in.o);
  args.lse = in.lse.has_value() ? DataOf<float>(in.lse.value()) : nullptr;
  args.causal = in.mask_mode == 1;
  args.window_left = static_cast<int32_t>(in.window_left);
  args.sm_scale = in.sm_scale;
  args.kv_dtype = args.dtype;
  args.v_scale = 1;
  return args;
}

void CheckOutputs(const Checker& check, const RunInputs& in,
                  std::initializer_list<std::pair<const char*, TensorView>> inputs) {
  std::vector<std::pair<const char*, TensorView>> written{{"o", in.o},
                                                          {"float_workspace", in.float_workspace}};
  if (in.lse.has_value()) written.emplace_back("lse", in.lse.value());
  for (size_t i = 0; i < written.size(); ++i) {
    const auto& [name, tensor] = written[i];
    for (size_t j = i + 1; j < written.size(); ++j) {
      check.NoOverlap(name, tensor, written[j].first, written[j].second);
    }
    check.NoOverlap(name, tensor, {{"q", in.q}, {"int_workspace", in.int_workspace}});
    check.NoOverlap(name, tensor, inputs);
  }
}

KVOperand ReadPages(const Checker& check, const char* name, const TensorView& pages,
                    int64_t layout) {
  const bool hnd = layout == 1;
  check.Rank(name, pages, 4,
             hnd ? "(num_pages, num_kv_heads, page_size, head_dim)"
                 : "(num_pages, page_size, num_kv_heads, head_dim)");
  check.UnitLastStride(name, pages);
  const int head = hnd ? 1 : 2, slot = hnd ? 2 : 1;
  return {pages.size(0),      pages.size(head),      pages.size(slot),     pages.size(3),
          StrideOf(pages, 0), StrideOf(pages, head), StrideOf(pages, slot)};
}

KVOperand ReadRagged(const Checker& check, const char* name, const TensorView& tensor,
                     int64_t layout) {
  const bool hnd = layout == 1;
  check.Rank(name, tensor, 3,
             hnd ? "(num_kv_heads, num_tokens, head_dim)" : "(num_tokens, num_kv_heads, head_dim)");
  check.UnitLastStride(name, tensor);
  const int head = hnd ? 0 : 1, token = hnd ? 1 : 0;
  return {1, tensor.size(head),      tensor.size(token),     tensor.size(2),
          0, StrideOf(tensor, head), StrideOf(tensor, token)};
}

kernels::PagedKV MakePagedKV(const Checker& check, const TensorView& q, const TensorView& k_pages,
                             const TensorView& v_pages, const TensorView& page_indptr,
                             const TensorView& page_indices, const TensorView& last_page_len,
                             int64_t batch_size, int64_t layout, KVOperand* k_out) {
  const DLDevice device = q.device();
  const KVOperand k = ReadPages(check, "k_pages", k_pages, layout);
  const KVOperand v = ReadPages(check, "v_pages", v_pages, layout);
  check.PlannedKVDType("k_pages", k_pages, q.dtype());
  check.PlannedKVDType("v_pages", v_pages, q.dtype());
  check.OnDevice("k_pages", k_pages, device);
  check.OnDevice("v_pages", v_pages, device);
  if (v_pages.size(0) != k_pages.size(0) || v.num_heads != k.num_heads || v.length != k.length ||
      v.head_dim != k.head_dim) {
    check.FailValue("`v_pages` has shape " + ShapeText(v_pages) + ", `k_pages` has " +
                    ShapeText(k_pages) + "; they must be equal");
  }
  if (k.head_dim != q.size(2)) {
    check.FailValue("`k_pages` has shape " + ShapeText(k_pages) + ", `q` has " + ShapeText(q) +
                    "; the last dimension is head_dim and must be equal");
  }
  check.Positive("page_size", k.length);
  check.IndexVector("page_indptr", page_indptr, batch_size + 1, "(batch_size + 1,)");
  check.IndexVector("last_page_len", last_page_len, batch_size, "(batch_size,)");
  check.Rank("page_indices", page_indices, 1, "(num_indices,)");
  check.IndexVector("page_indices", page_indices, page_indices.size(0), "(num_indices,)");
  check.OnDevice("page_indptr", page_indptr, device);
  check.OnDevice("page_indices", page_indices, device);
  check.OnDevice("last_page_len", last_page_len, device);
  *k_out = k;
  return {DataOf(k_pages),
          DataOf(v_pages),
          k.stride_outer,
          k.stride_head,
          k.stride_length,
          v.stride_outer,
          v.stride_head,
          v.stride_length,
          k.outer,
          static_cast<int32_t>(k.length),
          DataOf<int32_t>(page_indptr),
          DataOf<int32_t>(page_indices),
          DataOf<int32_t>(last_page_len)};
}

void CheckPagedContents(const Checker& check, const TensorView& page_indptr,
                        const TensorView& page_indices, const TensorView& last_page_len,
                        int64_t batch_size, int64_t num_pages, int64_t page_size) {
  auto run = [&](const int32_t* indptr, const int32_t* indices, const int32_t* last) {
    CheckIndptr(check, "page_indptr", indptr, batch_size, page_indices.size(0), "page_indices");
    CheckPageTable(check, indptr, indices, last, batch_size, num_pages, page_size);
  };
  if (IsCPU(page_indptr.device())) {
    run(DataOf<int32_t>(page_indptr), DataOf<int32_t>(page_indices),
        DataOf<int32_t>(last_page_len));
  } else if (CheckDeviceContents()) {
    const auto indptr = ReadBack(check, page_indptr);
    const auto indices = ReadBack(check, page_indices);
    const auto last = ReadBack(check, last_page_len);
    run(indptr.data(), indices.data(), last.data());
  }
}

void CheckCudaAlignment(const Checker& check, const kernels::AttentionArgs& args, const void* k,
                        const void* v, std::initializer_list<int64_t> kv_strides) {
  const int64_t piece = kCudaAlignment / kernels::ElementSize(args.dtype);
  const int64_t kv_piece = kCudaAlignment / kernels::ElementSize(args.kv_dtype);
  bool aligned = Aligned(args.q) && Aligned(k) && Aligned(v) && Aligned(args.o) &&
                 args.q_stride_row % piece == 0 && args.q_stride_head % piece == 0;
  for (int64_t stride : kv_strides) aligned = aligned && stride % kv_piece == 0;
  if (!aligned) {
    check.FailValue(
        "the CUDA kernels load 16 bytes at a time: q, keys, values and o must start at multiples "
        "of 16 bytes and their strides must be multiples of 8 elements, of 16 for float8; copy "
        "the view that is not");
  }
}

void CheckCudaStrides(const Checker& check, const kernels::AttentionArgs& args, const void* k,
                      const void* v, std::initializer_list<int64_t> kv_strides) {
  CheckCudaAlignment(check, args, k, v, kv_strides);
  if (std::max(kv_strides) > UINT32_MAX || args.num_rows * args.q_stride_row > INT32_MAX) {
    check.FailValue(
        "the CUDA kernels index with 32 bits: strides of keys and values must be below 2^32 "
        "elements "
        "and q must span less than 2^31 elements; split the batch");
  }
}

void CheckCudaPages(const Checker& check, const kernels::AttentionArgs& args,
                    const kernels::PagedKV& kv) {
  if (kv.k_stride_page != kv.v_stride_page || kv.k_stride_head != kv.v_stride_head ||
      kv.k_stride_slot != kv.v_stride_slot) {
    check.FailValue("the CUDA kernels need `k_pages` and `v_pages` of equal strides");
  }
  CheckCudaStrides(check, args, kv.k, kv.v, {kv.k_stride_page, kv.k_stride_head, kv.k_stride_slot});
}

void RequireCudaAttention(const Checker& check, const kernels::AttentionArgs& args, bool ragged) {
  std::string reason;
  if (args.dtype == kernels::DType::kFloat32) {
    reason = "CUDA attention runs in float16 and bfloat16; float32 is served on CPU alone";
  }
  auto supported = [](int head_dim) {
    return head_dim == 64 || head_dim == 128 || head_dim == 256;
  };
  const bool latent = ragged && args.head_dim_qk == 192 && args.head_dim_vo == 128;
  const bool equal = supported(args.head_dim_qk) && args.head_dim_vo == args.head_dim_qk;
  if (reason.empty() && !equal && !latent) {
    std::ostringstream message;
    message << "head_dim " << args.head_dim_qk;
    if (args.head_dim_vo != args.head_dim_qk) message << " with values of " << args.head_dim_vo;
    message << " has no CUDA kernel; head_dim 64, 128 and 256 have (pad to the next of them)";
    if (ragged) message << ", and 192 with values of 128";
    reason = message.str();
  }
  if (reason.empty() && !(args.sm_scale > 0)) {
    reason = "`sm_scale` is " + std::to_string(args.sm_scale) +
             "; the CUDA kernels need a positive one (negate q for a negative scale)";
  }
  if (!reason.empty()) check.FailValue(reason);
}

}  // namespace ops
}  // namespace tvm_flashinfer

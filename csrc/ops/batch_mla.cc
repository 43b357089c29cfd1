// Latent attention (MLA) over pages: a slot is the key of all heads, and its first part the value.
#include <cstdlib>
#include <optional>

#include "../kernels/cpu/kernels.h"
#include "attention_plan.h"
#include "cuda_kernels.h"
#include "ops.h"
#include "tuning.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

using NamedTensor = std::pair<const char*, TensorView>;

/*! \brief Head dimensions of the CUDA kernels: the latent part, and the one with positions. */
constexpr int64_t kCudaHeadDimCKV = 512, kCudaHeadDimKPE = 64;

constexpr const char* kNotCaptured =
    "plans hold for one step and cannot be captured; call latent attention outside of the graph";

/*!
 * \brief What a plan holds between its header and the kernel's arrays. The plan is made without the
 * page size, so it keeps the sizes that fit its pages and keys.
 */
struct MLAPlanPart {
  int64_t min_page_size;
  int64_t max_page_size;
  int64_t on_sm90;  // whether the kernel for Hopper is to run

  static constexpr int64_t kSize = 3;
};

/*! \brief The page sizes with which every request has as many pages as it has. */
void FindPageSizes(const Checker& check, const int32_t* kv_indptr, const int32_t* kv_len,
                   int64_t batch_size, MLAPlanPart* part) {
  part->min_page_size = 1;
  part->max_page_size = INT32_MAX;
  int64_t low_request = 0, high_request = 0;
  for (int64_t b = 0; b < batch_size; ++b) {
    const int64_t pages = static_cast<int64_t>(kv_indptr[b + 1]) - kv_indptr[b];
    const int64_t keys = kv_len[b];
    if (pages == 0 ? keys != 0 : keys < pages) {
      check.FailValue(Text("`kv_len`[", b, "] is ", keys, ", but request ", b, " has ", pages,
                           " pages",
                           pages == 0 ? ", and so 0 keys" : " and so as many keys or more",
                           "; make both from the same pages"));
    }
    if (pages == 0) continue;
    const int64_t low = (keys + pages - 1) / pages;
    const int64_t high = pages == 1 ? INT32_MAX : (keys - 1) / (pages - 1);
    if (low > part->min_page_size) part->min_page_size = low, low_request = b;
    if (high < part->max_page_size) part->max_page_size = high, high_request = b;
  }
  if (part->min_page_size > part->max_page_size) {
    check.FailValue(Text("`kv_len` fits no page size: the pages of request ", low_request, " hold ",
                         part->min_page_size, " tokens or more, those of request ", high_request,
                         " at most ", part->max_page_size));
  }
}

/*! \brief What TVM_FLASHINFER_MLA_KERNEL says; nothing where it is not set. */
std::optional<Kernel> KernelOfEnvironment(const Checker& check) {
  const char* value = std::getenv("TVM_FLASHINFER_MLA_KERNEL");
  const std::string wanted = value == nullptr ? "" : value;
  if (wanted.empty()) return std::nullopt;
  if (wanted == "fa2") return Kernel::kFA2;
  if (wanted == "sm90") return Kernel::kSM90;
  check.FailValue("TVM_FLASHINFER_MLA_KERNEL is \"" + wanted +
                  "\", expected fa2 or sm90, or leave it unset");
}

/*! \brief Whether the kernel for Hopper is to run; sm_90 has it alone. */
bool ChooseSM90(const Checker& check, DLDevice device, const kernels::cuda::PlanArgs& args) {
  const std::optional<Kernel> wanted = KernelOfEnvironment(check);
  const bool is_hopper = RunsOnArch(check, device, 9, 0);
  const Tuning* tuning = CurrentTuning(check);
  const bool prints = PrintsChoices(check);
  ChoiceShape shape{};
  if (tuning != nullptr || prints) {
    int64_t num_keys = 0;
    for (int32_t b = 0; b < args.batch_size; ++b) num_keys += args.kv_len[b];
    shape = {PlannedSlot::kMLA,
             args.num_qo_heads,
             1,
             args.head_dim_vo,
             args.head_dim_vo,
             args.causal,
             /*window_left=*/-1,
             args.batch_size,
             args.num_rows,
             num_keys};
  }
  const Tuned tuned = wanted.has_value() || !is_hopper ? Tuned() : FindTuned(tuning, device, shape);
  const Kernel rule = MLARule(is_hopper);
  Kernel kernel = tuned ? tuned.tactic->kernel : wanted.value_or(rule);
  if (!is_hopper) kernel = Kernel::kFA2;
  if (prints) {
    const Choice by_variable{{kernel}, "environment", "TVM_FLASHINFER_MLA_KERNEL says so"};
    PrintChoice(device, shape,
                tuned                ? TunedChoice(tuned)
                : wanted.has_value() ? by_variable
                                     : DefaultChoice(kernel, ReasonOfMLARule(rule), tuned));
  }
  return kernel == Kernel::kSM90;
}

UnitSpec UnitOf(const char* kind, kernels::DType dtype) {
  return {kind, dtype, kCudaHeadDimCKV + kCudaHeadDimKPE, kCudaHeadDimCKV};
}

/*!
 * \brief The launcher of a plan. Both kernels compute the same from one schedule: where a library
 * was built for plain "90", which the Hopper kernel needs more than, the FA2 one takes over.
 */
kernels::cuda::MLAFn RequireMLA(const Checker& check, kernels::DType dtype, bool on_sm90,
                                DLDevice device) {
  const UnitSpec fa2 = UnitOf("batch_mla", dtype), sm90 = UnitOf("batch_mla_sm90", dtype);
  void* function = nullptr;
  if (on_sm90) {
    function = FindLoaded(check, sm90, device);
    if (function == nullptr) function = FindLoaded(check, fa2, device);
  }
  if (function == nullptr) function = RequireKernel(check, on_sm90 ? sm90 : fa2, device);
  return reinterpret_cast<kernels::cuda::MLAFn>(function);
}

void RequireCudaMLA(const Checker& check, const kernels::MLAArgs& args, int64_t num_page_indices) {
  if (args.dtype == kernels::DType::kFloat32) {
    check.FailValue("CUDA attention runs in float16 and bfloat16; float32 is served on CPU alone");
  }
  if (args.head_dim_ckv != kCudaHeadDimCKV || args.head_dim_kpe != kCudaHeadDimKPE) {
    check.FailValue(Text("head dimensions ", args.head_dim_ckv, " (of ckv) and ", args.head_dim_kpe,
                         " (of kpe) have no CUDA kernel; ", kCudaHeadDimCKV, " and ",
                         kCudaHeadDimKPE, " have"));
  }
  if (!(args.sm_scale > 0)) {
    check.FailValue(Text("`sm_scale` is ", args.sm_scale,
                         "; the CUDA kernels need a positive one (negate q for a negative scale)"));
  }
  auto aligned = [](const void* address) { return reinterpret_cast<uintptr_t>(address) % 16 == 0; };
  bool fits = aligned(args.q_nope) && aligned(args.q_pe) && aligned(args.ckv) &&
              aligned(args.kpe) && aligned(args.o);
  for (int64_t stride : {args.q_nope_stride_row, args.q_nope_stride_head, args.q_pe_stride_row,
                         args.q_pe_stride_head, args.ckv_stride_page, args.ckv_stride_slot,
                         args.kpe_stride_page, args.kpe_stride_slot}) {
    fits = fits && stride % 8 == 0;
  }
  if (!fits) {
    check.FailValue(
        "the CUDA kernels load 16 bytes at a time: q_nope, q_pe, ckv, kpe and o must start at "
        "multiples of 16 bytes and their strides must be multiples of 8 elements; copy the view "
        "that is not");
  }
  // Pages are found with 64 bits; what lies inside a page, and the rows, with 32.
  const int64_t page_size = args.page_size;
  for (int64_t span : {args.num_rows * args.q_nope_stride_row, args.num_rows * args.q_pe_stride_row,
                       args.num_rows * args.num_heads * args.head_dim_ckv, args.ckv_stride_page,
                       args.kpe_stride_page, page_size * args.ckv_stride_slot,
                       page_size * args.kpe_stride_slot, num_page_indices * page_size}) {
    if (span > UINT32_MAX) {
      check.FailValue(
          "the CUDA kernels index rows, the inside of a page and all tokens of a batch with 32 "
          "bits: queries, outputs and single pages must span less than 2^32 elements, and the "
          "requests less than 2^32 tokens; split the batch");
    }
  }
}

/*! \brief The tables of a plan on CPU. */
struct HostTable {
  std::vector<int32_t> qo_indptr, page_indptr, last_page_len;

  HostTable(const PlanReader& reader, int64_t page_size) {
    const std::vector<int64_t>& kernel = reader.kernel();
    const int64_t batch_size = reader.header().batch_size;
    auto next = kernel.begin() + MLAPlanPart::kSize;
    qo_indptr.assign(next, next + batch_size + 1);
    page_indptr.assign(next + batch_size + 1, next + 2 * (batch_size + 1));
    next += 2 * (batch_size + 1);
    for (int64_t b = 0; b < batch_size; ++b) {
      const int64_t pages = page_indptr[b + 1] - page_indptr[b];
      last_page_len.push_back(
          static_cast<int32_t>(pages == 0 ? 0 : next[b] - (pages - 1) * page_size));
    }
  }
};

}  // namespace

Array<int64_t> BatchMLAPlan(TensorView float_workspace, TensorView int_workspace,
                            TensorView pinned_int_workspace, TensorView qo_indptr,
                            TensorView kv_indptr, TensorView kv_len, int64_t num_heads,
                            int64_t head_dim_ckv, bool causal) {
  const Checker check("batch_mla_plan");
  check.Workspace("float_workspace", float_workspace);
  check.Workspace("int_workspace", int_workspace);
  check.Workspace("pinned_int_workspace", pinned_int_workspace);
  const DLDevice device = check.Device("float_workspace", float_workspace);
  check.OnDevice("int_workspace", int_workspace, device);
  check.OnHost("pinned_int_workspace", pinned_int_workspace);
  check.OnHost("qo_indptr", qo_indptr);
  check.OnHost("kv_indptr", kv_indptr);
  check.OnHost("kv_len", kv_len);
  check.Rank("kv_len", kv_len, 1, "(batch_size,)");
  const int64_t batch_size = kv_len.size(0);
  check.IndexVector("kv_len", kv_len, batch_size, "(batch_size,)");
  check.IndexVector("qo_indptr", qo_indptr, batch_size + 1, "(batch_size + 1,)");
  check.IndexVector("kv_indptr", kv_indptr, batch_size + 1, "(batch_size + 1,)");
  check.Positive("num_heads", num_heads);
  check.Positive("head_dim_ckv", head_dim_ckv);
  const int32_t* rows = DataOf<int32_t>(qo_indptr);
  const int32_t* pages = DataOf<int32_t>(kv_indptr);
  const int32_t* keys = DataOf<int32_t>(kv_len);
  CheckIndptr(check, "qo_indptr", rows, batch_size, INT32_MAX, "a 32-bit row count");
  CheckIndptr(check, "kv_indptr", pages, batch_size, INT32_MAX, "a 32-bit page count");
  MLAPlanPart part{};
  FindPageSizes(check, pages, keys, batch_size, &part);
  const int64_t num_rows = rows[batch_size];
  if (num_rows * num_heads > INT32_MAX) {
    check.FailValue(Text("`qo_indptr` ends at ", num_rows, ", with ", num_heads,
                         " heads a row; rows times heads must be below 2^31, split the batch"));
  }
  const PlanHeader header{kMLAHeader,
                          device.device_type,
                          device.device_id,
                          batch_size,
                          num_rows,
                          num_heads,
                          /*num_kv_heads=*/1,
                          /*head_dim_qk=*/head_dim_ckv,
                          /*head_dim_vo=*/head_dim_ckv,
                          /*page_size=*/part.min_page_size,
                          causal ? 1 : 0,
                          /*window_left=*/-1,
                          float_workspace.numel(),
                          int_workspace.numel(),
                          pages[batch_size],
                          AddressOf(int_workspace),
                          /*seal=*/0};
  std::vector<int64_t> kernel;
  if (IsCPU(device)) {
    kernel.insert(kernel.end(), rows, rows + batch_size + 1);
    kernel.insert(kernel.end(), pages, pages + batch_size + 1);
    kernel.insert(kernel.end(), keys, keys + batch_size);
  } else {
    if (head_dim_ckv != kCudaHeadDimCKV) {
      check.FailValue(
          Text("`head_dim_ckv` is ", head_dim_ckv, "; the CUDA kernels have ", kCudaHeadDimCKV));
    }
    if (num_rows > 0) {
      kernels::cuda::PlanArgs args{};
      args.float_workspace = DataOf(float_workspace);
      args.float_workspace_bytes = float_workspace.numel();
      args.int_workspace = DataOf(int_workspace);
      args.int_workspace_bytes = int_workspace.numel();
      args.qo_indptr = rows;
      args.kv_indptr = pages;
      args.kv_len = keys;
      args.num_rows = num_rows;
      args.batch_size = static_cast<int32_t>(batch_size);
      args.num_qo_heads = static_cast<int32_t>(num_heads);
      args.num_kv_heads = 1;
      args.head_dim_vo = static_cast<int32_t>(head_dim_ckv);
      args.causal = causal;
      RefuseCapture(check, device, kNotCaptured);
      auto plan = RequireCommon<kernels::cuda::PlanFn>(check, "batch_mla_plan", device);
      part.on_sm90 = ChooseSM90(check, device, args);
      Launch(check, plan, args, CurrentStream(device), &kernel);
    }
  }
  const int64_t* first = reinterpret_cast<const int64_t*>(&part);
  kernel.insert(kernel.begin(), first, first + MLAPlanPart::kSize);
  return MakePlan(header, kernel);
}

void BatchMLARun(TensorView float_workspace, TensorView int_workspace, Array<int64_t> plan,
                 TensorView q_nope, TensorView q_pe, TensorView ckv, TensorView kpe,
                 TensorView page_indices, TensorView o, Optional<TensorView> lse, int64_t mask_mode,
                 int64_t num_heads, int64_t page_size, double sm_scale, bool lse_base_e) {
  const Checker check("batch_mla_run");
  const PlanReader reader(check, plan, kMLAHeader);
  const PlanHeader& header = reader.header();
  check.Workspace("float_workspace", float_workspace);
  check.Workspace("int_workspace", int_workspace);
  const DLDevice device = check.Device("float_workspace", float_workspace);
  check.OnDevice("int_workspace", int_workspace, device);
  reader.RequireDevice(device);
  reader.RequireWorkspaces(float_workspace, int_workspace);

  const kernels::DType dtype = check.FloatDType("q_nope", q_nope);
  check.OnDevice("q_nope", q_nope, device);
  const std::pair<const char*, const TensorView*> inputs[] = {
      {"q_nope", &q_nope}, {"q_pe", &q_pe}, {"ckv", &ckv}, {"kpe", &kpe}};
  for (const auto& [name, tensor] : inputs) {
    const bool is_q = name[0] == 'q';
    check.DType(name, *tensor, q_nope.dtype());
    check.OnDevice(name, *tensor, device);
    check.Rank(name, *tensor, 3,
               is_q ? "(n, num_heads, head_dim)" : "(num_pages, page_size, head_dim)");
    check.Sizes32(name, *tensor);
    check.UnitLastStride(name, *tensor);
  }
  const int64_t n = q_nope.size(0), head_dim_ckv = q_nope.size(2), head_dim_kpe = q_pe.size(2);
  reader.Require("num_rows (rows of q_nope)", header.num_rows, n);
  reader.Require("num_heads", header.num_qo_heads, num_heads);
  reader.Require("head_dim_ckv (columns of q_nope)", header.head_dim_vo, head_dim_ckv);
  reader.Require("mask_mode", header.causal, mask_mode);
  check.Shape("q_nope", q_nope, {n, num_heads, head_dim_ckv}, "(n, num_heads, head_dim_ckv)");
  check.Shape("q_pe", q_pe, {n, num_heads, head_dim_kpe}, "(n, num_heads, head_dim_kpe)");
  check.Positive("page_size", page_size);
  check.Shape("ckv", ckv, {ckv.size(0), page_size, head_dim_ckv},
              "(num_pages, page_size, head_dim_ckv)");
  check.Shape("kpe", kpe, {ckv.size(0), page_size, head_dim_kpe},
              "(num_pages, page_size, head_dim_kpe)");
  check.Positive("head_dim_kpe", head_dim_kpe);
  check.Data("o", o, device, q_nope.dtype(), {n, num_heads, head_dim_ckv},
             "(n, num_heads, head_dim_ckv)");
  if (lse.has_value()) {
    check.Data("lse", lse.value(), device, kFloat32, {n, num_heads}, "(n, num_heads)");
  }
  check.Finite("sm_scale", sm_scale);
  if (lse_base_e) {
    check.FailValue(
        "`return_lse_base_on_e` is True; LSE is in base 2 everywhere here, and so is what merges "
        "it: pass False and multiply by ln 2 where base e is needed");
  }

  const std::vector<int64_t>& kernel = reader.kernel();
  const int64_t batch_size = header.batch_size;
  const MLAPlanPart part{kernel[0], kernel[1], kernel[2]};
  if (page_size < part.min_page_size || page_size > part.max_page_size) {
    check.FailValue(Text("`page_size` is ", page_size, ", but the pages and keys that `plan` was ",
                         "made for fit page sizes from ", part.min_page_size, " to ",
                         part.max_page_size, "; make a plan for this batch"));
  }
  check.Rank("page_indices", page_indices, 1, "(num_indices,)");
  check.IndexVector("page_indices", page_indices, page_indices.size(0), "(num_indices,)");
  check.OnDevice("page_indices", page_indices, device);
  if (page_indices.size(0) < header.num_kv_entries) {
    check.FailValue(Text("`page_indices` has ", page_indices.size(0), " entries, but the requests ",
                         "that `plan` was made for have ", header.num_kv_entries, " pages"));
  }
  const std::initializer_list<NamedTensor> read{{"q_nope", q_nope},
                                                {"q_pe", q_pe},
                                                {"ckv", ckv},
                                                {"kpe", kpe},
                                                {"page_indices", page_indices},
                                                {"int_workspace", int_workspace}};
  check.NoOverlap("o", o, read);
  check.NoOverlap("float_workspace", float_workspace, read);
  check.NoOverlap("o", o, "float_workspace", float_workspace);
  if (lse.has_value()) {
    check.NoOverlap("lse", lse.value(), read);
    check.NoOverlap("lse", lse.value(), {{"o", o}, {"float_workspace", float_workspace}});
  }
  if (!IsCPU(device) && CheckDeviceContents()) {
    CheckPageIndices(check, ReadBack(check, page_indices).data(), header.num_kv_entries,
                     ckv.size(0));
  }

  kernels::MLAArgs args{};
  args.dtype = dtype;
  args.batch_size = static_cast<int32_t>(batch_size);
  args.num_heads = static_cast<int32_t>(num_heads);
  args.head_dim_ckv = static_cast<int32_t>(head_dim_ckv);
  args.head_dim_kpe = static_cast<int32_t>(head_dim_kpe);
  args.num_rows = n;
  args.q_nope = DataOf(q_nope);
  args.q_pe = DataOf(q_pe);
  args.q_nope_stride_row = StrideOf(q_nope, 0);
  args.q_nope_stride_head = StrideOf(q_nope, 1);
  args.q_pe_stride_row = StrideOf(q_pe, 0);
  args.q_pe_stride_head = StrideOf(q_pe, 1);
  args.ckv = DataOf(ckv);
  args.kpe = DataOf(kpe);
  args.ckv_stride_page = StrideOf(ckv, 0);
  args.ckv_stride_slot = StrideOf(ckv, 1);
  args.kpe_stride_page = StrideOf(kpe, 0);
  args.kpe_stride_slot = StrideOf(kpe, 1);
  args.num_pages = ckv.size(0);
  args.page_size = static_cast<int32_t>(page_size);
  args.page_indices = DataOf<int32_t>(page_indices);
  args.o = DataOf(o);
  args.lse = lse.has_value() ? DataOf<float>(lse.value()) : nullptr;
  args.causal = mask_mode == 1;
  args.sm_scale = sm_scale;
  if (IsCPU(device)) {
    const HostTable table(reader, page_size);
    CheckPageTable(check, table.page_indptr.data(), args.page_indices, table.last_page_len.data(),
                   batch_size, args.num_pages, page_size);
    if (n == 0) return;
    const kernels::MLATable pointers{table.qo_indptr.data(), table.page_indptr.data(),
                                     table.last_page_len.data()};
    check.Run([&] { kernels::cpu::BatchMLA(args, pointers); });
    return;
  }
  RequireCudaMLA(check, args, header.num_kv_entries);
  if (n == 0) return;
  RefuseCapture(check, device, kNotCaptured);
  const kernels::cuda::PlanView view{DataOf(float_workspace), DataOf(int_workspace),
                                     kernel.data() + MLAPlanPart::kSize,
                                     kernels::cuda::kMLAPlanSize, /*enable_pdl=*/false};
  Launch(check, RequireMLA(check, dtype, part.on_sm90 != 0, device), args, view,
         CurrentStream(device));
}

}  // namespace ops
}  // namespace tvm_flashinfer

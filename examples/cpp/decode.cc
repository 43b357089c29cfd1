// One step of decode for two requests over a paged KV cache, by the packed functions themselves.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm_flashinfer/functions.h>

#include <algorithm>
#include <cmath>

#include "example.h"
#include "reference.h"
#include "tensors.h"

namespace example {

namespace {

constexpr int kBatch = 2, kHeads = 4, kKVHeads = 2, kDim = 64, kPageSize = 16, kNumPages = 5;

// Request 0 has the pages 4, 0 and 2, of which the last holds 7 tokens; request 1 the pages 1
// and 3.
const std::vector<int32_t> kPageIndptr = {0, 3, 5};
const std::vector<int32_t> kPageIndices = {4, 0, 2, 1, 3};
const std::vector<int32_t> kLastPageLen = {7, 16};

std::vector<double> Row(const std::vector<float>& values, size_t row) {
  return {values.begin() + row * kDim, values.begin() + (row + 1) * kDim};
}

double Error(const std::vector<float>& q, const std::vector<float>& k, const std::vector<float>& v,
             const std::vector<float>& out) {
  double error = 0;
  for (int request = 0; request < kBatch; ++request) {
    for (int head = 0; head < kHeads; ++head) {
      std::vector<std::vector<double>> keys, values;
      for (int page = kPageIndptr[request]; page < kPageIndptr[request + 1]; ++page) {
        const bool is_last = page + 1 == kPageIndptr[request + 1];
        for (int slot = 0; slot < (is_last ? kLastPageLen[request] : kPageSize); ++slot) {
          // Pages are (pages, KV heads, tokens, dim).
          const int kv_head = head * kKVHeads / kHeads;
          const size_t row = (kPageIndices[page] * kKVHeads + kv_head) * kPageSize + slot;
          keys.push_back(Row(k, row));
          values.push_back(Row(v, row));
        }
      }
      const size_t row = request * kHeads + head;
      const std::vector<double> expected = Attend(Row(q, row), keys, values);
      for (int i = 0; i < kDim; ++i) {
        error = std::max(error, std::abs(expected[i] - out[row * kDim + i]));
      }
    }
  }
  return error;
}

}  // namespace

double Decode(DLDevice device) {
  using tvm::ffi::Array;
  namespace names = tvm_flashinfer::names;
  const std::vector<float> q = Random(kBatch * kHeads * kDim);
  const std::vector<float> k = Random(kNumPages * kKVHeads * kPageSize * kDim);
  const std::vector<float> v = Random(k.size());
  const Shape pages{kNumPages, kKVHeads, kPageSize, kDim};
  const Tensor queries = BFloat16(q, {kBatch, kHeads, kDim}, device);
  const Tensor keys = BFloat16(k, pages, device), values = BFloat16(v, pages, device);
  const Tensor out = Empty({kBatch, kHeads, kDim}, kBFloat16, device);
  const Tensor lse = Empty({kBatch, kHeads}, kFloat32, device);
  const Tensor float_workspace = Empty({16 << 20}, kUInt8, device);
  const Tensor int_workspace = Empty({1 << 20}, kUInt8, device);
  const Tensor pinned_workspace = Empty({1 << 20}, kUInt8, kCPU);

  // The plan reads the index array on the host.
  const auto plan = tvm_flashinfer::Get(names::kBatchDecodePlan)(
      float_workspace, int_workspace, pinned_workspace, Int32(kPageIndptr, kCPU), kBatch, kHeads,
      kKVHeads, kPageSize, /*enable_cuda_graph=*/false, /*window_left=*/-1,
      /*logits_soft_cap=*/0.0, kDim, kDim, queries, keys);
  tvm_flashinfer::Get(names::kBatchDecodeRun)(
      float_workspace, int_workspace, plan.cast<Array<int64_t>>(), queries, keys, values,
      Int32(kPageIndptr, device), Int32(kPageIndices, device), Int32(kLastPageLen, device), out,
      lse, /*layout: HND*/ 1, /*window_left=*/-1, /*enable_pdl=*/false,
      /*sm_scale=*/1 / std::sqrt(static_cast<double>(kDim)), /*rope_rcp_scale=*/1.0,
      /*rope_rcp_theta=*/1.0);
  return Error(q, k, v, ToHost(out));
}

}  // namespace example

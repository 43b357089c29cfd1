// What hides single keys from the rows of a call: trees and packed masks.
#include "cache_call.h"
#include "cache_scope.h"

namespace tvm_flashinfer {
namespace ops {

void CacheCall::SetTree(const TensorView& tree_indptr, const TensorView& tree_mask) {
  IndexVector("tree_indptr", tree_indptr, args_.batch_size + 1, "(batch_size + 1,)");
  check_.DType("tree_mask", tree_mask, kInt32);
  check_.OnDevice("tree_mask", tree_mask, device_);
  const bool flat = tree_mask.ndim() == 1;
  if (!flat) check_.Rank("tree_mask", tree_mask, 2, "(num_nodes, 2), or flat");
  if (flat ? tree_mask.size(0) % 2 != 0 : tree_mask.size(1) != 2) {
    check_.FailValue(
        "`tree_mask` has shape " + ShapeText(tree_mask) +
        ", expected (num_nodes, 2), the interval of orders of every node's subtree, or "
        "the same flat");
  }
  check_.Contiguous("tree_mask", tree_mask);
  KeepFromOutputs("tree_mask", tree_mask);
  extras_.tree_indptr = DataOf<int32_t>(tree_indptr);
  extras_.tree_mask = DataOf<int32_t>(tree_mask);
  extras_.num_tree_nodes = tree_mask.numel() / 2;
  const HostInts indptr = ReadInts(tree_indptr);
  if (!indptr) return;
  const HostInts mask = ReadInts(tree_mask);
  CheckTreeContents(indptr, mask);
  if (bound_.slot() == CacheSlot::kTreeRagged && bound_.layer_window() != 0 && !IsFullLayer()) {
    CheckTreeDepth(indptr, mask);
  }
}

/*! \brief No way through a tree of new tokens is longer than the window, which it has not. */
void CacheCall::CheckTreeDepth(const HostInts& indptr, const HostInts& mask) {
  const int64_t window = bound_.layer_window();
  for (int64_t b = 0; b < args_.batch_size; ++b) {
    const int64_t first = indptr.data[b];
    for (int64_t t = first + window; t < indptr.data[b + 1]; ++t) {
      int64_t depth = 0;
      for (int64_t s = first; s <= t; ++s) {
        depth += mask.data[2 * s] <= mask.data[2 * t] && mask.data[2 * t] < mask.data[2 * s + 1];
      }
      if (depth <= window) continue;
      check_.FailValue(Text("the token tree of request ", b, " has a way of ", depth,
                            " nodes, the window of the cache's sliding layers is ", window,
                            "; there is no window inside a tree, so give trees of at most ", window,
                            " nodes on a way"));
    }
  }
}

void CacheCall::CheckTreeContents(const HostInts& indptr, const HostInts& mask) {
  CheckIndptr(check_, "tree_indptr", indptr.data, args_.batch_size, extras_.num_tree_nodes,
              "tree_mask");
  for (int64_t b = 0; b < args_.batch_size; ++b) {
    const int64_t nodes = indptr.data[b + 1] - indptr.data[b];
    const int64_t rows =
        qo_indptr_ ? int64_t{qo_indptr_.data[b + 1]} - qo_indptr_.data[b] : int64_t{1};
    if (nodes > 0 && (nodes < rows || nodes > kv_lens_[b])) {
      check_.FailValue(Text("`tree_indptr` gives request ", b, " ", nodes, " nodes; it has ", rows,
                            " rows, the last of the nodes, and ", kv_lens_[b],
                            " keys, of which the nodes are the last"));
    }
    for (int64_t t = indptr.data[b]; t < indptr.data[b + 1]; ++t) {
      if (mask.data[2 * t] < 0 || mask.data[2 * t] >= mask.data[2 * t + 1]) {
        check_.FailValue(Text("`tree_mask`[", t, "] is [", mask.data[2 * t], ", ",
                              mask.data[2 * t + 1],
                              "), expected an interval that starts with the node's own order"));
      }
    }
  }
}

void CacheCall::SetPackedMask(const TensorView& mask_indptr, const TensorView& packed_mask) {
  IndexVector("mask_indptr", mask_indptr, args_.batch_size + 1, "(batch_size + 1,)");
  check_.Rank("packed_mask", packed_mask, 1, "(num_bytes,)");
  check_.Data("packed_mask", packed_mask, device_, kUInt8, {packed_mask.size(0)}, "(num_bytes,)");
  KeepFromOutputs("packed_mask", packed_mask);
  extras_.mask_indptr = DataOf<int32_t>(mask_indptr);
  extras_.packed_mask = DataOf<uint8_t>(packed_mask);
  extras_.num_mask_bytes = packed_mask.size(0);
  const HostInts indptr = ReadInts(mask_indptr);
  if (indptr) CheckMaskContents(indptr);
}

void CacheCall::CheckMaskContents(const HostInts& indptr) {
  CheckIndptr(check_, "mask_indptr", indptr.data, args_.batch_size, extras_.num_mask_bytes,
              "packed_mask");
  for (int64_t b = 0; b < args_.batch_size; ++b) {
    const int64_t rows = qo_indptr_ ? int64_t{qo_indptr_.data[b + 1]} - qo_indptr_.data[b]
                                    : args_.num_rows / args_.batch_size;
    const int64_t got = int64_t{indptr.data[b + 1]} - indptr.data[b];
    const int64_t expected = (rows * kv_lens_[b] + 7) / 8;
    if (got != expected) {
      check_.FailValue(Text("`mask_indptr` gives request ", b, " ", got,
                            " bytes of `packed_mask`; ", "its ", rows, " rows and ", kv_lens_[b],
                            " keys take ", expected,
                            ", a bit for each pair and whole bytes for each request"));
    }
  }
}

}  // namespace ops
}  // namespace tvm_flashinfer

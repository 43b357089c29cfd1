// Batches of attention requests: their numbers, the calls over them, and what these must give.
#ifndef TESTS_NATIVE_BATCH_H_
#define TESTS_NATIVE_BATCH_H_

#include <string>
#include <vector>

#include "fixture.h"
#include "oracle.h"
#include "worst.h"

namespace native {

/*! \brief Shape of a batch, and what its attention does. */
struct Spec {
  std::vector<int> kv_lens;
  /*! \brief Rows of each request; one without it. */
  std::vector<int> qo_lens = {};
  int num_qo_heads = 4;
  int num_kv_heads = 2;
  int head_dim = 64;
  int page_size = 16;
  bool causal = false;
  int window_left = -1;
  double sm_scale = 0;  // 0 is 1 / sqrt(head_dim)
  // Of functions without a plan alone:
  double soft_cap = 0;
  std::vector<float> sinks = {};
  bool has_rope = false;
  Rope rope = {};
  std::string options = "{}";
};

/*! \brief Rows (n, heads, d) as (heads, n, d). */
Numbers HeadsFirst(const Numbers& rows, int64_t n, int64_t heads, int64_t d);

/*! \brief An output full of NaN, and an LSE. */
struct State {
  Placed o;
  Placed lse;
};

/*! \brief A batch with its numbers on the host, and its pages on the device. */
class Batch {
 public:
  /*! \brief Random numbers that the dtype holds. */
  Batch(const Spec& spec, const Param& param, std::mt19937* generator);

  State Output() const;
  int num_rows() const { return Offsets(spec.qo_lens).back(); }
  int batch_size() const { return static_cast<int>(spec.kv_lens.size()); }
  double sm_scale() const;

  // Each makes the calls of one function or pair of functions, and returns what they wrote.
  State PagedPrefill() const;
  State RaggedPrefill() const;
  State Decode() const;
  State BoundPagedPrefill() const;
  State BoundRaggedPrefill() const;
  State BoundDecode() const;

  /*! \brief Fail where a state is not that of the oracle; `what` is part of the message. */
  void Expect(const State& state, const std::string& what, bool has_lse = true) const;

  Spec spec;
  Numbers q;                          // (rows, query heads, head_dim)
  std::vector<Numbers> keys, values;  // of each request: (keys, KV heads, head_dim)
  std::vector<int32_t> page_indptr, page_indices, last_page_len;

 private:
  struct Planned {
    Tensor float_workspace, int_workspace;
    tvm::ffi::Any plan;
  };

  DLDevice device() const { return param_.device; }
  /*! \brief Queries as a part of a fused tensor whose rest is NaN. */
  Tensor PlacedQueries() const;
  /*! \brief (P, 2, Hkv, S, d), NaN where no token is. */
  Placed Pool() const;
  /*! \brief The keys (0) or the values (1) of a pool. */
  Tensor Half(const Placed& pool, int which) const;
  Tensor Ragged(const std::vector<Numbers>& parts) const;
  Planned PrefillPlan(const std::vector<int32_t>& kv_indptr, int page_size) const;
  tvm::ffi::Function Bound(const char* slot) const;

  /*! \brief Positions of the first key of each request, and of each row. */
  std::vector<int32_t> FirstPositions() const;
  std::vector<int32_t> RowPositions() const;
  /*! \brief Heads with the RoPE of the spec, if any. */
  Numbers Rotated(const Numbers& heads, int num_heads, const std::vector<int32_t>& positions) const;
  /*! \brief What a head of a row sees, but for its query and the keys. */
  RowInput RowOf(int b, int i, int h) const;

  Param param_;
};

}  // namespace native

#endif  // TESTS_NATIVE_BATCH_H_

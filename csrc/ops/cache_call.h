// One call of an attention slot of TVM's cache that has no plan: what was bound when the cache was
// made, and the arguments of the call, checked and turned into the kernels' structs step by step.
#ifndef TVM_FLASHINFER_OPS_CACHE_CALL_H_
#define TVM_FLASHINFER_OPS_CACHE_CALL_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/optional.h>

#include <memory>
#include <string>
#include <vector>

#include "../kernels/types.h"
#include "checks.h"
#include "rope_frequencies.h"

namespace tvm_flashinfer {
namespace ops {

using tvm::ffi::Tensor;

/*!
 * \brief The functions without a plan: those that TVM's cache calls, those with a packed mask, and
 * the one for requests of equal length.
 */
enum class CacheSlot {
  kPrefillPaged,
  kDecodePaged,
  kPrefillRagged,
  kTreePaged,
  kTreeRagged,
  kMaskPaged,
  kMaskRagged,
  kDense,
  kMLA
};

/*! \brief What TVM does not pass in a call. */
class BoundAttention {
 public:
  /*!
   * \param op Name of the function in errors, a literal.
   * \param options JSON text; docs/ops.md lists the settings.
   */
  BoundAttention(const char* op, CacheSlot slot, const std::string& options, Optional<Tensor> sinks,
                 Optional<Tensor> alibi_slopes);

  /*! \brief What a call of a compiled graph has among its arguments. */
  BoundAttention(const char* op, CacheSlot slot, int64_t window_left, double logits_soft_cap);

  const char* op() const { return op_; }
  CacheSlot slot() const { return slot_; }
  /*! \brief Tokens of the window of the layers; 0 for none. */
  int64_t layer_window() const { return layer_window_; }
  /*! \brief Whether the pages hold the window alone, which those of layers that slide do. */
  bool pages_are_window() const {
    return layer_window_ != 0 &&
           (slot_ == CacheSlot::kPrefillPaged || slot_ == CacheSlot::kDecodePaged);
  }
  /*! \brief Keys before the diagonal that a row sees; -1 for all of them. */
  int64_t window_left() const { return window_left_; }
  /*! \brief Rotated dimensions; 0 for the whole head. */
  int64_t rotary_dim() const { return rotary_dim_; }
  double logits_soft_cap() const { return logits_soft_cap_; }
  /*! \brief The true key is k_scale times the stored one; 1 unless keys are 8-bit. */
  double k_scale() const { return k_scale_; }
  double v_scale() const { return v_scale_; }
  bool alibi_by_position() const { return alibi_by_position_; }
  const Optional<Tensor>& sinks() const { return sinks_; }
  const Optional<Tensor>& alibi_slopes() const { return alibi_slopes_; }
  RopeFrequencyCache& frequencies() const { return *frequencies_; }

 private:
  const char* op_;
  CacheSlot slot_;
  int64_t layer_window_ = 0;
  int64_t window_left_ = -1;
  int64_t rotary_dim_ = 0;
  double logits_soft_cap_ = 0;
  double k_scale_ = 1;
  double v_scale_ = 1;
  bool alibi_by_position_ = false;
  Optional<Tensor> sinks_;
  Optional<Tensor> alibi_slopes_;
  std::unique_ptr<RopeFrequencyCache> frequencies_;
};

/*! \brief How a call is to rotate queries and keys. */
struct RotaryInputs {
  int64_t rotary_mode;  // 1 for inside attention
  double rope_scale;
  double rope_theta;
  TensorView q_positions;
  Optional<TensorView> k_positions;  // none: keys have the positions of the rows
};

/*!
 * \brief Arguments of one call. The methods check shapes, dtypes and devices, and the contents of
 * index arrays where the host can read them or is asked to; Run* launches.
 */
class CacheCall {
 public:
  /*! \brief Start with the queries, outputs and scale; value columns are those of o. */
  CacheCall(const BoundAttention& bound, const TensorView& q, const TensorView& o,
            const Optional<TensorView>& lse, double sm_scale);

  /*! \brief Rows of the requests; without it every request has one. */
  void SetRows(const TensorView& qo_indptr);
  /*! \brief As many requests, each with equally many of the rows. */
  void SetEqualRows(int64_t batch_size);
  void SetCausal(int64_t causal);
  /*! \brief After the rows, for keys that are the new tokens: the window of the layer. */
  void SetNewTokensWindow();
  /*! \brief Pages (P, 2, Hkv, S, d), or of MLA (P, S, d); length_info is (B,) or (3, B). */
  void SetPages(const TensorView& pages, const TensorView& page_indptr,
                const TensorView& page_indices, const TensorView& length_info);
  void SetRaggedKeys(const TensorView& k, const TensorView& v, const TensorView& kv_indptr);
  /*! \brief Keys of which every request has equally many. */
  void SetEqualKeys(const TensorView& k, const TensorView& v);
  /*! \brief After the keys. tree_mask is (nodes, 2) or flat. */
  void SetTree(const TensorView& tree_indptr, const TensorView& tree_mask);
  /*! \brief After the keys. */
  void SetPackedMask(const TensorView& mask_indptr, const TensorView& packed_mask);
  /*!
   * \brief After the keys, which are those of requests of equal length. The bias is (sequences,
   * heads, rows, keys), each of which may be 1 for one number for all; a sequence is as many
   * requests.
   */
  void SetBias(const TensorView& bias, int64_t heads_as_requests);
  /*! \brief After the keys. */
  void SetRotary(const RotaryInputs& rotary);

  void Run();

 private:
  /*! \brief An index array on the host: of a CPU tensor, or read back when that is asked for. */
  struct HostInts {
    std::vector<int32_t> copy;
    const int32_t* data = nullptr;
    explicit operator bool() const { return data != nullptr; }
  };
  HostInts ReadInts(const TensorView& tensor) const;
  /*! \brief Rows of the longest request; only where the host can read qo_indptr. */
  int64_t LongestRequest() const;

  void IndexVector(const char* name, const TensorView& tensor, int64_t size, const char* meaning);
  /*! \brief The outputs share no memory with an input. */
  void KeepFromOutputs(const char* name, const TensorView& input) const;
  void SetRaggedTensors(const TensorView& k, const TensorView& v);
  void SetKVDType(const char* keys, const TensorView& k, const char* values, const TensorView& v);
  void SetHeads(int64_t num_kv_heads, int64_t head_dim_qk, int64_t head_dim_vo, const char* keys);
  void SetBatchSize(const char* indptr_name, const TensorView& indptr);
  const float* PerHead(const char* name, const Optional<Tensor>& values) const;
  void CheckPageContents(const HostInts& indptr, const HostInts& indices, const HostInts& lengths,
                         bool sliding);
  void CheckTreeContents(const HostInts& indptr, const HostInts& mask);
  void CheckTreeDepth(const HostInts& indptr, const HostInts& mask);
  void CheckMaskContents(const HostInts& indptr);
  /*! \brief For TVM_FLASHINFER_DEBUG=kernels. */
  void PrintKernel() const;
  void RunOnCuda();

  const BoundAttention& bound_;
  const Checker check_;
  DLDevice device_;
  TensorView q_;
  TensorView o_;
  Optional<TensorView> lse_;
  kernels::AttentionArgs args_{};
  kernels::AttentionExtras extras_{};
  kernels::PagedKV paged_{};
  kernels::RaggedKV ragged_{};
  bool is_paged_ = false;
  int64_t num_indices_ = 0;
  // What the checks of contents need of earlier arguments; empty where contents are not checked.
  HostInts qo_indptr_;
  std::vector<int64_t> kv_lens_;
  int64_t num_kv_tokens_ = 0;
  std::vector<int32_t> equal_keys_;  // offsets for the CPU kernels
  std::shared_ptr<const RopeFrequencies> frequencies_;
};

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_CACHE_CALL_H_

// What TVM's cache does not pass on: a function of ours that wraps one of its calls tells the
// functions in the cache's slots which window the layer has, and they tell it what they wrote. Both
// run on one thread, the one that the model runs on.
#ifndef TVM_FLASHINFER_OPS_CACHE_SCOPE_H_
#define TVM_FLASHINFER_OPS_CACHE_SCOPE_H_

#include <optional>

#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief The window of a layer that sees all tokens. */
constexpr int64_t kFullLayer = -1;

/*! \brief A state that a function of ours has written: o (rows, heads, dim), lse (rows, heads). */
struct AttentionState {
  DLDevice device;
  int64_t num_rows;
  int64_t num_heads;
  void* o;
  float* lse;  // null if none was asked for
};

/*! \brief A wrapped call of TVM's cache, as long as it lives. Scopes nest; the inner one counts. */
class CacheScope {
 public:
  /*! \param window Tokens of the window of the layer, or kFullLayer; none when nobody said. */
  explicit CacheScope(std::optional<int64_t> window);
  ~CacheScope();
  CacheScope(const CacheScope&) = delete;
  CacheScope& operator=(const CacheScope&) = delete;

  /*! \brief The innermost one of this thread, or null. */
  static CacheScope* Current();

  const std::optional<int64_t>& window() const { return window_; }
  /*! \brief The last state that was written; none if no function of ours wrote one. */
  const std::optional<AttentionState>& last_state() const { return last_state_; }
  /*! \brief Whether a function of a cache with windows was called. */
  bool met_window() const { return met_window_; }

 private:
  friend void RecordState(const TensorView& o, const Optional<TensorView>& lse);
  friend void MeetWindow(const Checker& check, int64_t layer_window, bool window_alone);

  CacheScope* outer_;
  std::optional<int64_t> window_;
  std::optional<AttentionState> last_state_;
  bool met_window_ = false;
};

/*! \brief What every function does that writes a state: outside of a wrapped call, nothing. */
void RecordState(const TensorView& o, const Optional<TensorView>& lse);

/*!
 * \brief A function that was made for layers with a window is called: the wrapped call must have
 * been told the same of the layer.
 * \param window_alone Whether the function serves no layer without a window.
 */
void MeetWindow(const Checker& check, int64_t layer_window, bool window_alone);

/*! \brief Whether the wrapped call says that the layer sees all tokens. */
bool IsFullLayer();

/*!
 * \brief The `window_left` for new tokens, which TVM gives to one function whatever the layer.
 *
 * It is W - 1, or -1 where no request has more rows than the window or the layer is a full one.
 * Raises where that cannot be told.
 *
 * \param longest Rows of the longest request, or of the whole step where only these are known.
 * \param exact Whether it is the former.
 */
int64_t NewTokensWindow(const Checker& check, int64_t layer_window, int64_t longest, bool exact);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_CACHE_SCOPE_H_

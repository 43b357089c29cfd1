#include "cache_scope.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

thread_local CacheScope* current_scope = nullptr;

}  // namespace

CacheScope::CacheScope(std::optional<int64_t> window) : outer_(current_scope), window_(window) {
  current_scope = this;
}

CacheScope::~CacheScope() { current_scope = outer_; }

CacheScope* CacheScope::Current() { return current_scope; }

void RecordState(const TensorView& o, const Optional<TensorView>& lse) {
  if (current_scope == nullptr) return;
  current_scope->last_state_ =
      AttentionState{o.device(), o.size(0), o.size(1), DataOf(o),
                     lse.has_value() ? DataOf<float>(lse.value()) : nullptr};
}

void MeetWindow(const Checker& check, int64_t layer_window, bool window_alone) {
  if (current_scope == nullptr) return;
  current_scope->met_window_ = true;
  const auto& window = current_scope->window_;
  if (!window.has_value() || *window == layer_window) return;
  if (*window == kFullLayer && !window_alone) return;
  check.FailValue(Text("the call says that the layer has ",
                       *window == kFullLayer ? "no window" : Text("a window of ", *window),
                       ", but the cache was created with one of ", layer_window,
                       " for it; give BindLayerWindows the kinds and the window that the cache is "
                       "created with"));
}

bool IsFullLayer() { return current_scope != nullptr && current_scope->window() == kFullLayer; }

int64_t NewTokensWindow(const Checker& check, int64_t layer_window, int64_t longest, bool exact) {
  MeetWindow(check, layer_window, /*window_alone=*/false);
  if (longest <= layer_window || IsFullLayer()) return -1;
  if (current_scope != nullptr && current_scope->window().has_value()) return layer_window - 1;
  check.FailValue(
      Text(exact ? "a request has " : "the requests of the step together have ", longest,
           " new tokens, the window of the cache's sliding layers is ", layer_window,
           exact ? "" : ", and how many each one has is known on the device alone",
           ". TVM's cache does not tell which layer calls: compile the model with the pass "
           "tvm_flashinfer.relax.BindLayerWindows, or keep prefill_chunk_size at most the window"));
}

}  // namespace ops
}  // namespace tvm_flashinfer

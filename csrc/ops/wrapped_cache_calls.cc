// Calls of TVM's paged KV cache with what TVM's own have no argument for: the window of a layer,
// and attention sinks.
#include <tvm/ffi/function.h>

#include <initializer_list>
#include <optional>
#include <string>
#include <utility>

#include "attention_sinks.h"
#include "cache_scope.h"
#include "ops.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

/*! \brief A method of TVM's cache. Its functions take tensors that they may keep, so no views. */
Function CacheMethod(const Checker& check, const char* name) {
  const std::string full_name = std::string("vm.builtin.attention_kv_cache_") + name;
  const auto method = Function::GetGlobal(full_name);
  if (!method.has_value()) {
    check.FailRuntime("there is no function `" + full_name +
                      "`; load TVM's runtime first, 0.27 or newer for attention_with_shared_kv");
  }
  return *method;
}

/*! \brief The argument `window` as a scope takes it. */
int64_t Window(const Checker& check, int64_t window) {
  if (window == kFullLayer || (window >= 1 && window <= INT32_MAX)) return window;
  check.FailValue(Text("`window` is ", window,
                       ", expected the tokens of the layer's window, 1 or more, or ", kFullLayer,
                       " for a layer that sees all tokens"));
}

/*! \brief TVM's functions take None for all of these, and then read from nowhere. */
void CheckDefined(const Checker& check, const AnyView& cache,
                  std::initializer_list<std::pair<const char*, Tensor>> tensors) {
  if (cache.type_index() < tvm::ffi::TypeIndex::kTVMFFIStaticObjectBegin) {
    check.FailType("`cache` is a " + cache.GetTypeKey() + ", expected TVM's paged KV cache");
  }
  for (const auto& [name, tensor] : tensors) check.Defined(name, tensor);
}

template <typename... Args>
void CallCache(const Checker& check, const CacheScope& scope, const char* method,
               const Args&... args) {
  CacheMethod(check, method)(args...);
  // A cache on TVM's own kernels does as it always does, and writes no state of ours.
  const int64_t window = scope.window().value_or(kFullLayer);
  if (window == kFullLayer || !scope.last_state().has_value() || scope.met_window()) return;
  check.FailValue(Text("`window` is ", window,
                       ", but the cache has no layers with a window; create it with the kind "
                       "mha_sliding for this layer, or give ",
                       kFullLayer));
}

/*!
 * \brief Attention, and then the sinks on the state that it ended with. That is the one of `o`
 * whether or not parts were merged. Rows that pad the step are at the end of `o`, and TVM leaves
 * them out.
 */
void AttentionWithSinks(const Checker& check, std::optional<int64_t> window, const AnyView& cache,
                        int64_t layer_id, double sm_scale, const Tensor& qkv, const Tensor& sinks,
                        const Tensor& o) {
  CheckDefined(check, cache, {{"qkv", qkv}, {"sinks", sinks}, {"o", o}});
  const DLDevice device = check.Device("o", o);
  const kernels::DType dtype = check.FloatDType("o", o);
  check.Rank("o", o, 3, "(n, num_qo_heads, head_dim)");
  check.Sizes32("o", o);
  check.Data("sinks", sinks, device, kFloat32, {o.size(1)}, "(num_qo_heads,)");
  check.NoOverlap("o", o, "sinks", sinks);
  const CacheScope scope(window);
  CallCache(check, scope, "attention_with_fused_qkv", cache, layer_id, sm_scale, qkv, o);
  const auto& state = scope.last_state();
  if (!state.has_value()) {
    check.FailRuntime(
        "no function of tvm_flashinfer wrote `o`, so there is no LSE to apply the sinks to: the "
        "cache runs on TVM's own kernels, or another copy of this library made it. Create it with "
        "tvm_flashinfer.relax.FlashInferPagedKVCache");
  }
  if (state->o != DataOf(o) || state->num_rows > o.size(0) || state->lse == nullptr) {
    check.FailRuntime(
        "the last attention of the call did not write `o` and its LSE; this TVM calls the "
        "functions of its cache in another order. `tvm-flashinfer doctor` names the versions that "
        "are served");
  }
  RunApplySinks(check,
                {dtype, state->num_rows, static_cast<int32_t>(o.size(1)),
                 static_cast<int32_t>(o.size(2)), state->o, state->lse, DataOf<float>(sinks)},
                device);
}

}  // namespace

void CacheAttentionInWindow(AnyView cache, int64_t layer_id, double sm_scale, int64_t window,
                            Tensor qkv, Tensor o) {
  const Checker check("cache_attention_in_window");
  CheckDefined(check, cache, {{"qkv", qkv}, {"o", o}});
  check.Device("o", o);
  const CacheScope scope(Window(check, window));
  CallCache(check, scope, "attention_with_fused_qkv", cache, layer_id, sm_scale, qkv, o);
}

void CacheSelfAttentionInWindow(AnyView cache, int64_t layer_id, double sm_scale, int64_t window,
                                Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) {
  const Checker check("cache_self_attention_in_window");
  CheckDefined(check, cache, {{"q", q}, {"k", k}, {"v", v}, {"o", o}, {"lse", lse}});
  check.Device("o", o);
  const CacheScope scope(Window(check, window));
  CallCache(check, scope, "self_attention", cache, layer_id, sm_scale, q, k, v, o, lse);
}

void CacheSharedAttentionInWindow(AnyView cache, int64_t source_layer_id, double sm_scale,
                                  int64_t window, Tensor q, Tensor k, Tensor v, Tensor o) {
  const Checker check("cache_shared_attention_in_window");
  CheckDefined(check, cache, {{"q", q}, {"k", k}, {"v", v}, {"o", o}});
  check.Device("o", o);
  const CacheScope scope(Window(check, window));
  CallCache(check, scope, "attention_with_shared_kv", cache, source_layer_id, sm_scale, q, k, v, o);
}

void CacheAttentionWithSinks(AnyView cache, int64_t layer_id, double sm_scale, Tensor qkv,
                             Tensor sinks, Tensor o) {
  AttentionWithSinks(Checker("cache_attention_with_sinks"), std::nullopt, cache, layer_id, sm_scale,
                     qkv, sinks, o);
}

void CacheAttentionWithSinksInWindow(AnyView cache, int64_t layer_id, double sm_scale,
                                     int64_t window, Tensor qkv, Tensor sinks, Tensor o) {
  const Checker check("cache_attention_with_sinks_in_window");
  AttentionWithSinks(check, Window(check, window), cache, layer_id, sm_scale, qkv, sinks, o);
}

}  // namespace ops
}  // namespace tvm_flashinfer

// TVM's paged KV cache with our functions in its slots, made without a compiled model: two prompts,
// then some steps of decode.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm_flashinfer/functions.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "example.h"
#include "reference.h"
#include "tensors.h"

namespace example {

namespace {

using tvm::ffi::Any;
using tvm::ffi::Array;
using tvm::ffi::Function;
namespace names = tvm_flashinfer::names;

constexpr int kLayers = 2, kHeads = 4, kKVHeads = 2, kDim = 64, kPageSize = 16;
constexpr double kTheta = 10000.0;

/*! \brief What the cache is given for one attention slot; on CUDA some functions take a plan. */
Array<Any> Slot(const char* slot, bool planned) {
  return tvm_flashinfer::Get(names::kMakeCacheSlot)(slot, R"({"rotary_dim": 64})", planned,
                                                    /*support_sliding_window=*/0)
      .cast<Array<Any>>();
}

Any CreateCache(DLDevice device) {
  using tvm_flashinfer::Get;
  const bool planned = device.device_type == kDLCUDA;
#ifdef TVM_HAS_LAYER_WINDOW
  const Shape sizes{/*batch*/ 4,
                    /*tokens*/ 1024,
                    /*chunk*/ 256,
                    kPageSize,
                    /*slides*/ 0,
                    /*window of layers*/ 1024};
#else
  const Shape sizes{/*batch*/ 4, /*tokens*/ 1024, /*chunk*/ 256, kPageSize, /*slides*/ 0};
#endif
  constexpr int kAttentionMHA = 0, kRopeNormal = 1, kNone = 0;
  const Function merge = Get(names::kMergeStateInPlace);
  const Function rotate = Get(names::kBindSplitQKVRotary)(kTheta, 1.0, kDim, "{}").cast<Function>();
  return Function::GetGlobalRequired("vm.builtin.paged_attention_kv_cache_create")(
      sizes, /*layer_partition=*/Shape{0, kLayers}, kHeads, kKVHeads, kDim, kDim,
      Shape(std::vector<int64_t>(kLayers, kAttentionMHA)), /*enable_disaggregation=*/false,
      kRopeNormal, /*rope_scale=*/1.0, kTheta, /*rope_ext_factors=*/kNone,
      /*device and dtype are those of*/ Empty(Shape{}, kBFloat16, device),
      Get(names::kAppendPagedKVCache), /*append of MLA*/ kNone, Slot("prefill_ragged", planned),
      Slot("prefill_paged", planned), Slot("decode_paged", planned),
      /*prefill and decode in windows*/ Slot("prefill_paged", false), Slot("decode_paged", false),
      Slot("tree_paged", false), Slot("tree_ragged", false), /*MLA*/ Array<Any>(),
      Array<Any>{merge, merge}, rotate, Get(names::kCopySinglePage), Get(names::kDebugGetKV),
      Get(names::kCompactKVCopy));
}

/*! \brief The keys and values of every sequence and layer, and attention over them. */
class Reference {
 public:
  /*! \brief Add the tokens of a step and return their largest difference from `out`. */
  double Step(int layer, const std::vector<int64_t>& lens, const std::vector<float>& qkv,
              const std::vector<float>& out) {
    double error = 0;
    int token = 0;
    for (size_t sequence = 0; sequence < lens.size(); ++sequence) {
      auto& past = past_[layer][sequence];
      for (int64_t i = 0; i < lens[sequence]; ++i, ++token) {
        const int position = static_cast<int>(past[0].keys.size());
        for (int head = 0; head < kKVHeads; ++head) {
          past[head].keys.push_back(Rotate(Head(qkv, token, kHeads + head), position, kTheta));
          past[head].values.push_back(Head(qkv, token, kHeads + kKVHeads + head));
        }
        for (int head = 0; head < kHeads; ++head) {
          const auto& seen = past[head * kKVHeads / kHeads];
          const auto expected =
              Attend(Rotate(Head(qkv, token, head), position, kTheta), seen.keys, seen.values);
          for (int d = 0; d < kDim; ++d) {
            const double got = out[(token * kHeads + head) * kDim + d];
            error = std::max(error, std::abs(expected[d] - got));
          }
        }
      }
    }
    return error;
  }

 private:
  struct Past {
    std::vector<std::vector<double>> keys, values;
  };

  static std::vector<double> Head(const std::vector<float>& qkv, int token, int head) {
    const auto start = qkv.begin() + (token * (kHeads + 2 * kKVHeads) + head) * kDim;
    return {start, start + kDim};
  }

  Past past_[kLayers][2][kKVHeads];
};

}  // namespace

double KVCache(DLDevice device) {
  const auto builtin = [](const char* name) {
    return Function::GetGlobalRequired(std::string("vm.builtin.") + name);
  };
  const Any cache = CreateCache(device);
  for (int sequence : {0, 1}) builtin("kv_state_add_sequence")(cache, sequence);
  const Function attend = builtin("attention_kv_cache_attention_with_fused_qkv");

  Reference reference;
  double error = 0;
  // Prompts of 20 and 7 tokens, two steps of decode, and a second chunk of a prompt.
  for (const auto& lens : {std::vector<int64_t>{20, 7}, {1, 1}, {1, 1}, {5, 18}}) {
    const int64_t tokens = lens[0] + lens[1];
    builtin("kv_state_begin_forward")(cache, Shape{0, 1}, Shape(lens));
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::vector<float> qkv = Random(tokens * (kHeads + 2 * kKVHeads) * kDim);
      const Tensor out = Empty({tokens, kHeads, kDim}, kBFloat16, device);
      attend(cache, layer, 1 / std::sqrt(static_cast<double>(kDim)),
             BFloat16(qkv, {tokens, kHeads + 2 * kKVHeads, kDim}, device), out);
      error = std::max(error, reference.Step(layer, lens, qkv, ToHost(out)));
    }
    builtin("kv_state_end_forward")(cache);
  }
  return error;
}

}  // namespace example

// Draws from what filters leave of rows of probabilities.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "kernels.h"
#include "thread_pool.h"

namespace tvm_flashinfer {
namespace kernels {
namespace cpu {
namespace {

struct Tail {
  double sum = 0;
  int64_t count = 0;
};

/*! \brief The tokens with at least a positive probability t. */
Tail TailOf(const float* probs, int32_t size, float t) {
  constexpr int kLanes = 16;
  constexpr int32_t kPiece = 4096;
  Tail tail;
  for (int32_t base = 0; base < size; base += kPiece) {
    const int32_t end = std::min(size, base + kPiece),
                  whole = base + (end - base) / kLanes * kLanes;
    float sums[kLanes] = {};
    int32_t counts[kLanes] = {};
    for (int32_t i = base; i < whole; i += kLanes) {
      for (int j = 0; j < kLanes; ++j) {
        const float p = probs[i + j];
        sums[j] += p >= t ? p : 0.f;
        counts[j] += p >= t;
      }
    }
    for (int32_t i = whole; i < end; ++i) {
      if (probs[i] >= t) {
        sums[0] += probs[i];
        ++counts[0];
      }
    }
    for (int j = 0; j < kLanes; ++j) {
      tail.sum += sums[j];
      tail.count += counts[j];
    }
  }
  return tail;
}

float FloatOf(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

/*! \brief The largest t from `low` to `high` for which reached(t) holds, `low` if none does. */
template <typename Reached>
float LargestThat(float low, float high, const Reached& reached) {
  // Positive floats are ordered as their bits are.
  uint32_t first, last;
  std::memcpy(&first, &low, sizeof(first));
  std::memcpy(&last, &high, sizeof(last));
  if (reached(high)) return high;
  while (last - first > 1) {
    const uint32_t middle = first + (last - first) / 2;
    (reached(FloatOf(middle)) ? first : last) = middle;
  }
  return FloatOf(first);
}

float LargestOf(const float* probs, int32_t size) {
  float largest = 0;
  for (int32_t i = 0; i < size; ++i) largest = probs[i] > largest ? probs[i] : largest;
  return largest;
}

/*! \brief The least probability that is kept of a row; infinite where none is positive. */
float ThresholdOf(const TokenFilter& filter, const float* probs, int32_t size, int64_t row) {
  const float largest = LargestOf(probs, size);
  if (!(largest >= FLT_MIN)) return INFINITY;
  float t = FLT_MIN;
  if (filter.top_k != nullptr && filter.top_k[row] > 0 && filter.top_k[row] < size) {
    const int64_t k = filter.top_k[row];
    t = LargestThat(t, largest, [&](float x) { return TailOf(probs, size, x).count >= k; });
  }
  if (filter.top_p != nullptr) {
    double wanted = filter.top_p[row];
    if (!filter.joint) wanted *= TailOf(probs, size, t).sum;
    t = LargestThat(t, largest, [&](float x) { return TailOf(probs, size, x).sum >= wanted; });
  }
  if (filter.min_p != nullptr) t = std::max(t, filter.min_p[row] * largest);
  return std::min(t, largest);
}

/*! \brief The first token at which the running sum of what value(i) gives is above a number. */
template <typename Value>
int32_t DrawFrom(int32_t size, double number, const Value& value) {
  double sum = 0;
  int32_t last = -1;
  for (int32_t i = 0; i < size; ++i) {
    const float p = value(i);
    if (!(p > 0)) continue;
    sum += p;
    last = i;
    if (sum > number) break;
  }
  return last;
}

/*! \brief How many tokens of a sorted row are kept, and their sum. */
Tail KeptOfSorted(const SortedArgs& args, int64_t row) {
  const float* probs = args.sorted_probs + row * args.vocab_size;
  const int64_t most = std::clamp<int64_t>(args.top_k[row], 1, args.vocab_size);
  Tail kept;
  while (kept.count < most) {
    kept.sum += probs[kept.count++];
    if (kept.sum >= args.top_p[row]) break;
  }
  return kept;
}

void Renorm(const float* probs, int32_t size, float t, float* out) {
  const double sum = TailOf(probs, size, t).sum;
  const float scale = sum > 0 ? static_cast<float>(1 / sum) : 0.f;
  for (int32_t i = 0; i < size; ++i) out[i] = probs[i] >= t ? probs[i] * scale : 0.f;
}

constexpr double kNsOfPass = 0.2, kPasses = 40;

}  // namespace

void DrawFiltered(const FilterDrawArgs& args) {
  const Draws& draws = args.draws;
  const int32_t size = args.vocab_size;
  const double cost_ns = kNsOfPass * kPasses * draws.num_samples * size;
  ParallelFor(draws.num_samples, cost_ns, [&](int64_t i) {
    const int32_t row = draws.row_indices[i];
    draws.ids[i] = -1;
    if (row < 0 || row >= args.num_rows) return;
    const float* probs = args.probs + static_cast<int64_t>(row) * size;
    const float t = ThresholdOf(args.filter, probs, size, row);
    const double number = draws.uniform[i] * TailOf(probs, size, t).sum;
    draws.ids[i] = DrawFrom(size, number, [&](int32_t j) { return probs[j] >= t ? probs[j] : 0; });
  });
}

void RenormFiltered(const FilterRenormArgs& args) {
  const int32_t size = args.vocab_size;
  ParallelFor(args.num_rows, kNsOfPass * kPasses * args.num_rows * size, [&](int64_t row) {
    const float* probs = args.probs + row * size;
    Renorm(probs, size, ThresholdOf(args.filter, probs, size, row), args.out + row * size);
  });
}

void DrawSorted(const SortedArgs& args) {
  const Draws& draws = args.draws;
  ParallelFor(draws.num_samples, 1.0 * draws.num_samples * args.vocab_size, [&](int64_t i) {
    const int32_t row = draws.row_indices[i];
    draws.ids[i] = -1;
    if (row < 0 || row >= args.num_rows) return;
    const Tail kept = KeptOfSorted(args, row);
    const int64_t start = static_cast<int64_t>(row) * args.vocab_size;
    const float* probs = args.sorted_probs + start;
    const int32_t at = DrawFrom(static_cast<int32_t>(kept.count), draws.uniform[i] * kept.sum,
                                [&](int32_t j) { return probs[j]; });
    if (at >= 0) draws.ids[i] = args.sorted_indices[start + at];
  });
}

void RenormSorted(const SortedArgs& args) {
  const int32_t size = args.vocab_size;
  ParallelFor(args.num_rows, 2.0 * args.num_rows * size, [&](int64_t row) {
    const int64_t start = row * size, last = KeptOfSorted(args, row).count - 1;
    const float t = std::max(args.sorted_probs[start + last], FLT_MIN);
    Renorm(args.probs + start, size, t, args.out + start);
  });
}

void SoftmaxRows(const SoftmaxArgs& args) {
  ParallelFor(args.num_rows, 5.0 * args.num_rows * args.vocab_size, [&](int64_t row) {
    const float* logits = args.logits + row * args.vocab_size;
    float* out = args.out + row * args.vocab_size;
    const float temperature = args.temperature[row];
    const bool is_greedy = !(temperature > 1e-5f);
    float largest = -INFINITY;
    for (int32_t i = 0; i < args.active_size; ++i) largest = std::max(largest, logits[i]);
    double sum = 0;
    for (int32_t i = 0; i < args.active_size; ++i) {
      out[i] = is_greedy ? logits[i] == largest : std::exp((logits[i] - largest) / temperature);
      sum += out[i];
    }
    const float scale = static_cast<float>(1 / sum);
    for (int32_t i = 0; i < args.active_size; ++i) out[i] *= scale;
    std::fill(out + args.active_size, out + args.vocab_size, 0.f);
  });
}

void VerifyDrafts(const SpeculativeArgs& args) {
  const int64_t size = args.vocab_size, drafts = args.num_drafts;
  ParallelFor(args.batch_size, 2.0 * args.batch_size * size, [&](int64_t b) {
    const float* draft = args.draft_probs + b * drafts * size;
    const float* target = args.target_probs + b * (drafts + 1) * size;
    const float* uniform = args.uniform + b * (drafts + 1);
    int32_t* ids = args.ids + b * (drafts + 1);
    int64_t at = 0;
    for (; at < drafts; ++at, draft += size, target += size) {
      const int32_t id = args.draft_ids[b * drafts + at];
      if (id < 0 || id >= size || !(uniform[at] * draft[id] < target[id])) break;
      ids[at] = id;
    }
    args.num_accepted[b] = static_cast<int32_t>(at);
    const bool all = at == drafts;
    auto rest = [&](int32_t i) { return all ? target[i] : target[i] - draft[i]; };
    auto sum_of = [&](const auto& value) {
      double sum = 0;
      for (int32_t i = 0; i < size; ++i) sum += value(i) > 0 ? value(i) : 0;
      return sum;
    };
    const double sum = sum_of(rest);
    auto whole = [&](int32_t i) { return target[i]; };
    ids[at] = sum > 0 ? DrawFrom(args.vocab_size, uniform[drafts] * sum, rest)
                      : DrawFrom(args.vocab_size, uniform[drafts] * sum_of(whole), whole);
    std::fill(ids + at + 1, ids + drafts + 1, -1);
  });
}

}  // namespace cpu
}  // namespace kernels
}  // namespace tvm_flashinfer

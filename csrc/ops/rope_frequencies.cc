#include "rope_frequencies.h"

#include <algorithm>
#include <cmath>

#include "json_settings.h"

namespace tvm_flashinfer {
namespace ops {

namespace {

constexpr const char* kExample = "{\"rope_type\": \"llama3\", ...}";

using Frequencies = std::vector<double>;

void ScaleLlama3(const JsonSettings& settings, Frequencies* inv_freq) {
  const double factor = settings.PositiveNumber("factor");
  const double low = settings.PositiveNumber("low_freq_factor");
  const double high = settings.PositiveNumber("high_freq_factor");
  const double context = settings.PositiveNumber("original_max_position_embeddings");
  if (low == high) settings.Fail("has equal low_freq_factor and high_freq_factor");
  for (double& f : *inv_freq) {
    const double rotations = context * f / (2 * M_PI);
    const double keep = std::clamp((rotations - low) / (high - low), 0.0, 1.0);
    f = (1 - keep) * f / factor + keep * f;
  }
}

/*!
 * \brief TVM's yarn. Its ramp runs over the dimensions, and not over the pairs whose bounds it has:
 * the second element of a pair, rotary_dim / 2 dimensions on, gets a frequency of its own.
 */
void ScaleYarn(const JsonSettings& settings, double theta, int64_t rotary_dim,
               Frequencies* inv_freq, Frequencies* second) {
  const double factor = settings.PositiveNumber("factor");
  const double context = settings.PositiveNumber("original_max_position_embeddings");
  const double fast = settings.PositiveNumber("beta_fast");
  const double slow = settings.PositiveNumber("beta_slow");
  if (!settings.Has("inv_theta_log_scale") && theta <= 1) {
    settings.Fail("of rope_type \"yarn\" needs a rope_theta above 1");
  }
  const double log_scale =
      settings.PositiveNumber("inv_theta_log_scale", 1 / (2 * std::log(std::max(theta, 1.1))));
  const double dim = static_cast<double>(rotary_dim);
  auto bound = [&](double rotations) {
    return dim * std::log(context / (rotations * 2 * M_PI)) * log_scale;
  };
  const double low = std::max(bound(fast), 0.0);
  double high = std::min(bound(slow), dim - 1);
  if (low == high) high += 0.001;
  auto scaled = [&](double f, double d) {
    const double ramp = std::clamp((d - low) / (high - low), 0.0, 1.0);
    return f / factor * ramp + f * (1 - ramp);
  };
  const size_t pairs = inv_freq->size();
  second->resize(pairs);
  for (size_t i = 0; i < pairs; ++i) {
    const double f = (*inv_freq)[i];
    (*inv_freq)[i] = scaled(f, static_cast<double>(i));
    (*second)[i] = scaled(f, static_cast<double>(i + pairs));
  }
}

double LongropeMagnitude(const JsonSettings& settings) {
  const double original = settings.PositiveNumber("original_max_position_embeddings");
  const double scale = settings.PositiveNumber("max_position_embeddings") / original;
  return scale > 1 ? std::sqrt(1 + std::log(scale) / std::log(original)) : 1.0;
}

std::vector<float> Rounded(const Frequencies& inv_freq, double scale) {
  std::vector<float> rounded;
  for (double f : inv_freq) rounded.push_back(static_cast<float>(f * scale));
  return rounded;
}

}  // namespace

RopeFrequencies MakeRopeFrequencies(const Checker& check, double theta, double scale,
                                    int64_t rotary_dim, const std::string& rope_scaling,
                                    const float* ext_factors) {
  if (!std::isfinite(theta) || theta <= 0) {
    check.FailValue("`rope_theta` is " + std::to_string(theta) + ", expected a positive number");
  }
  check.Finite("rope_scale", scale);
  if (rotary_dim < 0 || rotary_dim % 2 != 0 || rotary_dim / 2 > kernels::kMaxRotaryPairs) {
    check.FailValue("`rotary_dim` is " + std::to_string(rotary_dim) +
                    ", expected an even number from 0 to " +
                    std::to_string(2 * kernels::kMaxRotaryPairs));
  }
  const JsonSettings settings(check, "rope_scaling", rope_scaling, kExample);
  const std::string type = settings.Text("rope_type", "default");

  Frequencies inv_freq(rotary_dim / 2), second;
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
  }
  RopeFrequencies result;
  result.interleaved = type == "gptj";
  result.magnitude = 1;
  if (type == "llama3") {
    ScaleLlama3(settings, &inv_freq);
  } else if (type == "linear") {
    const double factor = settings.PositiveNumber("factor");
    for (double& f : inv_freq) f /= factor;
  } else if (type == "yarn") {
    ScaleYarn(settings, theta, rotary_dim, &inv_freq, &second);
  } else if (type == "longrope") {
    result.magnitude = static_cast<float>(LongropeMagnitude(settings));
    if (ext_factors == nullptr) {
      settings.Fail(
          "of rope_type \"longrope\" needs a table of factors; pass it in the place of "
          "apply_rope to the function that bind_split_qkv_rotary returns");
    }
    for (size_t i = 0; i < inv_freq.size(); ++i) inv_freq[i] /= ext_factors[i];
  } else if (type != "default" && type != "gptj") {
    settings.Fail("has rope_type \"" + type +
                  "\"; served are default, gptj, llama3, linear, yarn and longrope");
  }
  for (const Frequencies* list : {&inv_freq, &second}) {
    for (double f : *list) {
      if (!std::isfinite(static_cast<float>(f * scale))) {
        check.FailValue("the RoPE settings give a frequency of " + std::to_string(f * scale) +
                        "; rope_theta, rope_scale, rope_scaling and ext_factors must give finite "
                        "ones");
      }
    }
  }
  result.inv_freq = Rounded(inv_freq, scale);
  result.inv_freq_second = Rounded(second, scale);
  if (result.inv_freq_second == result.inv_freq) result.inv_freq_second.clear();
  return result;
}

bool NeedsExtFactors(const Checker& check, const std::string& rope_scaling) {
  const JsonSettings settings(check, "rope_scaling", rope_scaling, kExample);
  return settings.Text("rope_type", "default") == "longrope";
}

std::shared_ptr<const RopeFrequencies> RopeFrequencyCache::Get(const Checker& check, double theta,
                                                               double scale, int64_t rotary_dim) {
  constexpr size_t kMaxEntries = 8;
  // Not waited for: in a child of fork() a thread that is gone may hold the lock for ever.
  const std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    return std::make_shared<const RopeFrequencies>(
        MakeRopeFrequencies(check, theta, scale, rotary_dim, rope_scaling_));
  }
  for (const Entry& entry : entries_) {
    if (entry.theta == theta && entry.scale == scale && entry.rotary_dim == rotary_dim) {
      return entry.frequencies;
    }
  }
  auto frequencies = std::make_shared<const RopeFrequencies>(
      MakeRopeFrequencies(check, theta, scale, rotary_dim, rope_scaling_));
  if (entries_.size() == kMaxEntries) entries_.erase(entries_.begin());
  entries_.push_back({theta, scale, rotary_dim, frequencies});
  return frequencies;
}

}  // namespace ops
}  // namespace tvm_flashinfer

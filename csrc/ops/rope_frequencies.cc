#include "rope_frequencies.h"

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>

#include <algorithm>
#include <cmath>
#include <sstream>

namespace tvm_flashinfer {
namespace ops {

namespace {

namespace json = tvm::ffi::json;
using tvm::ffi::Any;
using tvm::ffi::String;

/*! \brief The JSON object of the settings; an error names the setting that is missing or wrong. */
class Settings {
 public:
  Settings(const Checker& check, const std::string& text) : check_(check) {
    String error;
    const json::Value value = json::Parse(text.empty() ? "{}" : text, &error);
    auto object = value.try_cast<json::Object>();
    if (error.size() != 0 || !object.has_value()) {
      check.FailValue("`rope_scaling` is \"" + text +
                      "\", expected a JSON object such as {\"rope_type\": \"llama3\", ...}");
    }
    object_ = *object;
  }

  std::string Type() const {
    auto it = object_.find(String("rope_type"));
    if (it == object_.end()) return "default";
    auto type = (*it).second.try_cast<String>();
    if (!type.has_value()) check_.FailValue("`rope_scaling` has a `rope_type` that is no text");
    return *type;
  }

  double Number(const char* name) const {
    auto it = object_.find(String(name));
    std::optional<double> number;
    if (it != object_.end()) number = (*it).second.try_cast<double>();
    if (!number.has_value() || !std::isfinite(*number) || *number <= 0) {
      check_.FailValue("`rope_scaling` of rope_type \"" + Type() + "\" needs a positive number `" +
                       name + "`");
    }
    return *number;
  }

 private:
  const Checker& check_;
  json::Object object_;
};

}  // namespace

RopeFrequencies MakeRopeFrequencies(const Checker& check, double theta, double scale,
                                    int64_t rotary_dim, const std::string& rope_scaling) {
  if (!std::isfinite(theta) || theta <= 0) {
    check.FailValue("`rope_theta` is " + std::to_string(theta) + ", expected a positive number");
  }
  check.Finite("rope_scale", scale);
  if (rotary_dim < 0 || rotary_dim % 2 != 0 || rotary_dim / 2 > kernels::kMaxRotaryPairs) {
    check.FailValue("`rotary_dim` is " + std::to_string(rotary_dim) +
                    ", expected an even number from 0 to " +
                    std::to_string(2 * kernels::kMaxRotaryPairs));
  }
  const Settings settings(check, rope_scaling);
  const std::string type = settings.Type();

  std::vector<double> inv_freq(rotary_dim / 2);
  for (size_t i = 0; i < inv_freq.size(); ++i) {
    inv_freq[i] = std::pow(theta, -2.0 * static_cast<double>(i) / static_cast<double>(rotary_dim));
  }
  if (type == "llama3") {
    const double factor = settings.Number("factor");
    const double low = settings.Number("low_freq_factor");
    const double high = settings.Number("high_freq_factor");
    const double context = settings.Number("original_max_position_embeddings");
    if (low == high)
      check.FailValue("`rope_scaling` has equal low_freq_factor and high_freq_factor");
    for (double& f : inv_freq) {
      const double rotations = context * f / (2 * M_PI);
      const double keep = std::clamp((rotations - low) / (high - low), 0.0, 1.0);
      f = (1 - keep) * f / factor + keep * f;
    }
  } else if (type == "linear") {
    const double factor = settings.Number("factor");
    for (double& f : inv_freq) f /= factor;
  } else if (type != "default" && type != "gptj") {
    check.FailValue("`rope_scaling` has rope_type \"" + type +
                    "\"; served are default, gptj, llama3 and linear");
  }
  RopeFrequencies result;
  result.interleaved = type == "gptj";
  for (double f : inv_freq) result.inv_freq.push_back(static_cast<float>(f * scale));
  return result;
}

}  // namespace ops
}  // namespace tvm_flashinfer

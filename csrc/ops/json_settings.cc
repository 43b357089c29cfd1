#include "json_settings.h"

#include <algorithm>
#include <cmath>

namespace tvm_flashinfer {
namespace ops {

namespace json = tvm::ffi::json;
using tvm::ffi::Any;
using tvm::ffi::String;

JsonSettings::JsonSettings(const Checker& check, const char* argument, const std::string& text,
                           const char* example)
    : check_(check), argument_(argument) {
  // The parser recurses, so that deep nesting would overflow the stack; settings are flat.
  int depth = 0, deepest = 0;
  for (char c : text) {
    if (c == '[' || c == '{') deepest = std::max(deepest, ++depth);
    if (c == ']' || c == '}') --depth;
  }
  if (deepest > 16 || text.size() > (1 << 16)) {
    Fail("is nested " + std::to_string(deepest) + " deep in " + std::to_string(text.size()) +
         " characters; settings take 16 and 65536 at most");
  }
  String error;
  const json::Value value = json::Parse(text.empty() ? "{}" : text, &error);
  auto object = value.try_cast<json::Object>();
  if (error.size() != 0 || !object.has_value()) {
    check.FailValue(std::string("`") + argument + "` is \"" + text +
                    "\", expected a JSON object such as " + example);
  }
  object_ = *object;
}

void JsonSettings::Fail(const std::string& message) const {
  check_.FailValue(std::string("`") + argument_ + "` " + message);
}

Any JsonSettings::Value(const char* name) const {
  auto it = object_.find(String(name));
  return it == object_.end() ? Any(nullptr) : (*it).second;
}

bool JsonSettings::Has(const char* name) const { return Value(name) != nullptr; }

void JsonSettings::AllowOnly(std::initializer_list<const char*> names) const {
  for (const auto& [key, value] : object_) {
    const std::string got = key.cast<String>();
    if (std::find(names.begin(), names.end(), got) != names.end()) continue;
    std::string known;
    for (const char* name : names) known += (known.empty() ? "" : ", ") + std::string(name);
    Fail("has a setting `" + got + "`; the settings here are " + known);
  }
}

bool JsonSettings::Flag(const char* name) const {
  if (!Has(name)) return false;
  const std::optional<bool> flag = Value(name).as<bool>();
  if (!flag.has_value()) Fail(std::string("has a `") + name + "` that is neither true nor false");
  return *flag;
}

std::string JsonSettings::Text(const char* name, const char* otherwise) const {
  if (!Has(name)) return otherwise;
  auto text = Value(name).try_cast<String>();
  if (!text.has_value()) Fail(std::string("has a `") + name + "` that is no text");
  return *text;
}

std::optional<double> JsonSettings::Number(const char* name) const {
  const Any value = Value(name);
  if (value == nullptr || value.as<bool>().has_value()) return std::nullopt;
  return value.try_cast<double>();
}

double JsonSettings::NumberFromZero(const char* name, double otherwise) const {
  if (!Has(name)) return otherwise;
  const std::optional<double> number = Number(name);
  if (!number.has_value() || !std::isfinite(*number) || *number < 0) {
    Fail(std::string("has a `") + name + "` that is no finite number from 0 on");
  }
  return *number;
}

double JsonSettings::PositiveNumber(const char* name, std::optional<double> otherwise) const {
  if (!Has(name) && otherwise.has_value()) return *otherwise;
  const std::optional<double> number = Number(name);
  if (!number.has_value() || !std::isfinite(*number) || *number <= 0) {
    const std::string type =
        Has("rope_type") ? "of rope_type \"" + Text("rope_type", "") + "\" " : "";
    Fail(type + "needs a positive number `" + name + "`");
  }
  return *number;
}

double JsonSettings::Scale(const char* name) const {
  const double scale = PositiveNumber(name, 1.0);
  if (!std::isnormal(static_cast<float>(scale))) {
    Fail(std::string("has a `") + name + "` of " + tvm_flashinfer::ops::Text(scale) +
         ", which float32 does not hold");
  }
  return scale;
}

int64_t JsonSettings::PositiveInteger(const char* name, int64_t otherwise) const {
  if (!Has(name)) return otherwise;
  const double number = PositiveNumber(name);
  if (number != std::floor(number) || number > INT32_MAX) {
    Fail(std::string("has a `") + name + "` that is no positive 32-bit integer");
  }
  return static_cast<int64_t>(number);
}

int64_t JsonSettings::IntegerFromZero(const char* name, int64_t otherwise) const {
  if (!Has(name)) return otherwise;
  const double number = NumberFromZero(name, 0);
  if (number != std::floor(number) || number > INT32_MAX) {
    Fail(std::string("has a `") + name + "` that is no 32-bit integer from 0 on");
  }
  return static_cast<int64_t>(number);
}

std::string JsonSettings::ObjectText(const char* name) const {
  if (!Has(name)) return "{}";
  const Any value = Value(name);
  if (!value.try_cast<json::Object>().has_value()) {
    Fail(std::string("has a `") + name + "` that is no JSON object");
  }
  return json::Stringify(value);
}

}  // namespace ops
}  // namespace tvm_flashinfer

// Settings that come as JSON text; an error names the setting that is missing or wrong.
#ifndef TVM_FLASHINFER_OPS_JSON_SETTINGS_H_
#define TVM_FLASHINFER_OPS_JSON_SETTINGS_H_

#include <tvm/ffi/container/map.h>
#include <tvm/ffi/extra/json.h>

#include <initializer_list>
#include <optional>
#include <string>

#include "checks.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief The object that one argument of a call holds. */
class JsonSettings {
 public:
  /*! \brief Parse `text`, empty for no settings; `example` shows what is expected. */
  JsonSettings(const Checker& check, const char* argument, const std::string& text,
               const char* example);

  bool Has(const char* name) const;
  /*! \brief Raise when there is a setting of another name. */
  void AllowOnly(std::initializer_list<const char*> names) const;

  /*! \brief true or false; false where the setting is missing. */
  bool Flag(const char* name) const;
  std::string Text(const char* name, const char* otherwise) const;
  /*! \brief A finite number, 0 or more, or above 0; `otherwise` where the setting is missing. */
  double NumberFromZero(const char* name, double otherwise) const;
  double PositiveNumber(const char* name, std::optional<double> otherwise = std::nullopt) const;
  /*! \brief A positive number that float32 holds as a normal one, or 1. */
  double Scale(const char* name) const;
  /*! \brief An integer from 1 to INT32_MAX. */
  int64_t PositiveInteger(const char* name, int64_t otherwise) const;
  /*! \brief An integer from 0 to INT32_MAX. */
  int64_t IntegerFromZero(const char* name, int64_t otherwise) const;
  /*! \brief The JSON text of an object, "{}" where the setting is missing or null. */
  std::string ObjectText(const char* name) const;

  [[noreturn]] void Fail(const std::string& message) const;

 private:
  std::optional<double> Number(const char* name) const;
  tvm::ffi::Any Value(const char* name) const;

  const Checker& check_;
  const char* argument_;
  tvm::ffi::json::Object object_;
};

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_JSON_SETTINGS_H_

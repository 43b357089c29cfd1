// The files of tuning that are in use, and the choice for a call: by them, or by the rules.
#ifndef TVM_FLASHINFER_OPS_TUNING_H_
#define TVM_FLASHINFER_OPS_TUNING_H_

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "tuning_file.h"

namespace tvm_flashinfer {
namespace ops {

/*! \brief A tactic that was measured, and the file that has it; null for none. */
struct Tuned {
  const Tactic* tactic = nullptr;
  const TuningFile* file = nullptr;  // also where it is for the GPU and has nothing for the shape

  explicit operator bool() const { return tactic != nullptr; }
};

/*!
 * \brief Files in use. One that the user named, by TVM_FLASHINFER_TUNING or in a call, goes before
 * those that models carry. Never changed once it is made: threads read it without a lock.
 */
struct Tuning {
  bool by_user = false;
  std::vector<std::shared_ptr<const TuningFile>> files;  // newest last

  Tuned Find(const Gpu& gpu, const ChoiceShape& shape) const;
};

namespace tuning_detail {
/*! \brief What is in use: null for nothing, kUnread until the environment was read. */
extern std::atomic<const Tuning*> current;
extern const Tuning kUnread;
const Tuning* ReadEnvironment(const Checker& check);
}  // namespace tuning_detail

/*! \brief Null where no tuning is in use, which costs a plan no more than this. */
inline const Tuning* CurrentTuning(const Checker& check) {
  const Tuning* tuning = tuning_detail::current.load(std::memory_order_acquire);
  return tuning == &tuning_detail::kUnread ? tuning_detail::ReadEnvironment(check) : tuning;
}

/*! \brief What was measured for a call; files that are for other GPUs are named once on stderr. */
Tuned FindTuned(const Tuning* tuning, DLDevice device, const ChoiceShape& shape);

/*! \brief Say on stderr why a file, or a part of it, is not used. */
void Warn(const std::string& message);

/*! \brief A choice that was measured, in words. */
Choice TunedChoice(const Tuned& tuned);
/*! \brief A choice by a rule, in words; also why not by the file that is in use. */
Choice DefaultChoice(Kernel kernel, const std::string& reason, const Tuned& tuned);

/*! \brief Use the file that a model carries, unless the user named one. Twice does nothing. */
void UseModelTuning(const Checker& check, const std::string& text);

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_TUNING_H_

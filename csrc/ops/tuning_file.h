// A file of tuning: for one GPU and one set of versions, the fastest kernel for each class of
// shapes. It is data, made by `tvm-flashinfer tune`; nothing is measured here.
#ifndef TVM_FLASHINFER_OPS_TUNING_FILE_H_
#define TVM_FLASHINFER_OPS_TUNING_FILE_H_

#include <atomic>
#include <optional>
#include <string>
#include <unordered_map>

#include "kernel_choice.h"

namespace tvm_flashinfer {
namespace ops {

class TuningFile {
 public:
  /*! \brief Parse the JSON text; a ValueError names what is wrong with it, and `source`. */
  TuningFile(const Checker& check, std::string text, std::string source);

  /*! \brief The tactic for the class of a shape; null where none was measured. */
  const Tactic* Find(const ChoiceShape& shape) const;

  /*! \brief Why these figures are not those of this library; empty if they are. */
  std::string WhyOld() const;
  /*! \brief Why they are not those of this library and driver. */
  std::string WhyStale() const;
  /*! \brief Why they are not those of a GPU; empty if they are. */
  std::string WhyForeign(const Gpu& gpu) const;

  const std::string& text() const { return text_; }
  const std::string& source() const { return source_; }
  const Gpu& gpu() const { return gpu_; }
  /*! \brief Of the text, in hex: ranks that print the same one choose alike. */
  const std::string& digest() const { return digest_; }
  /*! \brief True once for each device: the time to say that the file is not for it. */
  bool FirstMismatch(int device_id) const {
    const uint64_t bit = uint64_t{1} << (device_id & 63);
    return (mismatches_.fetch_or(bit, std::memory_order_relaxed) & bit) == 0;
  }
  /*! \brief Whether its choices of CUDA cores cannot be followed, since the kernel is nowhere. */
  bool lacks_cuda_core() const { return lacks_cuda_core_.load(std::memory_order_relaxed); }
  /*! \brief Note it; true for the first one who does. */
  bool NoteLacksCudaCore() const { return !lacks_cuda_core_.exchange(true); }
  int64_t size() const { return static_cast<int64_t>(tactics_.size()); }

 private:
  std::string text_;
  std::string source_;
  std::string digest_;
  Gpu gpu_;
  std::string version_;
  std::string flashinfer_;
  int64_t cuda_ = 0;
  std::unordered_map<uint64_t, Tactic> tactics_;  // by the key of the class
  mutable std::atomic<uint64_t> mismatches_{0};
  mutable std::atomic<bool> lacks_cuda_core_{false};
};

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_TUNING_FILE_H_

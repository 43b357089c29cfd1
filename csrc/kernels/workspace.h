// The bound that users may set on the memory which a kernel takes for itself. Host code, for the
// CPU kernels and for the units.
#ifndef TVM_FLASHINFER_KERNELS_WORKSPACE_H_
#define TVM_FLASHINFER_KERNELS_WORKSPACE_H_

#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <stdexcept>
#include <string>

namespace tvm_flashinfer {
namespace kernels {

/*! \brief What the environment allows, read in each call; without it there is no bound. */
inline int64_t MaxWorkspaceBytes() {
  const char* text = std::getenv("TVM_FLASHINFER_MAX_WORKSPACE_BYTES");
  if (text == nullptr || *text == '\0') return std::numeric_limits<int64_t>::max();
  char* end = nullptr;
  errno = 0;
  const long long bytes = std::strtoll(text, &end, 10);
  if (*end != '\0' || errno != 0 || bytes < 0) {
    throw std::invalid_argument("TVM_FLASHINFER_MAX_WORKSPACE_BYTES is \"" + std::string(text) +
                                "\", expected a number of bytes such as 268435456");
  }
  return bytes;
}

/*! \brief Raise when a call needs more memory of its own than the environment allows. */
inline void CheckWorkspaceBytes(int64_t need) {
  const int64_t have = MaxWorkspaceBytes();
  if (need <= have) return;
  throw std::invalid_argument("this call needs " + std::to_string(need) +
                              " bytes of workspace and TVM_FLASHINFER_MAX_WORKSPACE_BYTES allows " +
                              std::to_string(have) + "; raise it, or split the batch");
}

}  // namespace kernels
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_KERNELS_WORKSPACE_H_

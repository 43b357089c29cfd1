// The versions that files of tuning are compared with. A test compares them with the package's.
#ifndef TVM_FLASHINFER_OPS_VERSIONS_H_
#define TVM_FLASHINFER_OPS_VERSIONS_H_

namespace tvm_flashinfer {
namespace ops {

constexpr const char* kVersion = "0.1.0";
constexpr const char* kFlashInferVersion = "0.7.4";

}  // namespace ops
}  // namespace tvm_flashinfer

#endif  // TVM_FLASHINFER_OPS_VERSIONS_H_

// What a model library that looks its functions up needs of the process that loads it. Such a
// library carries a module of the kind below, which TVM makes again when it loads the library. A
// process that lacks this library cannot, and TVM's error names the kind: it is what to do.
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <string>

namespace tvm_flashinfer {

namespace {

using tvm::ffi::Bytes;
using tvm::ffi::Function;
using tvm::ffi::Module;
using tvm::ffi::Optional;
using tvm::ffi::String;

// One for each way in which models called the functions of their cache, with the first version that
// has it; the last one is that of models compiled now. A change that breaks compiled models adds
// one, and what is no longer served goes away.
constexpr const char* kRequirements[] = {"pip install 'tvm-flashinfer>=0.1.0'"};
constexpr size_t kNumRequirements = sizeof(kRequirements) / sizeof(kRequirements[0]);

class Requirement : public tvm::ffi::ModuleObj {
 public:
  explicit Requirement(const char* kind) : kind_(kind) {}
  const char* kind() const final { return kind_; }
  int GetPropertyMask() const final { return Module::kBinarySerializable | Module::kRunnable; }
  Optional<Function> GetFunction(const String& name) final { return std::nullopt; }
  // TVM reads no module of zero bytes.
  Bytes SaveToBytes() const final { return Bytes(kind_); }

 private:
  const char* kind_;
};

Module Require(const char* kind) { return Module(tvm::ffi::make_object<Requirement>(kind)); }

}  // namespace

TVM_FFI_STATIC_INIT_BLOCK() {
  namespace refl = tvm::ffi::reflection;
  for (const char* kind : kRequirements) {
    const std::string loader = std::string("ffi.Module.load_from_bytes.") + kind;
    // Another copy of this library was there before; see register.cc.
    if (Function::GetGlobal(loader).has_value()) return;
    refl::GlobalDef().def(loader.c_str(), [kind](const Bytes& bytes) { return Require(kind); });
  }
  refl::GlobalDef().def("flashinfer.requirement",
                        [] { return Require(kRequirements[kNumRequirements - 1]); });
}

}  // namespace tvm_flashinfer

// So that register.cc can name this file.
extern "C" void tvm_flashinfer_requirement() {}

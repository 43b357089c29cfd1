// The same functions as symbols of a model library: TVM finds `__tvm_ffi_<name>` there before it
// looks at the globals, so that a library that carries them runs where this package is not
// installed.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm_flashinfer/function_list.h>

#include <string>

#include "../ops/call_counts.h"
#include "../ops/ops.h"

// The names have a dot, which only an assembler label can spell.
#define TVM_FLASHINFER_EXPORT(name, function)                                                    \
  extern "C" __attribute__((visibility("default"))) int tvm_flashinfer_export_##function(        \
      void* self, const TVMFFIAny* args, int32_t num_args,                                       \
      TVMFFIAny* result) __asm__("__tvm_ffi_flashinfer." #name);                                 \
  extern "C" int tvm_flashinfer_export_##function(void* self, const TVMFFIAny* args,             \
                                                  int32_t num_args, TVMFFIAny* result) {         \
    (void)self;                                                                                  \
    TVM_FFI_SAFE_CALL_BEGIN();                                                                   \
    using Info = ::tvm::ffi::detail::FunctionInfo<decltype(::tvm_flashinfer::ops::function)>;    \
    static std::string full_name = "flashinfer." #name;                                          \
    ::tvm::ffi::detail::unpack_call<typename Info::RetType>(                                     \
        std::make_index_sequence<Info::num_args>{}, &full_name, ::tvm_flashinfer::ops::function, \
        reinterpret_cast<const ::tvm::ffi::AnyView*>(args), num_args,                            \
        reinterpret_cast<::tvm::ffi::Any*>(result));                                             \
    TVM_FFI_SAFE_CALL_END();                                                                     \
  }

TVM_FLASHINFER_FUNCTIONS(TVM_FLASHINFER_EXPORT)

// What the linker is told to look for, so that it takes this file out of the archive.
extern "C" void tvm_flashinfer_exports() {}

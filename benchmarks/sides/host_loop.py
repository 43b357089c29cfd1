"""A loop in C++ around a packed function, which costs what a call of TVM's virtual machine does."""

from __future__ import annotations

import functools
import shutil
from typing import Any

from . import Absent

_SOURCE = """
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>

#include <vector>

tvm::ffi::Any call_often(tvm::ffi::Function function, tvm::ffi::Array<tvm::ffi::Any> arguments,
                         int64_t count) {
  std::vector<tvm::ffi::AnyView> packed;
  for (const tvm::ffi::Any& argument : arguments) packed.emplace_back(argument);
  tvm::ffi::Any result;
  for (int64_t i = 0; i < count; ++i) {
    function.CallPacked(packed.data(), static_cast<int32_t>(packed.size()), &result);
  }
  return result;
}
"""


@functools.cache
def load_loop() -> Any:
    """The function `(function, arguments, count)`, which returns the last result.

    Raises
    ------
    Absent
        Where it cannot be compiled.
    """
    for program in ("ninja", "c++"):
        if shutil.which(program) is None:
            raise Absent(f"the loop in C++ is compiled, and {program} is not on the PATH")
    from tvm_ffi import cpp

    try:
        module = cpp.load_inline("benchmark_loop", cpp_sources=_SOURCE, functions=["call_often"])
    except RuntimeError as error:
        raise Absent(f"the loop in C++ does not compile: {error}") from error
    return module.call_often

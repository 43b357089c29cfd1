"""Libraries and model objects from real CUDA code, loaded without a GPU."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess

import pytest

from tvm_flashinfer.kernels import KernelSpec, build_library, build_model_object, toolchain

pytestmark = [
    pytest.mark.nvcc,
    pytest.mark.skipif(bool(toolchain.missing_tools()), reason="the CUDA compiler is not here"),
]

# Two units bring the same kernel, and the same inline variable, for the linker to keep one of.
UNIT = """
#include <cuda_runtime.h>
#include <string>
#include <vector>
#include "../../types.h"
template <typename T> __global__ void kernel(T* out) { *out = 1; }
template <typename T> struct Counter { static inline std::vector<T> values = {1, 2}; };
extern "C" int unit_KIND() {
  static std::string name = TVM_FLASHINFER_ARCHS;
  Counter<int>::values.push_back(3);
  kernel<int><<<1, 1>>>(nullptr);
  // 35: no driver; 100: no device; 0 where there is a GPU. Never 98, an unregistered kernel.
  return name == "80,90a" && cudaGetLastError() != cudaErrorInvalidDeviceFunction
             ? static_cast<int>(Counter<int>::values.size()) : -1;
}
"""

# What libflashinfer_tvm.a does: it exports packed functions under names with a dot, and throws.
OPS = """
#include <stdexcept>
#include <string>
#include <vector>
template <typename T> struct Counter { static inline std::vector<T> values = {1, 2}; };
extern "C" int unit_common();
struct OpError : std::runtime_error { using std::runtime_error::runtime_error; };
extern "C" __attribute__((visibility("default"))) int test_op(int fail)
    __asm__("__tvm_ffi_flashinfer.test_op");
extern "C" int test_op(int fail) {
  try {
    if (fail) throw OpError("failed");
  } catch (const std::exception& error) {
    return std::string(error.what()) == "failed" ? -2 : -3;
  }
  return 100 * unit_common() + static_cast<int>(Counter<int>::values.size());
}
extern "C" __attribute__((visibility("default"))) int not_exported() { return 0; }
extern "C" void tvm_flashinfer_exports() {}
"""

# The other file that nothing calls there: it must stay out of a model.
REGISTER = """
struct Registrar { Registrar() { __builtin_trap(); } } registrar;
extern "C" void tvm_flashinfer_register() {}
"""

PLUGIN = """
extern "C" int unit_common();
extern "C" __attribute__((visibility("default"))) int tvm_flashinfer_kernel_entries() {
  return unit_common();
}
"""


@pytest.fixture
def cuda_sandbox(csrc, headers_dir, cache_dir):
    cuda = csrc / "kernels" / "cuda"
    for unit in (cuda / "units").iterdir():
        unit.write_text(UNIT.replace("KIND", unit.stem))
    (cuda / "plugin.cc").write_text(PLUGIN)


@pytest.fixture
def archive(tmp_path):
    (tmp_path / "ops.cc").write_text(OPS)
    (tmp_path / "register.cc").write_text(REGISTER)
    run("g++", "-std=c++17", "-O1", "-fPIC", "-c", "ops.cc", "register.cc", cwd=tmp_path)
    run("ar", "rcs", "libops.a", "ops.o", "register.o", cwd=tmp_path)
    return tmp_path / "libops.a"


def run(*command, cwd=None):
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def defined(path, *flags):
    return {line.split()[-1] for line in run("nm", "--defined-only", *flags, path).splitlines()}


def machine_code(path):
    """Return the architectures that a library holds code for."""
    beside_nvcc = toolchain.find_nvcc().path.with_name("cuobjdump")
    cuobjdump = beside_nvcc if beside_nvcc.exists() else shutil.which("cuobjdump")
    if cuobjdump is None:
        pytest.skip("there is no cuobjdump, which lists the machine code of a library")
    listing = run(cuobjdump, "--list-elf", path)
    return set(re.findall(r"sm_\d+a?", listing))


SPECS = [KernelSpec("common"), KernelSpec("batch_decode", "float16", 128)]


def load(path):
    return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)


def test_library(cuda_sandbox):
    library = build_library(SPECS, progress=None)
    assert defined(library, "-D") == {"tvm_flashinfer_kernel_entries"}
    assert "cuda" not in run("readelf", "-d", library)
    assert load(library).tvm_flashinfer_kernel_entries() == 3


@pytest.mark.skipif(
    toolchain.find_gnu_ld() is None or shutil.which("objcopy") is None, reason="needs binutils"
)
def test_model_object(cuda_sandbox, archive, tmp_path):
    model = build_model_object(SPECS, archive, progress=None)
    assert defined(model, "--extern-only") == {"__tvm_ffi_flashinfer.test_op"}
    assert "UNIQUE" not in run("readelf", "-sW", model)
    assert "GROUP" not in run("readelf", "-SW", model)
    assert build_model_object(SPECS, archive, progress=None) == model

    # As TVM's export_library links. Two in one process have nothing in common.
    for name in ("one.so", "two.so"):
        run("g++", "-shared", "-fPIC", "-Wl,--no-undefined", "-o", name, model, cwd=tmp_path)
        assert defined(tmp_path / name, "-D") == {"__tvm_ffi_flashinfer.test_op"}
        needed = re.findall(r"NEEDED.*\[(\w+)", run("readelf", "-d", tmp_path / name))
        system = {"libstdc", "libm", "libgcc_s", "libc", "libdl", "librt", "libpthread", "ld"}
        assert set(needed) <= system
    assert machine_code(tmp_path / "one.so") == {"sm_80", "sm_90a"}
    one, two = (load(tmp_path / name) for name in ("one.so", "two.so"))
    first = one["__tvm_ffi_flashinfer.test_op"](0)
    assert first in (302, 303)  # the unit's own copy of the variable, or one merged in the link
    assert one["__tvm_ffi_flashinfer.test_op"](1) == -2
    assert two["__tvm_ffi_flashinfer.test_op"](0) == first
    assert one["__tvm_ffi_flashinfer.test_op"](0) > first

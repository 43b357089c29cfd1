"""Loading a compiled model where this package is missing or older, or TVM has no compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import tvm

import tvm_flashinfer

#: Makes a cache and lets one layer attend to three tokens; prints the native calls.
SERVE = """
import sys, tvm, tvm_ffi
from tvm_flashinfer import call_counts, hooks
hooks._autoload()
from tvm.runtime.vm import VirtualMachine
from tvm_ffi import Shape
vm = VirtualMachine(tvm.runtime.load_module(sys.argv[1]), tvm.cpu())
cache = vm["create_flashinfer_paged_kv_cache"](*(Shape([n]) for n in (1, 64, 16, 16, 0)))
function = lambda name: tvm_ffi.get_global_func("vm.builtin." + name)
function("kv_state_add_sequence")(cache, 0)
function("kv_state_begin_forward")(cache, Shape([0]), Shape([3]))
qkv, out = (tvm.runtime.empty((3, heads, 16), "float32") for heads in (4, 2))
function("attention_kv_cache_attention_with_fused_qkv")(cache, 0, 0.25, qkv, out)
print(tvm._RUNTIME_ONLY, sorted(call_counts()["cpu"]), *tvm.base._LOADED_LIBS)
"""
LOAD = """
import sys, tvm
tvm.runtime.load_module(sys.argv[1])
"""
WITHOUT_US = 'import sys; sys.modules["tvm_flashinfer"] = None'


def run(code: str, library: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python that finds this package."""
    path = [str(Path(tvm_flashinfer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.run(
        [sys.executable, "-c", code, str(library)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("code", [WITHOUT_US + LOAD, "import tvm_flashinfer" + LOAD])
def test_process_without_the_functions(code: str, library: Path) -> None:
    """Not installed, or turned off: loading fails, and the error says what to install."""
    done = run(code, library, TVM_FLASHINFER_DISABLE="1")
    assert done.returncode == 1
    assert "created using {pip install 'tvm-flashinfer>=0.1.0'}" in done.stderr.splitlines()[-1]


def test_model_of_a_newer_version(library: Path, tmp_path: Path) -> None:
    """One that calls its functions in a way that this version does not know."""
    newer = tmp_path / "newer.so"
    content = library.read_bytes()
    assert b"tvm-flashinfer>=0.1.0" in content
    newer.write_bytes(content.replace(b"tvm-flashinfer>=0.1.0", b"tvm-flashinfer>=9.8.7"))
    assert run("import tvm_flashinfer" + LOAD, library).returncode == 0
    done = run("import tvm_flashinfer" + LOAD, newer)
    assert done.returncode == 1
    assert "created using {pip install 'tvm-flashinfer>=9.8.7'}" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("runtime_only", [False, True])
def test_cache_serves_with_and_without_the_compiler(runtime_only: bool, library: Path) -> None:
    done = run(SERVE, library, TVM_USE_RUNTIME_LIB=str(int(runtime_only)))
    assert done.returncode == 0, done.stderr
    calls = "['append_paged_kv_cache', 'attention_prefill_ragged', 'split_qkv_rotary']"
    assert done.stdout.startswith(f"{runtime_only} {calls} ")
    # What TVM leaves unloaded without its compiler; the part of CUDA needs a driver.
    assert "tvm_runtime_extra" in done.stdout.split()
    if tvm.cuda(0).exist:
        assert "tvm_runtime_cuda" in done.stdout.split()

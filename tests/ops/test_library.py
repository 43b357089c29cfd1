"""The native library: what its environment variables may hold, and what loading it twice does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tvm_flashinfer
from tvm_flashinfer.kernels.paths import native_library


def run(code: str, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python that finds this package."""
    path = [str(Path(tvm_flashinfer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


# One small job, which a single thread does whatever the setting is.
MERGE = """
def merge():
    v, s = np.ones((1, 1, 64), np.float16), np.zeros((1, 1), np.float32)
    tvm_ffi.get_global_func("flashinfer.merge_state_in_place")(v, s, v.copy(), s.copy())
    return float(s[0, 0])
"""
SETTING = f"""
import numpy as np, tvm_flashinfer, tvm_ffi
{MERGE}
for function in (merge, tvm_ffi.get_global_func("flashinfer.cpu_info")):
    try:
        print(function())
    except Exception as error:
        print(type(error).__name__, error)
"""


@pytest.mark.parametrize("text", ["many", "2x", "0", "-3", "1025", "99999999999999999999"])
def test_number_of_threads_that_is_none(text):
    """Refused by the first call on CPU, however small, with the variable and what it holds."""
    lines = run(SETTING, TVM_FLASHINFER_NUM_THREADS=text).stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("ValueError")
        assert f'TVM_FLASHINFER_NUM_THREADS is "{text}"' in line
        assert "from 1 to 1024" in line


@pytest.mark.parametrize(("text", "threads"), [("1", "1"), ("3", "3"), ("1024", "1024")])
def test_number_of_threads(text, threads):
    """It is what the library reports."""
    lines = run(SETTING, TVM_FLASHINFER_NUM_THREADS=text).stdout.splitlines()
    assert lines[0] == "1.0"
    assert f'"threads": "{threads}"' in lines[1]


def test_empty_settings_are_none():
    """An empty variable is one that is not set."""
    empty = {"TVM_FLASHINFER_NUM_THREADS": "", "TVM_FLASHINFER_CPU_ISA": ""}
    lines = run(SETTING, **empty).stdout.splitlines()
    assert lines[0] == "1.0"
    assert "threads" in lines[1]


def test_unknown_instruction_set():
    """The names that there are stand in the error."""
    lines = run(SETTING, TVM_FLASHINFER_CPU_ISA="avx2").stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert line.startswith("ValueError")
        for part in ('TVM_FLASHINFER_CPU_ISA is "avx2"', '"baseline"', '"v3"', '"v4"'):
            assert part in line


def test_loaded_again():
    """The same file a second time, and a package that is reloaded, change nothing."""
    code = f"""
import importlib, sys
import numpy as np, tvm_flashinfer, tvm_ffi
{MERGE}
kernels = list(tvm_ffi.get_global_func("flashinfer.loaded_kernels")())
tvm_ffi.load_module(sys.argv[1])
importlib.reload(tvm_flashinfer)
assert list(tvm_ffi.get_global_func("flashinfer.loaded_kernels")()) == kernels
print(merge())
"""
    done = run(code, str(native_library()))
    assert done.stdout == "1.0\n"
    assert "second copy" not in done.stderr


@pytest.mark.parametrize("installed", [False, True], ids=["alone", "beside-flashinfer"])
@pytest.mark.parametrize("order", ["tvm, tvm_flashinfer", "tvm_flashinfer, tvm", "tvm", "tvm_ffi"])
def test_orders_of_imports(tmp_path, order, installed):
    """Every function is there once, whichever import comes first; flashinfer-python is left alone.

    `import tvm` alone loads an installed package, which a checkout on the path is not.
    """
    if installed:
        (tmp_path / "flashinfer").mkdir()
        (tmp_path / "flashinfer/__init__.py").write_text("print('imported')")
        info = tmp_path / "flashinfer_python-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: flashinfer-python\n")
    code = f"""
import {order}
import numpy as np, tvm_flashinfer, tvm_ffi
{MERGE}
print(merge())
ours = [x for x in tvm_ffi.registry.list_global_func_names() if x.startswith("flashinfer.")]
print(len(ours) == len(set(ours)), "flashinfer.batch_decode_run" in ours)
"""
    path = os.pathsep.join([str(tmp_path), str(Path(tvm_flashinfer.__file__).parent.parent)])
    done = run(code, PYTHONPATH=path)
    assert done.stdout == "1.0\nTrue True\n"
    assert "second copy" not in done.stderr


def test_second_copy(tmp_path):
    """Another file with the same functions: the first ones stay in use, and stderr says so."""
    copy = shutil.copy(native_library(), tmp_path)
    code = f"""
import sys
import numpy as np, tvm_flashinfer, tvm_ffi
{MERGE}
tvm_ffi.load_module(sys.argv[1])
print(merge())
"""
    done = run(code, str(copy))
    assert done.stdout == "1.0\n"
    assert "a second copy of libtvm_flashinfer.so" in done.stderr


def test_another_copy_before_the_package(tmp_path):
    """The package does not take the functions of another copy for its own."""
    copy = shutil.copy(native_library(), tmp_path)
    code = """
import sys, tvm_ffi
tvm_ffi.load_module(sys.argv[1])
try:
    import tvm_flashinfer
except ImportError as error:
    print(error)
"""
    done = run(code, str(copy), TVM_DEVICE_BACKEND_AUTOLOAD="0")
    assert "registered by another library" in done.stdout
    assert str(native_library()) in done.stdout
    assert "Load one copy" in done.stdout

"""The units of this package, compiled by the real nvcc from FlashInfer's real headers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import tvm_ffi

from tvm_flashinfer.kernels import (
    KernelSpec,
    build_library,
    build_model_object,
    build_objects,
    build_prebuilt,
    missing_tools,
)
from tvm_flashinfer.kernels.errors import KernelError
from tvm_flashinfer.kernels.spec import plain_specs

pytestmark = pytest.mark.nvcc

ARCHS = ("80",)
SPECS = [
    *plain_specs(ARCHS),
    KernelSpec("batch_prefill_paged", "float16", 64, archs=ARCHS),
    KernelSpec("batch_decode", "float16", 64, archs=ARCHS),
    KernelSpec("batch_attention", "bfloat16", 96, archs=ARCHS),
    KernelSpec("batch_attention", "float16", 64, archs=ARCHS, kv_dtype="float8_e5m2"),
    KernelSpec("batch_mla", "bfloat16", 576, 512, archs=ARCHS),
    KernelSpec("batch_mla_sm90", "bfloat16", 576, 512, archs=("90a",)),
    KernelSpec("batch_prefill_ragged_sm90", "float16", 128, archs=("90a",)),
]

LOAD = """
import sys, tvm_ffi, tvm_flashinfer
tvm_ffi.get_global_func("flashinfer.load_kernels")(sys.argv[1])
tvm_ffi.get_global_func("flashinfer.load_kernels")(sys.argv[1])  # a second time does nothing
print(*sorted(tvm_ffi.get_global_func("flashinfer.loaded_kernels")()), sep="\\n")
"""

# A process without this package has the functions of the model in the model's library alone.
LOAD_MODEL = """
import sys, tvm_ffi
module = tvm_ffi.load_module(sys.argv[1])
print("callable" if module.get_function("flashinfer.merge_state") else "missing")
found = tvm_ffi.get_global_func("flashinfer.merge_state", allow_missing=True)
print("registered" if found else "unregistered")
"""


@pytest.fixture(scope="module", autouse=True)
def nvcc() -> None:
    """Skip where CUDA code cannot be compiled, and say what is missing."""
    try:
        missing = missing_tools(model_object=True)
    except KernelError as error:
        missing = [str(error)]
    if missing:
        pytest.skip("CUDA units are not compiled: " + "; ".join(missing))


def test_units_compile_and_load_without_a_gpu() -> None:
    """Units of FA2, FA3, decode and MLA, ours and the common one, in a process of their own."""
    library = build_library(SPECS)
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(library)], capture_output=True, text=True, check=True
    )
    loaded = done.stdout.split()
    assert len(loaded) == len(set(loaded))
    for name in (
        "batch_attention:bf16:d96@80",
        "batch_attention:f16:e5m2:d64@80",
        "batch_decode:f16:d64@80",
        "batch_decode_plan:f16:d64@80",
        "batch_mla:bf16:d576x512@80",
        "batch_mla_plan@80",
        "batch_mla_sm90:bf16:d576x512@90a",
        "batch_prefill_paged:f16:d64@80",
        "batch_prefill_plan@80",
        "batch_prefill_ragged_sm90:f16:d128@90a",
        "merge_many_states@80",
        "merge_state@80",
        "move_rotated@80",
        "norm_rows@80",
    ):
        assert name in loaded


def test_model_object_exports_the_functions_and_nothing_else(tmp_path: Path) -> None:
    """What is linked into a model: every `flashinfer.*` function global, all else local."""
    path = build_model_object(SPECS)
    names = subprocess.run(
        ["nm", "--extern-only", "--defined-only", "--format=posix", str(path)],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    functions = {line.split()[0] for line in names}
    assert all(name.startswith("__tvm_ffi_flashinfer.") for name in functions)
    assert "__tvm_ffi_flashinfer.batch_prefill_plan" in functions
    library = link_as_tvm_does(path, tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", LOAD_MODEL, str(library)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["callable", "unregistered"]


def link_as_tvm_does(model_object: Path, folder: Path) -> Path:
    """Return a library of the object and no other, which lacks nothing but what it may need."""
    library = folder / "model.so"
    ffi = tvm_ffi.libinfo.find_libtvm_ffi()
    subprocess.run(
        ["g++", "-shared", "-Wl,--no-undefined", "-o", library, model_object, ffi], check=True
    )
    exported = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", library],
        capture_output=True, text=True, check=True,
    ).stdout.splitlines()  # fmt: skip
    assert exported
    assert all(line.startswith("__tvm_ffi_flashinfer.") for line in exported)
    return library


def test_a_model_from_prebuilt_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The set is made from the units above; then nvcc and the headers are out of reach."""
    monkeypatch.setenv("TVM_FLASHINFER_PREBUILT_DIR", str(tmp_path / "prebuilt"))
    compiled = build_objects(SPECS)
    folder = build_prebuilt(SPECS)
    monkeypatch.setenv("TVM_FLASHINFER_NVCC", str(tmp_path / "no-nvcc"))
    monkeypatch.setenv("TVM_FLASHINFER_FLASHINFER_DIR", str(tmp_path / "no-headers"))
    objects = build_objects(SPECS)
    assert {path.parent for path in objects.values()} == {folder}
    assert [path.read_bytes() for path in objects.values()] == [
        path.read_bytes() for path in compiled.values()
    ]
    link_as_tvm_does(build_model_object(SPECS), tmp_path)

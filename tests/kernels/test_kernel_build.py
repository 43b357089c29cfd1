"""Builds with an nvcc that is a shell script: what is compiled when, and what failures leave."""

from __future__ import annotations

import ctypes
import subprocess
import sys
import time

import pytest
from build_sandbox import compilations, files_below

from tvm_flashinfer.kernels import (
    KernelBuildError,
    KernelSpec,
    UnsupportedKernelError,
    attention_specs,
    build_library,
    build_objects,
)
from tvm_flashinfer.kernels import build as build_module
from tvm_flashinfer.kernels import jobs as jobs_module

SPECS = attention_specs(["float16"], [128], ["80"])
DECODE = KernelSpec("batch_decode", "float16", 128, archs="80")


def test_builds_once_and_is_silent_then(sandbox, cache_dir):
    lines = []
    objects = build_objects(SPECS, jobs=2, progress=lines.append)
    assert list(objects) == SPECS
    assert sorted(compilations(sandbox)) == sorted(f"{spec.kind}.cu" for spec in SPECS)
    assert (
        f"compiling {len(SPECS)} kernels with nvcc 12.8.93, 2 at once; kept in {cache_dir}"
        == lines[0]
    )
    assert [line.split("]")[0] for line in lines[1:]] == [
        f"[{i + 1}/{len(SPECS)}" for i in range(len(SPECS))
    ]
    assert {line.split()[1] for line in lines[1:]} == {spec.name for spec in SPECS}
    assert list((cache_dir / "tmp").iterdir()) == []

    lines.clear()
    assert build_objects(SPECS, progress=lines.append) == objects
    assert lines == []
    assert len(compilations(sandbox)) == len(SPECS)


@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda csrc, patch: (csrc / "kernels/cuda/units/batch_decode.cu").write_text("int x;"), 1),
        (lambda csrc, patch: (csrc / "kernels/types.h").write_text("#define TYPES 2"), len(SPECS)),
        (lambda csrc, patch: (csrc / "kernels/cuda/new.cuh").write_text(""), len(SPECS)),
        (lambda csrc, patch: patch.setenv("NVCC_APPEND_FLAGS", "-G"), len(SPECS)),
        (lambda csrc, patch: None, 0),
    ],
    ids=["unit", "header", "new header", "environment", "nothing"],
)
def test_a_change_rebuilds_what_depends_on_it(sandbox, csrc, monkeypatch, change, count):
    build_objects(SPECS, progress=None)
    change(csrc, monkeypatch)
    build_objects(SPECS, progress=None)
    assert len(compilations(sandbox)) == len(SPECS) + count


def test_headers_and_compiler_are_part_of_the_key(sandbox, headers_dir, monkeypatch):
    build_objects([DECODE], progress=None)
    (headers_dir / "include" / "flashinfer" / "attention" / "prefill.cuh").write_text("// new")
    build_module.get_headers.__globals__["_folders_digest"].cache_clear()
    build_objects([DECODE], progress=None)
    assert len(compilations(sandbox)) == 2
    monkeypatch.setenv("FAKE_NVCC_VERSION", "12.9.41")
    build_module.find_toolchain.__globals__["_probe_nvcc"].cache_clear()
    build_objects([DECODE], progress=None)
    assert len(compilations(sandbox)) == 3


def test_compile_error(sandbox, csrc, cache_dir):
    unit = csrc / "kernels" / "cuda" / "units" / "batch_decode.cu"
    unit.write_text("int broken() { return missing; }\n")
    with pytest.raises(KernelBuildError) as caught:
        build_objects([DECODE], progress=None)
    message = str(caught.value)
    assert message.startswith("batch_decode_f16_d128_sm80: the build failed (exit status 1)")
    assert "bin/nvcc" in message
    assert "-gencode=arch=compute_80,code=sm_80" in message
    assert "'missing' was not declared" in message
    assert files_below(cache_dir) == []


def test_first_error_stops_the_other_compilers(sandbox, csrc, cache_dir, monkeypatch):
    nvcc = sandbox.parent / "cuda" / "bin" / "nvcc"
    script = nvcc.read_text()
    nvcc.write_text(script.replace("sleep", "case $source in *common*) exit 3 ;; esac; sleep"))
    monkeypatch.setenv("FAKE_NVCC_SECONDS", "60")
    start = time.monotonic()
    with pytest.raises(KernelBuildError, match=r"common_sm80: .*\(exit status 3\)"):
        build_objects([DECODE, *SPECS], jobs=2, progress=None)
    assert time.monotonic() - start < 20
    assert files_below(cache_dir) == []


def test_damaged_object_is_compiled_again(sandbox):
    (path,) = build_objects([DECODE], progress=None).values()
    path.write_bytes(path.read_bytes()[:-1])
    assert build_objects([DECODE], progress=None) == {DECODE: path}
    assert len(compilations(sandbox)) == 2


def test_nothing_is_compiled_when_one_spec_is_unsupported(sandbox, cache_dir):
    with pytest.raises(UnsupportedKernelError, match="head_dim is 96"):
        build_objects([*SPECS, KernelSpec("batch_decode", "float16", 96, archs="80")])
    with pytest.raises(UnsupportedKernelError, match="nvcc 12"):
        build_objects([*SPECS, KernelSpec("common", archs="120")])
    with pytest.raises(UnsupportedKernelError, match="no kernel is named"):
        build_library([])
    with pytest.raises(UnsupportedKernelError, match="one list of architectures; got 80 and 90a"):
        build_library([DECODE, KernelSpec("common", archs="90a")])
    assert not cache_dir.exists()


def test_library(sandbox, cache_dir):
    library = build_library([KernelSpec("common", archs="80")], progress=None)
    assert library.parent == cache_dir / "libraries"
    assert ctypes.CDLL(str(library)).tvm_flashinfer_kernel_entries() == 7
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", library], check=True, capture_output=True, text=True
    ).stdout
    assert [line.split()[-1] for line in listing.splitlines()] == ["tvm_flashinfer_kernel_entries"]


def test_library_does_not_need_its_objects_again(sandbox):
    specs = [KernelSpec("common", archs="80"), DECODE]
    library = build_library(specs, progress=None)
    for path in build_objects(specs, progress=None).values():
        path.unlink()
    assert build_library(reversed(specs), progress=None) == library
    assert len(compilations(sandbox)) == 2


SCRIPT = """
import sys
from pathlib import Path
from tvm_flashinfer.kernels import attention_specs, build, build_library
build.csrc_dir = lambda: Path(sys.argv[1])
print(build_library(attention_specs(["float16"], [128], ["80"]), jobs=2))
"""


def test_two_processes_compile_each_unit_once(sandbox, csrc, monkeypatch):
    monkeypatch.setenv("FAKE_NVCC_SECONDS", "0.3")
    command = [sys.executable, "-c", SCRIPT, str(csrc)]
    builders = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    paths = {builder.communicate(timeout=100)[0] for builder in builders}
    assert [builder.returncode for builder in builders] == [0, 0]
    assert len(paths) == 1
    assert sorted(compilations(sandbox)) == sorted(f"{spec.kind}.cu" for spec in SPECS)


def test_jobs_follow_the_memory(monkeypatch):
    monkeypatch.setattr(jobs_module, "_available_memory", lambda: 3 << 29)
    assert jobs_module.default_jobs() == 1
    monkeypatch.setattr(jobs_module, "_available_memory", lambda: 0)
    assert jobs_module.default_jobs() == 1

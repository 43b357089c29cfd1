"""Stand-ins for what a kernel build reads: sources, headers, a CUDA toolkit, the cache."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from build_sandbox import FAKE_NVCC

from tvm_flashinfer.kernels import build as build_module
from tvm_flashinfer.kernels import toolchain
from tvm_flashinfer.kernels.spec import KINDS


@pytest.fixture
def cache_dir(tmp_path, monkeypatch) -> Path:
    """An empty cache that is not the user's, and no prebuilt kernels."""
    monkeypatch.setenv("TVM_FLASHINFER_PREBUILT_DIR", str(tmp_path / "prebuilt"))
    folder = tmp_path / "cache"
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def headers_dir(tmp_path, monkeypatch) -> Path:
    """A folder that looks like `flashinfer/data` of FlashInfer's wheel."""
    folder = tmp_path / "flashinfer" / "data"
    for name in (
        "cccl/cub/cub/cub.cuh",
        "cccl/libcudacxx/include/cuda/std/type_traits",
        "cccl/thrust/thrust/version.h",
        "include/flashinfer/attention/prefill.cuh",
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("// empty\n")
    monkeypatch.setenv("TVM_FLASHINFER_FLASHINFER_DIR", str(folder))
    return folder


@pytest.fixture
def csrc(tmp_path, monkeypatch) -> Path:
    """Sources in which every unit is one small function."""
    folder = tmp_path / "csrc"
    units = folder / "kernels" / "cuda" / "units"
    units.mkdir(parents=True)
    (folder / "kernels" / "types.h").write_text("#define TYPES 1\n")
    for kind in KINDS:
        (units / f"{kind}.cu").write_text(f'extern "C" int unit_{kind}() {{ return 7; }}\n')
    cuda = folder / "kernels" / "cuda"
    (cuda / "plugin.cc").write_text(
        'extern "C" int unit_common();\n'
        'extern "C" __attribute__((visibility("default"))) int tvm_flashinfer_kernel_entries() {\n'
        "  return unit_common();\n}\n"
    )
    (cuda / "kernel_table.cc").write_text("")
    monkeypatch.setattr(build_module, "csrc_dir", lambda: folder)
    return folder


@pytest.fixture
def fake_cuda(tmp_path, monkeypatch) -> Path:
    """A CUDA 12.8 toolkit whose nvcc is a shell script. Returns the log of compilations."""
    home = tmp_path / "cuda"
    (home / "bin").mkdir(parents=True)
    (home / "lib64").mkdir()
    (home / "bin" / "nvcc").write_text(FAKE_NVCC)
    (home / "bin" / "nvcc").chmod(0o755)
    subprocess.run(["ar", "cr", home / "lib64" / "libcudart_static.a"], check=True)
    for variable in ("TVM_FLASHINFER_NVCC", "CUDACXX", "CUDAHOSTCXX", "NVCC_CCBIN", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("CUDA_HOME", str(home))
    log = tmp_path / "compilations"
    monkeypatch.setenv("FAKE_NVCC_LOG", str(log))
    toolchain._probe_nvcc.cache_clear()
    return log


@pytest.fixture
def sandbox(cache_dir, headers_dir, csrc, fake_cuda) -> Path:
    """All of the above. Returns the log of compilations."""
    return fake_cuda

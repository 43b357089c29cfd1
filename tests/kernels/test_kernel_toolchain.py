"""Finding compilers, and saying what is missing."""

from __future__ import annotations

import pytest

from tvm_flashinfer.kernels import KernelSpec, ToolchainError, UnsupportedKernelError
from tvm_flashinfer.kernels import toolchain as tools


def test_finds_everything(fake_cuda):
    assert tools.missing_tools() == []
    found = tools.find_toolchain()
    assert found.nvcc.version == (12, 8)
    assert found.nvcc.archs == ("80", "90", "90a")
    assert found.nvcc.flags == {"--static-global-template-stub"}
    assert found.cudart_static.name == "libcudart_static.a"


def test_nothing_is_installed(fake_cuda, monkeypatch, tmp_path):
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(tools, "_executable", lambda path: None)
    missing = tools.missing_tools(model_object=True)
    assert [line.split(" is missing")[0] for line in missing] == [
        "nvcc", "a C++ compiler", "GNU ld", "objcopy",
    ]  # fmt: skip
    with pytest.raises(ToolchainError, match=r"(?s)nvcc is missing: install the CUDA.*g\+\+"):
        tools.find_toolchain()


def test_old_cuda(fake_cuda, monkeypatch):
    monkeypatch.setenv("FAKE_NVCC_VERSION", "11.8.89")
    (line,) = tools.missing_tools()
    assert "nvcc 11.8.89" in line
    assert "CUDA 12.0 or newer" in line


def test_toolkit_without_the_static_runtime(fake_cuda, monkeypatch):
    tools.find_nvcc().cudart_static.unlink()
    tools._probe_nvcc.cache_clear()
    (line,) = tools.missing_tools()
    assert line.startswith("libcudart_static.a is missing")


def test_variable_that_names_no_nvcc(fake_cuda, monkeypatch, tmp_path):
    monkeypatch.setenv("TVM_FLASHINFER_NVCC", str(tmp_path / "nvcc"))
    (line,) = tools.missing_tools()
    assert line.startswith(f"{tmp_path / 'nvcc'} is not a working nvcc")


def test_arch_that_nvcc_lacks(fake_cuda):
    spec = KernelSpec("common", archs="120")
    with pytest.raises(UnsupportedKernelError, match=r"nvcc 12\.8\.93.*'120'; it does for 80, 90"):
        tools.find_toolchain().check_archs([spec])

"""Finding FlashInfer's headers, and fetching the wheel that has them."""

from __future__ import annotations

import zipfile

import pytest
from build_sandbox import files_below

from tvm_flashinfer.kernels import HeadersError, KernelCache, headers
from tvm_flashinfer.kernels.cache import file_digest

WHEEL = "flashinfer_python-0.7.4-py3-none-any.whl"


@pytest.fixture
def not_installed(monkeypatch):
    monkeypatch.delenv("TVM_FLASHINFER_FLASHINFER_DIR", raising=False)
    monkeypatch.setattr(headers, "_from_installed", lambda: None)


@pytest.fixture
def index(tmp_path, headers_dir, monkeypatch, not_installed):
    """A package index with a small wheel, which is the only one that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "flashinfer_python-0.7.4.dist-info"
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for path in headers_dir.rglob("*"):
            if path.is_file():
                wheel.write(path, f"flashinfer/data/{path.relative_to(headers_dir).as_posix()}")
        wheel.writestr("flashinfer/data/csrc/unused.cu", "")
        wheel.writestr("flashinfer/data/include/../../../escaped", "")
        wheel.writestr(f"{info}/licenses/LICENSE", "the terms")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: flashinfer-python\nVersion: 0.7.4\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(headers, "FLASHINFER_WHEEL_SHA256", file_digest(folder / WHEEL))
    return folder


def test_folder_of_a_wheel(headers_dir):
    found = headers.find_headers()
    assert found.root == headers_dir
    names = [folder.relative_to(headers_dir).as_posix() for folder in found.include_dirs]
    assert names == ["cccl/cub", "cccl/libcudacxx/include", "cccl/thrust", "include"]
    assert found.cutlass is None


def test_source_checkout(headers_dir, tmp_path, monkeypatch):
    checkout = tmp_path / "checkout"
    (checkout / "3rdparty").mkdir(parents=True)
    (headers_dir / "include").rename(checkout / "include")
    (headers_dir / "cccl").rename(checkout / "3rdparty" / "cccl")
    monkeypatch.setenv("TVM_FLASHINFER_FLASHINFER_DIR", str(checkout))
    assert headers.find_headers().include_dirs[-1] == checkout / "include"
    (checkout / "version.txt").write_text("0.7.4\n")
    assert headers.find_headers() is not None
    (checkout / "version.txt").write_text("0.8.0\n")
    with pytest.raises(HeadersError, match=r"is FlashInfer 0\.8\.0; .* written for 0\.7\.4"):
        headers.find_headers()


def test_folder_without_headers(tmp_path, monkeypatch):
    monkeypatch.setenv("TVM_FLASHINFER_FLASHINFER_DIR", str(tmp_path))
    with pytest.raises(HeadersError, match=r"does not hold.*cub\.cuh.*3rdparty|flashinfer/data"):
        headers.find_headers()


def test_digest_follows_the_contents(headers_dir):
    before = headers.find_headers().digest
    (headers_dir / "include" / "flashinfer" / "page.cuh").write_text("// new\n")
    headers._folders_digest.cache_clear()
    assert headers.find_headers().digest != before


def test_fetches_once(index, headers_dir, cache_dir):
    lines = []
    found = headers.get_headers(KernelCache(), lines.append)
    assert "100 MB" in lines[0]
    assert found.root.parent == cache_dir / "flashinfer"
    assert files_below(found.root) == sorted(
        [*files_below(headers_dir), "digest", "licenses/LICENSE"]
    )
    (index / WHEEL).unlink()
    assert headers.get_headers(KernelCache(), lines.append) == found
    assert len(lines) == 1
    assert list((cache_dir / "tmp").iterdir()) == []


def test_same_contents_have_the_same_digest_wherever_they_are(
    index, headers_dir, cache_dir, monkeypatch
):
    fetched = headers.get_headers(KernelCache())
    monkeypatch.setenv("TVM_FLASHINFER_FLASHINFER_DIR", str(headers_dir))
    assert headers.get_headers(KernelCache()).digest == fetched.digest


def test_damaged_headers_are_fetched_again(index, cache_dir):
    found = headers.get_headers(KernelCache())
    (found.root / "include" / "flashinfer" / "attention" / "prefill.cuh").unlink()
    assert headers.find_headers(KernelCache()) is None
    assert headers.get_headers(KernelCache()) == found


def test_wrong_hash_is_refused(index, cache_dir, monkeypatch):
    monkeypatch.setattr(headers, "FLASHINFER_WHEEL_SHA256", "0" * 64)
    with pytest.raises(HeadersError) as caught:
        headers.get_headers(KernelCache())
    assert file_digest(index / WHEEL) in str(caught.value)
    assert "expected " + "0" * 64 in str(caught.value)
    assert "TVM_FLASHINFER_FLASHINFER_DIR" in str(caught.value)
    assert files_below(cache_dir) == []


def test_without_network(index, cache_dir):
    (index / WHEEL).unlink()
    with pytest.raises(HeadersError, match=r"(?s)could not be fetched.*set TVM_FLASHINFER_"):
        headers.get_headers(KernelCache())


def test_without_pip(not_installed, cache_dir, monkeypatch):
    monkeypatch.setattr(headers.sys, "executable", "no-such-python")
    with pytest.raises(HeadersError, match=r"could not be fetched.*\n.*no-such-python"):
        headers.get_headers(KernelCache())
    assert "python -m ensurepip" in headers._not_fetched("python: No module named pip")

"""Prebuilt kernels: made with an nvcc that is a shell script, and used where there is none."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from build_sandbox import compilations
from click.testing import CliRunner

from tvm_flashinfer.cli import main
from tvm_flashinfer.kernels import (
    KernelBuildError,
    KernelError,
    KernelSpec,
    ToolchainError,
    attention_specs,
    build_library,
    build_model_object,
    build_objects,
    build_prebuilt,
    prebuilt,
    preset_specs,
    toolchain,
)
from tvm_flashinfer.kernels.build import find_objects

ARCHS = ("80", "90a")
SPECS = [
    *attention_specs(["float16"], [64], ARCHS),
    KernelSpec("batch_mla", "float16", 576, 512, archs=ARCHS),
    KernelSpec("batch_mla_sm90", "float16", 576, 512, archs=("90a",)),
]


@pytest.fixture
def sandbox(sandbox, headers_dir) -> Path:
    """The sandbox with CUTLASS, for the units of Hopper."""
    cutlass = headers_dir / "cutlass" / "include" / "cutlass"
    cutlass.mkdir(parents=True)
    (cutlass / "cutlass.h").touch()
    return sandbox


@pytest.fixture
def folder(sandbox, tmp_path) -> Path:
    """A set of prebuilt kernels."""
    made = build_prebuilt(SPECS, progress=None)
    assert made == tmp_path / "prebuilt"
    return made


@pytest.fixture
def no_cuda(folder, monkeypatch, tmp_path) -> Path:
    """The same on a machine with neither nvcc nor headers, and with an empty cache."""
    monkeypatch.setenv("TVM_FLASHINFER_NVCC", str(tmp_path / "no-nvcc"))
    monkeypatch.setenv("TVM_FLASHINFER_FLASHINFER_DIR", str(tmp_path / "no-headers"))
    shutil.rmtree(tmp_path / "cache")
    toolchain._probe_nvcc.cache_clear()
    return folder


@pytest.fixture
def archive(tmp_path) -> Path:
    (tmp_path / "ops.cc").write_text(
        'extern "C" int unit_common(); extern "C" void tvm_flashinfer_exports() {}\n'
        'extern "C" __attribute__((visibility("default"))) int op() '
        '__asm__("__tvm_ffi_flashinfer.op");\n'
        'extern "C" int op() { return unit_common(); }\n'
    )
    subprocess.run(["g++", "-fPIC", "-c", "ops.cc"], cwd=tmp_path, check=True)
    subprocess.run(["ar", "rcs", "libops.a", "ops.o"], cwd=tmp_path, check=True)
    return tmp_path / "libops.a"


def test_a_set_is_complete(folder, sandbox):
    assert len(compilations(sandbox)) == len(SPECS)
    names = {f"{spec.name}.o" for spec in SPECS}
    assert {path.name for path in folder.iterdir()} == names | {
        "kernels.json", "libcudart_static.a", "libtvm_flashinfer_kernels.so",
    }  # fmt: skip
    assert str(folder.parent) not in (folder / "kernels.json").read_text()
    assert not list(folder.parent.glob(".prebuilt-*"))


@pytest.mark.parametrize("archs", [ARCHS, ("90a",), ("80",), ("86", "89"), ("90",)])
def test_nothing_is_compiled_for_what_is_there(no_cuda, sandbox, archs, tmp_path):
    """Also for a part of the architectures, and for GPUs that run the code of another one."""
    specs = attention_specs(["float16"], [64], archs)
    objects = build_objects(specs, progress=None)
    assert list(objects) == specs
    assert {path.parent for path in objects.values()} == {no_cuda}
    assert find_objects(specs) == objects
    library = build_library(specs, progress=None)
    assert ctypes.CDLL(str(library)).tvm_flashinfer_kernel_entries() == 7
    assert len(compilations(sandbox)) == len(SPECS)


def test_model_object_without_nvcc(no_cuda, archive, cache_dir, tmp_path):
    lines = []
    specs = attention_specs(["float16"], [64], ("90a",))
    model = build_model_object(specs, archive, progress=lines.append)
    assert lines == [f"using {len(specs)} prebuilt kernels of {no_cuda}, compiled by nvcc 12.8.93"]
    assert model.parent == cache_dir / "models"
    assert build_model_object(specs, archive, progress=None) == model
    subprocess.run(["g++", "-shared", "-o", tmp_path / "model.so", model], check=True)
    assert ctypes.CDLL(str(tmp_path / "model.so"))["__tvm_ffi_flashinfer.op"]() == 7


@pytest.mark.parametrize(
    "specs",
    [
        attention_specs(["float16"], [64], ("100",)),
        attention_specs(["float16"], [64], ("80", "120")),
        attention_specs(["float16"], [128], ARCHS),
        attention_specs(["bfloat16"], [64], ARCHS),
        [KernelSpec("batch_attention", "float16", 64, archs=ARCHS, kv_dtype="e4m3")],
    ],
    ids=["other arch", "one more arch", "other head_dim", "other dtype", "other KV dtype"],
)
def test_what_is_not_there_wants_nvcc(no_cuda, specs):
    with pytest.raises(ToolchainError) as caught:
        build_library(specs)
    message = str(caught.value)
    assert "no-nvcc is not a working nvcc" in message
    assert f"the prebuilt kernels in {no_cuda} lack " in message
    assert specs[-1].name in message


def test_without_a_set_the_error_says_so(no_cuda):
    shutil.rmtree(no_cuda)
    with pytest.raises(ToolchainError, match=f"there are no prebuilt kernels in {no_cuda}"):
        build_objects(SPECS)


def test_a_set_of_other_sources_is_not_used(folder, csrc, sandbox):
    (csrc / "kernels" / "types.h").write_text("#define TYPES 2\n")
    found, why = prebuilt.find_prebuilt(csrc)
    assert found is None
    assert "of another version of this package" in why
    build_objects(SPECS, progress=None)
    assert len(compilations(sandbox)) == 2 * len(SPECS)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda folder: (folder / "kernels.json").write_text("{"), "cannot be read"),
        (lambda folder: (folder / "kernels.json").write_text("[]"), "cannot be read"),
        (lambda folder: (folder / "libcudart_static.a").unlink(), "not complete"),
        (lambda folder: (folder / "kernels.json").unlink(), "no prebuilt kernels"),
    ],
    ids=["half a manifest", "other JSON", "a file less", "no manifest"],
)
def test_half_a_set_is_not_used(folder, csrc, damage, why):
    damage(folder)
    found, reason = prebuilt.find_prebuilt(csrc)
    assert found is None
    assert why in reason


def test_a_damaged_object_is_an_error(no_cuda):
    path = no_cuda / "batch_decode_f16_d64_sm80_sm90a.o"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(KernelError, match=f"{path} is damaged or missing: remove {no_cuda}"):
        build_objects(attention_specs(["float16"], [64], ARCHS), progress=None)


def test_a_new_set_replaces_the_old_one(folder, csrc, sandbox):
    smaller = [KernelSpec("common", archs=ARCHS)]
    assert build_prebuilt(smaller, progress=None) == folder
    assert [path.name for path in folder.glob("*.o")] == ["common_sm80_sm90a.o"]
    # One that fails leaves it as it is.
    (csrc / "kernels" / "cuda" / "units" / "batch_decode.cu").write_text("broken")
    with pytest.raises(KernelBuildError):
        build_prebuilt(SPECS, progress=None)
    assert prebuilt.find_prebuilt(csrc)[0].names == ["common_sm80_sm90a"]


def test_a_folder_that_cannot_be_written(sandbox, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TVM_FLASHINFER_PREBUILT_DIR", str(tmp_path / "file" / "prebuilt"))
    with pytest.raises(KernelError, match="Set TVM_FLASHINFER_PREBUILT_DIR to a folder"):
        build_prebuilt([KernelSpec("common", archs="80")], progress=None)


def test_command_line(sandbox, csrc, monkeypatch, tmp_path):
    monkeypatch.setattr(prebuilt, "csrc_dir", lambda: csrc)
    invoke = CliRunner().invoke
    found = json.loads(invoke(main, ["doctor", "--json"]).stdout)["prebuilt_kernels"]
    assert found["kernels"] == []
    assert found["unused"] == f"there are no prebuilt kernels in {tmp_path / 'prebuilt'}"
    arguments = ["build", "--preset", "fp16-d128", "--arch", "80,90a", "--prebuilt"]
    result = invoke(main, arguments)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1].endswith(str(tmp_path / "prebuilt"))
    found = json.loads(invoke(main, ["doctor", "--json"]).stdout)["prebuilt_kernels"]
    assert found["path"] == str(tmp_path / "prebuilt")
    assert found["unused"] == ""
    assert found["nvcc"] == "12.8.93"
    assert "batch_decode_f16_d128_sm80_sm90a" in found["kernels"]
    shown = invoke(main, ["doctor"]).stdout
    count = len(preset_specs("fp16-d128", ARCHS))
    assert f"prebuilt kernels in {tmp_path / 'prebuilt'}: {count}" in shown
    listing = invoke(main, ["cache", "list"]).stdout.splitlines()[-1]
    assert listing.endswith(f"{count} prebuilt kernels in {tmp_path / 'prebuilt'}, never pruned")
    # The next build of the same kernels names the library that is there.
    result = invoke(main, ["build", "--preset", "fp16-d128", "--arch", "90a"])
    assert result.stdout.splitlines()[-1].endswith(prebuilt.LIBRARY)


def test_libraries_that_are_loaded_when_a_kernel_is_wanted(folder, csrc, monkeypatch, tmp_path):
    monkeypatch.setattr(prebuilt, "csrc_dir", lambda: csrc)
    monkeypatch.setattr(prebuilt, "lib_dir", lambda: tmp_path)
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "by_hand.so").touch()
    by_hand = tmp_path / "kernels" / "by_hand.so"
    assert prebuilt.libraries_to_load() == [folder / prebuilt.LIBRARY, by_hand]
    (csrc / "kernels" / "types.h").write_text("// other\n")
    assert prebuilt.libraries_to_load() == [by_hand]


@pytest.mark.parametrize(
    ("hidden_size", "states"), [(512, {"prebuilt"}), (1024, {"cannot be compiled here"})]
)
def test_support_tells_what_is_prebuilt(no_cuda, hidden_size, states, tmp_path):
    """Of a model with head_dim 64, which the set serves, and of one with 128."""
    pytest.importorskip("tvm")
    config = {
        "model_type": "llama", "hidden_size": hidden_size, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_hidden_layers": 2, "torch_dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = ["support", str(tmp_path / "config.json"), "--arch", "80,90a", "--json"]
    result = CliRunner().invoke(main, command)
    assert result.exit_code == 0, result.output
    for answer in json.loads(result.stdout)["archs"].values():
        assert set(answer["kernels"].values()) == states
        assert (answer["problem"] is None) == (states == {"prebuilt"})

"""Files of tuning: what is refused, where they come from, and that ranks choose alike."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tvm_ffi
from fuzzing import budget
from hypothesis import given
from hypothesis.strategies import data, integers, sampled_from
from tuning_texts import A100, H200, entry, text_of, tuning

import tvm_flashinfer
from tvm_flashinfer import clear_tuning, load_tuning, tuning_files
from tvm_flashinfer.kernels.toolchain import find_cxx

VARIABLE = "TVM_FLASHINFER_TUNING"


@pytest.fixture(autouse=True)
def without_tuning() -> Iterator[None]:
    clear_tuning()
    yield
    clear_tuning()


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is no JSON"),
        ("{", "it is no JSON"),
        ("[]", "it is no JSON object"),
        ("[" * 100_000, "nested 100000 deep"),
        (" " * (5 << 20), "it has 5242880 bytes"),
        (text_of(format="tvm_flashinfer tuning 9"), 'has the format "tvm_flashinfer tuning 9"'),
        (text_of(format=...), "has no `format`"),
        (text_of(models=[]), "has a field `models`"),
        (text_of(gpu=("H200", "90a", 132)), "`gpu` has a `arch` that is no integer from 10 to 999"),
        (text_of(gpu=(None, 90, 132)), "`gpu` has a `name` that is no text"),
        (text_of(cuda_driver=13.5), "`versions` has a `cuda_driver` that is no integer"),
        (text_of(entries={}), "it has a `entries` that is no list"),
        (text_of(entry(), [1]), "entry 1 is no JSON object"),
        (text_of(entry(batch=63)), "entry 0 has a `batch` of 63, no power of two"),
        (text_of(entry(batch=0)), "entry 0 has a `batch` that is no integer from 1"),
        (text_of(entry(rows=True)), "entry 0 has a `rows` that is no integer"),
        (text_of(entry(keys=2**40)), "entry 0 has a `keys` that is no integer"),
        (text_of(entry(keys=...)), "entry 0 has no `keys`"),
        (text_of(entry(causal=1)), "entry 0 has a `causal` that is neither true nor false"),
        (text_of(entry(tile=64)), "entry 0 has a field `tile`"),
        (text_of(entry(kernel="cutlass")), '`kernel` of "cutlass", expected one of cuda_core, fa'),
        (text_of(entry(kernel="fa3")), "has the kernel fa3, which decode_paged does not have"),
        (text_of(entry("mla", "cuda_core")), "has the kernel cuda_core, which mla does not have"),
        (text_of(entry("tree_paged")), 'has a `slot` of "tree_paged", expected one of decode_'),
        (text_of(entry(num_kv_heads=5)), "`num_qo_heads` that is no multiple of `num_kv_heads`"),
        (text_of(entry(split_keys=64)), "`split_keys` for batch_attention; only fa2 takes them"),
        (text_of(entry(kernel="cuda_core", num_qo_heads=40)), "cuda_core for 5 query heads per KV"),
        (text_of(entry(num_qo_heads=1 << 20)), "`num_qo_heads` that is no integer from 1 to 4095"),
        (text_of(entry(), entry(kernel="fa2")), "entry 1 is for the class of an earlier one"),
        (text_of(tvm_flashinfer="0.0.9"), "made with tvm_flashinfer 0.0.9, this is"),
        (text_of(flashinfer="0.6.3"), "made with the kernels of FlashInfer 0.6.3, these are of"),
    ],
    ids=lambda value: value[-40:],
)  # fmt: skip
def test_refused(tmp_path, text, message):
    """The error has the path and what is wrong; what was in use stays in use."""
    good = written(tmp_path / "good.json", text_of(entry()))
    load_tuning(good)
    path = written(tmp_path / "tuning.json", text)
    with pytest.raises(ValueError, match="tvm-flashinfer tune") as error:
        load_tuning(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert [file["source"] for file in tuning_files()] == [str(good)]


def test_missing_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_tuning(tmp_path / "none.json")


ASK = """
import json, sys, tvm_flashinfer
from tvm_flashinfer import kernel_choice, tuning_files
answers = []
try:
    for heads in ((32, 8), (8, 8)):
        for batch in (1, 7, 64, 100):
            for keys in (1, 500, 4096, 40000):
                for slot in ("decode_paged", "prefill_paged"):
                    found = kernel_choice(slot, *heads, 128, [keys] * batch,
                                          gpu=("NVIDIA H200", 90, 132))
                    answers.append([found["kernel"], found["split_keys"], found["source"]])
    print(json.dumps({"answers": answers, "digests": [x["digest"] for x in tuning_files()]}))
except ValueError as error:
    print(json.dumps({"error": str(error)}))
"""


def start(code: str, **environment: str) -> subprocess.Popen[str]:
    """A new Python that finds this package."""
    path = [str(Path(tvm_flashinfer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    return subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return {**json.loads(out), "stderr": err}


def test_ranks_choose_alike(tmp_path):
    """Two ranks of a model with one file, started at once; and one with a file of its own.

    No rank measures: the same file gives the same answer for every shape, and the digest, which
    each can report, tells ranks with another one.
    """
    common = text_of(entry(kernel="cuda_core"), entry(kernel="fa2", batch=8, split_keys=256))
    paths = [written(tmp_path / f"{i}.json", common) for i in range(2)]
    paths.append(written(tmp_path / "other.json", text_of(entry(kernel="batch_attention"))))
    ranks = [start(ASK, **{VARIABLE: str(path)}) for path in paths]
    ranks += [start(ASK, **{VARIABLE: ""}) for _ in range(2)]
    one, two, other, *without = map(answer, ranks)
    assert one == two
    assert any(source == "tuned" for *_, source in one["answers"])
    assert other["digests"] != one["digests"]
    assert without[0] == without[1]
    assert {source for *_, source in without[0]["answers"]} == {"default"}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.json", None, "which cannot be read or is empty"),
        (".", None, "which cannot be read or is empty"),
        ("broken.json", "{}", "has no `format`"),
        ("old.json", text_of(tvm_flashinfer="0.0.1"), "is not for this machine"),
    ],
)
def test_variable_with_a_bad_file(tmp_path, name, text, message):
    """Every plan says so: with the rules in its place nobody would notice."""
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    found = answer(start(ASK, **{VARIABLE: str(path)}))
    assert message in found["error"]
    assert str(path) in found["error"]


#: A driver that shows the GPUs of the environment variable FAKE_GPUS: "name:arch:sms,...".
DRIVER = """
#include <stdlib.h>
#include <string.h>
static const char* gpu(int i) {
  const char* at = getenv("FAKE_GPUS");
  while (i-- > 0) at = strchr(at, ',') + 1;
  return at;
}
int cuInit(unsigned flags) { return flags != 0; }
int cuDriverGetVersion(int* version) { *version = 13000; return 0; }
int cuDeviceGetCount(int* count) {
  *count = 1;
  for (const char* at = getenv("FAKE_GPUS"); (at = strchr(at, ',')) != 0; ++at) ++*count;
  return 0;
}
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetName(char* name, int size, int device) {
  const char* at = gpu(device);
  int n = (int)(strchr(at, ':') - at);
  if (n >= size) return 1;
  memcpy(name, at, n);
  name[n] = 0;
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  const char* at = strchr(gpu(device), ':') + 1;
  int arch = atoi(at);
  *value = attribute == 16 ? atoi(strchr(at, ':') + 1) : attribute == 75 ? arch / 10 : arch % 10;
  return 0;
}
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a driver of the name that CUDA's has."""
    found = find_cxx()
    if found is None:
        pytest.skip("there is no C++ compiler to compile a driver with")
    folder = tmp_path_factory.mktemp("driver")
    source = written(folder / "driver.cc", f'extern "C" {{{DRIVER}}}')
    library = folder / "libcuda.so.1"
    subprocess.run([found[0], "-shared", "-fPIC", source, "-o", library], check=True)
    return folder


def on_machine(driver: Path, *gpus: tuple[str, int, int]) -> dict[str, str]:
    """The environment of a process that sees these GPUs."""
    shown = ",".join(":".join(map(str, gpu)) for gpu in gpus)
    return {"LD_LIBRARY_PATH": str(driver), "FAKE_GPUS": shown}


@pytest.mark.parametrize(
    ("gpus", "changes", "message"),
    [
        ([H200], {}, None),
        ([A100, H200], {}, None),
        ([A100], {}, "it was made on NVIDIA H200 (sm_90, 132 SMs), and this GPU is NVIDIA A100-SX"),
        ([("NVIDIA H200", 90, 60)], {}, "and this GPU is NVIDIA H200 (sm_90, 60 SMs)"),
        ([H200], {"cuda_driver": 12}, "with a driver for CUDA 12, the one here is for CUDA 13"),
    ],
    ids=str,
)
def test_file_of_another_machine(driver, tmp_path, gpus, changes, message):
    path = written(tmp_path / "tuning.json", text_of(entry(), **changes))
    found = answer(start(ASK, **{VARIABLE: str(path)}, **on_machine(driver, *gpus)))
    if message is None:
        assert len(found["digests"]) == 1
    else:
        assert message in found["error"]
        assert "run `tvm-flashinfer tune` here" in found["error"]


DOCTOR = """
import sys
from tvm_flashinfer.cli import main
import tvm_flashinfer.kernels.environment as environment
for name in ("_tvm", "_contract", "_mlc_llm"):  # TVM looks for a whole driver
    setattr(environment, name, lambda: None)
main(["doctor"])
"""


def test_doctor_knows_the_file_and_the_gpu(driver, tmp_path):
    path = written(tmp_path / "tuning.json", text_of(entry(), gpu=A100))
    for gpu, line in (
        (A100, f"kernels are chosen by {path}: NVIDIA A100-SXM4-80GB (sm_80, 108 SMs)"),
        (H200, f"problem: flashinfer.tuning_files: {path} is not for this machine: it was made on"),
    ):
        process = start(DOCTOR, **{VARIABLE: str(path)}, **on_machine(driver, gpu))
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert line in out
        assert ("no kernel was ever measured on sm_80" in out) == (gpu == A100)


def slot_with(ops: Any, text: str) -> None:
    """What a model does that carries a file of tuning, when its cache is created."""
    made = ops.cache_slot_with_tuning("decode_paged", "{}", True, 0, text)
    assert next(iter(made)) == "flashinfer"


def test_file_that_a_model_carries(ops):
    """It is used from the creation of the cache on, beside those of other models."""
    first, second = text_of(entry()), text_of(entry(batch=8), entry(batch=16))
    for text in (first, second, first):
        slot_with(ops, text)
    files = tuning_files()
    assert [file["entries"] for file in files] == [1, 2]
    assert {file["source"] for file in files} == {"the tuning of the model"}


def test_file_of_the_user_goes_before_that_of_a_model(ops, tmp_path):
    path = written(tmp_path / "tuning.json", text_of(entry(kernel="cuda_core")))
    slot_with(ops, text_of(entry()))
    load_tuning(path)
    slot_with(ops, text_of(entry()))
    assert [file["source"] for file in tuning_files()] == [str(path)]


def test_stale_file_in_a_model(ops, capfd):
    """The model works without it, and stderr says why: it may be run by a newer version."""
    slot_with(ops, text_of(entry(), tvm_flashinfer="0.0.1"))
    assert tuning_files() == []
    assert "the tuning of the model is not used: it was made with" in capfd.readouterr().err


def test_broken_file_in_a_model(ops):
    with pytest.raises(ValueError, match="the tuning of the model is no file of tuning"):
        slot_with(ops, json.dumps({**tuning(entry()), "gpu": 3}))


@budget(60)
@given(data())
def test_spoiled_texts(draw):
    """Characters that are cut, doubled or exchanged: a file, or an error that says what it is."""
    text = text_of(entry(), entry("prefill_ragged", "fa3", causal=True, rows=512))
    for _ in range(draw.draw(integers(1, 4))):
        start = draw.draw(integers(0, len(text)))
        end = draw.draw(integers(start, min(len(text), start + 30)))
        part = ["", text[start:end] * 2, "null", "-1", "1e999", "[", '"', "\\u"]
        text = text[:start] + draw.draw(sampled_from(part)) + text[end:]
    said = ""
    try:
        tvm_ffi.get_global_func("flashinfer.check_tuning")(text, "what was spoiled")
    except ValueError as error:
        said = str(error)
    for part in ("what was spoiled is ", " file of tuning", "tvm-flashinfer tune"):
        assert said == "" or part in said

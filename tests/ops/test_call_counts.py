"""The counter of calls: what it counts, what it does not, and whose calls and tuning they are."""

from __future__ import annotations

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
import tvm_ffi
from tuning_texts import H200, HEAD_DIM, HEADS, entry, text_of

from tvm_flashinfer import (
    call_counts,
    clear_tuning,
    kernel_choice,
    load_tuning,
    reset_call_counts,
    tuning_files,
)
from tvm_flashinfer.kernels import commands
from tvm_flashinfer.kernels.build import MODEL_SYMBOLS
from tvm_flashinfer.kernels.paths import static_library
from tvm_flashinfer.kernels.toolchain import find_gnu_ld

MERGE = "merge_state_in_place"


def states(device: Any = None) -> list[Any]:
    """Two attention states of one row."""
    arrays = [np.ones((1, 1, 64), np.float16), np.zeros((1, 1), np.float32)] * 2
    return [tvm.runtime.tensor(x, device or tvm.cpu()) for x in arrays]


@pytest.fixture(autouse=True)
def from_zero() -> None:
    reset_call_counts()


def test_calls_of_each_device(ops: Any, device: Any) -> None:
    here, other = ("cpu", "cuda") if device.dlpack_device_type() == 1 else ("cuda", "cpu")
    for _ in range(3):
        ops.merge_state_in_place(*states(device))
    assert call_counts() == {here: {MERGE: 3}, other: {}}
    reset_call_counts()
    assert call_counts() == {"cpu": {}, "cuda": {}}


def test_bound_functions_count_when_they_are_called(ops: Any) -> None:
    """Under the name of what they do, and not when they are made."""
    attend = ops.bind_attention_dense("{}")
    assert call_counts()["cpu"] == {}
    q = np.ones((1, 2, 1, 64), np.float32)
    attend(q, q, q, np.empty_like(q), np.empty((1, 2, 1), np.float32), 0, 1.0)
    assert call_counts()["cpu"] == {"attention_dense": 1}


def test_refused_calls_do_not_count(ops: Any) -> None:
    v, s, v_other, _ = states()
    with pytest.raises(ValueError, match="s_other"):
        ops.merge_state_in_place(v, s, v_other, np.zeros((1, 2), np.float32))
    assert call_counts()["cpu"] == {}


def test_threads_lose_no_call(ops: Any) -> None:
    def calls(_: int) -> None:
        given = states()
        for _ in range(500):
            ops.merge_state_in_place(*given)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(calls, range(8)))
    assert call_counts()["cpu"] == {MERGE: 4000}


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    """A library with the ops linked into it, as a self-contained model is."""
    if find_gnu_ld() is None or shutil.which("objcopy") is None:
        pytest.skip("needs binutils")
    model, library = tmp_path / "model.o", tmp_path / "model.so"
    nothing = tmp_path / "nothing.a"
    for command in (
        ["ar", "cr", nothing],
        commands.merge_objects(find_gnu_ld(), [], static_library(), nothing, model),
        commands.keep_symbols("objcopy", MODEL_SYMBOLS, model),
        ["g++", "-shared", "-fPIC", "-o", library, model],
    ):
        subprocess.run(command, check=True)
    return tvm_ffi.load_module(library)


def test_linked_library_counts_its_own_calls(ops: Any, loaded: Any) -> None:
    ops.merge_state_in_place(*states())
    for _ in range(2):
        loaded.get_function(f"flashinfer.{MERGE}")(*states())
    assert call_counts(loaded) == {"cpu": {MERGE: 2}, "cuda": {}}
    assert call_counts()["cpu"] == {MERGE: 1}
    reset_call_counts(loaded)
    assert call_counts(loaded)["cpu"] == {}
    assert call_counts()["cpu"] == {MERGE: 1}


def test_linked_library_has_its_own_tuning(loaded: Any, tmp_path: Path) -> None:
    path = tmp_path / "tuning.json"
    path.write_text(text_of(entry()))
    ask = lambda library: kernel_choice(  # noqa: E731
        "decode_paged", *HEADS, HEAD_DIM, [4096] * 64, gpu=H200, library=library
    )["source"]
    load_tuning(path, loaded)
    assert [len(tuning_files(loaded)), len(tuning_files())] == [1, 0]
    assert [ask(loaded), ask(None)] == ["tuned", "default"]
    clear_tuning(loaded)
    assert ask(loaded) == "default"


def test_library_without_functions_of_its_own() -> None:
    class Shared:
        """A module in which nothing is found."""

        def get_function(self, name: str, query_imports: bool) -> None:
            raise AttributeError(name)

    with pytest.raises(KeyError, match="leave the library out"):
        call_counts(Shared())

"""The calls that the installed TVM makes, against the arguments that our functions take."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tvm
import tvm_ffi
from click.testing import CliRunner

from tvm_flashinfer import cli, contract, contract_probe
from tvm_flashinfer.contract import UnsupportedTVMError, check_contract, contract_problems
from tvm_flashinfer.contract_probe import ACCEPTED, contract_differences, recorded_calls


@pytest.fixture(autouse=True)
def cache_dir(tmp_path, monkeypatch) -> Iterator[Path]:
    """A folder of kernels that is there and empty; no verdict of other tests is kept."""
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(tmp_path))
    contract_problems.cache_clear()
    yield tmp_path
    contract_problems.cache_clear()


@pytest.fixture
def other_tvm(monkeypatch) -> str:
    """Make this TVM one that calls `append` otherwise. Returns how that is put."""
    monkeypatch.setitem(ACCEPTED, "append", (*ACCEPTED["append"], "int"))
    return "append is called with 4 arguments (float16[5], float16[3], float16[3], int32[1])"


@pytest.fixture
def tried(monkeypatch) -> list[int]:
    """Count how often TVM's cache is tried."""
    count: list[int] = []

    def differences() -> list[str]:
        count.append(1)
        return contract_differences()

    monkeypatch.setattr(contract_probe, "contract_differences", differences)
    return count


def test_this_tvm_calls_what_we_take() -> None:
    """Every function of the cache is reached, and called as ours is."""
    assert contract_differences() == []


def test_other_calls_are_named_with_both_argument_lists() -> None:
    """One argument more, and a function that is not called at all."""
    wanted = {"append": (*ACCEPTED["append"], "int"), "bake_bread": ("int",)}
    append, bread = contract_differences(wanted)
    assert append.startswith("append is called with 4 arguments (float16[5], ")
    assert append.endswith("expected 5 (float16[5], float16[3], float16[3], int32[1], int)")
    assert bread == "bake_bread is never called; expected (int)"


def test_the_list_is_that_of_the_functions() -> None:
    """Our functions take as many arguments as the list says, and object to one more."""
    functions = {
        "append": "append_paged_kv_cache",
        "copy_page": "copy_single_page",
        "compact_copy": "compact_kv_copy",
        "debug_get_kv": "debug_get_kv",
        "merge_state": "merge_state_in_place",
        "prefill_plan": "batch_prefill_plan",
        "decode_plan": "batch_decode_plan",
        "prefill_ragged_run": "batch_prefill_ragged_run",
        "prefill_paged_run": "batch_prefill_paged_run",
        "decode_paged_run": "batch_decode_run",
        "append_mla": "append_paged_mla_kv_cache",
        "copy_page_mla": "copy_single_page_mla",
        "debug_get_kv_mla": "debug_get_kv_mla",
        "mla_plan": "batch_mla_plan",
        "mla_run": "batch_mla_run",
    }
    made = {
        name: tvm_ffi.get_global_func(f"flashinfer.{function}")
        for name, function in functions.items()
    }
    made["split_rotary"] = tvm_ffi.get_global_func("flashinfer.bind_split_qkv_rotary")(
        1e4, 1.0, 64, "{}"
    )
    slots = ("prefill_ragged", "prefill_paged", "decode_paged", "tree_ragged", "tree_paged", "mla")
    for name in slots:
        made[name] = tvm_ffi.get_global_func("flashinfer.cache_slot")(name, "{}", False, 0)[1]
    assert made.keys() == ACCEPTED.keys()
    for name, function in made.items():
        for count, fits in ((len(ACCEPTED[name]), True), (len(ACCEPTED[name]) + 1, False)):
            with pytest.raises((TypeError, ValueError), match="rgument") as caught:
                function(*["nothing that any function takes"] * count)
            assert ("Mismatched number of arguments" not in str(caught.value)) == fits, name


def test_the_probe_does_not_change_tvm() -> None:
    """It makes caches of its own; a second time gives the same."""
    assert recorded_calls() == recorded_calls()
    assert contract_probe.ACCEPTED is ACCEPTED


def test_a_tvm_that_fits_is_remembered(cache_dir, tried) -> None:
    """By the libraries that are loaded: another build of TVM is tried again."""
    check_contract()
    contract_problems.cache_clear()
    check_contract()
    assert len(tried) == 1
    (kept,) = cache_dir.glob("contracts/*.txt")
    assert kept.read_text() == f"TVM {tvm.__version__} ({tvm.__path__[0]})\n"


def test_another_build_of_tvm_is_tried(tried, monkeypatch) -> None:
    check_contract()
    contract_problems.cache_clear()
    libraries = list(contract._identity())
    assert any("libtvm_runtime" in path for path, _, _ in libraries)
    changed = [(path, size, time + 1) for path, size, time in libraries]
    monkeypatch.setattr(contract, "_identity", lambda: changed)
    check_contract()
    assert len(tried) == 2


def test_without_a_folder_nothing_is_written(tmp_path, tried, monkeypatch) -> None:
    monkeypatch.setenv("TVM_FLASHINFER_CACHE_DIR", str(tmp_path / "none"))
    check_contract()
    check_contract()
    assert len(tried) == 1
    assert not (tmp_path / "none").exists()


def test_a_tvm_that_calls_otherwise_is_named(other_tvm, cache_dir) -> None:
    with pytest.raises(UnsupportedTVMError) as caught:
        check_contract()
    message = str(caught.value)
    assert f"TVM {tvm.__version__} ({tvm.__path__[0]})" in message
    assert f"\n  - {other_tvm}, expected 5 (" in message
    assert list(cache_dir.glob("contracts/*")) == []  # it is tried again


def test_a_tvm_without_such_a_cache(monkeypatch) -> None:
    def create(*arguments: object) -> None:
        raise ValueError("there is no such function")

    monkeypatch.setattr(contract_probe, "_create", create)
    with pytest.raises(UnsupportedTVMError, match=r"not be tried: ValueError: there is no such"):
        check_contract()


def test_no_cache_is_made_of_a_model_compiled_elsewhere(other_tvm) -> None:
    """The native library asks before a slot is filled."""
    make = tvm_ffi.get_global_func("flashinfer.cache_slot")
    with pytest.raises(UnsupportedTVMError, match="append is called with 4"):
        make("prefill_paged", "{}", False, 0)


def test_doctor_tries_tvm(tried) -> None:
    check_contract()
    result = CliRunner().invoke(cli.main, ["doctor", "--json"])
    assert result.exit_code == 0
    assert json.loads(result.stdout)["tvm_contract"] == {"fits": True, "differences": []}
    assert len(tried) == 2


def test_doctor_names_what_tvm_calls_otherwise(other_tvm) -> None:
    result = CliRunner().invoke(cli.main, ["doctor"])
    assert result.exit_code == 1
    assert f"otherwise: {other_tvm}, expected 5" in result.stdout

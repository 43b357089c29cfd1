"""Files of tuning that a model carries: they are put into it where it is compiled."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import tvm
from tvm import relax as rx

sys.path.append(str(Path(__file__).parents[1] / "ops"))

from tuning_texts import A100, entry, text_of

from tvm_flashinfer.relax import CompileReport, DispatchKVCacheCreation
from tvm_flashinfer.relax.report import REPORT_ATTRIBUTE
from tvm_flashinfer.tuning import tuning_to_carry

VARIABLE = "TVM_FLASHINFER_TUNING"


@pytest.fixture
def name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a file and names it in the environment."""

    def write(text: str) -> str:
        path = tmp_path / "tuning.json"
        path.write_text(text)
        monkeypatch.setenv(VARIABLE, str(path))
        return text

    return write


def slot_calls(mod: tvm.IRModule) -> list[tuple[str, list[Any]]]:
    """The functions that fill attention slots, with their arguments, in order."""
    found: list[tuple[str, list[Any]]] = []

    def visit(expr: Any) -> None:
        if isinstance(expr, rx.Call) and isinstance(expr.args[0], rx.ExternFunc):
            symbol = str(expr.args[0].global_symbol)
            if symbol.startswith("flashinfer.cache_slot"):
                found.append((symbol.removeprefix("flashinfer."), list(expr.args[1:])))

    rx.analysis.post_order_visit(mod["create_flashinfer_paged_kv_cache"], visit)
    return found


def compiled(mod: tvm.IRModule, target: tvm.target.Target) -> tvm.IRModule:
    return DispatchKVCacheCreation(target, ship="shared")(mod)


def test_one_slot_carries_the_file(generic_module, cuda, name):
    text = name(text_of(entry()))
    mod = compiled(generic_module(), cuda)
    calls = slot_calls(mod)
    assert [function for function, _ in calls].count("cache_slot_with_tuning") == 1
    [arguments] = [args for function, args in calls if function == "cache_slot_with_tuning"]
    assert arguments[-1].value == text
    assert bool(arguments[2].value)
    report = CompileReport.from_json(mod.attrs[REPORT_ATTRIBUTE])
    assert report.tuning.startswith("NVIDIA H200 (sm_90, 132 SMs), 1 entries, ")


def test_without_the_variable_nothing_is_carried(generic_module, cuda, monkeypatch):
    monkeypatch.delenv(VARIABLE, raising=False)
    mod = compiled(generic_module(), cuda)
    assert {function for function, _ in slot_calls(mod)} == {"cache_slot"}
    assert CompileReport.from_json(mod.attrs[REPORT_ATTRIBUTE]).tuning == ""


def test_models_for_cpu_carry_none(generic_module, llvm, name):
    name(text_of(entry()))
    mod = compiled(generic_module(), llvm)
    assert {function for function, _ in slot_calls(mod)} == {"cache_slot"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (text_of(entry(), gpu=A100), "a file for NVIDIA A100.*the model is compiled for sm_90a"),
        (text_of(entry(), tvm_flashinfer="0.0.1"), "is an old file of tuning: it was made with"),
        (text_of(entry(batch=3)), "is no file of tuning: entry 0"),
    ],
)
def test_refused_where_the_model_is_compiled(name, text, message):
    name(text)
    with pytest.raises(ValueError, match=message):
        tuning_to_carry(["90a"])


def test_one_of_several_architectures_is_enough(name):
    name(text_of(entry(), gpu=A100))
    assert tuning_to_carry(["80", "90a"]) is not None

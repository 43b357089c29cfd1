"""The report of a compile, and reading it back from a library."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tvm
from tvm import relax as rx

from tvm_flashinfer.relax import CompileReport, DispatchKVCacheCreation, ReportRow, read_report
from tvm_flashinfer.relax.report import attach_report, emit_report
from tvm_flashinfer.report import ReportError, report_of_file

ROW = ReportRow("create", "decode", "native", "flashinfer.batch_decode_run", "sm_90a")
FALLBACK = ReportRow("create", "tree", "fallback", "tir_tree", "sm_90a", ("no kernel yet",))


def test_round_trip() -> None:
    report = CompileReport("cuda", "shared", [ROW, FALLBACK])
    assert CompileReport.from_json(report.to_json()) == report
    assert json.loads(report.to_json())["rows"][1]["reasons"] == ["no kernel yet"]


def test_text_shows_every_row_and_reason() -> None:
    text = str(CompileReport("cuda", "shared", [ROW, FALLBACK]))
    assert text.splitlines()[0] == "1 of 2 native (cuda, shared)"
    assert "flashinfer.batch_decode_run" in text
    assert "      no kernel yet" in text
    assert str(CompileReport("llvm", "shared")) == "0 of 0 native (llvm, shared)"


def test_wrong_status_and_text() -> None:
    with pytest.raises(ValueError, match="expected 'native' or 'fallback'"):
        ReportRow("create", "decode", "fast", "kernel", "cpu")
    for text in ("{", "[]", '{"target": "cuda"}', '{"target": "", "ship": "", "rows": [1]}'):
        with pytest.raises(ValueError, match="expected the JSON of a report"):
            CompileReport.from_json(text)


def test_attached_reports_add_up(module_builder) -> None:
    builder = rx.BlockBuilder()
    module_builder[1](builder)
    mod = attach_report(builder.get(), CompileReport("cuda", "shared", [ROW]))
    mod = attach_report(mod, CompileReport("cuda", "shared", [FALLBACK]))
    rx.analysis.well_formed(mod)
    report = CompileReport.from_json(mod["flashinfer_report"].body.body.value)
    assert report.rows == [ROW, FALLBACK]
    assert CompileReport.from_json(mod.attrs["tvm_flashinfer.report"]) == report


def test_reports_of_a_builder_add_up() -> None:
    builder = rx.BlockBuilder()
    with builder.function("main", []):
        emit_report(builder, CompileReport("cuda", "shared", [ROW]))
        emit_report(builder, CompileReport("cuda", "shared", [FALLBACK]))
        builder.emit_func_output(rx.prim_value(1))
    mod = builder.get()
    rx.analysis.well_formed(mod)
    report = CompileReport.from_json(mod["flashinfer_report"].body.body.value)
    assert report.rows == [ROW, FALLBACK]


@pytest.mark.parametrize("pipeline", ["default", "default_build"])
def test_survives_compilation(pipeline, generic_module, llvm, tmp_path) -> None:
    """Read back from the library on disk, through a VM and without a cache."""
    dispatch = DispatchKVCacheCreation(llvm)
    mod = dispatch(generic_module(num_hidden_layers=1))
    # Only what the report needs is kept, so that no kernel must be registered or compiled.
    keep = {v: f for v, f in mod.functions_items() if v.name_hint in ("embed", "flashinfer_report")}
    mod = tvm.IRModule(keep, attrs=dict(mod.attrs))
    mod = rx.transform.DeadCodeElimination()(mod)
    path = tmp_path / f"{pipeline}.so"
    rx.build(mod, llvm, relax_pipeline=pipeline).export_library(str(path))
    library = tvm.runtime.load_module(str(path))
    vm = rx.VirtualMachine(library, tvm.cpu())
    assert read_report(vm) == dispatch.report
    assert read_report(path) == dispatch.report


def test_library_without_a_report(module_builder, llvm, tmp_path) -> None:
    builder = rx.BlockBuilder()
    module_builder[1](builder)
    path = tmp_path / "none.so"
    rx.build(builder.get(), llvm).export_library(str(path))
    vm = rx.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())
    with pytest.raises(KeyError, match="not compiled through tvm_flashinfer"):
        read_report(vm)
    with pytest.raises(ReportError, match="holds no report: the model was not compiled through"):
        read_report(path)


def test_file_is_data(tmp_path: Path) -> None:
    """Nothing that stands in a file but a whole report counts, and nothing of it is run."""
    path = tmp_path / "model.so"
    text = CompileReport("cuda", "shared", [ROW]).to_json().encode()
    other = CompileReport("cuda", "shared", [FALLBACK]).to_json().encode()
    path.write_bytes(b"\x7fELF\xff" + text[:-4] + b"\0" + text + b"\xfe" + other + text)
    assert report_of_file(path).rows == [ROW, FALLBACK]
    path.write_bytes(b"\x7fELF" + text.replace(b'"rows": [', b'"rows": ' + b"[" * 100_000))
    with pytest.raises(ReportError, match="holds no report"):
        report_of_file(path)
    path.write_bytes(b"\x7fELF" + text.replace(b'"cuda"', b"1"))
    with pytest.raises(ReportError, match="holds no report"):
        report_of_file(path)


@pytest.mark.parametrize("content", [b"", b"# a model", CompileReport("a", "b").to_json().encode()])
def test_file_that_is_no_library(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.so"
    path.write_bytes(content)
    with pytest.raises(ReportError, match=r"model.so is no library: it begins with b'"):
        report_of_file(path)


def test_control_characters_are_spelt_out() -> None:
    """A library may hold any text, and what is printed goes to a terminal."""
    report = CompileReport("cuda", "shared", [ReportRow("\x1b[2J", "a", "native", "k", "cpu")])
    assert "\x1b" not in str(report)
    assert r"\x1b[2J" in str(report)

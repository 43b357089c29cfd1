"""What the tuner measures with: tensors, plans and runs, on CPU and on CUDA."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tuning_texts import identity_of_here

from tvm_flashinfer import clear_tuning, tuning_files
from tvm_flashinfer.tuner import (
    Limits,
    ModelShape,
    Point,
    Tactic,
    TacticError,
    grid,
    tactics,
    tune,
)
from tvm_flashinfer.tuner import measure as measure_module
from tvm_flashinfer.tuner.measure import Measurement

LIMITS = Limits(max_batch=2, max_keys=512, max_rows=256, max_bytes=4 << 20)
SHAPES = {
    "group 4": ModelShape(8, 2, 128, 128),
    "group 1": ModelShape(2, 2, 128, 128, "bfloat16"),
    "new tokens of mla": ModelShape(2, 2, 192, 128, only_new_tokens=True),
    "mla": ModelShape(2, 1, 512, 512, is_mla=True),
}


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_module, "_REPEAT_SECONDS", 0)
    monkeypatch.setattr(measure_module, "_ROTATED_BYTES", 1 << 20)


@pytest.mark.parametrize("name", SHAPES)
def test_every_point_is_measured(device: Any, tmp_path: Path, name: str) -> None:
    """No kernel fails, and the file says what each took."""
    shape, identity = SHAPES[name], identity_of_here()
    clear_tuning()
    measure = Measurement(shape, identity, device, LIMITS)
    points, seen = grid(shape, LIMITS), []
    path = tune(tmp_path / "tuning.json", shape, identity, points, measure, seen.append)
    assert [progress.point for progress in seen] == points
    for progress in seen:
        assert not progress.failed, str(progress)
        gpu = identity["gpu"]
        assert set(tactics(shape, progress.point, gpu["arch"], gpu["num_sm"])) <= set(
            progress.seconds
        )
    entries = json.loads(path.read_text())["entries"]
    assert all(min(entry["microseconds"].values()) > 0 for entry in entries)
    assert tuning_files() == []


def test_wrong_result_is_found() -> None:
    shape, point = SHAPES["group 4"], Point("decode_paged", 1, 1, 512)
    measure = Measurement(shape, identity_of_here(), tvm.cpu(), LIMITS)
    assert measure(point, Tactic("fa2")) > 0
    assert measure._expected is not None
    measure._expected[1][:] += 0.2
    with pytest.raises(TacticError, match=r"differs from that of another kernel by [12]"):
        measure(point, Tactic("batch_attention"))


def test_output_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, point = SHAPES["group 4"], Point("decode_paged", 1, 1, 512)
    measure = Measurement(shape, identity_of_here(), tvm.cpu(), LIMITS)
    monkeypatch.setattr(measure, "_runs", lambda *_: [lambda: None])
    with pytest.raises(TacticError, match="left a part of the output"):
        measure(point, Tactic("fa2"))


def test_errors_of_kernels_are_those_of_tactics() -> None:
    shape, point = SHAPES["group 4"], Point("decode_paged", 1, 1, 512)
    measure = Measurement(shape, identity_of_here(), tvm.cpu(), LIMITS)
    measure._spaces[0] = np.zeros(8, np.uint8)[::2]
    with pytest.raises(TacticError, match="float_workspace"):
        measure(point, Tactic("fa2"))
    assert tuning_files() == []

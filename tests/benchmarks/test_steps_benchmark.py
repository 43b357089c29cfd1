"""`benchmarks.steps` on a tiny model: all sides run, agree, and are drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tvm

from benchmarks import steps

pytestmark = pytest.mark.skipif(
    not hasattr(tvm.ir, "StringImm"), reason="the models of the examples need apache-tvm 0.27"
)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a run on the processor wrote."""
    folder = tmp_path_factory.mktemp("steps")
    path = folder / "results.json"
    sizes = "--batch 2 --length 40 --steps 2 --model tiny --device cpu".split()
    steps.main(["run", "--lib", str(folder), "--json", str(path), *sizes])
    return path


def test_every_side_runs(results: Path) -> None:
    (row,) = json.loads(results.read_text())["rows"]
    assert row["row"] == "B2-L40"
    assert list(row["sides"]) == list(steps.SIDES)
    for name, side in row["sides"].items():
        assert side["us"] >= side["min_us"] > 0, name
        assert side["difference"] < 1e-4, name
    # Two layers, keys and values, of two heads with 64 numbers of four bytes.
    assert row["page_bytes"] == 2 * 40 * 2 * 2 * 2 * 64 * 4
    assert row["limit_us"] == pytest.approx((row["weight_bytes"] + row["page_bytes"]) / 4.25e6)


def test_sides_that_differ_are_refused(results: Path, monkeypatch: Any) -> None:
    """One whose tokens are others."""
    step = steps.OnSteps.step
    monkeypatch.setattr(steps.OnSteps, "step", lambda side, tokens: step(side, tokens * 0))
    sizes = "--batch 2 --length 40 --steps 2 --model tiny --device cpu".split()
    with pytest.raises(SystemExit, match="the logits of steps differ by"):
        steps.main(["run", "--lib", str(results.parent), *sizes])


def test_the_picture(results: Path) -> None:
    """From the file alone; parts that were not measured are in the rest."""
    pytest.importorskip("matplotlib")
    steps.main(["plot", str(results)])
    assert "B2-L40" in results.with_suffix(".svg").read_text()

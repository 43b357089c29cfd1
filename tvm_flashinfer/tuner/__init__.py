"""Makes files of tuning: what to measure, the search, and the measuring on a GPU."""

from __future__ import annotations

from tvm_flashinfer.tuner.grid import Limits, ModelShape, Point, Tactic, grid, tactics
from tvm_flashinfer.tuner.search import TacticError, TuningError, tune

__all__ = [
    "Limits", "ModelShape", "Point", "Tactic", "TacticError", "TuningError", "grid", "tactics",
    "tune",
]  # fmt: skip

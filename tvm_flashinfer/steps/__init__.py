"""Decode steps that fit into one CUDA graph: a runner over page tables at fixed addresses.

`tvm_flashinfer.relax.export_steps` makes what it runs.
"""

from __future__ import annotations

from tvm_flashinfer.steps.config import StepConfig
from tvm_flashinfer.steps.page_table import OutOfPagesError, PageTable
from tvm_flashinfer.steps.runner import StepRunner

__all__ = ["OutOfPagesError", "PageTable", "StepConfig", "StepRunner"]

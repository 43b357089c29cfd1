"""FlashInfer's attention and paged-KV kernels under TVM.

Importing this package registers the ``flashinfer.*`` packed functions; ``import tvm`` does the same
where the package is installed, through TVM's entry points. `tvm_flashinfer.relax` has the passes.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tvm_flashinfer import _native
from tvm_flashinfer.contract import UnsupportedTVMError, check_contract
from tvm_flashinfer.counts import call_counts, reset_call_counts
from tvm_flashinfer.hooks import disable, enable, turned_off
from tvm_flashinfer.tuning import clear_tuning, kernel_choice, load_tuning, tuning_files

__version__ = "0.1.0"

__all__ = [
    "__version__", "call_counts", "clear_tuning", "disable", "enable", "kernel_choice",
    "load_tuning", "reset_call_counts", "tuning_files",
]  # fmt: skip


def _register() -> None:
    """Register the functions, if we are on; while TVM is imported, the hook decides."""
    if turned_off():
        return
    tvm = sys.modules.get("tvm")
    if tvm is not None:
        if getattr(tvm.__spec__, "_initializing", False):
            return
        try:
            check_contract()
        except UnsupportedTVMError as error:
            raise ImportError(f"tvm_flashinfer cannot be used: {error}") from error
    try:
        _native.load()
    except ImportError:
        # `doctor` tells what is wrong, most of all where the package cannot be imported.
        if not _is_command_line():
            raise


def _is_command_line() -> bool:
    program = Path(sys.argv[0]).name if sys.argv else ""
    return program == "tvm-flashinfer" or sys.orig_argv[1:3] == ["-m", "tvm_flashinfer"]


_register()

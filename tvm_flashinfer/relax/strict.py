"""Falling back to TVM's kernels: a warning, or in strict mode an error."""

from __future__ import annotations

import os
import warnings

import tvm_ffi

from tvm_flashinfer.relax.report import FALLBACK, ReportRow
from tvm_flashinfer.relax.support import UnsupportedConfigError


class FallbackWarning(UserWarning):
    """Something of the model runs on TVM's kernels, since no kernel of ours serves it."""


@tvm_ffi.register_error
class StrictModeError(UnsupportedConfigError):
    """Strict mode is on and something would have fallen back to TVM's kernels."""

    headline = "strict mode is on, and tvm_flashinfer cannot serve all of the model:"


#: What `set_strict_mode` was given last.
_strict: bool | None = None


def set_strict_mode(strict: bool | None) -> None:
    """Make fallbacks errors in this process, or warnings; None: as ``TVM_FLASHINFER_STRICT`` says.

    It reaches compiles that take no argument for it, such as those of MLC LLM. A pass that was
    given ``strict`` keeps to that.
    """
    global _strict
    _strict = strict


def strict_mode(strict: bool | None = None) -> bool:
    """Return whether fallbacks are errors.

    As given, else as `set_strict_mode` was told, else as ``TVM_FLASHINFER_STRICT`` says.
    """
    for choice in (strict, _strict):
        if choice is not None:
            return choice
    return os.environ.get("TVM_FLASHINFER_STRICT", "0") not in ("", "0")


def strict_violations(rows: list[ReportRow]) -> list[str]:
    """Return what strict mode objects to: one sentence for each reason of each fallback."""
    return [
        f"{row.site}, slot {row.slot}: {reason}"
        for row in rows
        if row.status == FALLBACK
        for reason in row.reasons
    ]


def warn_of_fallbacks(what: str, violations: list[str]) -> None:
    """Warn of what `strict_violations` returned, if it is anything.

    Parameters
    ----------
    what : str
        What of a model it is, such as ``"attention"``.
    violations : list of str
    """
    if violations:
        lines = "".join(f"\n  - {violation}" for violation in violations)
        warnings.warn(
            f"some {what} of the model runs on TVM's own kernels:{lines}",
            FallbackWarning,
            stacklevel=3,
        )

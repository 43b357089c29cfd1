"""The paged KV cache as the hook puts it into TVM: it reports, warns and is strict by itself."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

from tvm import relax as rx

from tvm_flashinfer.relax import slots
from tvm_flashinfer.relax.kv_cache import FlashInferPagedKVCache
from tvm_flashinfer.relax.report import CompileReport, emit_report
from tvm_flashinfer.relax.ship import resolve_ship
from tvm_flashinfer.relax.strict import FallbackWarning, strict_mode, strict_violations
from tvm_flashinfer.relax.support import UnsupportedConfigError

_SIGNATURE = inspect.signature(FlashInferPagedKVCache)


class StrictFallback(BaseException):
    """Strict mode is on and the model would have fallen back to TVM's kernels.

    It is no `Exception`, because MLC LLM catches every one of those here and goes on with TVM's
    kernels, which is what strict mode is there to prevent.
    """


class HookedPagedKVCache(FlashInferPagedKVCache):
    """`FlashInferPagedKVCache` in the place of TVM's class of that name.

    The module being built gets the function ``flashinfer_report``. A cache that cannot be made is
    reported and warned of before the error is raised, since callers may swallow it.

    Raises
    ------
    StrictFallback
        When strict mode is on, by ``TVM_FLASHINFER_STRICT`` or `set_strict_mode`, and anything the
        model runs into falls back.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = _SIGNATURE.bind(*args, **kwargs)
        given.apply_defaults()
        target, name = given.arguments["target"], given.arguments["name"]
        try:
            super().__init__(*args, **kwargs)
        except Exception as error:
            reasons = (
                error.reasons
                if isinstance(error, UnsupportedConfigError)
                else [f"{type(error).__name__}: {error}"]
            )
            ship = resolve_ship(given.arguments["ship"], target)
            rows = slots.fallback_rows(reasons, target, name)
            _finish(CompileReport(target.kind.name, ship, rows), reasons)
            raise
        _finish(self.report, [])


def _finish(report: CompileReport, reasons: list[str]) -> None:
    builder = rx.BlockBuilder.current()
    if builder is not None:
        emit_report(builder, report)
    violations = strict_violations(report.rows)
    if violations and strict_mode():
        lines = "".join(f"\n  - {violation}" for violation in violations)
        raise StrictFallback(f"strict mode is on and there are fallbacks:{lines}")
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        warnings.warn(
            f"the KV cache of this model runs on TVM's own kernels:{lines}",
            FallbackWarning,
            stacklevel=4,
        )

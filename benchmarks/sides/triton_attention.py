"""Attention in Triton, as one would write it: streaming softmax, tuned by Triton's autotuner.

Prompts have a block of query rows for each program; a step of decode divides the keys of a request
into parts, whose results a second kernel adds up.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

from ..cases import Case
from . import Absent, Side, Tuner

LOG2_E = 1.4426950408889634


@functools.cache
def _kernels() -> Any:
    """The kernels' module.

    Raises
    ------
    Absent
        Where Triton is not installed.
    """
    if importlib.util.find_spec("triton") is None:
        raise Absent("Triton is not installed")
    from . import triton_kernels

    return triton_kernels


def build(case: Case) -> Side:
    """Prompts over ragged keys, and decode over pages."""
    if case.row.kind not in ("ragged", "decode"):
        raise Absent("the benchmark's Triton kernels serve ragged prompts and decode")
    if not case.row.planned:
        raise Absent("see the row with a plan")
    if case.machine.kind == "cpu":
        raise Absent("Triton compiles for GPUs")
    kernels = _kernels()
    return _ragged(case, kernels) if case.row.kind == "ragged" else _decode(case, kernels)


def tuner_of(kernel: Any) -> Tuner:
    """Triton's autotuner of a kernel, which keeps what it chose by what was called."""
    return Tuner(lambda: len(kernel.cache), lambda: str(getattr(kernel, "best_config", None)))


def _ragged(case: Case, kernels: Any) -> Side:
    row = case.row
    if row.head_dim & (row.head_dim - 1):
        raise Absent(f"head dimension {row.head_dim} is not a power of 2")
    # A tuner for each row, so that what it counts is of that row.
    kernel = kernels.tuned(kernels.prompts, kernels.PROMPT_CONFIGS, ["length", "dim"])
    (qo, kv), length, d = row.heads, row.kv_len, row.head_dim

    def call_of(i: int) -> Any:
        q, k, v, o, lse = (case.buffers[i][name] for name in ("q", "k", "v", "o", "lse"))
        grid = lambda meta: (-(-length // meta["rows"]), row.batch * qo)  # noqa: E731
        arguments = (q, k, v, o, lse, row.sm_scale * LOG2_E, length, qo, kv)
        return lambda: kernel[grid](*arguments, dim=d)

    calls = [call_of(i) for i in range(len(case.buffers))]
    return Side("triton", calls, "prompts", tuner=tuner_of(kernel))


def _decode(case: Case, kernels: Any) -> Side:
    row, machine = case.row, case.machine
    (qo, kv), d = row.heads, row.head_dim
    group = qo // kv
    if d & (d - 1) or row.page_size & (row.page_size - 1):
        raise Absent("head dimension and page size must be powers of 2")
    # As many parts as it takes to fill the GPU about twice, none shorter than 256 keys.
    programs = row.batch * kv
    parts = max(1, min(row.kv_len // 256, -(-2 * machine.processors // programs)))
    each = -(-row.kv_len // parts)
    each += -each % 128
    kernel = kernels.tuned(kernels.decode_parts, kernels.DECODE_CONFIGS, ["length", "dim", "parts"])
    space = machine.empty(row.batch, qo, parts, d), machine.empty(row.batch, qo, parts)
    table, lengths = case.shared["page_indices"], case.shared["kv_len"]
    first = case.shared["kv_indptr"]

    def call_of(i: int) -> Any:
        q, pages, o, lse = (case.buffers[i][name] for name in ("q", "pages", "o", "lse"))
        arguments = (
            q, pages, table, first, lengths, *space, row.sm_scale * LOG2_E, row.kv_len, qo, kv,
            each,
        )  # fmt: skip

        def call() -> None:
            kernel[(row.batch * kv, parts)](
                *arguments, parts=parts, group=group, padded=max(16, _power(group)), dim=d,
                page_size=row.page_size,
            )  # fmt: skip
            kernels.add_parts[(row.batch * qo,)](
                *space, o, lse, parts=parts, up=_power(parts), dim=d
            )

        return call

    calls = [call_of(i) for i in range(len(case.buffers))]
    return Side("triton", calls, f"decode in {parts} parts", tuner=tuner_of(kernel))


def _power(number: int) -> int:
    """The next power of 2."""
    return 1 << (number - 1).bit_length()

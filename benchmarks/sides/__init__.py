"""What is timed beside each other: ours, and the peers, each by its intended entry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Call = Callable[[], object]


class Absent(Exception):
    """A side does not serve a row, or is not installed; the message says which, and why."""


@dataclass
class Tuner:
    """What chooses a kernel by trying several.

    Attributes
    ----------
    runs : callable
        How often it has chosen: more than 0 before a side may be timed, and the same after.
    chosen : callable
        What it chose, in words.
    """

    runs: Callable[[], int]
    chosen: Callable[[], str]


@dataclass
class Side:
    """The calls of one side, one for each buffer of a case.

    Attributes
    ----------
    calls : list of callable
        What is timed.
    kernel : str
        Which kernel the side says it runs.
    done : callable, optional
        How many calls the side counts itself; the harness compares it with its own count.
    tuner : Tuner, optional
        What tunes the side; None where nothing does.
    returned : callable, optional
        The output of a buffer's last call, for sides that return it.
    forget : callable, optional
        Fill what was returned with NaN.
    inner : int
        How often one of `calls` calls the function that is timed.
    """

    name: str
    calls: list[Call]
    kernel: str = ""
    done: Callable[[], int] | None = None
    tuner: Tuner | None = None
    returned: Callable[[int], Any] | None = None
    forget: Callable[[int], None] | None = None
    inner: int = 1


def builders() -> dict[str, Callable[[Any], Side]]:
    """What builds each side for a case, or raises `Absent`."""
    from . import flashinfer_jit, ours, sdpa, tir, triton_attention

    return {
        "ours": ours.build,
        "ours-fa2": ours.build_fa2,
        "ours-loop": ours.build_loop,
        "tir": tir.build,
        "torch-flash": sdpa.build_flash,
        "torch-cudnn": sdpa.build_cudnn,
        "flashinfer-cuda-cores": flashinfer_jit.build_cuda_cores,
        "flashinfer-fa2": flashinfer_jit.build_fa2,
        "flashinfer-fa3": flashinfer_jit.build_fa3,
        "triton": triton_attention.build,
    }


PEERS = (
    "tir", "torch-flash", "torch-cudnn", "flashinfer-cuda-cores", "flashinfer-fa2",
    "flashinfer-fa3", "triton",
)  # fmt: skip

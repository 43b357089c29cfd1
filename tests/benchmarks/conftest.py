"""Cases small enough for a processor, and sides that do what no side should."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks import work  # noqa: E402
from benchmarks.cases import make_case  # noqa: E402
from benchmarks.machine import Processor  # noqa: E402
from benchmarks.measure import Options, measure  # noqa: E402
from benchmarks.sides import Side, ours  # noqa: E402

SMALL = 512 << 10


@pytest.fixture
def machine() -> Processor:
    """A processor whose cache is said to be small, so that few buffers leave it."""
    return Processor(SMALL)


@pytest.fixture
def case(machine: Processor) -> Any:
    """Decode."""
    return make_case(work.ROWS["tiny-decode"], machine)


@pytest.fixture
def right(case: Any) -> Side:
    """Our side of it."""
    return ours.build(case)


@pytest.fixture
def timed(case: Any) -> Callable[..., dict[str, Any]]:
    """Time sides of the case, with few repeats."""

    def run(*sides: Side, **options: Any) -> dict[str, Any]:
        return measure(case, sides, Options(repeats=3, pause=0.0, **options), 1e-6)

    return run

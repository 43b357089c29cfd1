"""How much the random tests try: a fixed budget, the same inputs in each run; more when asked."""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings


def budget(examples: int, **others: Any) -> settings:
    """So many examples, always the same ones.

    `TVM_FLASHINFER_FUZZ=N` in the environment tries N times as many, from new seeds.
    """
    times = int(os.environ.get("TVM_FLASHINFER_FUZZ", "1"))
    return settings(
        max_examples=examples * times,
        derandomize=times == 1,
        deadline=None,
        database=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        **others,
    )

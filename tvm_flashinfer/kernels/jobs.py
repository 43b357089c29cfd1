"""How many compilers to run at once."""

from __future__ import annotations

import os
import re
from pathlib import Path

#: Memory to leave for one compiler. FA2 units take half of it.
_BYTES_PER_JOB = 1 << 30

#: The same of units from CUTLASS' collective kernels, which take four times that.
_BYTES_PER_LARGE_JOB = 5 << 30


def default_jobs() -> int:
    """Return how many compilers this machine can run at once, by its processors and free memory."""
    if hasattr(os, "sched_getaffinity"):
        processors = len(os.sched_getaffinity(0))
    else:
        processors = os.cpu_count() or 1
    return max(1, min(processors, _available_memory() // _BYTES_PER_JOB))


def large_jobs() -> int:
    """Return how many of the compilers may have a large unit at once, by the free memory."""
    return max(1, _available_memory() // _BYTES_PER_LARGE_JOB)


def _available_memory() -> int:
    """Return the free memory of the machine or of the container, in bytes."""
    amounts = []
    match = re.search(r"MemAvailable:\s+(\d+) kB", _read("/proc/meminfo"))
    if match:
        amounts.append(int(match.group(1)) * 1024)
    limit = _read("/sys/fs/cgroup/memory.max").strip()
    used = _read("/sys/fs/cgroup/memory.current").strip()
    # The page cache counts as used, and is given back on demand.
    cached = re.search(r"^inactive_file (\d+)", _read("/sys/fs/cgroup/memory.stat"), re.MULTILINE)
    if limit.isdigit() and used.isdigit():
        amounts.append(int(limit) - int(used) + (int(cached.group(1)) if cached else 0))
    return min(amounts, default=_BYTES_PER_JOB)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""

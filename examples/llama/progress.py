"""Lines of progress with the elapsed time, for whatever takes longer than a moment."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator


class Progress:
    """Print progress to standard error, each line with the seconds since the start."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.start = time.perf_counter()

    def say(self, message: str) -> None:
        """Print one line."""
        if self.enabled:
            elapsed = time.perf_counter() - self.start
            print(f"[{elapsed:6.1f}s] {message}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Announce a step, and say how long it took when it ends."""
        self.say(f"{name} ...")
        begin = time.perf_counter()
        yield
        self.say(f"{name}: {time.perf_counter() - begin:.1f}s")

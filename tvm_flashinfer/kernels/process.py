"""Running compilers: many at once, all of them stopped when one fails or the user interrupts."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tvm_flashinfer.kernels.errors import KernelBuildError


class Cancelled(Exception):
    """The command was not run, or was stopped, since `Runner.cancel` was called."""


class Runner:
    """Runs commands from several threads, and can stop those that are running."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._cancelled = False

    def run(self, what: str, command: Sequence[str | Path], cwd: Path) -> str:
        """Run a command and return what it printed.

        Parameters
        ----------
        what : str
            What is being built, for the error.
        command : sequence of str
            The command and its arguments.
        cwd : Path
            The working folder, which is also where the compiler puts its temporary files.

        Raises
        ------
        KernelBuildError
            The command could not be started or failed.
        Cancelled
            `cancel` was called.
        """
        argv = [str(part) for part in command]
        with self._lock:
            if self._cancelled:
                raise Cancelled
            try:
                process = subprocess.Popen(
                    argv,
                    cwd=cwd,
                    env=_environment(cwd),
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                    errors="replace",
                    # A group of its own: nvcc starts other compilers, to be stopped with it.
                    start_new_session=True,
                )
            except OSError as error:
                raise KernelBuildError(what, argv, str(error), 127) from error
            self._running.add(process)
        try:
            output, _ = process.communicate()
        finally:
            with self._lock:
                self._running.discard(process)
            if process.poll() is None:  # communicate was interrupted
                _kill_group(process)
                process.wait()
        if process.returncode != 0:
            if self._cancelled:
                raise Cancelled
            raise KernelBuildError(what, argv, output, process.returncode)
        return output

    def check(self) -> None:
        """Raise `Cancelled` when `cancel` was called."""
        if self._cancelled:
            raise Cancelled

    def cancel(self) -> None:
        """Stop the commands that are running and refuse new ones."""
        with self._lock:
            self._cancelled = True
            for process in self._running:
                _kill_group(process)


def _kill_group(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment(cwd: Path) -> Mapping[str, str]:
    # English messages, for the hints of KernelBuildError.
    return {**os.environ, "TMPDIR": str(cwd), "LC_ALL": "C"}


def probe(command: Sequence[str | Path]) -> str | None:
    """Return what a quick command prints, or None when it cannot be run or fails."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=60,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None

"""Exceptions of the kernel build. All of them derive from :class:`KernelError`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence


class KernelError(RuntimeError):
    """Anything that keeps a CUDA kernel from being built or found."""


class UnsupportedKernelError(KernelError, ValueError):
    """No kernel exists for a spec.

    Parameters
    ----------
    reasons : sequence of str
        Why not, one sentence each.
    """

    def __init__(self, reasons: Sequence[str]) -> None:
        self.reasons = list(reasons)
        super().__init__(
            "no such kernel:\n" + "\n".join(f"  - {reason}" for reason in self.reasons)
        )


class ToolchainError(KernelError):
    """A compiler or linker is missing or too old.

    Parameters
    ----------
    missing : sequence of str
        What is missing and how to get it, one sentence each.
    """

    def __init__(self, missing: Sequence[str]) -> None:
        self.missing = list(missing)
        super().__init__(
            "CUDA kernels cannot be compiled on this machine:\n"
            + "\n".join(f"  - {line}" for line in self.missing)
        )


class HeadersError(KernelError):
    """FlashInfer's headers were not found, could not be fetched, or are not the pinned ones."""


class CacheError(KernelError):
    """The folder of built kernels cannot be used."""


class KernelBuildError(KernelError):
    """A compiler or linker failed.

    Parameters
    ----------
    what : str
        What was being built, such as ``"batch_decode_f16_d128_sm90a"``.
    command : sequence of str
        The command that failed.
    output : str
        Everything that the command printed.
    returncode : int
        Its exit status; negative for a signal.
    """

    TAIL_LINES = 40

    def __init__(self, what: str, command: Sequence[str], output: str, returncode: int) -> None:
        self.what = what
        self.command = list(command)
        self.output = output
        self.returncode = returncode
        tail = "\n".join(output.strip().splitlines()[-self.TAIL_LINES :])
        hints = "".join(f"\nhint: {hint}" for hint in _hints(output, returncode))
        super().__init__(
            f"{what}: the build failed (exit status {returncode})\n"
            f"command: {shlex.join(self.command)}\n"
            f"output:\n{tail or '(none)'}{hints}"
        )


def _hints(output: str, returncode: int) -> list[str]:
    hints = []
    if "unsupported GNU version" in output or "unsupported clang version" in output:
        hints.append(
            "the C++ compiler is too new for this nvcc; set CUDAHOSTCXX to one that it supports"
        )
    if returncode in (-9, 137) or "Killed" in output:
        hints.append("the compiler was killed, often for want of memory; build with fewer jobs")
    if "No space left on device" in output:
        hints.append("the disk is full; set TVM_FLASHINFER_CACHE_DIR to a folder with more room")
    return hints

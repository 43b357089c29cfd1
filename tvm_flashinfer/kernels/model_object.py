"""The object file that makes a model self-contained: units, ops and the CUDA runtime in one."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tvm_flashinfer.kernels import commands
from tvm_flashinfer.kernels.cache import KernelCache, Notice, digest, file_digest
from tvm_flashinfer.kernels.errors import KernelBuildError, ToolchainError
from tvm_flashinfer.kernels.process import Runner, probe
from tvm_flashinfer.kernels.toolchain import find_gnu_ld, missing_binutils

#: Changes when the meaning of a cache entry changes for the same inputs.
_FORMAT = 1

_NAME = "tvm_flashinfer_model"


@dataclass(frozen=True)
class ModelParts:
    """What a model object is made from.

    Attributes
    ----------
    units : sequence of str
        Hashes that tell the units.
    objects : callable
        Returns their object files; it is called when the model object is not in the cache.
    cudart_static : Path
        The static CUDA runtime.
    archive : Path
        The archive with the ops.
    exports : Path or None
        An object file with further exports.
    keep : sequence of str
        Patterns, in the manner of the shell, of the symbols that stay visible.
    """

    units: Sequence[str]
    objects: Callable[[], Iterable[Path]]
    cudart_static: Path
    archive: Path
    exports: Path | None
    keep: Sequence[str]


def link_model_object(
    parts: ModelParts, cache: KernelCache, runner: Runner, notice: Notice | None
) -> Path:
    """Return the model object, linked when the cache has none.

    Raises
    ------
    ToolchainError
        GNU ld or objcopy is missing.
    KernelBuildError
        One of them failed.
    """
    linker, objcopy = find_gnu_ld(), shutil.which("objcopy")
    if linker is None or objcopy is None:
        raise ToolchainError(missing_binutils())
    key = _key(parts, linker)
    if path := cache.lookup("models", _NAME, key, ".o"):
        return path
    objects = [*parts.objects(), *([] if parts.exports is None else [parts.exports.absolute()])]

    def merge(output: Path) -> None:
        archive, runtime = parts.archive.absolute(), parts.cudart_static
        command = commands.merge_objects(linker, objects, archive, runtime, output)
        runner.run(_NAME, command, output.parent)
        check_closed(output, command)
        runner.run(_NAME, commands.keep_symbols(objcopy, parts.keep, output), output.parent)

    return cache.get_or_build("models", _NAME, key, ".o", merge, notice)[0]


def _key(parts: ModelParts, linker: Path) -> str:
    others = [parts.archive, parts.cudart_static]
    others += [] if parts.exports is None else [parts.exports]
    nothing = Path()
    return digest(
        {
            "format": _FORMAT,
            "objects": sorted(parts.units),
            "others": [file_digest(path) for path in others],
            "linker": probe([linker, "--version"]),
            "commands": [
                commands.merge_objects(nothing, [], nothing, nothing, nothing),
                commands.keep_symbols("", parts.keep, nothing),
            ],
        }
    )


def check_closed(path: Path, command: Sequence[str] = ()) -> None:
    """Raise `KernelBuildError` when an object file needs a symbol of the CUDA runtime."""
    listing = probe(["nm", "-u", path]) or ""
    missing = sorted(set(re.findall(r"\bU (_*cuda\w+)", listing)))
    if missing:
        raise KernelBuildError(path.name, command, "left undefined: " + ", ".join(missing), 1)

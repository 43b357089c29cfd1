"""Building kernels: object files from specs, and libraries and model objects from those.

Everything is kept in the cache under the hash of what it is made from, so that the second call with
the same specs, sources, headers and compilers builds nothing.
"""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

from tvm_flashinfer.kernels import commands
from tvm_flashinfer.kernels.cache import KernelCache, digest, file_digest
from tvm_flashinfer.kernels.errors import (
    KernelBuildError,
    KernelError,
    ToolchainError,
    UnsupportedKernelError,
)
from tvm_flashinfer.kernels.headers import Headers, find_headers, get_headers
from tvm_flashinfer.kernels.jobs import default_jobs
from tvm_flashinfer.kernels.paths import csrc_dir
from tvm_flashinfer.kernels.paths import static_library as packaged_static_library
from tvm_flashinfer.kernels.process import Runner, probe
from tvm_flashinfer.kernels.spec import KernelSpec, check_same_archs, check_supported
from tvm_flashinfer.kernels.toolchain import Toolchain, find_gnu_ld, find_toolchain, missing_tools

Progress = Callable[[str], None]

#: Changes when the meaning of a cache entry changes for the same inputs.
_FORMAT = 1

#: Symbols that a model library may see: what TVM looks packed functions up by.
MODEL_SYMBOLS = ("__tvm_ffi_flashinfer.*",)

_HEADER_SUFFIXES = (".h", ".cuh", ".hpp", ".inc")
_PLUGIN_SOURCES = ("kernels/cuda/plugin.cc", "kernels/cuda/kernel_table.cc")


def print_progress(line: str) -> None:
    """Print a line of progress to standard error."""
    print(f"tvm-flashinfer: {line}", file=sys.stderr, flush=True)


def build_objects(
    specs: Iterable[KernelSpec],
    jobs: int | None = None,
    progress: Progress | None = print_progress,
) -> dict[KernelSpec, Path]:
    """Compile units that are not in the cache, several at once.

    Parameters
    ----------
    specs : iterable of KernelSpec
        What to compile.
    jobs : int, optional
        How many compilers to run at once; as many as the processors and the memory allow when it is
        left out.
    progress : callable, optional
        Is given lines of text; nothing when all units are in the cache.

    Returns
    -------
    objects : dict
        The object file of each spec, in the order of `specs`.

    Raises
    ------
    UnsupportedKernelError
        There is no kernel for a spec; nothing was compiled.
    ToolchainError, HeadersError, CacheError
        Nothing can be compiled on this machine as it is.
    KernelBuildError
        A compiler failed. The other compilers are stopped, and units that were finished are kept.
    """
    build = _Build.prepare(specs, jobs, progress)
    with build.cache.in_use():
        return build.objects()


def find_objects(specs: Iterable[KernelSpec]) -> dict[KernelSpec, Path]:
    """Return the object files that there are already; nothing is compiled and nothing fetched.

    Parameters
    ----------
    specs : iterable of KernelSpec
        What to look for.

    Raises
    ------
    UnsupportedKernelError, ToolchainError, HeadersError, CacheError
        As `build_objects`: where nothing can be compiled it is not known what would be used.
    """
    if find_headers() is None:
        return {}
    return _Build.prepare(specs, None, None).cached()


def build_library(
    specs: Iterable[KernelSpec],
    jobs: int | None = None,
    progress: Progress | None = print_progress,
) -> Path:
    """Build the shared library that holds the units, for ``flashinfer.load_kernels``.

    It needs no CUDA library and can be loaded on a machine without a GPU. It exports one symbol.
    All units must be compiled for the same architectures.

    Parameters
    ----------
    specs, jobs, progress
        As for `build_objects`.

    Returns
    -------
    library : Path
        The ``.so`` file.

    Raises
    ------
    KernelError
        As `build_objects`.
    """
    build = _Build.prepare(specs, jobs, progress, link=True)
    with build.cache.in_use():
        return build.library()


def build_model_object(
    specs: Iterable[KernelSpec],
    static_library: Path | None = None,
    exports_object: Path | None = None,
    *,
    keep: Sequence[str] = MODEL_SYMBOLS,
    jobs: int | None = None,
    progress: Progress | None = print_progress,
) -> Path:
    """Build one object file with the units, the ops and the CUDA runtime, to link into a model.

    TVM's ``export_library`` links it like its own objects, with the C++ compiler and no CUDA
    library. Every symbol in it is local but those of the packed functions, so several models, and
    this package's shared library, can be in one process.

    Parameters
    ----------
    specs, jobs, progress
        As for `build_objects`.
    static_library : Path, optional
        The archive with the ops; the one of this package when it is left out.
    exports_object : Path, optional
        An object file with further exports.
    keep : sequence of str
        Patterns, in the manner of the shell, of the symbols that stay visible.

    Returns
    -------
    model_object : Path
        The ``.o`` file.

    Raises
    ------
    KernelError
        As `build_objects`.
    """
    archive = packaged_static_library() if static_library is None else static_library
    build = _Build.prepare(specs, jobs, progress, link=True, model_object=True)
    with build.cache.in_use():
        return build.model_object(archive, exports_object, keep)


@dataclass
class _Build:
    """One call: what is built, and the tools, headers, sources and cache that it uses."""

    specs: Sequence[KernelSpec]
    jobs: int | None
    progress: Progress | None
    cache: KernelCache
    toolchain: Toolchain
    headers: Headers
    csrc: Path
    keys: dict[KernelSpec, str] = field(default_factory=dict)
    runner: Runner = field(default_factory=Runner)

    @classmethod
    def prepare(
        cls,
        specs: Iterable[KernelSpec],
        jobs: int | None,
        progress: Progress | None,
        *,
        link: bool = False,
        model_object: bool = False,
    ) -> _Build:
        wanted = list(dict.fromkeys(specs))
        if not wanted:
            raise UnsupportedKernelError(["no kernel is named; name at least one spec"])
        check_supported(wanted)
        if link:
            check_same_archs(wanted)
        toolchain = find_toolchain(model_object=model_object)
        toolchain.check_archs(wanted)
        cache = KernelCache()
        headers = get_headers(cache, progress)
        build = cls(wanted, jobs, progress, cache, toolchain, headers, csrc_dir())
        sources = build.sources_digest()
        build.keys = {spec: build.object_key(spec, sources) for spec in wanted}
        return build

    def tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def sources_digest(self) -> str:
        """Return the hash of every header of ours that a unit may include."""
        root = self.csrc / "kernels"
        found = [*root.glob("*"), *(root / "cuda").rglob("*")]
        files = sorted(path for path in found if path.suffix in _HEADER_SUFFIXES)
        return digest({path.relative_to(root).as_posix(): file_digest(path) for path in files})

    def object_key(self, spec: KernelSpec, sources: str) -> str:
        unit = self.csrc / spec.source
        if not unit.is_file():
            raise KernelError(f"the source of {spec.name} is missing: {unit}")
        return digest(
            {
                "format": _FORMAT,
                "unit": file_digest(unit),
                "sources": sources,
                "flags": commands.nvcc_flags(spec, self.toolchain),
                "tools": self.toolchain.fingerprint,
                "flashinfer": self.headers.digest_of(spec),
            }
        )

    def objects(self) -> dict[KernelSpec, Path]:
        """Return the object file of every spec, compiling those that the cache has not."""
        paths = self.cached()
        missing = [spec for spec in self.specs if spec not in paths]
        if missing:
            paths |= self._compile_all(missing)
        return {spec: paths[spec] for spec in self.specs}

    def cached(self) -> dict[KernelSpec, Path]:
        """Return the object files that the cache has."""
        return {
            spec: path
            for spec in self.specs
            if (path := self.cache.lookup("objects", spec.name, self.keys[spec], ".o"))
        }

    def _compile_all(self, specs: Sequence[KernelSpec]) -> dict[KernelSpec, Path]:
        jobs = min(self.jobs or default_jobs(), len(specs))
        self.tell(
            f"compiling {len(specs)} kernel{'s' if len(specs) > 1 else ''} with nvcc "
            f"{self.toolchain.nvcc.release}, {jobs} at once; kept in {self.cache.root}"
        )
        paths: dict[KernelSpec, Path] = {}
        lock = Lock()

        def compile_one(spec: KernelSpec) -> None:
            start = time.monotonic()
            path, built = self.cache.get_or_build(
                "objects",
                spec.name,
                self.keys[spec],
                ".o",
                lambda output: self._compile(spec, output),
                self.tell,
                self.runner.check,
            )
            with lock:
                paths[spec] = path
                how = f"{time.monotonic() - start:.1f} s" if built else "built by another process"
                self.tell(f"[{len(paths)}/{len(specs)}] {spec.name}  {how}")

        with ThreadPoolExecutor(jobs, thread_name_prefix="tvm-flashinfer") as pool:
            self._wait([pool.submit(compile_one, spec) for spec in specs])
        return paths

    def _wait(self, futures: Sequence[Future[None]]) -> None:
        """Wait for all; at the first failure or interrupt stop the others."""
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            for future in futures:
                future.cancel()
            self.runner.cancel()
            raise

    def _compile(self, spec: KernelSpec, output: Path) -> None:
        command = commands.compile_unit(spec, self.toolchain, self.headers, self.csrc, output)
        self.runner.run(spec.name, command, output.parent)

    def library(self) -> Path:
        """Return the shared library of the specs."""
        name = "libtvm_flashinfer_kernels"
        sources = [self.csrc / source for source in _PLUGIN_SOURCES]
        nothing = Path()
        key = digest(
            {
                "format": _FORMAT,
                "objects": sorted(self.keys.values()),
                "sources": [self.sources_digest(), *map(file_digest, sources)],
                "exports": commands.LIBRARY_EXPORTS,
                "command": commands.link_library([], [], self.toolchain, nothing, nothing, nothing),
                "tools": self.toolchain.fingerprint,
            }
        )
        if path := self.cache.lookup("libraries", name, key, ".so"):
            return path
        objects = self.objects()

        def link(output: Path) -> None:
            exports = output.with_name("exports.map")
            exports.write_text(commands.LIBRARY_EXPORTS)
            command = commands.link_library(
                sources, objects.values(), self.toolchain, self.csrc, exports, output
            )
            self.runner.run(name, command, output.parent)

        return self.cache.get_or_build("libraries", name, key, ".so", link, self.tell)[0]

    def model_object(self, archive: Path, exports: Path | None, keep: Sequence[str]) -> Path:
        """Return the object file of the specs for a model library."""
        linker, objcopy = find_gnu_ld(), shutil.which("objcopy")
        if linker is None or objcopy is None:
            raise ToolchainError(missing_tools(model_object=True))
        name = "tvm_flashinfer_model"
        others = [archive, self.toolchain.cudart_static, *([] if exports is None else [exports])]
        nothing = Path()
        key = digest(
            {
                "format": _FORMAT,
                "objects": sorted(self.keys.values()),
                "others": [file_digest(path) for path in others],
                "linker": probe([linker, "--version"]),
                "commands": [
                    commands.merge_objects(nothing, [], nothing, nothing, nothing),
                    commands.keep_symbols("", keep, nothing),
                ],
            }
        )
        if path := self.cache.lookup("models", name, key, ".o"):
            return path
        objects = [*self.objects().values(), *([] if exports is None else [exports.absolute()])]

        def merge(output: Path) -> None:
            runtime = self.toolchain.cudart_static
            command = commands.merge_objects(linker, objects, archive.absolute(), runtime, output)
            self.runner.run(name, command, output.parent)
            check_closed(output, command)
            command = commands.keep_symbols(objcopy, keep, output)
            self.runner.run(name, command, output.parent)

        return self.cache.get_or_build("models", name, key, ".o", merge, self.tell)[0]


def check_closed(path: Path, command: Sequence[str] = ()) -> None:
    """Raise `KernelBuildError` when an object file needs a symbol of the CUDA runtime."""
    listing = probe(["nm", "-u", path]) or ""
    missing = sorted(set(re.findall(r"\bU (_*cuda\w+)", listing)))
    if missing:
        raise KernelBuildError(path.name, command, "left undefined: " + ", ".join(missing), 1)

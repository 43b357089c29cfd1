"""Building kernels: object files from specs, and libraries and model objects from those.

Everything is kept in the cache under the hash of what it is made from, so that the second call with
the same specs, sources, headers and compilers builds nothing. Where all specs are among prebuilt
kernels, nothing is compiled either, and nvcc is not needed.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Semaphore

from tvm_flashinfer.kernels import commands
from tvm_flashinfer.kernels.cache import KernelCache, digest, file_digest
from tvm_flashinfer.kernels.errors import ToolchainError, UnsupportedKernelError
from tvm_flashinfer.kernels.headers import Headers, find_headers, get_headers
from tvm_flashinfer.kernels.jobs import default_jobs, large_jobs
from tvm_flashinfer.kernels.model_object import ModelParts, link_model_object
from tvm_flashinfer.kernels.paths import csrc_dir
from tvm_flashinfer.kernels.paths import static_library as packaged_static_library
from tvm_flashinfer.kernels.prebuilt import (
    Prebuilt,
    find_prebuilt,
    headers_digest,
    unit_source,
    write_prebuilt,
)
from tvm_flashinfer.kernels.process import Runner
from tvm_flashinfer.kernels.spec import KernelSpec, check_same_archs, check_supported
from tvm_flashinfer.kernels.toolchain import Toolchain, find_toolchain

Progress = Callable[[str], None]

#: Changes when the meaning of a cache entry changes for the same inputs.
_FORMAT = 1

#: Symbols that a model library may see: what TVM looks packed functions up by.
MODEL_SYMBOLS = ("__tvm_ffi_flashinfer.*",)

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
    wanted = _checked(specs)
    if found := _prebuilt(wanted, progress):
        return found.objects(wanted)
    build = _Build.prepare(wanted, jobs, progress)
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
    wanted = _checked(specs)
    if found := _prebuilt(wanted, None):
        return found.objects(wanted)
    if find_headers() is None:
        return {}
    return _Build.prepare(wanted, None, None).cached()


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
        The ``.so`` file. Of prebuilt kernels, the one that holds all of them.

    Raises
    ------
    KernelError
        As `build_objects`.
    """
    wanted = _checked(specs, link=True)
    if found := _prebuilt(wanted, progress):
        return found.library
    build = _Build.prepare(wanted, jobs, progress)
    with build.cache.in_use():
        return build.library()


def build_prebuilt(
    specs: Iterable[KernelSpec],
    jobs: int | None = None,
    progress: Progress | None = print_progress,
) -> Path:
    """Build a set of prebuilt kernels, with which later compiles of models need no nvcc.

    It takes the place of the set that is there. All units must be compiled for the same
    architectures.

    Parameters
    ----------
    specs, jobs, progress
        As for `build_objects`.

    Returns
    -------
    folder : Path
        What `tvm_flashinfer.kernels.prebuilt.prebuilt_dir` returns. It may be copied to another
        machine.

    Raises
    ------
    KernelError
        As `build_objects`, and when the folder cannot be written.
    """
    build = _Build.prepare(_checked(specs, link=True), jobs, progress)
    with build.cache.in_use():
        return write_prebuilt(build.objects(), build.library(), build.toolchain, build.csrc)


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
    wanted = _checked(specs, link=True)
    if found := _prebuilt(wanted, progress):
        objects = found.objects(wanted)
        units, runtime = [found.object_digest(spec) for spec in wanted], found.cudart_static
        parts = ModelParts(units, objects.values, runtime, archive, exports_object, keep)
        cache = KernelCache()
        with cache.in_use():
            return link_model_object(parts, cache, Runner(), progress)
    build = _Build.prepare(wanted, jobs, progress, model_object=True)
    units, runtime = list(build.keys.values()), build.toolchain.cudart_static

    def compiled() -> Iterable[Path]:
        return build.objects().values()

    parts = ModelParts(units, compiled, runtime, archive, exports_object, keep)
    with build.cache.in_use():
        return link_model_object(parts, build.cache, build.runner, build.tell)


def _checked(specs: Iterable[KernelSpec], *, link: bool = False) -> list[KernelSpec]:
    """Return the specs without repeats, or raise when there is no kernel for one of them."""
    wanted = list(dict.fromkeys(specs))
    if not wanted:
        raise UnsupportedKernelError(["no kernel is named; name at least one spec"])
    check_supported(wanted)
    if link:
        check_same_archs(wanted)
    return wanted


def _prebuilt(specs: Sequence[KernelSpec], progress: Progress | None) -> Prebuilt | None:
    """Return the prebuilt kernels when they serve every spec.

    Some of them beside compiled ones would not do: units of one library have one list of
    architectures.
    """
    found, _ = find_prebuilt(csrc_dir())
    if found is None or found.lacks(specs):
        return None
    if progress is not None:
        count = f"{len(specs)} prebuilt kernel{'s' if len(specs) > 1 else ''}"
        progress(f"using {count} of {found.root}, compiled by nvcc {found.nvcc}")
    return found


def _toolchain(specs: Sequence[KernelSpec], model_object: bool) -> Toolchain:
    """Return the toolchain, or raise and tell also why no prebuilt kernels serve in its place."""
    try:
        return find_toolchain(model_object=model_object)
    except ToolchainError as error:
        found, why = find_prebuilt(csrc_dir())
        if found is not None:
            why = f"the prebuilt kernels in {found.root} lack {', '.join(found.lacks(specs))}"
        raise ToolchainError([*error.missing, f"{why}."]) from error


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
        wanted: Sequence[KernelSpec],
        jobs: int | None,
        progress: Progress | None,
        *,
        model_object: bool = False,
    ) -> _Build:
        toolchain = _toolchain(wanted, model_object)
        toolchain.check_archs(wanted)
        cache = KernelCache()
        headers = get_headers(cache, progress)
        build = cls(wanted, jobs, progress, cache, toolchain, headers, csrc_dir())
        sources = headers_digest(build.csrc)
        build.keys = {spec: build.object_key(spec, sources) for spec in wanted}
        return build

    def tell(self, line: str) -> None:
        if self.progress is not None:
            self.progress(line)

    def object_key(self, spec: KernelSpec, sources: str) -> str:
        return digest(
            {
                "format": _FORMAT,
                "unit": file_digest(unit_source(self.csrc, spec)),
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
        lock, large = Lock(), Semaphore(large_jobs())

        def compile_unit(spec: KernelSpec, output: Path) -> None:
            with large if spec.is_large else nullcontext():
                self._compile(spec, output)

        def compile_one(spec: KernelSpec) -> None:
            start = time.monotonic()
            path, built = self.cache.get_or_build(
                "objects",
                spec.name,
                self.keys[spec],
                ".o",
                lambda output: compile_unit(spec, output),
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
                "sources": [headers_digest(self.csrc), *map(file_digest, sources)],
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

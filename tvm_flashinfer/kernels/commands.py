"""The command lines of compilers and linkers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tvm_flashinfer.kernels.headers import Headers
from tvm_flashinfer.kernels.spec import KernelSpec
from tvm_flashinfer.kernels.toolchain import Toolchain

_DEFINES = (
    "-DNDEBUG",
    "-DFLASHINFER_ENABLE_F16",
    "-DFLASHINFER_ENABLE_BF16",
    "-DFLASHINFER_ENABLE_FP8_E4M3",
    "-DFLASHINFER_ENABLE_FP8_E5M2",
)

#: Of code that may be linked into any library: no symbol of it is seen from outside, and none is
#: "unique", which would merge the inline variables of two libraries in one process.
_CXX_FLAGS = ("-fPIC", "-fvisibility=hidden")

#: What a library of units exports. The templates of the C++ library are visible whatever the flags.
LIBRARY_EXPORTS = "{ global: tvm_flashinfer_kernel_entries; local: *; };\n"

#: In the archive of ops, a symbol of the file that exports the functions. Nothing calls that file.
#: Another one registers them as globals, which a model library must not.
EXPORTS_SYMBOL = "tvm_flashinfer_exports"

#: What the static CUDA runtime itself needs; part of libc since glibc 2.34.
_SYSTEM_LIBRARIES = ("-ldl", "-lrt", "-lpthread")


def nvcc_flags(spec: KernelSpec, toolchain: Toolchain) -> list[str]:
    """Return the flags of a unit, without include folders: all that the code depends on."""
    optional = []
    if "--static-global-template-stub" in toolchain.nvcc.flags:
        # Lets the kernels of an explicit instantiation be called from another unit.
        optional.append("-static-global-template-stub=false")
    if "--compress-mode" in toolchain.nvcc.flags:
        optional.append("--compress-mode=size")
    return [
        "-std=c++17",
        "-O3",
        "-use_fast_math",
        "--expt-relaxed-constexpr",
        "--threads=1",
        *optional,
        "-Xfatbin=-compress-all",
        "-Xcompiler=" + ",".join(cxx_flags(toolchain)),
        *(f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in spec.archs),
        *_DEFINES,
        *(f"-D{name}={value}" for name, value in sorted(spec.definitions.items())),
    ]


def cxx_flags(toolchain: Toolchain) -> list[str]:
    """Return the flags of code that is compiled without nvcc, beyond language and optimisation."""
    gnu = "clang" not in toolchain.cxx_version
    return [*_CXX_FLAGS, *(["-fno-gnu-unique"] if gnu else [])]


def compile_unit(
    spec: KernelSpec, toolchain: Toolchain, headers: Headers, csrc: Path, output: Path
) -> list[str]:
    """Return the command that compiles a unit to an object file."""
    return [
        str(toolchain.nvcc.path),
        "-ccbin",
        str(toolchain.cxx),
        *nvcc_flags(spec, toolchain),
        *(f"-I{folder}" for folder in headers.include_dirs_of(spec)),
        f"-I{csrc}",
        "-c",
        str(csrc / spec.source),
        "-o",
        str(output),
    ]


def link_library(
    sources: Iterable[Path],
    objects: Iterable[Path],
    toolchain: Toolchain,
    csrc: Path,
    exports: Path,
    output: Path,
) -> list[str]:
    """Return the command that makes a shared library of units, which needs no CUDA library.

    `exports` is a file that holds `LIBRARY_EXPORTS`.
    """
    return [
        str(toolchain.cxx),
        "-shared",
        "-std=c++17",
        "-O2",
        *cxx_flags(toolchain),
        "-static-libgcc",
        f"-I{csrc}",
        *map(str, sources),
        *map(str, objects),
        str(toolchain.cudart_static),
        *_SYSTEM_LIBRARIES,
        "-Wl,--no-undefined",
        "-Wl,--exclude-libs,ALL",
        f"-Wl,--version-script={exports}",
        "-Wl,-s",
        "-o",
        str(output),
    ]


def merge_objects(
    linker: Path, objects: Iterable[Path], archive: Path, cudart_static: Path, output: Path
) -> list[str]:
    """Return the command that makes one object file of objects, an archive and the CUDA runtime.

    ``--force-group-allocation`` keeps one copy of each inline function and template, and ends their
    being merged with those of other objects: they become local later, and cannot be merged then.
    """
    return [
        str(linker),
        "-r",
        "--force-group-allocation",
        f"--undefined={EXPORTS_SYMBOL}",
        "-o",
        str(output),
        *map(str, objects),
        str(archive),
        str(cudart_static),
    ]


def keep_symbols(objcopy: str, patterns: Sequence[str], path: Path) -> list[str]:
    """Return the command that makes every symbol of an object local that fits no pattern."""
    kept = [f"--keep-global-symbol={pattern}" for pattern in patterns]
    return [objcopy, "--wildcard", *kept, "--strip-debug", str(path)]

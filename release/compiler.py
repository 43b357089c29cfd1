"""A g++ whose libraries run on older systems than the one that it runs on.

It is the g++ of this machine; what differs is what it links with. For the C library those are the
stubs that Zig makes for a version of glibc, for libstdc++ a stub of our own, which offers what was
there in the version of manylinux. The symbols that libstdc++ got later come from its archive. Code
that asks for more does not link, so a library that links runs where it should.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

#: The oldest C library to run with, which is that of the wheels of tvm-ffi.
GLIBC = "2.28"

#: The newest versions of symbols of libstdc++ that manylinux allows there.
LIBSTDCXX = {"GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11)}

_SYMBOL = re.compile(
    r"\s*\d+: \w+\s+(?P<size>\d+)\s+(?P<type>FUNC|OBJECT|TLS)\s+\w+\s+DEFAULT\s+\d+ "
    r"(?P<name>[^@\s]+)@+(?P<version>(?P<family>GLIBCXX|CXXABI)_(?P<number>[\d.]+))$"
)
_TYPES = {"FUNC": "function", "OBJECT": "object", "TLS": "tls_object"}


def make_compiler(folder: Path) -> Path:
    """Make the compiler and return its path.

    Parameters
    ----------
    folder : Path
        What to make it in; it must stay where it is. A former one is replaced.
    """
    shutil.rmtree(folder, ignore_errors=True)
    stubs = folder / "lib"
    stubs.mkdir(parents=True)
    _add_glibc(stubs)
    _add_libstdcxx(stubs)
    compiler = folder / "g++"
    # What it says of itself keeps kernels apart from those that were linked with other libraries.
    # The archive of libgcc wants a newer C library; the shared one is linked, as manylinux allows.
    compiler.write_text(
        f"""#!/bin/sh
case "$*" in --version) exec {_gxx()} --version | sed '1s/$/, for glibc {GLIBC}/' ;; esac
for argument; do
  shift
  [ "$argument" = -static-libgcc ] || set -- "$@" "$argument"
done
exec {_gxx()} "$@" -L'{stubs}' -shared-libgcc
"""
    )
    compiler.chmod(0o755)
    return compiler


def _gxx() -> str:
    found = shutil.which("g++")
    if found is None:
        raise SystemExit("g++ is missing; install it to build a wheel")
    return found


def _file_of_gxx(name: str) -> Path:
    done = subprocess.run(
        [_gxx(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    )
    return Path(done.stdout.strip()).resolve()


def _add_glibc(stubs: Path) -> None:
    """Let Zig link a library, for which it makes the stubs, and take those from its cache."""
    with tempfile.TemporaryDirectory() as work:
        source = Path(work, "empty.c")
        source.touch()
        command = [sys.executable, "-m", "ziglang", "cc", "-target", f"x86_64-linux-gnu.{GLIBC}"]
        command += ["-shared", "-o", str(Path(work, "empty.so")), str(source)]
        cache = {"ZIG_GLOBAL_CACHE_DIR": work, "ZIG_LOCAL_CACHE_DIR": work, "PATH": "/usr/bin:/bin"}
        subprocess.run(command, env=cache, check=True)
        (made,) = Path(work).glob("o/*/libc.so.6")
        for path in made.parent.glob("lib*.so.*"):
            shutil.copy(path, stubs)
    for name, version in (("m", 6), ("dl", 2), ("rt", 1), ("pthread", 0)):
        (stubs / f"lib{name}.so").symlink_to(f"lib{name}.so.{version}")
    # Names that newer ones have in the C library itself are in libraries of their own.
    needed = " ".join(f"{stubs / name}" for name in ("libld.so.2", "libpthread.so.0", "libdl.so.2"))
    nonshared = _file_of_gxx("libc_nonshared.a")
    (stubs / "libc.so").write_text(
        f"GROUP ( {stubs / 'libc.so.6'} {nonshared} AS_NEEDED ( {needed} ) )\n"
    )


def _add_libstdcxx(stubs: Path) -> None:
    stub = stubs / "libstdc++.so.6"
    with tempfile.TemporaryDirectory() as work:
        source, versions = Path(work, "stub.s"), Path(work, "versions")
        symbols = _old_symbols(_file_of_gxx("libstdc++.so.6"))
        lines = [
            f".globl s{i}\n.type s{i}, @{kind}\n.size s{i}, {size}\ns{i}: .byte 0\n"
            f".symver s{i}, {name}@@@{version}\n"
            for i, (name, (version, kind, size)) in enumerate(symbols.items())
        ]
        source.write_text("".join(lines) + '.section .note.GNU-stack,"",@progbits\n')
        names = sorted({version for version, _, _ in symbols.values()})
        versions.write_text("".join(f"{name} {{}};\n" for name in names))
        command = [_gxx(), "-shared", "-nostdlib", "-Wl,-soname,libstdc++.so.6"]
        command += [f"-Wl,--version-script={versions}", "-o", str(stub), str(source)]
        subprocess.run(command, check=True)
    archive = _file_of_gxx("libstdc++.a")
    (stubs / "libstdc++.so").write_text(f"GROUP ( {stub} {archive} )\n")


def _old_symbols(library: Path) -> dict[str, tuple[str, str, str]]:
    """Return version, type and size of symbols: of each the newest version that is old enough."""
    command = ["readelf", "--wide", "--dyn-syms", str(library)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found: dict[str, tuple[tuple[int, ...], tuple[str, str, str]]] = {}
    for match in filter(None, map(_SYMBOL.match, listing.splitlines())):
        number = tuple(map(int, match["number"].split(".")))
        newest = found.get(match["name"], ((), None))[0]
        if newest < number <= LIBSTDCXX[match["family"]]:
            symbol = (match["version"], _TYPES[match["type"]], match["size"])
            found[match["name"]] = (number, symbol)
    return {name: symbol for name, (_, symbol) in found.items()}

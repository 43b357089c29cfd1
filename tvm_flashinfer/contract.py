"""Whether the imported TVM calls the functions of its KV cache as ours are called.

The calls decide and not the version: wheels of TVM come with numbers of their own. They are tried
before anything of ours is put into TVM, and again when a model is built or a cache of one is made.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from pathlib import Path

import tvm_ffi

#: Releases of TVM that this package is tested with. Others are served when they call as these do.
TESTED_TVM = ("0.26", "0.27")

#: Folder of the cache of kernels that remembers which builds of TVM fit.
_FOLDER = "contracts"


@tvm_ffi.register_error
class UnsupportedTVMError(RuntimeError):
    """The imported TVM calls the functions of its KV cache in another way than ours are called."""


@functools.cache
def contract_problems() -> tuple[str, ...]:
    """Return what keeps the imported TVM from being served: one sentence each, none when it fits.

    A build of TVM that fits is remembered in the cache of kernels, where there is one. What does
    not fit is tried again by the next process.
    """
    from tvm_flashinfer.kernels.cache import KernelCache, digest
    from tvm_flashinfer.kernels.errors import CacheError

    cache = None
    with contextlib.suppress(CacheError):
        cache = KernelCache()
    if cache is None or not cache.root.is_dir():
        return try_contract()
    key = digest({"files": list(_identity())})
    if cache.lookup(_FOLDER, "tvm", key, ".txt") is not None:
        return ()
    problems = try_contract()
    if not problems:
        with contextlib.suppress(CacheError):  # a cache that this user may only read
            cache.get_or_build(
                _FOLDER, "tvm", key, ".txt", lambda path: path.write_text(f"{tvm_name()}\n")
            )
    return problems


def try_contract() -> tuple[str, ...]:
    """Return what `contract_problems` does, tried now."""
    try:
        # Its hook comes here too: before the probe is imported, which it would find half done.
        import tvm  # noqa: F401

        from tvm_flashinfer.contract_probe import contract_differences

        return tuple(contract_differences())
    except Exception as error:  # a TVM that is too different to be asked
        return (f"its KV cache could not be tried: {type(error).__name__}: {error}",)


def check_contract() -> None:
    """Raise when the imported TVM is not served.

    Raises
    ------
    UnsupportedTVMError
        It names each function that is called in another way, with both argument lists.
    """
    problems = contract_problems()
    if problems:
        raise UnsupportedTVMError(
            f"{tvm_name()} calls the functions of its KV cache in another way than those of "
            "tvm_flashinfer are called:"
            + "".join(f"\n  - {problem}" for problem in problems)
            + f"\nInstall apache-tvm {' or '.join(TESTED_TVM)}, or another TVM that "
            "`tvm-flashinfer doctor` accepts"
        )


def tvm_name() -> str:
    """Return the version of the imported TVM and where it lies, for messages."""
    import tvm

    return f"TVM {tvm.__version__} ({tvm.__path__[0]})"


def _identity() -> Iterator[tuple[str, int, int]]:
    """Yield path, size and time of what decides the verdict: TVM's libraries, ours and the probe.

    The libraries are those that are loaded, wherever TVM found them.
    """
    maps = Path("/proc/self/maps").read_text().splitlines()
    libraries = {line.split(maxsplit=5)[-1] for line in maps if "/libtvm" in line}
    for path in (*sorted(libraries), Path(__file__).with_name("contract_probe.py")):
        status = Path(path).stat()
        yield str(path), status.st_size, status.st_mtime_ns

"""Whether the imported TVM calls the functions of its KV cache as ours are called.

The calls decide and not the version: wheels of TVM come with numbers of their own. They are tried
before anything of ours is put into TVM, and again when a model is built or a cache of one is made.
"""

from __future__ import annotations

import functools

import tvm_ffi

#: Releases of TVM that this package is tested with. Others are served when they call as these do.
TESTED_TVM = ("0.26", "0.27")


@tvm_ffi.register_error
class UnsupportedTVMError(RuntimeError):
    """The imported TVM calls the functions of its KV cache in another way than ours are called."""


@functools.cache
def contract_problems() -> tuple[str, ...]:
    """Return what keeps the imported TVM from being served: one sentence each, none when it fits.

    The answer of the first call is kept.
    """
    return try_contract()


def try_contract() -> tuple[str, ...]:
    """Return what `contract_problems` does, tried now."""
    try:
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

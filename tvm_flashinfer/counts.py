"""How often the functions ``flashinfer.*`` were called, which shows what kernels ran."""

from __future__ import annotations

from typing import Any

import tvm_ffi


def call_counts(library: Any = None) -> dict[str, dict[str, int]]:
    """Return how often each function was called since the start, or since `reset_call_counts`.

    A call counts when it ends without an error. What a function ``bind_...`` returned has its name
    without that: ``attention_decode_paged`` is decode without a plan. Counting takes a few
    nanoseconds a call and is always on.

    Parameters
    ----------
    library : tvm.runtime.Module, optional
        A self-contained model, as ``tvm.runtime.load_module`` returns it: its functions are its
        own, and so are their counts. Left out, those of this package.

    Returns
    -------
    counts : dict
        By ``"cpu"`` and ``"cuda"``, the functions that were called there:
        ``{"cpu": {}, "cuda": {"batch_decode_run": 32}}``.

    Raises
    ------
    KeyError
        When a library has no functions of its own, since its model runs on those of this package.
    """
    counts = function_of("flashinfer.call_counts", library)()
    return {device: dict(ops.items()) for device, ops in counts.items()}


def reset_call_counts(library: Any = None) -> None:
    """Let the counts of `call_counts` start again at 0.

    Parameters
    ----------
    library : tvm.runtime.Module, optional
        As for `call_counts`.

    Raises
    ------
    KeyError
        As for `call_counts`.
    """
    function_of("flashinfer.reset_call_counts", library)()


def function_of(name: str, library: Any) -> Any:
    """Return a function of this package, or of a self-contained model."""
    if library is None:
        return tvm_ffi.get_global_func(name)
    try:
        return library.get_function(name, query_imports=True)
    except AttributeError as error:
        raise KeyError(
            f"the library has no function {name!r}. A self-contained model has it: give what "
            "tvm.runtime.load_module returned. A shared one runs on the functions of this "
            "package: leave the library out"
        ) from error

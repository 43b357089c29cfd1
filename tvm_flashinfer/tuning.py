"""Files of tuning, which say what kernel is fastest for a class of shapes on one GPU.

They are made by ``tvm-flashinfer tune``, and used where a model runs, by the environment variable
``TVM_FLASHINFER_TUNING`` or by `load_tuning`, or put into a model when it is compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tvm_flashinfer.counts import function_of

#: Environment variable with the path of a file: of a process that runs models or compiles them.
TUNING_VARIABLE = "TVM_FLASHINFER_TUNING"

#: What the field ``format`` of a file holds.
FORMAT = "tvm_flashinfer tuning 1"


def load_tuning(path: str | Path, library: Any = None) -> None:
    """Let plans choose kernels by a file of tuning, in place of files that were used before.

    Shapes that it has nothing for go by the rules, as without it. All ranks of a model must be
    given the same file: then they choose alike.

    Parameters
    ----------
    path : str or Path
        What ``tvm-flashinfer tune`` wrote.
    library : tvm.runtime.Module, optional
        A self-contained model, as ``tvm.runtime.load_module`` returns it, whose functions are its
        own. Left out, those of this package.

    Raises
    ------
    ValueError
        The file is none of tuning, or was made for another GPU, driver or version.
    OSError
        It cannot be read.
    """
    text = Path(path).read_text(encoding="utf-8")
    function_of("flashinfer.load_tuning", library)(text, os.fspath(path))


def clear_tuning(library: Any = None) -> None:
    """Let all plans choose kernels by the rules again.

    Parameters
    ----------
    library : tvm.runtime.Module, optional
        As for `load_tuning`.
    """
    function_of("flashinfer.clear_tuning", library)()


def tuning_files(library: Any = None) -> list[dict[str, Any]]:
    """Return the files of tuning that are in use.

    Parameters
    ----------
    library : tvm.runtime.Module, optional
        As for `load_tuning`.

    Returns
    -------
    files : list of dict
        ``source``, the path or that it came with a model; ``gpu``; ``digest``, which is the same on
        all ranks that choose alike; and ``entries``, how many there are.
    """
    return [dict(file.items()) for file in function_of("flashinfer.tuning_files", library)()]


@dataclass(frozen=True)
class CarriedTuning:
    """A file of tuning that a model carries.

    Parameters
    ----------
    text : str
        What the file holds.
    description : str
        The GPU, how many entries there are, and the digest.
    """

    text: str
    description: str


def tuning_to_carry(archs: Iterable[str]) -> CarriedTuning | None:
    """Return the file that a model which is compiled now is to carry, or None without one.

    That is the one that ``TVM_FLASHINFER_TUNING`` names. The GPU need not be that of this machine.

    Parameters
    ----------
    archs : iterable of str
        What the model is compiled for, such as ``"90a"``; none on CPU.

    Raises
    ------
    ValueError
        It is no file of tuning, or one for another version or for none of the architectures.
    OSError
        It cannot be read.
    """
    path, archs = os.environ.get(TUNING_VARIABLE), list(archs)
    if not path or not archs:
        return None
    text = Path(path).read_text(encoding="utf-8")
    found = function_of("flashinfer.check_tuning", None)(text, path)
    if str(found["arch"]) not in {arch.rstrip("af") for arch in archs}:
        raise ValueError(
            f"{TUNING_VARIABLE} is {path!r}, a file for {found['gpu']}; the model is compiled for "
            f"{', '.join(f'sm_{arch}' for arch in archs)}. Name the file of such a GPU, or leave "
            "the variable unset"
        )
    return CarriedTuning(text, f"{found['gpu']}, {found['entries']} entries, {found['digest']}")


def measured_archs() -> tuple[str, ...]:
    """Return the architectures that the rules for kernels were measured on, such as ``("90",)``."""
    from tvm_flashinfer import _native

    _native.load()  # also where TVM_FLASHINFER_DISABLE keeps `import tvm` from it
    return tuple(str(arch) for arch in function_of("flashinfer.measured_archs", None)())


def never_measured(archs: Iterable[str]) -> str | None:
    """Return what there is to say of architectures without figures; None when all have some.

    Parameters
    ----------
    archs : iterable of str
        Such as ``"80"`` and ``"90a"``.
    """
    known = measured_archs()
    unknown = [arch for arch in dict.fromkeys(archs) if arch.rstrip("af") not in known]
    if not unknown:
        return None
    return (
        f"no kernel was ever measured on {', '.join(f'sm_{arch}' for arch in unknown)}: the rules "
        f"that choose between kernels are those of sm_{known[0]}. `tvm-flashinfer tune` measures "
        "them for a model"
    )


def kernel_choice(
    slot: str,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int | tuple[int, int],
    kv_lens: Sequence[int],
    qo_lens: Sequence[int] | None = None,
    *,
    causal: bool = False,
    window_left: int = -1,
    gpu: tuple[str, int, int] | None = None,
    library: Any = None,
) -> dict[str, Any]:
    """Return the kernel that a plan would choose. Nothing runs, and no GPU is needed.

    Parameters
    ----------
    slot : str
        ``"decode_paged"``, ``"prefill_paged"``, ``"prefill_ragged"`` or ``"mla"``.
    num_qo_heads, num_kv_heads : int
        Heads of queries and of keys; of MLA its heads and 1.
    head_dim : int or (int, int)
        Of queries and keys, and of values where that is another; of MLA 512.
    kv_lens, qo_lens : sequence of int
        Keys and rows of each request. Without `qo_lens` each has one row.
    causal, window_left
        As in ``flashinfer.batch_prefill_plan``.
    gpu : (str, int, int), optional
        Name, architecture such as 90, and number of multiprocessors. Left out, the first GPU of
        this machine. All kernels are taken to be loaded.
    library : tvm.runtime.Module, optional
        As for `load_tuning`.

    Returns
    -------
    choice : dict
        ``kernel``; ``split_keys``, the keys of a chunk, or 0 where the plan finds that; ``source``,
        which is ``"default"``, ``"tuned"`` or ``"environment"``; ``reason``; ``measured``, whether
        figures of this architecture stand behind it; and ``line``, all of it in one line, as
        ``TVM_FLASHINFER_DEBUG=kernels`` prints it.

    Raises
    ------
    ValueError
        For numbers that are none of a batch, and without a GPU when `gpu` is left out.
    """
    if gpu is None:
        from tvm_flashinfer.kernels.environment import gpus  # which costs imports

        found = gpus()
        if not found:
            raise ValueError("this machine has no GPU; say for which one: gpu=(name, 90, 132)")
        major, minor = found[0]["capability"]
        gpu = found[0]["name"], major * 10 + minor, found[0]["num_sm"]
    qk, vo = head_dim if isinstance(head_dim, tuple) else (head_dim, head_dim)
    rows = [1] * len(kv_lens) if qo_lens is None else list(qo_lens)
    choice = function_of("flashinfer.kernel_choice", library)(
        slot, *gpu, num_qo_heads, num_kv_heads, qk, vo, causal, window_left, rows, list(kv_lens)
    )
    return dict(choice.items())

"""Calls of packed functions from inside TensorIR."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx


def packed_call(
    name: str,
    inputs: Sequence[te.Tensor],
    scalars: Sequence[int | float],
    shape: Sequence[Any],
    dtype: str,
) -> te.Tensor:
    """Return what a function ``flashinfer.<name>`` computes that takes its output last.

    The PrimFunc around it runs on the host, for any target, and passes the tensors where they lie:
    on CUDA the function gets tensors of the device. Other computations of the same PrimFunc must be
    in kernels of their own.

    Parameters
    ----------
    name : str
        Such as ``"attention_dense"``; see "Attention in a compiled graph" in docs/ops.md.
    inputs : sequence of te.Tensor
        The tensors that it takes, in order.
    scalars : sequence of int or float
        The numbers that follow them; they are passed with 64 bits.
    shape : sequence of int or PrimExpr
    dtype : str
        Of the output.

    Returns
    -------
    output : te.Tensor
    """
    numbers = [_constant(x) for x in scalars]

    def call(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        return tirx.call_packed(f"flashinfer.{name}", *ins, *numbers, outs[0])

    return te.extern([tuple(shape)], list(inputs), call, name=name.replace(".", "_"), dtype=[dtype])


@dataclass(frozen=True)
class Written:
    """A tensor that a packed function writes: an output, or what it changes in place.

    Attributes
    ----------
    shape : sequence of int or PrimExpr
    dtype : str
    """

    shape: Sequence[Any]
    dtype: str


def packed_prim_func(
    name: str, arguments: Sequence[te.Tensor | Written | int | float | str]
) -> tirx.PrimFunc:
    """Return a PrimFunc that calls any function ``flashinfer.<name>``.

    It runs on the host, for any target, as `packed_call` does. Its parameters are the tensors among
    the arguments, in their order. Where those that are written come last, ``relax.call_tir`` calls
    it; ``relax.call_tir_inplace`` calls one that changes a tensor, such as pages.

    Parameters
    ----------
    name : str
        Such as ``"split_qkv_rotary_append"``; see docs/ops.md.
    arguments : sequence of te.Tensor, Written, int, float or str
        All that the function takes, in order: placeholders of tensors that are read, `Written` for
        the others, numbers, which are passed with 64 bits, and texts.

    Raises
    ------
    ValueError
        When nothing is written: such a call would have no effect.
    """
    read = [x for x in arguments if isinstance(x, te.Tensor)]
    written = [x for x in arguments if isinstance(x, Written)]
    if not written:
        raise ValueError(
            f"no argument of flashinfer.{name} is written; pass outputs, and what is changed in "
            "place, as `Written`"
        )

    def call(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        inputs, outputs = iter(ins), iter(outs)
        passed = [
            next(inputs) if isinstance(x, te.Tensor)
            else next(outputs) if isinstance(x, Written)
            else _constant(x)
            for x in arguments
        ]  # fmt: skip
        return tirx.call_packed(f"flashinfer.{name}", *passed)

    made = te.extern(
        [tuple(x.shape) for x in written], read, call, name=name.replace(".", "_"),
        dtype=[x.dtype for x in written],
    )  # fmt: skip
    outputs = iter([made] if isinstance(made, te.Tensor) else made)
    params = [
        next(outputs) if isinstance(x, Written) else x
        for x in arguments
        if isinstance(x, te.Tensor | Written)
    ]
    return te.create_prim_func(params).without_attr("global_symbol")


def _constant(x: float | str) -> Any:
    if isinstance(x, str):
        return x
    return tirx.const(x, "int64" if isinstance(x, int) else "float64")

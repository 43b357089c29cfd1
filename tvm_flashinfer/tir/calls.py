"""Calls of packed functions from inside TensorIR."""

from __future__ import annotations

from collections.abc import Sequence
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
    numbers = [tirx.const(x, "int64" if isinstance(x, int) else "float64") for x in scalars]

    def call(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        return tirx.call_packed(f"flashinfer.{name}", *ins, *numbers, outs[0])

    return te.extern([tuple(shape)], list(inputs), call, name=name.replace(".", "_"), dtype=[dtype])

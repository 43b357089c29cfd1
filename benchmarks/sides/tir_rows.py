"""TVM's kernels of norms, gates and joined rows: its operators, fused and scheduled as it does."""

from __future__ import annotations

import functools
from typing import Any

import tvm
from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend.nn.llm import kv_cache
from tvm.s_tir import dlight as dl

from ..moves import THETA
from ..rows import EPS
from .ours import Arguments

#: Rules of TVM's pipeline for CUDA, in its order.
_RULES = (dl.gpu.Reduction, dl.gpu.GeneralReduction, dl.gpu.Fallback)


def calls_of(case: Any, target: tvm.target.Target) -> list[Any]:
    """One call for each buffer."""
    row, given = case.row, Arguments(case)
    count = range(len(case.buffers))
    key = (row.kind, row.heads, row.head_dim, row.dtype, case.machine.kind == "cuda", str(target))
    _TARGETS[str(target)] = target
    kernels, shared = _kernels(*key), given.shared
    if row.kind == "rotary_append":
        rotary, append = kernels
        steps = [
            (
                (*given.of(i, "qkv"), shared["positions"], *given.of(i, "q", "k", "v"), 1),
                (*given.of(i, "o", "k", "v"), shared["slots"]),
            )
            for i in count
        ]
        return [lambda s=s: (rotary(*s[0]), append(*s[1])) for s in steps]
    if row.kind == "add_rmsnorm":
        add, norm = kernels
        steps = [
            (
                given.of(i, "x", "residual", "sum"),
                (*given.of(i, "sum"), shared["weight"], *given.of(i, "o")),
            )
            for i in count
        ]
        return [lambda s=s: (add(*s[0]), norm(*s[1])) for s in steps]
    (kernel,) = kernels
    weight = [shared["weight"]] if row.kind == "rmsnorm" else []
    arguments = [(*given.of(i, "x"), *weight, *given.of(i, "o")) for i in count]
    return [lambda a=a: kernel(*a) for a in arguments]


_TARGETS: dict[str, Any] = {}


@functools.cache
def _kernels(
    kind: str, heads: tuple[int, int], dim: int, dtype: str, gpu: bool, target: str
) -> list[Any]:
    where = _TARGETS[target]
    if kind == "rotary_append":
        rope = (THETA, 1.0, dim, *heads, dtype, {}, dim)
        parts = [
            tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
            for function in (
                kv_cache.llama_rope_with_position_map(*rope),
                kv_cache._kv_cache_transpose_append(heads[1], dim, dtype),
            )
        ]
    else:
        parts = [_fused(make, dim, dtype) for make in _OPERATORS[kind]]
    rules = [rule() for rule in ((dl.gpu.Fallback,) if kind == "rotary_append" else _RULES)]
    with where:
        if gpu:
            parts = [dl.ApplyDefaultSchedule(*rules)(part) for part in parts]
        return [tvm.compile(part, target=where)["main"] for part in parts]


def _fused(make: Any, dim: int, dtype: str) -> tvm.IRModule:
    """The one PrimFunc that TVM fuses some operators to, of any number of rows."""
    builder, rows = rx.BlockBuilder(), tirx.Var("n", "int64")
    inputs = [
        rx.Var(f"x{i}", rx.TensorType([rows, k * dim] if k else [dim], dtype))
        for i, k in enumerate(make.inputs)
    ]
    with builder.function("f", inputs):
        with builder.dataflow():
            out = builder.emit_output(make(builder.emit, *inputs))
        builder.emit_func_output(out)
    passes = [
        rx.transform.LegalizeOps(), rx.transform.AnnotateTIROpPattern(), rx.transform.FuseOps(),
        rx.transform.FuseTIR(), rx.transform.DeadCodeElimination(["f"]),
    ]  # fmt: skip
    mod = tvm.transform.Sequential(passes)(builder.get())
    (function,) = (f for f in mod.functions.values() if isinstance(f, tirx.PrimFunc))
    return tvm.IRModule({"main": function.with_attr("global_symbol", "main")})


def _add(emit: Any, x: rx.Expr, y: rx.Expr) -> rx.Expr:
    return rx.op.add(x, y)


def _norm(emit: Any, x: rx.Expr, weight: rx.Expr) -> rx.Expr:
    return rx.op.nn.rms_norm(x, weight, axes=[-1], epsilon=EPS)


def _gate(emit: Any, x: rx.Expr) -> rx.Expr:
    parts = emit(rx.op.split(x, 2, axis=-1))
    gate, up = (emit(rx.TupleGetItem(parts, i)) for i in range(2))
    return rx.op.multiply(emit(rx.op.nn.silu(gate)), up)


# How many times the width of a row each input has; 0 for a weight.
_add.inputs, _norm.inputs, _gate.inputs = (1, 1), (1, 0), (2,)
_OPERATORS = {"rmsnorm": [_norm], "add_rmsnorm": [_add, _norm], "silu": [_gate]}

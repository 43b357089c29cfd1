"""TVM's kernels of the functions around attention: operators, fused and scheduled as it does."""

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
from ..work import NORMS
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
    if row.kind == "rope":
        of_q, of_k = kernels
        angles = (shared["cos"], shared["sin"])
        steps = [
            [(*given.of(i, x), *angles, *given.of(i, f"{x}_out")) for x in "qk"] for i in count
        ]
        return [lambda s=s: (of_q(*s[0]), of_k(*s[1])) for s in steps]
    if row.kind in NORMS and "add" in row.kind:
        add, norm = kernels
        steps = [
            (
                given.of(i, "x", "residual", "sum"),
                (*given.of(i, "sum"), shared["whole_weight"], *given.of(i, "o")),
            )
            for i in count
        ]
        return [lambda s=s: (add(*s[0]), norm(*s[1])) for s in steps]
    if row.kind == "softmax":
        scale, normed = kernels
        heat = given.of_column("temperature")
        steps = [
            ((*given.of(i, "x"), heat, *given.of(i, "scaled")), given.of(i, "scaled", "o"))
            for i in count
        ]
        return [lambda s=s: (scale(*s[0]), normed(*s[1])) for s in steps]
    (kernel,) = kernels
    weight = [shared["whole_weight"]] if row.kind in NORMS else []
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
        parts = [_fused(make, shapes, dtype) for make, shapes in _operators(kind, heads, dim)]
    rules = [rule() for rule in ((dl.gpu.Fallback,) if kind == "rotary_append" else _RULES)]
    with where:
        if gpu:
            parts = [dl.ApplyDefaultSchedule(*rules)(part) for part in parts]
        return [tvm.compile(part, target=where)["main"] for part in parts]


def _operators(kind: str, heads: tuple[int, int], dim: int) -> list[tuple[Any, list[list[Any]]]]:
    """What makes the operators of each kernel of a kind, and the shapes that it is given."""
    rows, weight = ["n", dim], [dim]
    if kind == "rope":
        angles = [["n", 1, dim]] * 2
        return [(_turned, [["n", count, dim], *angles]) for count in heads]
    if kind == "softmax":
        logits = ["n", "v"]
        return [(_scaled, [logits, ["n", 1]]), (_softmax, [logits])]
    if kind in NORMS:
        norm = (_norm, [rows, weight])
        return [(_add, [rows, rows]), norm] if "add" in kind else [norm]
    gate = {"silu": rx.op.nn.silu, "gelu": rx.op.nn.gelu, "gelu_tanh": rx.op.nn.gelu_tanh}[kind]
    return [(lambda emit, x: _gated(emit, x, gate), [["n", 2 * dim]])]


def _fused(make: Any, shapes: list[list[Any]], dtype: str) -> tvm.IRModule:
    """The one PrimFunc that TVM fuses some operators to, of any number of rows."""
    builder = rx.BlockBuilder()
    symbols = {name: tirx.Var(name, "int64") for name in "nv"}
    inputs = [
        rx.Var(f"x{i}", rx.TensorType([symbols.get(size, size) for size in shape], dtype))
        for i, shape in enumerate(shapes)
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


def _halves(emit: Any, x: rx.Expr) -> list[rx.Expr]:
    parts = emit(rx.op.split(x, 2, axis=-1))
    return [emit(rx.TupleGetItem(parts, i)) for i in range(2)]


def _gated(emit: Any, x: rx.Expr, gate: Any) -> rx.Expr:
    first, second = _halves(emit, x)
    return rx.op.multiply(emit(gate(first)), second)


def _turned(emit: Any, x: rx.Expr, cos: rx.Expr, sin: rx.Expr) -> rx.Expr:
    first, second = _halves(emit, x)
    turned = emit(rx.op.concat([emit(rx.op.negative(second)), first], -1))
    return rx.op.add(emit(rx.op.multiply(x, cos)), emit(rx.op.multiply(turned, sin)))


def _scaled(emit: Any, x: rx.Expr, temperature: rx.Expr) -> rx.Expr:
    return rx.op.divide(x, temperature)


def _softmax(emit: Any, x: rx.Expr) -> rx.Expr:
    return rx.op.nn.softmax(x)

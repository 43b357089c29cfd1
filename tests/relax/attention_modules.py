"""Modules with one attention, and the means to run them and to compare with NumPy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax as rx
from tvm import tirx

from tvm_flashinfer.relax import DispatchAttention

Shape = Sequence[int | str]


def tensors(shapes: dict[str, Shape], dtype: str = "float32") -> dict[str, rx.Var]:
    """Parameters by name; a name in a shape is a symbol, the same one in all shapes."""
    symbols: dict[str, Any] = {}

    def size(dim: int | str) -> Any:
        if isinstance(dim, int):
            return dim
        return symbols.setdefault(dim, tirx.Var(dim, "int64"))

    def variable(name: str, shape: Shape) -> rx.Var:
        kind = "int32" if name.startswith("start") else dtype
        kind = "bool" if name.startswith("seen") else kind
        kind = "int64" if name.startswith("ints") else kind
        return rx.Var(name, rx.TensorType([size(dim) for dim in shape], kind))

    return {name: variable(name, shape) for name, shape in shapes.items()}


def module(params: dict[str, rx.Var], body: Callable[..., rx.Expr | list[rx.Expr]]) -> tvm.IRModule:
    """A module whose function ``main`` binds each expression that `body` yields or returns.

    `body` is called with a function that binds an expression, and the parameters.
    """
    builder = rx.BlockBuilder()
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            result = body(builder.emit, **params)
            output = builder.emit_output(result)
        builder.emit_func_output(output)
    mod = builder.get()
    rx.analysis.well_formed(mod)
    return mod


def dispatched(mod: tvm.IRModule, target: Any = "llvm", **options: Any) -> tvm.IRModule:
    """The module after the pass, well-formed, with the purity and the type of ``main`` kept."""
    after = DispatchAttention(tvm.target.Target(target), **options)(mod)
    rx.analysis.well_formed(after)
    for name in ("ret_ty", "is_pure"):
        old, new = (getattr(m["main"], name) for m in (mod, after))
        tvm.ir.assert_structural_equal(new, old, map_free_vars=True)
    return after


def without_report(mod: tvm.IRModule) -> tvm.IRModule:
    """The functions but for the report, without attributes of the module."""
    return tvm.IRModule(
        {var: fn for var, fn in mod.functions_items() if var.name_hint != "flashinfer_report"}
    )


def rows(mod: tvm.IRModule) -> list[Any]:
    """The rows of the report of a module."""
    from tvm_flashinfer.relax import CompileReport

    return CompileReport.from_json(mod["flashinfer_report"].body.body.value).rows


def called(mod: tvm.IRModule) -> list[str]:
    """The packed functions that ``main`` calls, in order."""
    names = []

    def visit(expr: rx.Expr) -> None:
        if isinstance(expr, rx.ExternFunc):
            names.append(str(expr.global_symbol))

    rx.analysis.post_order_visit(mod["main"], visit)
    return names


def run(mod: tvm.IRModule, *arrays: np.ndarray, device: Any = None) -> np.ndarray:
    """What ``main`` gives after TVM's default pipeline for the CPU."""
    executable = tvm.compile(mod, target="llvm")
    vm = rx.VirtualMachine(executable, device or tvm.cpu())
    return vm["main"](*(tvm.runtime.tensor(x) for x in arrays)).numpy()


def packed_call(
    function: str,
    args: Sequence[rx.Expr],
    like: rx.Expr | rx.Type,
    causal: int = 0,
    window_left: int = -1,
    soft_cap: float = 0.0,
    scale: float = 1.0,
) -> rx.Expr:
    """The call that a site is rewritten to."""
    numbers = [("int64", causal), ("int64", window_left), ("float64", soft_cap), ("float64", scale)]
    scalars = [rx.prim_value(tirx.const(value, dtype)) for dtype, value in numbers]
    return rx.call_dps_packed(f"flashinfer.{function}", rx.Tuple([*args, *scalars]), like)


def reference(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float,
    seen: np.ndarray | None = None,
    soft_cap: float = 0.0,
) -> np.ndarray:
    """Attention in float64 over (batch, sequence, heads, head_dim); hidden rows are 0."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.astype(np.float64).repeat(group, 2) for x in (k, v))
    scores = np.einsum("bnhd,bmhd->bhnm", q.astype(np.float64), k) * scale
    if soft_cap:
        scores = soft_cap * np.tanh(scores / soft_cap)
    if seen is not None:
        scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    return np.einsum("bhnm,bmhd->bnhd", weights / np.where(total > 0, total, 1), v)

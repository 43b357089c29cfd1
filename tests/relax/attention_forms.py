"""Attention that is spelt with products and a softmax, in parts that tests put together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
from attention_modules import called, dispatched, run
from relax_in_numpy import run_in_numpy
from tvm import relax as rx
from tvm.ir import assert_structural_equal

op = rx.op
DENSE = "flashinfer.attention_dense"
MASKED = "flashinfer.attention_dense_masked"

#: Heads before lengths, and lengths before heads; symbolic batch and length.
BNSH = {"q": ("b", 4, "n", 32), "k": ("b", 4, "n", 32), "v": ("b", 4, "n", 32)}
BSNH = {"q": ("b", "n", 4, 32), "k": ("b", "n", 4, 32), "v": ("b", "n", 4, 32)}
CROSS = {"q": ("b", 4, "n", 32), "k": ("b", 4, "m", 32), "v": ("b", 4, "m", 32)}

Emit = Callable[[rx.Expr], rx.Var]


def const(value: Any, dtype: str = "float32") -> rx.Expr:
    return rx.const(np.array(value, dtype), dtype)


def products(emit: Emit, q: rx.Expr, k: rx.Expr, v: rx.Expr, change: Any = None, scale: Any = 0.25):
    """The plain form over heads before lengths; `change` is made to scores before the softmax."""
    transposed = emit(op.permute_dims(k, [0, 1, 3, 2]))
    scores = emit(op.multiply(emit(op.matmul(q, transposed)), const(scale)))
    scores = scores if change is None else emit(change(emit, scores))
    return op.matmul(emit(op.nn.softmax(scores, axis=-1)), v)


def heads_first(emit: Emit, *xs: rx.Expr) -> list[rx.Var]:
    return [emit(op.permute_dims(x, [0, 2, 1, 3])) for x in xs]


def positions(emit: Emit, scores: rx.Var) -> tuple[rx.Var, rx.Var]:
    """Row and key numbers, (n, 1) and (1, m)."""
    n, m = list(scores.ty.shape)[-2:]
    row = emit(op.expand_dims(emit(op.arange(0, n, 1, "int64")), [1]))
    return row, emit(op.expand_dims(emit(op.arange(0, m, 1, "int64")), [0]))


def hide(emit: Emit, scores: rx.Var, seen: rx.Expr, value: float = -np.inf) -> rx.Expr:
    return op.where(emit(seen), scores, const(value))


def of_scores(change: Any) -> Any:
    return lambda emit, q, k, v: products(emit, q, k, v, change)


def causal_compared(emit, scores):
    row, key = positions(emit, scores)
    return hide(emit, scores, op.less_equal(key, row))


def capped(emit, scores):
    return op.multiply(emit(op.tanh(emit(op.divide(scores, const(2.0))))), const(2.0))


def numbers_are_kept(mod: tvm.IRModule, calls: list[str], *arrays: np.ndarray) -> Any:
    after = dispatched(mod, strict=True)
    assert called(after) == calls
    # NumPy has no attention of one operator.
    reference = run if "R.nn.attention" in mod.script() else run_in_numpy
    want = reference(mod, *arrays)
    np.testing.assert_allclose(run(after, *arrays), want, rtol=2e-5, atol=2e-5)
    # TVM compares no modules, such as that which the library needs.
    assert_structural_equal(*(m.without_attr("external_mods") for m in (dispatched(after), after)))
    return after


def random(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]

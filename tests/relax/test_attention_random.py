"""Random chains of operators that are nearly attention: rewritten or not, the numbers stay.

Sizes are small and often equal, so that only the meaning of dimensions tells right from wrong.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import tvm
from attention_modules import called
from relax_in_numpy import run_in_numpy
from tvm import relax as rx

from tvm_flashinfer.relax import DispatchAttention, FallbackWarning

op = rx.op
SEEDS = 400


def number(value: float, dtype: str = "float32") -> rx.Expr:
    return rx.const(np.array(value, dtype), dtype)


class Maker:
    """Makes one random module."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = rx.BlockBuilder()
        self.emit = self.builder.emit
        sizes = ([1, 2, 2, 3], [1, 2, 4], [1, 3, 4, 4], [1, 4, 4, 6], [4, 4, 8])
        picked = [int(self.rng.choice(choice)) for choice in sizes]
        self.dims = [4] * 5 if self.one_of(3) else picked

    def one_of(self, count: int) -> bool:
        """True once in so many times."""
        return int(self.rng.integers(count)) == 0

    def pick(self, *choices: Any) -> Any:
        """One of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def shape(self, x: rx.Expr) -> list[int]:
        """The sizes of a tensor."""
        return [int(size.value) for size in x.ty.shape]

    def viewed(self, x: rx.Expr) -> rx.Expr:
        """The same elements through views; now and then two dimensions of one size are swapped."""
        shape = self.shape(x)
        order = [int(axis) for axis in self.rng.permutation(len(shape))]
        kind = self.pick("none", "broadcast", "around", "merged", "unit", "swapped")
        if kind == "broadcast":
            return self.emit(op.broadcast_to(x, shape))
        if kind == "around":
            back = [order.index(axis) for axis in range(len(shape))]
            return self.emit(op.permute_dims(self.emit(op.permute_dims(x, order)), back))
        if kind == "merged" and len(shape) == 4:
            merged = [shape[0] * shape[1], *shape[2:]]
            return self.emit(op.reshape(self.emit(op.reshape(x, merged)), shape))
        if kind == "unit":
            return self.emit(op.squeeze(self.emit(op.expand_dims(x, [1])), [1]))
        if kind == "swapped" and shape[order[0]] == shape[order[1]]:
            axes = list(range(len(shape)))
            axes[order[0]], axes[order[1]] = order[1], order[0]
            return self.emit(op.permute_dims(x, axes))
        return x

    def repeated(self, x: rx.Expr, heads: int) -> rx.Expr:
        """KV heads as many as query heads, in one of two orders."""
        batch, count, length, dim = self.shape(x)
        if count == heads:
            return x
        if self.one_of(3):
            return self.emit(op.repeat(x, heads // count, axis=1))
        after = self.one_of(2)
        unit = self.emit(op.expand_dims(x, [2 if after else 1]))
        whole = [batch, count, heads // count] if after else [batch, heads // count, count]
        whole = self.emit(op.broadcast_to(unit, [*whole, length, dim]))
        return self.emit(op.reshape(whole, [batch, heads, length, dim]))

    def seen(self, n: int, m: int, depth: int = 0) -> rx.Expr:
        """Booleans of rows and keys."""
        row = self.emit(op.expand_dims(self.emit(op.arange(0, n, 1, "int64")), [1]))
        key = self.emit(op.expand_dims(self.emit(op.arange(0, m, 1, "int64")), [0]))
        offset = number(self.pick(-2, -1, 0, 1, 2, m - n), "int64")
        row = self.emit(op.add(row, offset)) if self.one_of(2) else row
        compare = self.pick(op.less, op.less_equal, op.greater, op.greater_equal)
        x = self.emit(compare(key, row) if self.one_of(2) else compare(row, key))
        if self.one_of(4):
            triangle = self.pick(op.triu, op.tril)
            ones = self.emit(op.ones([n, m], "int32"))
            kept = self.emit(triangle(ones, self.pick(-1, 0, 1)))
            x = self.emit(op.astype(kept, "bool"))
        if self.one_of(3):
            x = self.emit(op.logical_not(x))
        if depth < 2 and self.one_of(3):
            both = self.pick(op.logical_and, op.logical_or)
            x = self.emit(both(x, self.seen(n, m, depth + 1)))
        if depth == 0 and n == m and self.one_of(6):
            x = self.emit(op.permute_dims(x, [1, 0]))
        return x

    def masked(self, scores: rx.Expr) -> rx.Expr:
        """Scores some of which are hidden, or none."""
        *_, n, m = shape = self.shape(scores)
        low, zero = number(-np.inf), number(0)
        kind = self.pick("none", "kept", "filled", "added", "constant")
        if kind == "kept":
            return self.emit(op.where(self.seen(n, m), scores, low))
        if kind == "filled":
            return self.emit(op.where(self.seen(n, m), low, scores))
        if kind == "added":
            return self.emit(op.add(scores, self.emit(op.where(self.seen(n, m), zero, low))))
        if kind == "constant":
            part = [self.pick(1, size) for size in shape]
            hidden = np.where(self.rng.random(part) < 0.6, 0, -np.inf)
            return self.emit(op.add(scores, number(hidden)))
        return scores

    def body(self, q: rx.Expr, k: rx.Expr, v: rx.Expr) -> rx.Expr:
        """Products around a softmax."""
        emit, (b, h, n, m, d) = self.emit, self.dims
        q, k, v = self.viewed(q), self.repeated(k, h), self.repeated(v, h)
        k, v = self.viewed(k), self.viewed(v)
        turned = emit(op.permute_dims(k, [0, 1, 3, 2]))
        if self.one_of(4):
            shapes = ([b * h, n, d], [b * h, d, m], [b * h, m, d])
            q, turned, v = (
                emit(op.reshape(x, shape)) for x, shape in zip((q, turned, v), shapes, strict=True)
            )
        scores = emit(op.matmul(q, turned))
        if self.one_of(2):
            scores = emit(op.multiply(scores, number(0.5)))
        if self.one_of(5):
            scores = emit(op.multiply(emit(op.tanh(emit(op.divide(scores, number(2))))), number(2)))
        if self.one_of(6):
            scores = self.viewed(scores)
        weights = emit(op.nn.softmax(self.masked(scores), axis=-2 if self.one_of(12) else -1))
        weights = self.viewed(weights) if self.one_of(8) else weights
        out = self.viewed(emit(op.matmul(weights, v)))
        if len(out.ty.shape) == 3 and self.one_of(2):
            out = emit(op.reshape(out, [b, h, n, d]))
        if len(out.ty.shape) == 4 and self.one_of(2):
            out = emit(op.permute_dims(out, [0, 2, 1, 3]))
        return emit(op.multiply(out, number(1)))

    def module(self) -> tvm.IRModule:
        """The module, whose operands have their dimensions in any order."""
        b, h, n, m, d = self.dims
        kv_heads = h // 2 if h % 2 == 0 and self.one_of(3) else h
        wanted = ([b, h, n, d], [b, kv_heads, m, d], [b, kv_heads, m, d])
        params, orders = [], []
        for name, shape in zip("qkv", wanted, strict=True):
            order = self.pick([0, 1, 2, 3], [0, 2, 1, 3], [int(i) for i in self.rng.permutation(4)])
            orders.append([order.index(axis) for axis in range(4)])
            params.append(rx.Var(name, rx.TensorType([shape[axis] for axis in order], "float32")))
        with self.builder.function("main", params):
            with self.builder.dataflow():
                moved = [
                    self.emit(op.permute_dims(x, order))
                    for x, order in zip(params, orders, strict=True)
                ]
                output = self.builder.emit_output(self.body(*moved))
            self.builder.emit_func_output(output)
        return self.builder.get()

    def arrays(self, mod: tvm.IRModule) -> list[np.ndarray]:
        """What a module is called with."""
        shapes = [self.shape(param) for param in mod["main"].params]
        return [self.rng.standard_normal(shape).astype("float32") for shape in shapes]


def test_numbers_stay() -> None:
    """Most are rewritten, and none changes what it computes."""
    kinds: dict[str, int] = {}
    for seed in range(SEEDS):
        maker = Maker(seed)
        try:
            mod = maker.module()
        except (ValueError, TypeError):  # sizes that no product takes, after a swap
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            after = DispatchAttention(tvm.target.Target("llvm"))(mod)
        rx.analysis.well_formed(after)
        for name in called(after) or ["none"]:
            kinds[name] = kinds.get(name, 0) + 1
        arrays = maker.arrays(mod)
        got, want = run_in_numpy(after, *arrays), run_in_numpy(mod, *arrays)
        np.testing.assert_allclose(got, want, 1e-4, 1e-4, err_msg=f"seed {seed}")
    assert len(kinds) == 3
    assert min(kinds.values()) > SEEDS / 10

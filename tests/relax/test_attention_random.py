"""Random chains of operators that are nearly attention: rewritten or not, the numbers stay.

Sizes are small and often equal, so that only the meaning of dimensions tells right from wrong.
"""

from __future__ import annotations

import os
import warnings
from typing import Any

import numpy as np
import tvm
from attention_modules import called
from relax_in_numpy import run_in_numpy
from tvm import relax as rx
from tvm import tirx
from tvm.ir import assert_structural_equal

from tvm_flashinfer.relax import DispatchAttention, FallbackWarning

op = rx.op
#: `TVM_FLASHINFER_FUZZ=N` tries N times as many.
SEEDS = 500 * int(os.environ.get("TVM_FLASHINFER_FUZZ", "1"))


def number(value: Any, dtype: str = "float32") -> rx.Expr:
    return rx.const(np.array(value, dtype), dtype)


class Maker:
    """Makes one random module.

    Attributes
    ----------
    finite : bool
        Whether numbers may hide keys that are not minus infinity. A row that sees no key is then
        a mean of the values in the model, and 0 by a kernel.
    """

    finite = False

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.builder = rx.BlockBuilder()
        self.emit = self.builder.emit
        sizes = ([1, 2, 2, 3], [1, 2, 4], [1, 3, 4, 4], [1, 4, 4, 6], [4, 4, 8])
        picked = [self.pick(*choice) for choice in sizes]
        b, self.heads, n, m, self.dim = [4] * 5 if self.one_of(3) else picked
        self.dtype = "float16" if self.one_of(4) else "float32"
        self.values: dict[str, int] = {}
        self.batch, self.rows = self.size("b", b), self.size("n", n)
        self.keys = self.rows if n == m and self.one_of(2) else self.size("m", m)
        self.params: list[rx.Var] = []
        shapes = self.mask_shapes()
        self.masks = [self.param(f"seen{i}", shape, "bool") for i, shape in enumerate(shapes)]
        self.biases = {
            dtype: [self.param(f"{dtype}{i}", shape, dtype) for i, shape in enumerate(shapes[4:])]
            for dtype in dict.fromkeys((self.dtype, "float32"))
        }

    def one_of(self, count: int) -> bool:
        """True once in so many times."""
        return int(self.rng.integers(count)) == 0

    def pick(self, *choices: Any) -> Any:
        """One of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def size(self, name: str, value: int) -> Any:
        """A size, which is a symbol now and then."""
        if not self.one_of(3):
            return value
        self.values[name] = value
        return tirx.Var(name, "int64")

    def value(self, size: Any) -> int:
        """What a size stands for."""
        return self.values[size.name] if isinstance(size, tirx.Var) else int(size)

    def shape(self, x: rx.Expr) -> list[Any]:
        """The sizes of a tensor."""
        return list(x.ty.shape)

    def param(self, name: str, shape: list[Any], dtype: str) -> rx.Var:
        """A parameter of the module."""
        self.params.append(rx.Var(name, rx.TensorType(shape, dtype)))
        return self.params[-1]

    def mask_shapes(self) -> list[list[Any]]:
        """Of parameters that masks and biases are made of."""
        b, h, n, m = self.batch, self.heads, self.rows, self.keys
        return [
            [n, m], [1, m], [m], [n, 1], [1, 1, n, m], [b, 1, 1, m], [b, 1, n, m], [b, h, n, m],
            [1, h, n, m], [h, n, m],
        ]  # fmt: skip

    def scaled(self, x: rx.Expr) -> rx.Expr:
        """A product with a number, spelt in one of several ways; or with several numbers."""
        dtype = str(x.ty.dtype)
        kind = self.pick("none", "none", "product", "quotient", "first", "filled", "vector")
        if kind == "product":
            return self.emit(op.multiply(x, number(self.pick(0.5, 0.25, 2.0, -0.5), dtype)))
        if kind == "quotient":
            return self.emit(op.divide(x, number(self.pick(2.0, 4.0), dtype)))
        if kind == "first":
            return self.emit(op.multiply(number(0.5, dtype), x))
        if kind == "filled":
            ones = [1] * len(x.ty.shape)
            return self.emit(op.multiply(x, number(np.full(ones, 0.5), dtype)))
        last = self.shape(x)[-1]
        if kind == "vector" and self.one_of(4) and not isinstance(last, tirx.Var):
            return self.emit(op.multiply(x, number(self.rng.random(int(last)), dtype)))
        return x

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
            at = int(self.rng.integers(len(shape) + 1))
            return self.emit(op.squeeze(self.emit(op.expand_dims(x, [at])), [at]))
        if kind == "swapped" and len(shape) > 1:
            one, other = order[:2]
            axes = list(range(len(shape)))
            axes[one], axes[other] = other, one
            if str(shape[one]) == str(shape[other]):
                return self.emit(op.permute_dims(x, axes))
        return x

    def repeated(self, x: rx.Expr) -> rx.Expr:
        """KV heads as many as query heads, in one of two orders."""
        batch, count, length, dim = self.shape(x)
        groups = self.heads // int(count)
        if groups == 1:
            return x
        if self.one_of(3):
            return self.emit(op.repeat(x, groups, axis=self.pick(1, -3)))
        after = not self.one_of(3)
        unit = self.emit(op.expand_dims(x, [2 if after else 1]))
        whole = [batch, count, groups] if after else [batch, groups, count]
        whole = self.emit(op.broadcast_to(unit, [*whole, length, dim]))
        return self.emit(op.reshape(whole, [batch, self.heads, length, dim]))

    def compared(self) -> rx.Expr:
        """Positions of rows and keys."""
        row = self.emit(op.expand_dims(self.emit(op.arange(0, self.rows, 1, "int64")), [1]))
        key = self.emit(op.expand_dims(self.emit(op.arange(0, self.keys, 1, "int64")), [0]))
        offset = self.pick(-2, -1, 0, 1, 2, self.value(self.keys) - self.value(self.rows))
        row = self.emit(op.add(row, number(offset, "int64"))) if self.one_of(2) else row
        compare = self.pick(op.less, op.less_equal, op.greater, op.greater_equal)
        left, right = (key, row) if self.one_of(2) else (row, key)
        if self.one_of(3):
            left = self.emit(op.subtract(left, right))
            right = number(self.pick(-3, -1, 0, 1, 3), "int64")
        return self.emit(compare(left, right))

    def seen(self, depth: int = 0) -> rx.Expr:
        """Booleans of rows and keys."""
        kind = self.pick("parameter", "triangle", "compared", "compared")
        if kind == "parameter":
            x = self.pick(*self.masks)
        elif kind == "triangle":
            ones = self.emit(op.ones([self.rows, self.keys], self.pick("int32", "float32")))
            kept = self.emit(self.pick(op.triu, op.tril)(ones, self.pick(-1, 0, 1)))
            x = self.emit(op.astype(kept, "bool"))
        else:
            x = self.compared()
        if self.one_of(3):
            x = self.emit(op.logical_not(x))
        if depth < 2 and self.one_of(3):
            both = self.pick(op.logical_and, op.logical_or)
            x = self.emit(both(x, self.seen(depth + 1)))
        return self.viewed(x) if self.one_of(3) else x

    def low(self, dtype: str) -> rx.Expr:
        """What hides keys."""
        low = self.pick(-np.inf, -np.inf, -3e4)
        self.finite |= np.isfinite(low)
        return number(low, dtype)

    def masked(self, scores: rx.Expr) -> rx.Expr:
        """Scores some of which are hidden, or none."""
        dtype = str(scores.ty.dtype)
        kinds = ("none", "kept", "filled", "added", "product", "constant", "clamped", "numbers")
        kind = self.pick(*kinds)
        if kind == "kept":
            return self.emit(op.where(self.seen(), scores, self.low(dtype)))
        if kind == "filled":
            return self.emit(op.where(self.seen(), self.low(dtype), scores))
        if kind == "added":
            hidden = self.emit(op.where(self.seen(), number(0, dtype), self.low(dtype)))
            hidden = self.viewed(hidden) if self.one_of(3) else hidden
            pair = (scores, hidden) if self.one_of(2) else (hidden, scores)
            return self.emit(op.add(*pair))
        if kind == "product":
            self.finite = True
            unseen = self.emit(op.astype(self.seen(), dtype))
            return self.emit(op.add(scores, self.emit(op.multiply(unseen, number(-3e4, dtype)))))
        if kind == "constant":
            part = [self.pick(1, self.value(size)) for size in self.shape(scores)]
            hidden = np.where(self.rng.random(part) < 0.6, 0, -np.inf)
            return self.emit(op.add(scores, number(hidden, dtype)))
        if kind == "numbers":
            return self.emit(op.add(scores, self.scaled(self.pick(*self.biases[dtype]))))
        if kind == "clamped":
            self.finite = True
            return self.emit(op.maximum(scores, number(self.pick(-3e4, -1.0), dtype)))
        return scores

    def scores(self, q: rx.Expr, turned: rx.Expr) -> rx.Expr:
        """What goes into the softmax."""
        emit, wide = self.emit, self.dtype == "float16" and self.one_of(2)
        scores = self.scaled(emit(op.matmul(q, turned, "float32" if wide else None)))
        dtype = str(scores.ty.dtype)
        if self.one_of(5):
            capped = emit(op.tanh(emit(op.divide(scores, number(2, dtype)))))
            scores = emit(op.multiply(capped, number(2, dtype)))
        if self.one_of(6):
            scores = self.viewed(scores)
        scores = self.masked(scores)
        scores = self.masked(scores) if self.one_of(4) else scores
        return self.scaled(scores) if self.one_of(6) else scores

    def body(self, q: rx.Expr, k: rx.Expr, v: rx.Expr) -> rx.Expr:
        """Products around a softmax."""
        emit, b, h = self.emit, self.batch, self.heads
        n, m, d = self.rows, self.keys, self.dim
        q, k, v = self.scaled(self.viewed(q)), self.repeated(k), self.repeated(v)
        k, v = self.viewed(k), self.viewed(v)
        turned = emit(op.permute_dims(k, [0, 1, 3, 2]))
        if self.one_of(4):
            shapes = ([b * h, n, d], [b * h, d, m], [b * h, m, d])
            q, turned, v = (
                emit(op.reshape(x, shape)) for x, shape in zip((q, turned, v), shapes, strict=True)
            )
        axis = -2 if self.one_of(12) else -1
        weights = emit(op.nn.softmax(self.scores(q, turned), axis=axis))
        if str(weights.ty.dtype) != self.dtype:
            weights = emit(op.astype(weights, self.dtype))
        weights = self.viewed(weights) if self.one_of(8) else weights
        out = self.viewed(emit(op.matmul(weights, v)))
        if len(out.ty.shape) == 3 and self.one_of(2):
            out = emit(op.reshape(out, [b, h, n, d]))
        if len(out.ty.shape) == 4 and self.one_of(2):
            out = emit(op.permute_dims(out, [0, 2, 1, 3]))
            out = emit(op.reshape(out, [b, n, h * d])) if self.one_of(2) else out
        return emit(op.multiply(out, number(1, self.dtype)))

    def module(self) -> tvm.IRModule:
        """The module, whose operands have their dimensions in any order."""
        b, h, n, m, d = self.batch, self.heads, self.rows, self.keys, self.dim
        kv_heads = h // 2 if h % 2 == 0 and self.one_of(3) else h
        wanted = ([b, h, n, d], [b, kv_heads, m, d], [b, kv_heads, m, d])
        params, orders = [], []
        for name, shape in zip("qkv", wanted, strict=True):
            order = self.pick([0, 1, 2, 3], [0, 2, 1, 3], [int(i) for i in self.rng.permutation(4)])
            orders.append([order.index(axis) for axis in range(4)])
            params.append(self.param(name, [shape[axis] for axis in order], self.dtype))
        with self.builder.function("main", self.params):
            with self.builder.dataflow():
                moved = [
                    self.emit(op.permute_dims(x, order))
                    for x, order in zip(params, orders, strict=True)
                ]
                output = self.builder.emit_output(self.body(*moved))
            self.builder.emit_func_output(output)
        return self.builder.get()

    def arrays(self) -> list[np.ndarray]:
        """What a module is called with."""
        found = []
        for param in self.params:
            shape, dtype = [self.value(size) for size in param.ty.shape], str(param.ty.dtype)
            x = self.rng.random(shape) < 0.7 if dtype == "bool" else self.rng.standard_normal(shape)
            found.append(x.astype(dtype))
        return found


def test_numbers_stay() -> None:
    """Most are rewritten, and none changes what it computes; the pass changes nothing twice."""
    kinds: dict[str, int] = {}
    for seed in range(SEEDS):
        maker = Maker(seed)
        try:
            mod = maker.module()
        except (ValueError, TypeError):  # sizes that no operator takes, after a swap
            continue
        ours = DispatchAttention(tvm.target.Target("llvm"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FallbackWarning)
            after = ours(mod)
            again = ours(after)
        rx.analysis.well_formed(after)
        assert_structural_equal(*(x.without_attr("external_mods") for x in (again, after)))
        for name in called(after) or ["none"]:
            kinds[name] = kinds.get(name, 0) + 1
        if not called(after):
            continue
        arrays = maker.arrays()
        got, want = run_in_numpy(after, *arrays), run_in_numpy(mod, *arrays)
        want = np.where(got == 0, 0, want) if maker.finite else want
        error = 3e-2 if maker.dtype == "float16" else 1e-4
        np.testing.assert_allclose(
            *(x.astype("float64") for x in (got, want)), error, error, err_msg=f"seed {seed}"
        )
    assert len(kinds) == 4
    assert min(kinds.values()) > SEEDS / 20

"""`DispatchAttention` on attention that is spelt with products and a softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from attention_forms import (
    BNSH,
    BSNH,
    CROSS,
    DENSE,
    MASKED,
    capped,
    causal_compared,
    const,
    heads_first,
    hide,
    numbers_are_kept,
    of_scores,
    op,
    positions,
    products,
    random,
)
from attention_modules import (
    called,
    dispatched,
    module,
    packed_call,
    rows,
    run,
    tensors,
    without_report,
)
from relax_in_numpy import run_in_numpy
from tvm import relax as rx
from tvm.ir import assert_structural_equal


def numbers_of(mod: tvm.IRModule) -> list[float]:
    """The causal flag, the window, the cap and the scale of the only call."""
    found: list[float] = []

    def visit(expr: rx.Expr) -> None:
        if isinstance(expr, rx.Call) and isinstance(expr.args[0], rx.ExternFunc):
            found.extend(x.value for x in expr.args[1].fields if hasattr(x, "value"))

    rx.analysis.post_order_visit(mod["main"], visit)
    return found


# The rewritten form


def test_before_and_expected() -> None:
    """Heads are moved before the products and back; the call reads and writes what was there."""

    def before(emit, q, k, v):
        o = emit(products(emit, *heads_first(emit, q, k, v)))
        return op.permute_dims(o, [0, 2, 1, 3])

    expected = module(
        tensors(BSNH),
        lambda emit, q, k, v: packed_call("attention_dense", [q, k, v], q.ty, scale=0.25),
    )
    after = dispatched(module(tensors(BSNH), before))
    assert_structural_equal(without_report(after), expected, map_free_vars=True)
    assert [(row.status, row.kernel) for row in rows(after)] == [("native", DENSE)]


def test_heads_before_lengths_are_requests() -> None:
    """No tensor is moved: a head of a request is a request with one head."""

    def expected(emit, q, k, v):
        b, _, n, d = list(q.ty.shape)
        q, k, v = (emit(op.reshape(x, [b * 4, n, 1, d])) for x in (q, k, v))
        return op.reshape(
            emit(packed_call("attention_dense", [q, k, v], q.ty, scale=0.25)), [b, 4, n, d]
        )

    after = dispatched(module(tensors(BNSH), products))
    assert_structural_equal(
        without_report(after), module(tensors(BNSH), expected), map_free_vars=True
    )


# Forms that are rewritten, and keep their numbers


def causal_compared_with_the_row_first(emit, scores):
    row, key = positions(emit, scores)
    return hide(emit, scores, op.greater_equal(row, key))


def causal_by_the_difference(emit, scores):
    row, key = positions(emit, scores)
    return hide(emit, scores, op.less(emit(op.subtract(key, row)), const(1, "int64")))


def causal_added(emit, scores):
    row, key = positions(emit, scores)
    hidden = emit(op.where(emit(op.greater(key, row)), const(-np.inf), const(0.0)))
    return op.add(scores, hidden)


def causal_added_triangle(emit, scores):
    full = emit(op.full(list(scores.ty.shape)[-2:], const(-1e9), "float32"))
    return op.add(emit(op.triu(full, 1)), scores)


def causal_multiplied(emit, scores):
    ones = emit(op.ones(list(scores.ty.shape)[-2:], "float32"))
    hidden = emit(op.subtract(const(1.0), emit(op.tril(ones, 0))))
    return op.add(scores, emit(op.multiply(hidden, const(-1e4))))


def causal_clamped(emit, scores):
    low = float(np.finfo(np.float32).min)
    return causal_compared(emit, emit(op.maximum(scores, const(low))))


def window(emit, scores):
    row, key = positions(emit, scores)
    after = emit(op.greater(key, emit(op.subtract(row, const(3, "int64")))))
    return hide(emit, scores, op.logical_and(emit(op.less_equal(key, row)), after))


def capped_and_causal(emit, scores):
    return causal_compared(emit, emit(capped(emit, scores)))


CAUSAL = [
    causal_compared,
    causal_compared_with_the_row_first,
    causal_by_the_difference,
    causal_added,
    causal_added_triangle,
    causal_multiplied,
    causal_clamped,
    capped_and_causal,
    window,
]


@pytest.mark.parametrize(
    "change", [None, capped, *CAUSAL], ids=lambda x: getattr(x, "__name__", "")
)
def test_scores(rng: np.random.Generator, change: Any) -> None:
    mod = module(tensors(BNSH), of_scores(change))
    after = numbers_are_kept(mod, [DENSE], *random(rng, *[(2, 4, 9, 32)] * 3))
    cap = 2.0 if change in (capped, capped_and_causal) else 0.0
    assert numbers_of(after)[:3] == [int(change in CAUSAL), 2 if change is window else -1, cap]


def test_last_rows_of_the_keys(rng: np.random.Generator) -> None:
    """Causal, aligned bottom-right, with symbolic lengths of rows and keys."""

    def change(emit, scores):
        n, m = list(scores.ty.shape)[-2:]
        row = emit(op.expand_dims(emit(op.arange(m - n, m, 1, "int64")), [1]))
        return hide(emit, scores, op.less_equal(positions(emit, scores)[1], row))

    mod = module(tensors(CROSS), of_scores(change))
    numbers_are_kept(mod, [DENSE], *random(rng, (2, 4, 3, 32), *[(2, 4, 9, 32)] * 2))


@pytest.mark.parametrize("constant", ["boolean", "added"])
def test_constant_triangle(rng: np.random.Generator, constant: str) -> None:
    """A buffer of the model, as GPT-2 has, cut to the length."""

    def change(emit, scores):
        n, m = list(scores.ty.shape)[-2:]
        seen = np.tril(np.ones((1, 1, 16, 16), bool))
        table = rx.const(seen) if constant == "boolean" else const(np.where(seen, 0.0, -1e9))
        cut = emit(op.strided_slice(table, [2, 3], [0, 0], [n, m], assume_inbound=True))
        return hide(emit, scores, cut, -1e9) if constant == "boolean" else op.add(scores, cut)

    shapes = {"q": (2, 4, 9, 32), "k": (2, 4, 9, 32), "v": (2, 4, 9, 32)}
    numbers_are_kept(
        module(tensors(shapes), of_scores(change)), [DENSE], *random(rng, *shapes.values())
    )


@pytest.mark.parametrize(
    ("shape", "heads"),
    [
        (("b", 1, 1, "m"), "last"),
        (("b", 1, "n", "m"), "first"),
        (("b", 4, "n", "m"), "first"),
        (("b", 4, "n", "m"), "last"),
        (("n", "m"), "first"),
        ((1, "m"), "last"),
        ((4, "n", "m"), "first"),
    ],
    ids=str,
)
def test_boolean_mask(rng: np.random.Generator, shape: tuple, heads: str) -> None:
    layout = (
        CROSS
        if heads == "first"
        else {name: (dims[0], dims[2], dims[1], dims[3]) for name, dims in CROSS.items()}
    )

    def body(emit, q, k, v, seen):
        q, k, v = (q, k, v) if heads == "first" else heads_first(emit, q, k, v)
        o = products(emit, q, k, v, lambda emit, scores: op.where(seen, scores, const(-1e9)))
        return o if heads == "first" else op.permute_dims(emit(o), [0, 2, 1, 3])

    sizes = {"b": 2, "n": 5, "m": 11}
    arrays = random(rng, *[[sizes.get(dim, dim) for dim in dims] for dims in layout.values()])
    seen = rng.random([sizes.get(dim, dim) for dim in shape]) < 0.6
    seen[..., 0] = True  # a row that sees no key is a mean of all values in this model
    after = numbers_are_kept(
        module(tensors({**layout, "seen": shape}), body), [MASKED], *arrays, seen
    )
    assert "all masked" in rows(after)[0].reasons[0]


def test_mask_and_causal(rng: np.random.Generator) -> None:
    """Padding and a triangle in one tensor: the triangle is the kernel's, the padding is bits."""

    def body(emit, q, k, v, seen):
        def change(emit, scores):
            row, key = positions(emit, scores)
            both = emit(op.logical_and(emit(op.less_equal(key, row)), seen))
            return op.add(scores, emit(op.where(both, const(0.0), const(-1e9))))

        return products(emit, q, k, v, change)

    seen = rng.random((2, 1, 1, 9)) < 0.6
    seen[..., 0] = True
    mod = module(tensors({**BNSH, "seen": ("b", 1, 1, "n")}), body)
    after = numbers_are_kept(mod, [MASKED], *random(rng, *[(2, 4, 9, 32)] * 3), seen)
    assert numbers_of(after)[:2] == [1, -1]


def test_attention_mask_of_integers(rng: np.random.Generator) -> None:
    """Added as numbers; where the user says that it holds 0 and 1 alone it becomes bits."""

    def body(emit, q, k, v, ints):
        def change(emit, scores):
            mask = emit(op.astype(emit(op.expand_dims(ints, [1, 2])), "float32"))
            hidden = emit(op.subtract(const(1.0), mask))
            return op.add(scores, emit(op.multiply(hidden, const(-1e9))))

        return products(emit, q, k, v, change)

    mod = module(tensors({**BNSH, "ints": ("b", "n")}), body)
    plain = dispatched(mod, strict=True)
    assert called(plain) == ["flashinfer.attention_dense_biased"]
    assert "binary_masks=True" in rows(plain)[0].reasons[0]
    after = dispatched(mod, binary_masks=True, strict=True)
    assert called(after) == [MASKED]
    arrays = random(rng, *[(2, 4, 9, 32)] * 3)
    ints = (np.arange(9)[None] < np.array([[4], [9]])).astype("int64")
    want = run_in_numpy(mod, *arrays, ints)
    for rewritten in (plain, after):
        got = run(rewritten, *arrays, ints)
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


def grouped_repeat(emit, q, k, v):
    k, v = (emit(op.repeat(x, 2, axis=1)) for x in (k, v))
    return products(emit, q, k, v)


def grouped_expand(emit, q, k, v):
    b, heads, m, d = list(k.ty.shape)

    def expanded(x):
        x = emit(op.broadcast_to(emit(op.expand_dims(x, [2])), [b, heads, 2, m, d]))
        return emit(op.reshape(x, [b, heads * 2, m, d]))

    return products(emit, q, expanded(k), expanded(v))


def grouped_products(emit, q, k, v):
    """Five dimensions, and the product broadcasts the keys."""
    b, _, n, d = list(q.ty.shape)
    q = emit(op.reshape(q, [b, 2, 2, n, d]))
    k, v = (emit(op.expand_dims(x, [2])) for x in (k, v))
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 2, 4, 3]))))
    o = emit(op.matmul(emit(op.nn.softmax(emit(op.multiply(scores, const(0.25))))), v))
    return op.reshape(o, [b, 4, n, d])


@pytest.mark.parametrize("form", [grouped_repeat, grouped_expand, grouped_products])
def test_grouped_heads(rng: np.random.Generator, form: Any) -> None:
    """The kernel gets the KV heads as they are, not repeated."""
    shapes = {"q": ("b", 4, "n", 32), "k": ("b", 2, "m", 32), "v": ("b", 2, "m", 32)}
    mod = module(tensors(shapes), form)
    after = numbers_are_kept(mod, [DENSE], *random(rng, (2, 4, 5, 32), *[(2, 2, 9, 32)] * 2))
    assert "R.repeat" not in after.script()
    assert "R.broadcast_to" not in after.script()


def test_one_kv_head(rng: np.random.Generator) -> None:
    shapes = {"q": ("b", 4, "n", 32), "k": ("b", 1, "m", 32), "v": ("b", 1, "m", 32)}
    arrays = random(rng, (2, 4, 5, 32), *[(2, 1, 9, 32)] * 2)
    numbers_are_kept(module(tensors(shapes), products), [DENSE], *arrays)


def test_batches_and_heads_in_one_dimension(rng: np.random.Generator) -> None:
    """Products of three dimensions, as `bmm` takes them."""

    def body(emit, q, k, v):
        q = emit(op.multiply(q, const(0.3)))
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 2, 1]))))
        return op.matmul(emit(op.nn.softmax(scores)), v)

    shapes = {"q": ("bh", "n", 32), "k": ("bh", "m", 32), "v": ("bh", "m", 16)}
    arrays = random(rng, (6, 5, 32), (6, 9, 32), (6, 9, 16))
    numbers_are_kept(module(tensors(shapes), body), [DENSE], *arrays)


def test_one_head_in_three_dimensions(rng: np.random.Generator) -> None:
    """A result of one head has the shape of the model's, whatever the kernel's is."""

    def body(emit, q, k, v):
        n, m = q.ty.shape[2], k.ty.shape[2]
        q, k, v = (emit(op.reshape(x, [2, size, 32])) for x, size in ((q, n), (k, m), (v, m)))
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 2, 1]))))
        o = emit(op.matmul(emit(op.nn.softmax(scores)), v))
        return op.reshape(o, [2, 1, n, 32])

    shapes = {"q": (2, 1, 3, 32), "k": (2, 1, 5, 32), "v": (2, 1, 5, 32)}
    arrays = random(rng, *shapes.values())
    numbers_are_kept(module(tensors(shapes), body), [DENSE], *arrays)


def test_softmax_in_float32() -> None:
    """Of a model in float16, whose weights become float16 again."""

    def body(emit, q, k, v):
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2])), "float32"))
        weights = emit(op.astype(emit(op.nn.softmax(scores)), "float16"))
        return op.matmul(weights, v)

    after = dispatched(module(tensors(BNSH, "float16"), body), strict=True)
    assert called(after) == [DENSE]

"""Numbers that are added to scores: they hide keys, or go to the kernel as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_forms import (
    BNSH,
    BSNH,
    MASKED,
    capped,
    causal_compared,
    const,
    heads_first,
    numbers_are_kept,
    op,
    products,
    random,
)
from attention_modules import called, dispatched, module, packed_call, rows, tensors, without_report
from tvm import relax as rx
from tvm import tirx
from tvm.ir import assert_structural_equal

BIASED = "flashinfer.attention_dense_biased"
GROUPED = {"q": ("b", 4, "n", 32), "k": ("b", 2, "m", 32), "v": ("b", 2, "m", 32)}
SIZES = {"b": 2, "n": 5, "m": 11}


def sized(shapes: dict[str, tuple]) -> list[list[int]]:
    return [[SIZES.get(size, size) for size in shape] for shape in shapes.values()]


def added(change: Any = None) -> Any:
    """A body that adds its last parameter to scores, and changes them before or after."""

    def body(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr, bias: rx.Expr) -> rx.Expr:
        def with_bias(emit: Any, scores: rx.Expr) -> rx.Expr:
            if change is None:
                return op.add(scores, bias)
            return change(emit, scores, bias)

        if k.ty.shape[1] != q.ty.shape[1]:
            k, v = (emit(op.repeat(x, 2, axis=1)) for x in (k, v))
        return products(emit, q, k, v, with_bias)

    return body


def test_before_and_expected() -> None:
    """Heads before lengths are requests; the bias is read as it lies."""

    def expected(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr, bias: rx.Expr) -> rx.Expr:
        b, _, n, d = list(q.ty.shape)
        q, k, v = (emit(op.reshape(x, [b * 4, n, 1, d])) for x in (q, k, v))
        heads = rx.prim_value(tirx.const(4, "int64"))
        call = packed_call("attention_dense_biased", [q, k, v, bias, heads], q.ty, scale=0.25)
        return op.reshape(emit(call), [b, 4, n, d])

    shapes = {**BNSH, "bias": (1, 4, "n", "n")}
    after = dispatched(module(tensors(shapes), added()), strict=True)
    assert_structural_equal(
        without_report(after), module(tensors(shapes), expected), map_free_vars=True
    )
    (row,) = rows(after)
    assert row.kernel == BIASED
    assert "the tensor bias is added to scores" in row.reasons[0]


@pytest.mark.parametrize(
    "shape",
    [(1, 4, "n", "m"), ("b", 4, "n", "m"), ("b", 1, 1, "m"), ("n", "m"), (4, "n", "m"), (4, 1, 1)],
    ids=str,
)
@pytest.mark.parametrize("layout", ["BNSH", "BSNH", "grouped"])
def test_shapes(rng: np.random.Generator, shape: tuple, layout: str) -> None:
    """Of relative positions, of ALiBi, of padding that is given as numbers."""
    shapes = {**GROUPED, "bias": shape}
    if layout != "grouped":
        shapes |= {name: ("b", 4, *GROUPED[name][2:]) for name in "kv"}
    body = added()
    if layout == "BSNH":
        shapes |= {x: (s[0], s[2], s[1], s[3]) for x, s in shapes.items() if x in "qkv"}

        def body(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr, bias: rx.Expr) -> rx.Expr:
            o = emit(added()(emit, *heads_first(emit, q, k, v), bias))
            return op.permute_dims(o, [0, 2, 1, 3])

    numbers_are_kept(module(tensors(shapes), body), [BIASED], *random(rng, *sized(shapes)))


def twice(emit: Any, scores: rx.Expr, bias: rx.Expr) -> rx.Expr:
    return op.add(emit(op.add(scores, bias)), const(np.linspace(0, 1, 9)))


def scaled_after(emit: Any, scores: rx.Expr, bias: rx.Expr) -> rx.Expr:
    return op.multiply(emit(op.add(scores, bias)), const(0.5))


def after_a_cap(emit: Any, scores: rx.Expr, bias: rx.Expr) -> rx.Expr:
    return op.add(emit(capped(emit, scores)), bias)


def and_causal(emit: Any, scores: rx.Expr, bias: rx.Expr) -> rx.Expr:
    return causal_compared(emit, emit(op.add(scores, bias)))


def and_a_mask(emit: Any, scores: rx.Expr, bias: rx.Expr) -> rx.Expr:
    seen = rx.const(np.arange(9) != 4)
    return op.where(seen, emit(op.add(scores, bias)), const(-np.inf))


def wrong_triangle(emit: Any, scores: rx.Expr, bias: rx.Expr) -> rx.Expr:
    """A triangle of numbers that hide nothing."""
    full = emit(op.full(list(scores.ty.shape)[-2:], const(-5.0), "float32"))
    return op.add(scores, emit(op.triu(full, 1)))


def of_the_scores(emit: Any, scores: rx.Expr, bias: rx.Expr) -> rx.Expr:
    return op.add(scores, scores)


@pytest.mark.parametrize(
    "change",
    [twice, scaled_after, after_a_cap, and_causal, and_a_mask, wrong_triangle, of_the_scores],
)
def test_beside_other_changes(rng: np.random.Generator, change: Any) -> None:
    shapes = {**{name: (2, 4, 9, 32) for name in "qkv"}, "bias": (1, 4, 9, 9)}
    arrays = random(rng, *shapes.values())
    numbers_are_kept(module(tensors(shapes), added(change)), [BIASED], *arrays)


@pytest.mark.parametrize("bias", ["seen", "numbers"])
@pytest.mark.parametrize("causal", [None, "TopLeft", "BottomRight"])
def test_bias_of_the_operator(rng: np.random.Generator, bias: str, causal: str | None) -> None:
    """`nn.attention_bias`: what hides keys becomes bits, other numbers are added."""

    def body(emit, q, k, v, seen=None, numbers=None):
        if seen is not None:
            numbers = emit(op.where(seen, const(0.0), const(-np.inf)))
        return op.nn.attention(q, k, v, numbers, 0.25, causal)

    mod = module(tensors({**BSNH, bias: ("b", 1, "n", "n")}), body)
    given = rng.random((2, 1, 9, 9)) < 0.6 if bias == "seen" else random(rng, (2, 1, 9, 9))[0]
    if bias == "seen":
        given[..., 0] = True
    kernel = MASKED if bias == "seen" else BIASED
    numbers_are_kept(mod, [kernel], *random(rng, *[(2, 9, 4, 32)] * 3), given)


@pytest.mark.parametrize("bias", ["seen", "numbers"])
def test_top_left_and_more_keys(rng: np.random.Generator, bias: str) -> None:
    """Keys, values and what is added are cut to the first keys."""

    def body(emit, q, k, v, seen=None, numbers=None):
        if seen is not None:
            numbers = emit(op.where(seen, const(0.0), const(-np.inf)))
        return op.nn.attention(q, k, v, numbers, 0.25, "TopLeft")

    shapes = {"q": (2, 3, 4, 32), "k": (2, 7, 4, 32), "v": (2, 7, 4, 32), bias: (2, 1, 3, 7)}
    given = rng.random((2, 1, 3, 7)) < 0.6 if bias == "seen" else random(rng, (2, 1, 3, 7))[0]
    if bias == "seen":
        given[..., 0] = True
    arrays = random(rng, *[shapes[name] for name in "qkv"])
    kernel = MASKED if bias == "seen" else BIASED
    numbers_are_kept(module(tensors(shapes), body), [kernel], *arrays, given)


def test_mask_of_heads_that_are_grouped(rng: np.random.Generator) -> None:
    """Bits are those of requests; of query heads that share keys a mask becomes numbers."""

    def body(emit, q, k, v, seen):
        k, v = (emit(op.repeat(x, 2, axis=1)) for x in (k, v))
        return products(emit, q, k, v, lambda e, scores: op.where(seen, scores, const(-np.inf)))

    mod = module(tensors({**GROUPED, "seen": ("b", 4, "n", "m")}), body)
    seen = rng.random((2, 4, 5, 11)) < 0.6
    seen[..., 0] = True
    numbers_are_kept(mod, [BIASED], *random(rng, *sized(GROUPED)), seen)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("wide", [False, True])
def test_dtypes(dtype: str, wide: bool) -> None:
    """Of a softmax in float32 the bias is float32 too; the kernel takes both."""

    def body(emit, q, k, v, bias):
        turned = emit(op.permute_dims(k, [0, 1, 3, 2]))
        scores = emit(op.matmul(q, turned, "float32" if wide else None))
        bias = emit(op.astype(bias, "float32")) if wide else bias
        weights = emit(op.nn.softmax(emit(op.add(scores, bias))))
        return op.matmul(emit(op.astype(weights, dtype)), v)

    mod = module(tensors({**BNSH, "bias": (1, 4, "n", "n")}, dtype), body)
    for target in ("llvm", {"kind": "cuda", "arch": "sm_90a"}):
        after = dispatched(mod, target, ship="shared", strict=True)
        assert called(after) == [BIASED]


def test_bias_of_another_shape() -> None:
    """One that widens the scores is none."""
    mod = module(
        tensors({**{name: (1, 4, 9, 32) for name in "qkv"}, "bias": (2, 1, 9, 9)}), added()
    )
    assert_structural_equal(dispatched(mod), mod)

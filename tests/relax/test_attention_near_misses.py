"""Near misses of attention, which `DispatchAttention` must leave as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from attention_forms import (
    BNSH,
    DENSE,
    MASKED,
    capped,
    causal_compared,
    const,
    hide,
    numbers_are_kept,
    of_scores,
    op,
    positions,
    products,
    random,
)
from attention_modules import dispatched, module, rows, tensors, without_report
from tvm import relax as rx
from tvm.ir import assert_structural_equal

from tvm_flashinfer.relax import FallbackWarning


def is_kept(mod: tvm.IRModule, says: str | None) -> None:
    if says is None:
        assert_structural_equal(dispatched(mod), mod)
        return
    with pytest.warns(FallbackWarning, match=says):
        after = dispatched(mod)
    assert_structural_equal(without_report(after), mod)
    assert {row.status for row in rows(after)} == {"fallback"}


def clamped(emit, scores):
    return op.maximum(scores, const(-2.0))


def replaced_by_zero(emit, scores):
    row, key = positions(emit, scores)
    return hide(emit, scores, op.less_equal(key, row), 0.0)


def masked_before_the_cap(emit, scores):
    return capped(emit, emit(causal_compared(emit, scores)))


def of_other_positions(emit, scores):
    """Key twice the row: affine, and no diagonal."""
    row, key = positions(emit, scores)
    return hide(emit, scores, op.less_equal(emit(op.add(key, key)), row))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (clamped, "clamped"),
        (replaced_by_zero, "do not hide"),
        (masked_before_the_cap, "before they are capped"),
        (lambda emit, scores: op.subtract(scores, const([1.0] * 9)), "subtracted"),
        (lambda emit, scores: op.exp(scores), None),
    ],
    ids=str,
)
def test_other_changes_of_scores(change: Any, says: str | None) -> None:
    shapes = {name: (2, 4, 9, 32) for name in "qkv"}
    is_kept(module(tensors(shapes), of_scores(change)), says)


def test_positions_that_are_no_diagonal(rng: np.random.Generator) -> None:
    """They become bits, and keep their meaning."""
    mod = module(tensors(BNSH), of_scores(of_other_positions))
    numbers_are_kept(mod, [MASKED], *random(rng, *[(2, 4, 9, 32)] * 3))


def softmax_over_rows(emit, q, k, v):
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    return op.matmul(emit(op.nn.softmax(scores, axis=-2)), v)


def scores_transposed(emit, q, k, v):
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    turned = emit(op.permute_dims(scores, [0, 1, 3, 2]))
    return op.matmul(emit(op.nn.softmax(turned)), v)


def heads_mixed(emit, q, k, v):
    """The weights of one head for the values of another."""
    scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
    return op.matmul(emit(op.permute_dims(emit(op.nn.softmax(scores)), [1, 0, 2, 3])), v)


def weights_without_scores(emit, q, k, v):
    return op.matmul(
        emit(op.nn.softmax(emit(op.add(q, q)))), emit(op.permute_dims(k, [0, 1, 3, 2]))
    )


@pytest.mark.parametrize(
    "form", [softmax_over_rows, scores_transposed, heads_mixed, weights_without_scores]
)
def test_what_is_no_attention(form: Any) -> None:
    """Left alone and not reported: all sizes are equal, so that only the meaning differs."""
    shapes = {name: (4, 4, 8, 8) for name in "qkv"}
    is_kept(module(tensors(shapes), form), None)


@pytest.mark.parametrize("used", ["scores", "weights"])
def test_shared_intermediate(used: str) -> None:
    def body(emit, q, k, v):
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
        weights = emit(op.nn.softmax(scores))
        o = emit(op.matmul(weights, v))
        return rx.Tuple([o, scores if used == "scores" else weights])

    is_kept(module(tensors(BNSH), body), "used elsewhere")


def test_dropout() -> None:
    def body(emit, q, k, v):
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
        dropped = emit(op.nn.dropout(emit(op.nn.softmax(scores)), 0.1))
        return op.matmul(emit(rx.TupleGetItem(dropped, 0)), v)

    is_kept(module(tensors(BNSH), body), "dropout")


def test_scale_that_is_no_constant() -> None:
    def body(emit, q, k, v, x):
        return products(emit, q, k, v, lambda emit, scores: op.multiply(scores, x))

    is_kept(module(tensors({**BNSH, "x": ()}), body), "scale of scores is not a constant")


def test_unequal_heads() -> None:
    """Repeated in another order than kernels have: head h of queries has KV head h % 2."""

    def body(emit, q, k, v):
        def tiled(x):
            return emit(op.concat([x, x], axis=1))

        k, v = tiled(k), emit(op.repeat(v, 2, axis=1))
        return products(emit, q, k, v)

    shapes = {"q": ("b", 4, "n", 32), "k": ("b", 2, "m", 32), "v": ("b", 2, "m", 32)}
    is_kept(module(tensors(shapes), body), "4 heads of keys and 2 of values")


def test_tiled_heads_are_not_taken_for_repeated_ones(rng: np.random.Generator) -> None:
    """Broadcast before the heads, not after them."""

    def tiled(emit, q, k, v):
        b, heads, m, d = list(k.ty.shape)

        def expanded(x):
            x = emit(op.broadcast_to(emit(op.expand_dims(x, [1])), [b, 2, heads, m, d]))
            return emit(op.reshape(x, [b, 2 * heads, m, d]))

        return products(emit, q, expanded(k), expanded(v))

    shapes = {"q": ("b", 4, "n", 32), "k": ("b", 2, "m", 32), "v": ("b", 2, "m", 32)}
    after = numbers_are_kept(
        module(tensors(shapes), tiled),
        [DENSE],
        *random(rng, (2, 4, 5, 32), *[(2, 2, 9, 32)] * 2),
    )
    assert "R.broadcast_to" in after.script()


def test_result_of_another_dtype() -> None:
    def body(emit, q, k, v):
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2])), "float32"))
        return op.matmul(emit(op.nn.softmax(scores)), emit(op.astype(v, "float32")))

    is_kept(module(tensors(BNSH, "float16"), body), "the result is not")

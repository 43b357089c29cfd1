"""The patterns under the prefix ``flashinfer.``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from attention_modules import module, rows, run, tensors
from tvm import relax as rx
from tvm.ir import assert_structural_equal
from tvm.relax.backend.pattern_registry import get_pattern, get_patterns_with_prefix

from tvm_flashinfer.relax import DispatchAttention, attention_patterns, partition_for_flashinfer

op = rx.op
SHAPES = {"q": ("b", 4, "n", 32), "k": ("b", 4, "n", 32), "v": ("b", 4, "n", 32)}
BSNH = {name: ("b", "n", 4, 32) for name in SHAPES}
RAGGED = {"q": (1, "n", 4, 32), "k": (1, "n", 2, 32), "v": (1, "n", 2, 32), "starts": ("b",)}


def operator(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr) -> rx.Expr:
    return op.nn.attention(q, k, v, causal_mask="TopLeft")


def var_len(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr, starts: rx.Expr) -> rx.Expr:
    longest = rx.const(9, "int32")
    return op.nn.attention_var_len(q, k, v, starts, longest, starts, longest, 0.5, "TopLeft")


def products(scale: Any) -> Any:
    def body(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr) -> rx.Expr:
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
        scores = scores if scale is None else emit(scale(scores, rx.const(4.0, "float32")))
        return op.matmul(emit(op.nn.softmax(scores)), v)

    return body


def with_bias(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr, bias: rx.Expr) -> rx.Expr:
    return op.nn.attention(q, k, v, bias)


FORMS = {
    "attention": (BSNH, operator),
    "attention_bias": ({**BSNH, "bias": ("b", 4, "n", "n")}, with_bias),
    "attention_var_len": (RAGGED, var_len),
    "attention_products": (SHAPES, products(None)),
    "attention_products_multiplied": (SHAPES, products(op.multiply)),
    "attention_products_divided": (SHAPES, products(op.divide)),
}


def composites(mod: tvm.IRModule) -> list[str]:
    attributes = [fn.attrs or {} for _, fn in mod.functions_items()]
    return [str(attrs["Composite"]) for attrs in attributes if "Composite" in attrs]


def test_all_are_registered() -> None:
    registered = {str(pattern.name) for pattern in get_patterns_with_prefix("flashinfer.")}
    assert {name for name, *_ in attention_patterns()} == registered
    assert registered == {f"flashinfer.{form}" for form in FORMS}
    assert get_pattern("flashinfer.attention") is not None


@pytest.mark.parametrize("form", FORMS)
def test_partition(form: str) -> None:
    """One function of each form, which the pass rewrites."""
    shapes, body = FORMS[form]
    after = partition_for_flashinfer(module(tensors(shapes), body))
    rx.analysis.well_formed(after)
    assert composites(after) == [f"flashinfer.{form}"]
    rewritten = DispatchAttention(tvm.target.Target("llvm"), strict=True)(after)
    rx.analysis.well_formed(rewritten)
    assert [row.status for row in rows(rewritten)] == ["native"]


@pytest.mark.parametrize("form", ["attention", "attention_products_divided"])
def test_numbers(rng: np.random.Generator, form: str) -> None:
    shapes, body = FORMS[form]
    mod = module(tensors(shapes), body)
    arrays = [rng.standard_normal((2, 4, 4, 32)).astype("float32") for _ in range(3)]
    ours = DispatchAttention(tvm.target.Target("llvm"), strict=True)(partition_for_flashinfer(mod))
    np.testing.assert_allclose(run(ours, *arrays), run(mod, *arrays), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(
    ("dtype", "body"),
    [
        ("float64", operator),
        ("float32", products(lambda scores, four: op.nn.softmax(scores))),
    ],
    ids=["dtype", "softmax-twice"],
)
def test_what_no_kernel_serves_stays(dtype: str, body: Any) -> None:
    mod = module(tensors(BSNH if body is operator else SHAPES, dtype), body)
    after = partition_for_flashinfer(mod)
    assert composites(after) == []
    assert_structural_equal(after, mod)


def test_shared_weights_stay() -> None:
    def body(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr) -> rx.Expr:
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 1, 3, 2]))))
        weights = emit(op.nn.softmax(scores))
        return rx.Tuple([emit(op.matmul(weights, v)), weights])

    assert composites(partition_for_flashinfer(module(tensors(SHAPES), body))) == []

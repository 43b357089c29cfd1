"""`DispatchAttention` on graphs that no frontend makes: rewritten or reported, never an error."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from attention_forms import BNSH, BSNH, DENSE, MASKED, const, op, positions, products, random
from attention_modules import called, dispatched, module, rows, run, tensors, without_report
from relax_in_numpy import run_in_numpy
from tvm import relax as rx
from tvm.ir import assert_structural_equal
from tvm.relax.backend.cuda import cutlass  # noqa: F401  registers patterns
from tvm.relax.backend.pattern_registry import get_patterns_with_prefix
from tvm.script import ir as I
from tvm.script import relax as R

from tvm_flashinfer.relax import FallbackWarning

TYPE = R.Tensor((2, 4, 8, 16), "float32")


@I.ir_module
class Branch:
    """An attention in a branch, whose weights come from outside of it."""

    @R.function
    def main(flag: R.Tensor((), "bool"), q: TYPE, k: TYPE, v: TYPE):  # noqa: D102
        weights = R.nn.softmax(R.matmul(q, R.permute_dims(k, [0, 1, 3, 2])))
        if flag:
            o = R.matmul(weights, v)
        else:
            o = R.add(q, k)
        return o


@I.ir_module
class LocalFunction:
    """An attention in a function inside of another one."""

    @R.function
    def main(q: TYPE, k: TYPE, v: TYPE):  # noqa: D102
        @R.function
        def inner(x: TYPE) -> TYPE:
            weights = R.nn.softmax(R.matmul(q, R.permute_dims(k, [0, 1, 3, 2])))
            o = R.matmul(weights, x)
            return o

        o = inner(v)
        return o


@pytest.mark.parametrize("flag", [False, True])
def test_branch(rng: np.random.Generator, flag: bool) -> None:
    after = dispatched(Branch, strict=True)
    assert called(after) == [DENSE]
    arrays = [np.array(flag), *random(rng, *[(2, 4, 8, 16)] * 3)]
    np.testing.assert_allclose(run(after, *arrays), run(Branch, *arrays), rtol=2e-5, atol=2e-5)


def test_local_function(rng: np.random.Generator) -> None:
    after = dispatched(LocalFunction, strict=True)
    assert called(after) == [DENSE]
    arrays = random(rng, *[(2, 4, 8, 16)] * 3)
    got, want = (run(rx.transform.LambdaLift()(mod), *arrays) for mod in (after, LocalFunction))
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("view", ["expand_dims", "permute_dims", "reshape", "strided_slice"])
@pytest.mark.parametrize("kind", ["boolean", "added"])
def test_view_of_conditions_of_several_shapes(
    rng: np.random.Generator, view: str, kind: str
) -> None:
    """What is viewed is the tensor that all conditions are broadcast to, not each of them."""

    def viewed(emit: Any, x: rx.Expr) -> rx.Expr:
        b, h, n, m = list(x.ty.shape)
        if view == "expand_dims":
            return emit(op.squeeze(emit(op.expand_dims(x, [0])), [0]))
        if view == "permute_dims":
            return emit(op.permute_dims(emit(op.permute_dims(x, [3, 2, 0, 1])), [2, 3, 1, 0]))
        if view == "reshape":
            return emit(op.reshape(emit(op.reshape(x, [b * h, n, m])), [b, h, n, m]))
        return emit(op.strided_slice(x, [2, 3], [0, 0], [n, m], assume_inbound=True))

    def change(emit: Any, scores: rx.Expr, seen: rx.Expr) -> rx.Expr:
        row, key = positions(emit, scores)
        both = emit(op.logical_and(emit(op.less_equal(key, row)), seen))
        if kind == "boolean":
            return op.where(viewed(emit, both), scores, const(-np.inf))
        hidden = emit(op.where(both, const(0.0), const(-np.inf)))
        return op.add(scores, viewed(emit, hidden))

    def body(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr, seen: rx.Expr) -> rx.Expr:
        return products(emit, q, k, v, lambda emit, scores: change(emit, scores, seen))

    mod = module(tensors({**BNSH, "seen": ("b", 1, 1, "n")}), body)
    after = dispatched(mod, strict=True)
    assert called(after) == [MASKED]
    seen = rng.random((2, 1, 1, 9)) < 0.6
    seen[..., 0] = True
    arrays = [*random(rng, *[(2, 4, 9, 32)] * 3), seen]
    got = run(after, *arrays)
    np.testing.assert_allclose(got, run_in_numpy(mod, *arrays), rtol=2e-5, atol=2e-5)


def test_scores_of_more_dimensions_than_their_product() -> None:
    """A choice adds a dimension; such scores are none that are followed."""

    def body(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr, seen: rx.Expr) -> rx.Expr:
        scores = emit(op.matmul(q, emit(op.permute_dims(k, [0, 2, 1]))))
        chosen = emit(op.where(seen, scores, const(-np.inf)))
        turned = emit(op.permute_dims(chosen, [1, 0, 2, 3]))
        weights = emit(op.reshape(emit(op.nn.softmax(turned)), [1, 1, 8]))
        return op.matmul(weights, v)

    shapes = {"q": (1, 1, 16), "k": (1, 8, 16), "v": (1, 8, 16), "seen": (1, 1, 1, 8)}
    mod = module(tensors(shapes), body)
    assert_structural_equal(dispatched(mod), mod)


@pytest.mark.parametrize(("rows_", "keys", "names"), [(0, 8, "q"), (3, 0, "kv")])
@pytest.mark.parametrize("form", ["products", "operator"])
def test_no_elements(rows_: int, keys: int, names: str, form: str) -> None:
    def body(emit: Any, q: rx.Expr, k: rx.Expr, v: rx.Expr) -> rx.Expr:
        return products(emit, q, k, v) if form == "products" else op.nn.attention(q, k, v)

    shapes = {"q": (2, 4, rows_, 16), "k": (2, 4, keys, 16), "v": (2, 4, keys, 16)}
    if form == "operator":
        shapes = {name: (b, n, h, d) for name, (b, h, n, d) in shapes.items()}
    mod = module(tensors(shapes), body)
    with pytest.warns(FallbackWarning, match="has no elements"):
        after = dispatched(mod)
    assert_structural_equal(without_report(after), mod)
    (row,) = rows(after)
    assert [reason[0] for reason in row.reasons] == list(names)


@pytest.mark.parametrize("annotated", [False, True])
def test_functions_of_another_backend(annotated: bool) -> None:
    """What was parted for CUTLASS stays as CUTLASS's compiler takes it."""
    mod = module(tensors(BSNH, "float16"), lambda emit, q, k, v: op.nn.attention(q, k, v))
    patterns = get_patterns_with_prefix("cutlass.attention")
    parted = rx.transform.FuseOpsByPattern(patterns, annotate_codegen=annotated)(mod)
    assert len(parted.functions) == 2
    assert dispatched(parted).same_as(parted)

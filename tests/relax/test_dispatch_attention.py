"""`DispatchAttention` on the operators of attention that Relax has."""

from __future__ import annotations

import numpy as np
import pytest
import tvm
from attention_modules import (
    called,
    dispatched,
    module,
    packed_call,
    reference,
    rows,
    run,
    tensors,
    without_report,
)
from tvm import relax as rx
from tvm.ir import assert_structural_equal

from tvm_flashinfer.relax import (
    DispatchAttention,
    FallbackWarning,
    StrictModeError,
    dispatch_attention,
    last_report,
)

#: Symbolic requests and lengths; `one` and `two` give lengths of their own to rows and keys.
SAME = {"q": ("b", "n", 4, 32), "k": ("b", "n", 2, 32), "v": ("b", "n", 2, 32)}
CROSS = {"q": ("b", "n", 4, 32), "k": ("b", "m", 4, 32), "v": ("b", "m", 4, 16)}
DECODE = {"q": ("b", 1, 4, 32), "k": ("b", "m", 2, 32), "v": ("b", "m", 2, 32)}
RAGGED = {"q": (1, "n", 4, 32), "k": (1, "m", 2, 32), "v": (1, "m", 2, 32), "starts": ("b",)}


def attention(shapes: dict, dtype: str = "float32", **attrs) -> tvm.IRModule:
    return module(
        tensors(shapes, dtype), lambda emit, q, k, v: rx.op.nn.attention(q, k, v, **attrs)
    )


def random(rng: np.random.Generator, *shapes: tuple[int, ...]) -> list[np.ndarray]:
    return [rng.standard_normal(shape).astype("float32") for shape in shapes]


@pytest.mark.parametrize(
    ("shapes", "attrs", "numbers"),
    [
        (CROSS, {}, {"scale": 32**-0.5}),
        (CROSS, {"scale": 0.25}, {"scale": 0.25}),
        (SAME, {"causal_mask": "TopLeft", "scale": 0.25}, {"causal": 1, "scale": 0.25}),
        (SAME, {"causal_mask": "BottomRight", "scale": 0.25}, {"causal": 1, "scale": 0.25}),
        (DECODE, {"causal_mask": "BottomRight", "scale": 0.25}, {"causal": 1, "scale": 0.25}),
        (
            SAME,
            {"causal_mask": "TopLeft", "window_size": 5, "scale": 0.25},
            {"causal": 1, "window_left": 4, "scale": 0.25},
        ),
    ],
    ids=["plain", "scale", "top-left", "bottom-right", "decode", "window"],
)
@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_operator(shapes: dict, attrs: dict, numbers: dict, dtype: str) -> None:
    before = attention(shapes, dtype, **attrs)
    expected = module(
        tensors(shapes, dtype),
        lambda emit, q, k, v: packed_call(
            "attention_dense",
            [q, k, v],
            rx.TensorType([*list(q.ty.shape)[:3], v.ty.shape[3]], dtype),
            **numbers,
        ),
    )
    after = dispatched(before)
    assert_structural_equal(without_report(after), expected, map_free_vars=True)
    assert [(row.status, row.kernel) for row in rows(after)] == [
        ("native", "flashinfer.attention_dense")
    ]


def test_top_left_with_more_keys_than_rows(rng: np.random.Generator) -> None:
    """Rows see the first keys alone."""
    shapes = {"q": ("b", 3, 4, 32), "k": ("b", 7, 2, 32), "v": ("b", 7, 2, 32)}
    after = dispatched(attention(shapes, causal_mask="TopLeft", scale=0.25))
    q, k, v = random(rng, (2, 3, 4, 32), (2, 7, 2, 32), (2, 7, 2, 32))
    want = reference(q, k, v, 0.25, np.tril(np.ones((3, 7), bool)))
    np.testing.assert_allclose(run(after, q, k, v), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [None, "TopLeft", "BottomRight"])
def test_numbers_are_those_of_tvm(rng: np.random.Generator, causal: str | None) -> None:
    """The same module, rewritten and not."""
    shapes = {"q": ("b", "n", 4, 32), "k": ("b", "n", 4, 32), "v": ("b", "n", 4, 32)}
    before = attention(shapes, causal_mask=causal)
    arrays = random(rng, (2, 9, 4, 32), (2, 9, 4, 32), (2, 9, 4, 32))
    want = run(before, *arrays)
    np.testing.assert_allclose(run(dispatched(before), *arrays), want, rtol=1e-5, atol=1e-5)


def ragged(causal: str | None, own_lengths: bool, **attrs) -> tvm.IRModule:
    params = tensors({**RAGGED, **({"starts_of_keys": ("b",)} if own_lengths else {})})
    longest = rx.const(9, "int32")

    def body(emit, q, k, v, starts, starts_of_keys=None) -> rx.Expr:
        keys = starts if starts_of_keys is None else starts_of_keys
        return rx.op.nn.attention_var_len(
            q, k, v, starts, longest, keys, longest, 0.25, causal, **attrs
        )

    return module(params, body)


@pytest.mark.parametrize(
    ("causal", "own_lengths"),
    [(None, True), ("BottomRight", True), ("TopLeft", False)],
)
def test_ragged(rng: np.random.Generator, causal: str | None, own_lengths: bool) -> None:
    after = dispatched(ragged(causal, own_lengths))
    assert called(after) == ["flashinfer.attention_ragged"]
    starts = np.array([0, 2, 7, 9], np.int32)
    keys = np.array([0, 4, 9, 14], np.int32) if own_lengths else starts
    q, k, v = random(rng, (1, 9, 4, 32), (1, keys[-1], 2, 32), (1, keys[-1], 2, 32))
    got = run(after, q, k, v, starts, *([keys] if own_lengths else []))
    for b in range(3):
        at, over = slice(*starts[b : b + 2]), slice(*keys[b : b + 2])
        n, m = at.stop - at.start, over.stop - over.start
        seen = np.tril(np.ones((n, m), bool), m - n) if causal else None
        want = reference(q[:, at], k[:, over], v[:, over], 0.25, seen)
        np.testing.assert_allclose(got[:, at], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("mod", "says"),
    [
        (attention(CROSS, causal_mask="TopLeft"), "no more rows than keys"),
        (attention(CROSS, causal_mask="BottomRight"), "more rows than keys"),
        (attention(SAME, window_size=5), "causal_mask None"),
        (attention(SAME, "float64"), "the dtype is float64"),
        (attention(SAME, scale=float("inf")), "must be finite"),
        (attention({**SAME, "v": ("b", "n", 4, 32)}), "they must be equal"),
        (attention({**SAME, "k": ("b", "n", "h", 32)}), "number of heads is not known"),
        (attention({**SAME, "k": ("b", "m", 2, 32)}), "not provably equal"),
        (ragged("TopLeft", True), "lengths of their own"),
    ],
    ids=lambda x: "" if isinstance(x, tvm.IRModule) else x.replace(" ", "-"),
)
def test_kept_as_it_is(mod: tvm.IRModule, says: str) -> None:
    """With a row that says why, and a warning; in strict mode an error."""
    with pytest.warns(FallbackWarning, match=says):
        after = dispatched(mod)
    assert_structural_equal(without_report(after), mod)
    (row,) = rows(after)
    assert row.status == "fallback"
    assert row.kernel.startswith("relax.nn.attention")
    with pytest.raises(StrictModeError, match=says):
        dispatched(mod, strict=True)


@pytest.mark.parametrize(
    ("changes", "attrs", "dtype", "says"),
    [
        ({}, {}, "float32", "float16 and bfloat16"),
        ({"q": ("b", "n", 4, 264), "k": ("b", "n", 2, 264)}, {}, "float16", "head_dim is 264"),
        ({"q": ("b", "n", 4, 9), "k": ("b", "n", 2, 9)}, {}, "float16", "padding head_dim 9"),
        ({}, {"scale": -0.5}, "float16", "positive"),
    ],
)
def test_what_cuda_has_no_kernel_for(changes, attrs, dtype, says, cuda) -> None:
    with pytest.warns(FallbackWarning, match=says):
        dispatched(attention({**SAME, **changes}, dtype, **attrs), cuda, ship="shared")


def test_padding(cuda, llvm, rng, monkeypatch) -> None:
    """Operands get zeros up to the next kernel, and the result loses the columns again.

    Numbers are compared on CPU, which pads nothing by itself.
    """
    shapes = {"q": ("b", "n", 4, 72), "k": ("b", "n", 2, 72), "v": ("b", "n", 2, 40)}
    after = dispatched(attention(shapes, "float16"), cuda, ship="shared")
    (row,) = rows(after)
    assert row.status == "native"
    assert row.reasons == (
        "head_dim 72 of keys is padded to 80",
        "head_dim 40 of values is padded to 48",
    )
    monkeypatch.setattr(dispatch_attention, "kernel_head_dims", lambda site, target: (80, 48))
    padded = dispatched(attention(shapes), llvm)
    assert padded.script().count("R.nn.pad") == 3
    sizes = [(2, 9, 4, 72), (2, 9, 2, 72), (2, 9, 2, 40)]
    arrays = random(rng, *sizes)
    np.testing.assert_allclose(run(padded, *arrays), reference(*arrays, 72**-0.5), 1e-5, 1e-5)


def test_padding_of_ragged_requests(llvm, rng, monkeypatch) -> None:
    monkeypatch.setattr(dispatch_attention, "kernel_head_dims", lambda site, target: (48, 48))
    after = dispatched(ragged(None, False), llvm)
    arrays = random(rng, (1, 9, 4, 32), (1, 9, 2, 32), (1, 9, 2, 32))
    got = run(after, *arrays, np.array([0, 9], np.int32))
    np.testing.assert_allclose(got, reference(*arrays, 0.25), rtol=1e-5, atol=1e-5)


def test_cuda(cuda) -> None:
    """The same call; the report names the architecture."""
    after = dispatched(attention(SAME, "float16", causal_mask="TopLeft"), cuda, ship="shared")
    (row,) = rows(after)
    assert (row.status, row.arch) == ("native", "sm_90a")


def test_second_run_changes_nothing() -> None:
    once = dispatched(attention(SAME, causal_mask="TopLeft"))
    # TVM compares no modules, such as that which the library needs.
    both = (mod.without_attr("external_mods") for mod in (dispatched(once), once))
    assert_structural_equal(*both)


def test_second_run_over_a_kept_site() -> None:
    with pytest.warns(FallbackWarning):
        once = dispatched(attention(CROSS, causal_mask="TopLeft"))
    with pytest.warns(FallbackWarning):
        assert_structural_equal(dispatched(once), once)


def test_sites_of_all_functions_are_reported() -> None:
    builder = rx.BlockBuilder()
    for name in ("encode", "decode"):
        params = tensors(SAME)
        with builder.function(name, list(params.values())):
            first = builder.emit(rx.op.nn.attention(*params.values()), "first")
            second = rx.op.nn.attention(first, params["k"], params["v"], causal_mask="TopLeft")
            builder.emit_func_output(builder.emit(second, "second"))
    before = builder.get()
    dispatch = DispatchAttention(tvm.target.Target("llvm"))
    after = dispatch(before)
    rx.analysis.well_formed(after)
    # The builder numbers names that it has given before.
    names = {(row.site, row.slot.rstrip("1")) for row in dispatch.report.rows}
    slots = ("attention first", "attention second")
    assert names == {(function, slot) for function in ("encode", "decode") for slot in slots}
    assert dispatch.report == last_report()


def test_module_without_attention_is_returned_as_it_is() -> None:
    before = module(tensors(SAME), lambda emit, q, k, v: rx.op.add(q, q))
    dispatch = DispatchAttention(tvm.target.Target("llvm"))
    assert_structural_equal(dispatch(before), before)
    assert dispatch.report is None


def test_no_target_says_so() -> None:
    with pytest.raises(ValueError, match="target is not known"):
        DispatchAttention()(attention(SAME))


def test_memory_is_planned() -> None:
    """The output of the call is a tensor that TVM's planner allocates."""
    shapes = {"q": (2, 9, 4, 32), "k": (2, 9, 2, 32), "v": (2, 9, 2, 32)}
    mod = module(
        tensors(shapes),
        lambda emit, q, k, v: emit(rx.op.nn.attention(emit(rx.op.nn.attention(q, k, v)), k, v)),
    )
    steps = [rx.transform.CallTIRRewrite(), rx.transform.StaticPlanBlockMemory()]
    text = tvm.transform.Sequential([rx.transform.ToNonDataflow(), *steps])(
        dispatched(mod)
    ).script()
    assert "R.memory.alloc_storage" in text

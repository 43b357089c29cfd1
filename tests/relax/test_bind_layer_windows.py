"""The pass that tells the calls of a cache which window their layer has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tvm
from tvm import relax as rx
from tvm import tirx
from tvm.ir import assert_structural_equal
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn.llm.kv_cache import PagedKVCache

from tvm_flashinfer.relax import (
    BindLayerWindows,
    DispatchKVCacheCreation,
    attention_with_sinks,
    read_report,
)
from tvm_flashinfer.relax._compat import DEFAULT_LAYER_WINDOW

KINDS = ["mha_sliding", "mha", "mha_sliding"]
HEADS, KV_HEADS, DIM = 32, 8, 128

Call = Callable[[rx.Expr, int], rx.Call]


def dps(name: str, arguments: list[Any], rows: Any, *, lse: bool = False) -> rx.Call:
    out = rx.TensorType((rows, HEADS, DIM), "float16")
    outs = [out, rx.TensorType((rows, HEADS), "float32")] if lse else out
    return rx.call_dps_packed(name, arguments, out_ty=outs)


def fused(function: str, cache: rx.Expr, x: rx.Expr, layer: Any, *window: int) -> rx.Call:
    numbers = map(rx.prim_value, (0.25, *window))
    layer = rx.prim_value(layer) if isinstance(layer, int) else layer
    return dps(function, [cache, layer, *numbers, x], x.ty.shape[0])


VM = "vm.builtin.attention_kv_cache_attention_with_fused_qkv"
OURS = "flashinfer.cache_attention_in_window"


def add_model(
    builder: rx.BlockBuilder, calls: list[tuple[Any, ...]], name: str = "prefill"
) -> None:
    """A function that attends once for each call; `fused` takes what follows x."""
    x = rx.Var("x", rx.TensorType((tirx.Var("n", "int64"), HEADS + 2 * KV_HEADS, DIM), "float16"))
    cache = rx.Var("cache", rx.AnyType())
    with builder.function(name, [x, cache]):
        with builder.dataflow():
            for function, *rest in calls:
                out = builder.emit(fused(function, cache, x, *rest))
            output = builder.emit_output(out)
        builder.emit_func_output(output)


def model(*calls: tuple[Any, ...]) -> tvm.IRModule:
    builder = rx.BlockBuilder()
    add_model(builder, list(calls))
    return builder.get()


def test_each_call_names_the_window_of_its_layer() -> None:
    before = model((VM, 0), (VM, 1), (VM, 2))
    bind = BindLayerWindows(KINDS, 512)
    after = bind(before)
    assert_structural_equal(after, model((OURS, 0, 512), (OURS, 1, -1), (OURS, 2, 512)))
    assert (bind.bound, bind.left) == (3, [])
    assert rx.analysis.well_formed(after) in (None, True)  # 0.27 raises
    again = BindLayerWindows(KINDS, 512)
    assert_structural_equal(again(after), after)
    assert again.bound == 0


class Methods(nn.Module):
    """Every call of a cache that attends to new tokens, spelt by the frontend."""

    def prefill(
        self, qkv: nn.Tensor, q: nn.Tensor, k: nn.Tensor, sinks: nn.Tensor, cache: Any
    ) -> tuple[nn.Tensor, ...]:
        """Attend by each method."""
        first = cache.attention_with_fused_qkv(0, qkv, HEADS, 0.25)
        second, lse = cache.self_attention(1, q, k, k, 0.25)
        third = attention_with_sinks(cache, 2, qkv, HEADS, 0.25, sinks)
        if hasattr(cache, "attention_with_shared_kv"):
            third = third + cache.attention_with_shared_kv(0, q, k, k, 0.25)
        return first, second, lse, third


def test_every_method_of_the_frontend() -> None:
    """The window comes behind the scale, and the shapes stay."""

    def tensor(*shape: Any, dtype: str = "float16") -> Any:
        return nn.spec.Tensor([1, "n", *shape], dtype)

    spec = {
        "prefill": {
            "qkv": tensor(HEADS + 2 * KV_HEADS, DIM),
            "q": tensor(HEADS, DIM),
            "k": tensor(KV_HEADS, DIM),
            "sinks": nn.spec.Tensor([HEADS], "float16"),
            "cache": nn.spec.Object(object_type=PagedKVCache),
            "$": {"param_mode": "none", "effect_mode": "none"},
        }
    }
    before, _ = Methods().export_tvm(spec)
    after = BindLayerWindows(KINDS, 512)(before)
    assert rx.analysis.well_formed(after) in (None, True)  # 0.27 raises
    calls = {}

    def visit(expr: rx.Expr) -> None:
        if isinstance(expr, rx.Call) and isinstance(expr.args[0], rx.ExternFunc):
            numbers = [f.value for f in expr.args[1].fields if hasattr(f, "value")]
            calls[str(expr.args[0].global_symbol)] = [float(number) for number in numbers]

    rx.analysis.post_order_visit(after["prefill"], visit)
    expected = {
        "flashinfer.cache_attention_in_window": [0, 0.25, 512],
        "flashinfer.cache_self_attention_in_window": [1, 0.25, -1],
        "flashinfer.cache_attention_with_sinks_in_window": [2, 0.25, 512],
    }
    if hasattr(PagedKVCache, "attention_with_shared_kv"):
        expected["flashinfer.cache_shared_attention_in_window"] = [0, 0.25, 512]
    assert calls == expected
    assert_structural_equal(after["prefill"].ret_ty, before["prefill"].ret_ty, True)


def test_nothing_slides_and_other_functions() -> None:
    """The module is returned as it is, and functions without attention are the same objects."""
    before = model((VM, 0), (VM, 1))
    assert BindLayerWindows(["mha", "mha"], 512)(before).same_as(before)
    builder = rx.BlockBuilder(before)
    y = rx.Var("y", rx.TensorType((4,), "float32"))
    with builder.function("other", [y]):
        builder.emit_func_output(builder.emit(rx.op.add(y, y)))
    both = builder.get()
    after = BindLayerWindows(KINDS, 512)(both)
    assert after["other"].same_as(both["other"])
    assert not after["prefill"].same_as(both["prefill"])


def test_layers_that_are_bound_to_variables() -> None:
    """A constant behind a variable is found; a layer that is an argument is left and told."""

    def of(name: str, *window: int) -> tvm.IRModule:
        builder = rx.BlockBuilder()
        x = rx.Var("x", rx.TensorType((4, HEADS + 2 * KV_HEADS, DIM), "float16"))
        cache = rx.Var("cache", rx.AnyType())
        with builder.function("prefill", [x, cache]):
            layer = builder.emit(rx.prim_value(2))
            builder.emit_func_output(builder.emit(fused(name, cache, x, layer, *window)))
        return builder.get()

    assert_structural_equal(BindLayerWindows(KINDS, 512)(of(VM)), of(OURS, 512))
    builder = rx.BlockBuilder()
    x = rx.Var("x", rx.TensorType((4, HEADS + 2 * KV_HEADS, DIM), "float16"))
    cache, layer = rx.Var("cache", rx.AnyType()), rx.Var("layer", rx.AnyType())
    with builder.function("prefill", [x, cache, layer]):
        builder.emit_func_output(builder.emit(fused(VM, cache, x, layer)))
    before = builder.get()
    bind = BindLayerWindows(KINDS, 512)
    assert_structural_equal(bind(before), before)
    assert (bind.bound, bind.left) == (0, ["prefill"])


@pytest.mark.parametrize(
    ("kinds", "window", "message"),
    [
        (["mha", "slides"], 512, r"layer_kinds has \['slides'\].*mha, mla, mha_sliding"),
        ([], 512, "layer_kinds has no layer"),
        (KINDS, 0, "window is 0"),
    ],
)
def test_wrong_arguments(kinds: list[str], window: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BindLayerWindows(kinds, window)


def test_a_layer_without_a_kind() -> None:
    with pytest.raises(ValueError, match="prefill attends in layer 3, but layer_kinds has 3"):
        BindLayerWindows(KINDS, 512)(model((VM, 0), (VM, 3)))


def dispatched(
    module_builder: Any, target: Any, *caches: dict[str, Any], calls: Any = ((VM, 0), (VM, 1))
) -> tuple[tvm.IRModule, list[str]]:
    """A model and its caches after `DispatchKVCacheCreation`; what the report says of windows."""
    builder = rx.BlockBuilder()
    add_model(builder, list(calls))
    for i, changes in enumerate(caches):
        module_builder[0](builder, f"create_{i}_cache", **changes)
    mod = DispatchKVCacheCreation(target, ship="shared")(builder.get())
    rows = read_report({"flashinfer_report": lambda: mod["flashinfer_report"].body.body.value})
    notes = [row.reasons[-1] for row in rows.rows if row.slot == "prefill_ragged" and row.reasons]
    return mod, [note for note in notes if "window" in note]


SLIDING = {"num_hidden_layers": 2, "attn_kind": ["mha", "mha_sliding"]}


@pytest.mark.parametrize("kind", ["llvm", "cuda"])
def test_dispatch_of_the_cache_binds(kind: str, module_builder: Any, request: Any) -> None:
    mod, notes = dispatched(module_builder, request.getfixturevalue(kind), SLIDING)
    expected = model((OURS, 0, -1), (OURS, 1, DEFAULT_LAYER_WINDOW))
    assert_structural_equal(mod["prefill"], expected["prefill"])
    assert notes == ["2 calls of the module name the window of their layer"]


def test_slots_where_a_window_of_the_cache_is_refused(module_builder: Any, cuda: Any) -> None:
    """What a cache of `support_sliding_window` 1 would run is not promised where layers slide."""

    def promises(changes: dict[str, Any]) -> set[str]:
        mod, _ = dispatched(module_builder, cuda, changes)
        report = read_report(
            {"flashinfer_report": lambda: mod["flashinfer_report"].body.body.value}
        )
        promise = "created with support_sliding_window 1: "
        reasons = [reason for row in report.rows for reason in row.reasons]
        return {x.removeprefix(promise) for x in reasons if x.startswith(promise)}

    assert promises(SLIDING) == {"refused, since single layers have windows"}
    assert all(x.startswith("flashinfer.") for x in promises({}))
    assert promises({})


def test_dispatch_of_equal_caches_binds(module_builder: Any, llvm: Any) -> None:
    """It does not matter which of them a function is given."""
    mod, notes = dispatched(module_builder, llvm, SLIDING, SLIDING)
    expected = model((OURS, 0, -1), (OURS, 1, DEFAULT_LAYER_WINDOW))
    assert_structural_equal(mod["prefill"], expected["prefill"])
    assert len(notes) == 2


@pytest.mark.parametrize("other", [{"attn_kind": ["mha_sliding", "mha"]}, {"attn_kind": "mha"}])
def test_dispatch_of_different_caches_leaves_the_calls(
    other: dict[str, Any], module_builder: Any, llvm: Any
) -> None:
    mod, notes = dispatched(module_builder, llvm, SLIDING, {**SLIDING, **other})
    assert_structural_equal(mod["prefill"], model((VM, 0), (VM, 1))["prefill"])
    assert notes
    assert all("refused: the module creates caches of different layers" in note for note in notes)


def test_dispatch_without_layers_that_slide(module_builder: Any, llvm: Any) -> None:
    mod, notes = dispatched(module_builder, llvm, {})
    assert_structural_equal(mod["prefill"], model((VM, 0), (VM, 1))["prefill"])
    assert notes == []


def test_dispatch_of_a_cache_alone_says_so(module_builder: Any, llvm: Any) -> None:
    """The model may be in another module."""
    _, notes = dispatched(module_builder, llvm, SLIDING, calls=[("flashinfer.other", 0)])
    assert notes == [
        f"more new tokens of a request than the window of {DEFAULT_LAYER_WINDOW} are refused: no "
        "call in the module names its window, see BindLayerWindows"
    ]

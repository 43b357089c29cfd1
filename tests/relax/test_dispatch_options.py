"""The choices of the pass: strictness, where kernels are shipped, the window of layers."""

from __future__ import annotations

import json
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import tvm
from tvm import relax as rx
from tvm import tirx
from tvm.ir import assert_structural_equal
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind, RopeMode

from tvm_flashinfer.relax import (
    CompileReport,
    DispatchAttention,
    DispatchKVCacheCreation,
    FallbackWarning,
    StrictModeError,
)
from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW

OURS = "create_flashinfer_paged_kv_cache"
TVMS = "create_tir_paged_kv_cache"


def names(mod: tvm.IRModule) -> set[str]:
    return {var.name_hint for var in mod.get_global_vars()}


def test_unsupported_cache_is_tvms_with_reasons(generic_module, cuda) -> None:
    changes = {"qk_head_dim": 72, "v_head_dim": 72, "rotary_dim": 72}
    dispatch = DispatchKVCacheCreation(cuda)
    with pytest.warns(FallbackWarning, match="head_dim is 72"):
        after = dispatch(generic_module(**changes))
    rx.analysis.well_formed(after)
    assert OURS not in names(after)
    assert TVMS in names(after)
    (row,) = dispatch.report.rows
    assert (row.site, row.slot, row.status) == (OURS, "all", "fallback")
    assert any("head_dim is 72" in reason for reason in row.reasons)
    assert "external_mods" not in after.attrs


@pytest.mark.parametrize("how", ["argument", "environment"])
def test_strict_raises_with_reasons(how, generic_module, cuda, monkeypatch) -> None:
    strict = True
    if how == "environment":
        monkeypatch.setenv("TVM_FLASHINFER_STRICT", "1")
        strict = None
    changes = {"rope_scaling": {"rope_type": "dynamic"}, "dtype": "float32"}
    with pytest.raises(StrictModeError, match=r"dynamic.*\n.*float32") as caught:
        DispatchKVCacheCreation(cuda, strict=strict)(generic_module(**changes))
    assert len(caught.value.reasons) == 2


@pytest.mark.parametrize("kind", ["llvm", "cuda"])
def test_strict_passes_a_supported_cache(kind, generic_module, request) -> None:
    """Layers that slide, and trees, are ours too."""
    target = request.getfixturevalue(kind)
    mod = generic_module(attn_kind=["mha_sliding", "mha"], num_hidden_layers=2)
    dispatch = DispatchKVCacheCreation(target, ship="shared", strict=True)
    assert OURS in names(dispatch(mod))
    assert len(dispatch.report.rows) == 13
    assert dispatch.report.fallbacks == []


@pytest.fixture
def fake_kernels(monkeypatch, tmp_path) -> list[list[Any]]:
    """Stands in for the build of kernels; holds the specs of each build."""
    from tvm_flashinfer import kernels

    builds: list[list[Any]] = []

    def build_model_object(specs: list[Any]) -> Any:
        builds.append(list(specs))
        path = tmp_path / "kernels.o"
        path.write_bytes(b"")
        return path

    monkeypatch.setattr(kernels, "build_model_object", build_model_object)
    return builds


def test_cuda_is_self_contained_by_default(generic_module, cuda, fake_kernels) -> None:
    earlier = tvm.runtime.load_static_library(__file__, func_names=[])
    before = generic_module().with_attr("external_mods", [earlier])
    dispatch = DispatchKVCacheCreation(cuda)
    after = dispatch(before)
    attached = list(after.attrs["external_mods"])
    assert len(attached) == 2
    assert attached[0].same_as(earlier)
    assert dispatch.report.ship == "self-contained"
    (specs,) = fake_kernels
    assert [spec.name for spec in specs] == [
        "common_sm90a",
        "batch_attention_f16_d128_sm90a",
        "batch_prefill_paged_f16_d128_sm90a",
        "batch_prefill_paged_sm90_f16_d128_sm90a",
        "batch_prefill_ragged_f16_d128_sm90a",
        "batch_prefill_ragged_sm90_f16_d128_sm90a",
    ]


def test_cache_and_attention_share_one_object(module_builder, cuda, fake_kernels) -> None:
    """Two objects would both define the functions that they have in common."""
    builder = rx.BlockBuilder()
    module_builder[0](builder)
    x = rx.Var("x", rx.TensorType([tirx.Var("n", "int64"), 9, 4, 64], "float16"))
    with builder.function("encode", [x]):
        with builder.dataflow():
            output = builder.emit_output(rx.op.nn.attention(x, x, x))
        builder.emit_func_output(output)
    passes = [DispatchAttention(cuda), DispatchKVCacheCreation(cuda)]
    for order in (passes, passes[::-1]):
        fake_kernels.clear()
        after = tvm.transform.Sequential(order)(builder.get())
        rx.analysis.well_formed(after)
        assert len(after.attrs["external_mods"]) == 1
        attention = "batch_attention_f16_d{}_sm90a".format
        names = {spec.name for spec in fake_kernels[-1]}
        assert {"common_sm90a", attention(64), attention(128)} <= names
        rows = CompileReport.from_json(after["flashinfer_report"].body.body.value).rows
        assert {row.site for row in rows} == {OURS, "encode"}


def test_small_groups_need_the_decode_kernel(generic_module, cuda, fake_kernels) -> None:
    """From 4 query heads per KV head on, decode runs on the prefill kernel."""
    DispatchKVCacheCreation(cuda)(generic_module(num_attention_heads=24))
    assert fake_kernels[0][-1].name == "batch_decode_f16_d128_sm90a"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qk_head_dim": 80, "v_head_dim": 80, "rotary_dim": 80}, "head_dim is 80"),
        ({"rope_mode": int(RopeMode.INLINE)}, "rope_mode is inline"),
    ],
)
def test_caches_without_plans(changes, reason, generic_module, cuda, fake_kernels) -> None:
    dispatch = DispatchKVCacheCreation(cuda)
    after = dispatch(generic_module(**changes))
    (specs,) = fake_kernels
    assert [spec.kind for spec in specs] == ["common", "batch_attention"]
    rows = {row.slot: row for row in dispatch.report.rows}
    for slot in ("prefill_ragged", "prefill_paged", "decode_paged"):
        assert rows[slot].kernel == f"flashinfer.bind_attention_{slot}"
        assert reason in rows[slot].reasons[0]
    calls = slot_calls(after)
    assert len(calls) == 7
    assert not any(call.args[3].value for call in calls)


def slot_calls(mod: tvm.IRModule, name: str = OURS) -> list[rx.Call]:
    """The calls that give the slots of attention of our cache."""
    values = [binding.value for block in mod[name].body.blocks for binding in block.bindings]
    return [
        value
        for value in values
        if isinstance(value, rx.Call)
        and isinstance(value.args[0], rx.ExternFunc)
        and value.args[0].global_symbol == "flashinfer.cache_slot"
    ]


def test_caches_share_one_object(module_builder, cuda, fake_kernels, monkeypatch) -> None:
    monkeypatch.setenv("MLC_MULTI_ARCH", "80,90a")
    builder = rx.BlockBuilder()
    module_builder[0](builder)
    module_builder[0](builder, "create_draft_cache", num_hidden_layers=1)
    after = DispatchKVCacheCreation(cuda)(builder.get())
    assert len(after.attrs["external_mods"]) == 1
    (specs,) = fake_kernels
    assert len(specs) == len(set(specs)) == 6
    both = [spec for spec in specs if not spec.kind.endswith("_sm90")]
    assert len(both) == 4
    assert all(spec.archs == ("80", "90a") for spec in both)


def test_shared_attaches_what_the_library_needs(generic_module, cuda, fake_kernels) -> None:
    after = DispatchKVCacheCreation(cuda, ship="shared")(generic_module())
    (module,) = after.attrs["external_mods"]
    assert module.kind == "pip install 'tvm-flashinfer>=0.1.0'"
    assert fake_kernels == []


@pytest.mark.parametrize(
    ("ship", "message"), [("static", "expected 'self-contained'"), ("self-contained", "llvm")]
)
def test_wrong_ship(ship: str, message: str, generic_module, llvm) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        DispatchKVCacheCreation(llvm, ship=ship)(generic_module())


def test_linear_scaling_of_tvms_cache_is_its_scale(generic_module, llvm) -> None:
    """TVM has no linear RoPE scaling; dividing the positions is the same."""
    linear = {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    after = DispatchKVCacheCreation(llvm)(generic_module(**linear))
    same = DispatchKVCacheCreation(llvm)(generic_module(rope_scale=0.25))
    assert_structural_equal(after[TVMS], same[TVMS], map_free_vars=True)


@pytest.mark.parametrize(
    ("ours", "which"),
    [(("flashinfer",), {OURS}), (("tir",), {TVMS}), (("flashinfer", "tir"), {OURS, TVMS})],
)
def test_functions_that_make_our_cache(ours, which, generic_module, llvm) -> None:
    dispatch = DispatchKVCacheCreation(llvm, ours=ours)
    after = dispatch(generic_module())
    rx.analysis.well_formed(after)
    assert names(after) & {OURS, TVMS} == which | {TVMS}
    assert {row.site for row in dispatch.report.rows} == which
    with_slots = {name for name in which | {TVMS} if slot_calls(after, name)}
    assert with_slots == which


@pytest.mark.parametrize("ours", [(), ("both",)])
def test_wrong_functions(ours) -> None:
    with pytest.raises(ValueError, match="expected one or both of flashinfer, tir"):
        DispatchKVCacheCreation(ours=ours)


def test_kernels_that_cannot_be_built(generic_module, cuda, monkeypatch) -> None:
    """The cache is TVM's, as for any other reason."""
    from tvm_flashinfer import kernels
    from tvm_flashinfer.kernels.errors import CacheError

    def fail(specs: list[Any]) -> None:
        raise CacheError("/nowhere cannot be written")

    monkeypatch.setattr(kernels, "build_model_object", fail)
    with pytest.warns(FallbackWarning, match="CacheError: /nowhere cannot be written"):
        after = DispatchKVCacheCreation(cuda)(generic_module())
    assert OURS not in names(after)
    assert TVMS in names(after)
    with pytest.raises(StrictModeError, match="/nowhere cannot be written"):
        DispatchKVCacheCreation(cuda, strict=True)(generic_module())


def test_ship_of_the_environment(generic_module, cuda, llvm, fake_kernels, monkeypatch) -> None:
    """An argument goes first, and on CPU there is no choice."""
    monkeypatch.setenv("TVM_FLASHINFER_SHIP", "shared")
    dispatch = DispatchKVCacheCreation(cuda)
    dispatch(generic_module())
    assert dispatch.report.ship == "shared"
    assert fake_kernels == []
    DispatchKVCacheCreation(cuda, ship="self-contained")(generic_module())
    assert len(fake_kernels) == 1
    monkeypatch.setenv("TVM_FLASHINFER_SHIP", "static")
    DispatchKVCacheCreation(llvm)(generic_module())
    with pytest.raises(ValueError, match="ship is 'static'"):
        DispatchKVCacheCreation(cuda)(generic_module())


def test_kernels_are_not_imported_for_shared(generic_module, llvm, monkeypatch) -> None:
    broken = ModuleType("tvm_flashinfer.kernels.build")
    monkeypatch.setitem(sys.modules, "tvm_flashinfer.kernels.build", broken)
    assert OURS in names(DispatchKVCacheCreation(llvm)(generic_module()))


@pytest.mark.skipif(not HAS_LAYER_WINDOW, reason="TVM 0.26 fixes the window of layers at 1024")
def test_window_of_layers(generic_module, llvm) -> None:
    kinds = ["mha_sliding", "mha"]
    mod = generic_module(attn_kind=kinds, num_hidden_layers=2)
    after = DispatchKVCacheCreation(llvm, layer_sliding_window_size=512)(mod)
    for name in (OURS, TVMS):
        # TVM's class binds its call to a variable of its own.
        values = [binding.value for binding in after[name].body.blocks[0].bindings]
        call = [value for value in values if isinstance(value, rx.Call)][-1]
        assert list(call.args[1].values)[5] == 512
        assert list(call.args[7].values) == [int(AttnKind.MHA_SLIDING), int(AttnKind.MHA)]
    windows = [json.loads(call.args[2].value).get("layer_window") for call in slot_calls(after)]
    assert windows == [512, None, None, 512, 512, 512, 512]


def test_no_window_without_layers_that_slide(generic_module, llvm) -> None:
    """The window slots of such a cache are for the window of the whole cache."""
    after = DispatchKVCacheCreation(llvm)(generic_module())
    assert {"layer_window" in call.args[2].value for call in slot_calls(after)} == {False}


def test_without_rope_nothing_is_bound(generic_module, llvm) -> None:
    """Such models leave values that mean nothing."""
    changes = {"rope_mode": int(RopeMode.NONE), "rotary_dim": -1, "rope_theta": -1}
    after = DispatchKVCacheCreation(llvm)(generic_module(**changes))
    assert {call.args[2].value for call in slot_calls(after)} == {"{}"}


MLA = {
    "attn_kind": "mla",
    "num_hidden_layers": 1,
    "num_key_value_heads": 1,
    "qk_head_dim": 576,
    "v_head_dim": 512,
    "mla_original_qk_head_dim": 192,
    "mla_original_v_head_dim": 128,
    "rope_mode": int(RopeMode.NONE),
}


def test_mla_on_cpu_is_ours_alone(generic_module, llvm) -> None:
    """TVM has no kernels for it there."""
    dispatch = DispatchKVCacheCreation(llvm)
    after = dispatch(generic_module(**MLA))
    rx.analysis.well_formed(after)
    assert OURS in names(after)
    assert TVMS not in names(after)
    assert [call.args[1].value for call in slot_calls(after)] == ["prefill_ragged", "mla"]
    assert dispatch.report.fallbacks == []


def test_mla_on_cuda(generic_module, cuda, fake_kernels) -> None:
    """A plan for the pages and for the new tokens, and the kernel for steps that have none."""
    dispatch = DispatchKVCacheCreation(cuda)
    after = dispatch(generic_module(**MLA, num_attention_heads=16))
    rx.analysis.well_formed(after)
    ragged, mla = slot_calls(after)
    assert json.loads(ragged.args[2].value) == {"head_dim_qk": 192, "head_dim_vo": 128}
    assert [bool(call.args[3].value) for call in (ragged, mla)] == [True, True]
    assert dispatch.report.fallbacks == []
    kernels = {row.slot: row.kernel for row in dispatch.report.rows}
    assert kernels["prefill_ragged"] == "flashinfer.batch_prefill_ragged_run"
    assert kernels["mla"] == "flashinfer.batch_mla_run"
    assert [spec.name for spec in fake_kernels[0]] == [
        "common_sm90a",
        "batch_attention_f16_d192x128_sm90a",
        "batch_prefill_ragged_f16_d192x128_sm90a",
        "batch_prefill_ragged_sm90_f16_d192x128_sm90a",
        "batch_mla_f16_d576x512_sm90a",
        "batch_mla_sm90_f16_d576x512_sm90a",
    ]


@pytest.mark.parametrize(
    ("arch", "has_hopper"), [("sm_80", False), ("sm_90", True), ("sm_100a", False)]
)
def test_mla_kernels_of_an_architecture(generic_module, fake_kernels, arch, has_hopper) -> None:
    """A target that says sm_90 means Hopper too, whose kernel is compiled as 90a."""
    target = tvm.target.Target({"kind": "cuda", "arch": arch})
    DispatchKVCacheCreation(target)(generic_module(**MLA))
    kinds = {spec.kind: spec.archs for spec in fake_kernels[0]}
    assert kinds.get("batch_mla_sm90") == (("90a",) if has_hopper else None)
    assert kinds["batch_mla"] == (arch[3:],)


def test_mla_of_other_head_dims_on_cuda(generic_module, cuda, fake_kernels) -> None:
    """Where there is no kernel with a plan, the one without."""
    dims = {"qk_head_dim": 160, "v_head_dim": 128, "mla_original_qk_head_dim": 96}
    dispatch = DispatchKVCacheCreation(cuda)
    after = dispatch(generic_module(**{**MLA, **dims}))
    assert [bool(call.args[3].value) for call in slot_calls(after)] == [False, False]
    rows = {row.slot: row for row in dispatch.report.rows}
    assert rows["mla"].kernel == "flashinfer.bind_attention_mla"
    assert "have 576 with values of 512" in rows["mla"].reasons[0]
    assert [spec.name for spec in fake_kernels[0]] == [
        "common_sm90a",
        "batch_attention_f16_d96x128_sm90a",
        "batch_attention_f16_d160x128_sm90a",
    ]

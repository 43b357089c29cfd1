"""The pass that turns the generic creation of a paged KV cache into ours and TVM's."""

from __future__ import annotations

import pytest
import tvm
from tvm import relax as rx
from tvm import tirx
from tvm.ir import assert_structural_equal
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

from tvm_flashinfer.relax import (
    CompileReport,
    DispatchKVCacheCreation,
    KVCacheCallError,
    last_report,
)
from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW, StringImm

OURS = "create_flashinfer_paged_kv_cache"
TVMS = "create_tir_paged_kv_cache"
SIZES = [
    "max_batch_size",
    "max_total_seq_len",
    "prefill_chunk_size",
    "page_size",
    "support_sliding_window",
]


def names(mod: tvm.IRModule) -> set[str]:
    return {var.name_hint for var in mod.get_global_vars()}


def parameters() -> tuple[list[tirx.Var], list[rx.Var]]:
    sizes = [tirx.Var(size, "int64") for size in SIZES]
    return sizes, [rx.Var(f"{var.name}_", rx.ShapeType([var])) for var in sizes]


def add_expected_ours(builder: rx.BlockBuilder, planned: bool) -> None:
    """The creation function of Llama-3-8B, spelt out."""
    sizes, params = parameters()

    def attention(slot: str, planned: bool, name: str) -> rx.Var:
        call = rx.call_pure_packed(
            "flashinfer.cache_slot",
            StringImm(slot),
            StringImm('{"rope_scaling": {}, "rotary_dim": 128}'),
            rx.prim_value(planned),
            sizes[4],
            ty_args=rx.AnyType(),
        )
        return builder.emit(call, name)

    with builder.function(OURS, params, attrs={"num_input": 5}):
        with builder.dataflow():
            slots = [
                attention("prefill_ragged", planned, "prefill_ragged"),
                attention("prefill_paged", planned, "prefill_paged"),
                attention("decode_paged", planned, "decode_paged"),
                attention("prefill_paged", False, "prefill_sliding_window"),
                attention("decode_paged", False, "decode_sliding_window"),
                attention("tree_paged", False, "tree_paged"),
                attention("tree_ragged", False, "tree_ragged"),
            ]
            rotary = builder.emit(
                rx.call_pure_packed(
                    "flashinfer.bind_split_qkv_rotary",
                    rx.prim_value(500000.0),
                    rx.prim_value(1.0),
                    rx.prim_value(128),
                    StringImm("{}"),
                    ty_args=rx.AnyType(),
                )
            )
            cache = rx.call_pure_packed(
                "vm.builtin.paged_attention_kv_cache_create",
                rx.ShapeExpr([*sizes, 1024] if HAS_LAYER_WINDOW else sizes),
                rx.ShapeExpr([0, 32]),
                rx.prim_value(32),
                rx.prim_value(8),
                rx.prim_value(128),
                rx.prim_value(128),
                rx.ShapeExpr([0] * 32),
                rx.prim_value(False),
                rx.prim_value(1),
                rx.prim_value(1),
                rx.prim_value(500000.0),
                rx.prim_value(0),
                rx.op.zeros((), "float16"),
                rx.ExternFunc("flashinfer.append_paged_kv_cache"),
                rx.prim_value(0),
                *slots,
                rx.Tuple([]),
                rx.Tuple([rx.ExternFunc("flashinfer.merge_state_in_place")] * 2),
                rotary,
                rx.ExternFunc("flashinfer.copy_single_page"),
                rx.ExternFunc("flashinfer.debug_get_kv"),
                rx.ExternFunc("flashinfer.compact_kv_copy"),
                ty_args=rx.AnyType(),
            )
            output = builder.emit_output(cache)
        builder.emit_func_output(output)


def add_expected_tvms(builder: rx.BlockBuilder, target: tvm.target.Target) -> None:
    """TVM's own cache, made by TVM's own class."""
    sizes, params = parameters()
    with builder.function(TVMS, params, attrs={"num_input": 5}):
        with builder.dataflow():
            cache = tvm_kv_cache.TIRPagedKVCache(
                "mha",
                *sizes,
                layer_partition=rx.ShapeExpr([0, 32]),
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
                qk_head_dim=128,
                v_head_dim=128,
                mla_original_qk_head_dim=0,
                mla_original_v_head_dim=0,
                rope_mode=RopeMode.NORMAL,
                rope_scale=1,
                rope_theta=500000.0,
                rope_scaling={},
                rope_ext_factors=rx.prim_value(0),
                rotary_dim=128,
                enable_disaggregation=False,
                dtype="float16",
                target=target,
            )
            output = builder.emit_output(cache._expr)
        builder.emit_func_output(output)


@pytest.mark.parametrize("kind", ["llvm", "cuda"])
def test_rewrites_to_both_caches(kind: str, generic_module, module_builder, request) -> None:
    target = request.getfixturevalue(kind)
    before = generic_module()
    rx.analysis.well_formed(before)

    builder = rx.BlockBuilder()
    module_builder[1](builder)
    add_expected_ours(builder, planned=kind == "cuda")
    add_expected_tvms(builder, target)
    expected = builder.get()

    dispatch = DispatchKVCacheCreation(target, ship="shared")
    after = dispatch(before)
    rx.analysis.well_formed(after)
    report = after["flashinfer_report"].body.body.value
    assert CompileReport.from_json(report) == dispatch.report == last_report()
    assert after.attrs["tvm_flashinfer.report"] == report
    functions = {v: f for v, f in after.functions_items() if v.name_hint != "flashinfer_report"}
    # One of TVM's kernels has a free variable.
    assert_structural_equal(tvm.IRModule(functions), expected, map_free_vars=True)


def test_other_functions_are_the_same_objects(generic_module, llvm) -> None:
    before = generic_module()
    after = DispatchKVCacheCreation(llvm)(before)
    assert after["embed"].same_as(before["embed"])
    assert "create_paged_kv_cache" in names(before), "the input must not be changed"
    assert "create_paged_kv_cache" not in names(after)


def test_module_without_the_call_is_returned_as_it_is(module_builder, llvm) -> None:
    builder = rx.BlockBuilder()
    module_builder[1](builder)
    before = builder.get()
    dispatch = DispatchKVCacheCreation(llvm)
    after = dispatch(before)
    assert_structural_equal(after, before)
    assert names(after) == {"embed"}
    assert dispatch.report is None


def test_function_of_that_name_without_the_call_stays(llvm) -> None:
    builder = rx.BlockBuilder()
    with builder.function("create_paged_kv_cache", []):
        builder.emit_func_output(rx.call_pure_packed("other.create", ty_args=rx.AnyType()))
    before = builder.get()
    assert_structural_equal(DispatchKVCacheCreation(llvm)(before), before)


def test_second_run_changes_nothing(generic_module, llvm) -> None:
    once = DispatchKVCacheCreation(llvm)(generic_module())
    twice = DispatchKVCacheCreation(llvm)(once)
    assert list(twice.attrs["external_mods"]) == list(once.attrs["external_mods"])
    # TVM compares no modules.
    assert_structural_equal(*(mod.without_attr("external_mods") for mod in (twice, once)))


def test_two_creation_functions(module_builder, llvm) -> None:
    builder = rx.BlockBuilder()
    module_builder[0](builder)
    module_builder[0](
        builder,
        "make_draft_cache",
        num_hidden_layers=2,
        qk_head_dim=64,
        v_head_dim=64,
        rotary_dim=64,
    )
    dispatch = DispatchKVCacheCreation(llvm)
    after = dispatch(builder.get())
    rx.analysis.well_formed(after)
    created = {OURS, TVMS, "make_draft_cache_flashinfer", "make_draft_cache_tir"}
    assert created <= names(after)
    symbols = [function.attrs["global_symbol"] for _, function in after.functions_items()]
    assert len(symbols) == len(set(symbols)), "a module with two of one symbol cannot be built"
    assert {row.site for row in dispatch.report.rows} == {OURS, "make_draft_cache_flashinfer"}


def test_attributes_are_kept(generic_module, llvm) -> None:
    before = generic_module().with_attr("model", "llama")
    after = DispatchKVCacheCreation(llvm)(before)
    assert after.attrs["model"] == "llama"
    for name in (OURS, TVMS):
        assert after[name].attrs["num_input"] == 5
        assert after[name].attrs["global_symbol"] == name


def test_bindings_around_the_call_are_kept(module_builder, llvm) -> None:
    """The function is rewritten, not made anew."""
    builder = rx.BlockBuilder()
    module_builder[0](builder, observer="test.observe")
    before = builder.get()
    rx.analysis.well_formed(before)
    after = DispatchKVCacheCreation(llvm)(before)
    rx.analysis.well_formed(after)
    for name in (OURS, TVMS):
        value = after[name].body.blocks[-1].bindings[-1].value
        assert value.args[0].global_symbol == "test.observe"
        assert value.args[1].same_as(after[name].body.blocks[0].bindings[-1].var)


def test_target_of_the_context(generic_module, llvm) -> None:
    with llvm:
        after = DispatchKVCacheCreation()(generic_module())
    assert OURS in names(after)


def test_no_target_says_so(generic_module) -> None:
    with pytest.raises(ValueError, match="target is not known"):
        DispatchKVCacheCreation()(generic_module())


def test_wrong_number_of_arguments(generic_module, llvm) -> None:
    mod = generic_module(edit=lambda args: args[:16] + args[17:])
    with pytest.raises(KVCacheCallError, match=r"called with 17 arguments.*Expected 18: attn_kind"):
        DispatchKVCacheCreation(llvm)(mod)


def test_call_in_a_branch_is_refused(module_builder, llvm) -> None:
    builder = rx.BlockBuilder()
    module_builder[0](builder)
    inner = builder.get()["create_paged_kv_cache"]
    which = rx.Var("which", rx.TensorType([], "bool"))
    value = inner.body.blocks[0].bindings[0].value
    output = rx.Var("output", rx.AnyType())
    branches = [
        rx.SeqExpr([rx.BindingBlock([rx.VarBinding(v := rx.Var("c", rx.AnyType()), value)])], v)
        for _ in range(2)
    ]
    block = rx.BindingBlock([rx.VarBinding(output, rx.If(which, *branches))])
    function = rx.Function([*inner.params, which], rx.SeqExpr([block], output), rx.AnyType())
    mod = tvm.IRModule(
        {"create_paged_kv_cache": function.with_attr("global_symbol", "create_paged_kv_cache")}
    )
    with pytest.raises(KVCacheCallError, match=r"0 calls .* outside of branches"):
        DispatchKVCacheCreation(llvm)(mod)


def test_creation_called_from_the_module_is_refused(generic_module, llvm) -> None:
    mod = generic_module()
    builder = rx.BlockBuilder(mod)
    _, params = parameters()
    with builder.function("main", params):
        builder.emit_func_output(rx.Call(mod.get_global_var("create_paged_kv_cache"), params))
    with pytest.raises(KVCacheCallError, match="main calls create_paged_kv_cache"):
        DispatchKVCacheCreation(llvm)(builder.get())

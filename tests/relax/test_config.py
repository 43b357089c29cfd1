"""Reading the generic call."""

from __future__ import annotations

import pytest
from tvm import relax as rx

from tvm_flashinfer.relax import KVCacheCallError, parse_generic_call
from tvm_flashinfer.relax._compat import StringImm


def call_of(mod) -> rx.Call:
    return mod["create_paged_kv_cache"].body.blocks[0].bindings[0].value


def test_reads_every_argument(generic_module) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0}
    mod = generic_module(rope_scaling=scaling, enable_disaggregation=True, dtype="bfloat16")
    call = call_of(mod)
    config = parse_generic_call(call)
    assert (config.attn_kind, config.layer_kinds) == ("mha", ("mha",) * 32)
    assert (config.num_hidden_layers, config.num_attention_heads) == (32, 32)
    assert (config.num_key_value_heads, config.head_ratio) == (8, 4)
    assert (config.qk_head_dim, config.v_head_dim, config.rotary_dim) == (128, 128, 128)
    assert (config.rope_mode, config.rope_scale, config.rope_theta) == (1, 1, 500000.0)
    assert (config.rope_scaling, config.rope_type) == (scaling, "llama3")
    assert config.enable_disaggregation is True
    assert config.dtype == "bfloat16"
    assert config.support_sliding_window.same_as(call.args[2].values[4])
    assert list(config.layer_partition.values) == [0, 32]


def test_reads_a_kind_for_each_layer(generic_module) -> None:
    kinds = ["mha_sliding", "mha"]
    config = parse_generic_call(call_of(generic_module(attn_kind=kinds, num_hidden_layers=2)))
    assert config.attn_kind == ("mha_sliding", "mha")
    assert config.builder_arguments()["attn_kind"] == kinds


def test_follows_bindings(generic_module) -> None:
    """A pass may bind a tuple of constants to a variable before the call."""
    kinds = rx.Tuple([StringImm("mha")] * 32)
    var = rx.Var("kinds", rx.TupleType([rx.AnyType()] * 32))
    call = call_of(generic_module())
    moved = rx.Call(call.op, [call.args[0], var, *call.args[2:]], call.attrs, call.ty_args)
    config = parse_generic_call(moved, {var: kinds}.get)
    assert config.attn_kind == ("mha",) * 32


def test_reads_extension_factors(generic_module) -> None:
    config = parse_generic_call(call_of(generic_module(rope_ext_factors=[1.0, 2.0])))
    assert config.rope_ext_factors is not None


@pytest.mark.parametrize(
    ("position", "value", "message"),
    [
        (0, StringImm("paged"), "'attn_kind'.*'paged', expected one of mha, mla, mha_sliding"),
        (1, rx.ShapeExpr([1, 2, 3]), "'sizes'.*has 3 values.*Expected 5: max_batch_size"),
        (2, rx.prim_value(3), "'layer_partition'.*expected a shape"),
        (4, rx.prim_value(3.5), "'num_attention_heads'.*expected an integer"),
        (11, StringImm("x"), "'rope_scale'.*expected a number"),
        (13, StringImm("{"), "'rope_scaling' .*cannot be read"),
        (17, rx.prim_value(16), "'dtype'.*expected a dtype"),
    ],
)
def test_wrong_argument_is_named(position, value, message, generic_module) -> None:
    def edit(args):
        return [*args[:position], value, *args[position + 1 :]]

    with pytest.raises(KVCacheCallError, match=message):
        parse_generic_call(call_of(generic_module(edit=edit)))


def test_wrong_number_of_layer_kinds(generic_module) -> None:
    with pytest.raises(KVCacheCallError, match=r"names 2 layers.*'num_hidden_layers' is 32"):
        parse_generic_call(call_of(generic_module(attn_kind=["mha", "mha"])))

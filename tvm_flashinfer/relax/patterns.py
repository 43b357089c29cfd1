"""The patterns ``flashinfer.*`` in TVM's registry, for those who partition a model first.

`DispatchAttention` needs no patterns, and finds more: a mask is proven from what makes it, which a
pattern leaves outside. Of these patterns each becomes a function of its own, which the pass then
rewrites inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import tvm
from tvm import relax as rx
from tvm.relax.backend import pattern_registry
from tvm.relax.backend.patterns import make_attention_pattern
from tvm.relax.dpl import DFPattern, is_const, is_op, wildcard
from tvm.relax.transform import PatternCheckContext
from tvm.target import Target

from tvm_flashinfer.relax.attention_match import read_products
from tvm_flashinfer.relax.attention_ops import read_operator
from tvm_flashinfer.relax.attention_support import unserved_reasons
from tvm_flashinfer.relax.graph import Graph

#: What the names of all patterns start with.
PREFIX = "flashinfer."

Pattern = tuple[str, DFPattern, Mapping[str, DFPattern], Callable[[PatternCheckContext], bool]]


def attention_patterns() -> list[Pattern]:
    """Return name, pattern, annotations and check of every pattern; later ones come first."""
    return [
        (f"{PREFIX}attention_products", *_products(None), _check),
        (f"{PREFIX}attention_products_multiplied", *_products("relax.multiply"), _check),
        (f"{PREFIX}attention_products_divided", *_products("relax.divide"), _check),
        (f"{PREFIX}attention", *make_attention_pattern(), _check),
        (f"{PREFIX}attention_bias", *make_attention_pattern(with_bias=True), _check),
        (f"{PREFIX}attention_var_len", *make_attention_pattern(var_len=True), _check),
    ]


def partition_for_flashinfer(mod: tvm.IRModule, target: Target | None = None) -> tvm.IRModule:
    """Move every attention that a pattern finds into a function of its own.

    Parameters
    ----------
    mod : tvm.IRModule
    target : tvm.target.Target, optional
        What the model is compiled for; the current target when it is left out. Attention that no
        kernel for it serves stays where it is.

    Returns
    -------
    mod : tvm.IRModule
        With functions whose attribute ``Composite`` is the name of a pattern. `DispatchAttention`
        rewrites them.
    """
    target = target or Target.current(allow_none=True) or Target("llvm")
    patterns = pattern_registry.get_patterns_with_prefix(PREFIX)
    with target:
        fused = rx.transform.FuseOpsByPattern(patterns, bind_constants=True)(mod)
    return fused


def _products(scale: str | None) -> tuple[DFPattern, Mapping[str, DFPattern]]:
    query, key, value = wildcard(), wildcard(), wildcard()
    scores = is_op("relax.matmul")(query, is_op("relax.permute_dims")(key))
    if scale is not None:
        scores = is_op(scale)(scores, is_const())
    out = is_op("relax.matmul")(is_op("relax.nn.softmax")(scores), value)
    return out, {"query": query, "key": key, "value": value, "scores": scores}


def _check(context: PatternCheckContext) -> bool:
    """Return whether a kernel for the current target serves what a pattern has found."""
    values = {var: value for value, var in context.value_to_bound_var.items()}
    graph = Graph.of_values(values, context.var_usages)
    root = context.matched_expr
    var = context.value_to_bound_var[root]
    site = read_operator(graph, var, root) or read_products(graph, var, root)
    target = Target.current(allow_none=True) or Target("llvm")
    # A view after the products is not part of the pattern, so it must not be the result either.
    return site is not None and not unserved_reasons(site, target)


pattern_registry.register_patterns(attention_patterns())

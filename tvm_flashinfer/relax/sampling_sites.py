"""Sampling in a function: TVM's operator, and the chains of its frontend over sorted rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tvm
import tvm_ffi
from tvm import relax as rx
from tvm.ir import GlobalVar
from tvm.relax.frontend import nn

from tvm_flashinfer.relax.graph import Graph, op_name

#: The functions of TVM's frontend whose computations are looked for.
_SAMPLE = nn.op.sample_top_p_top_k_from_sorted_prob
_RENORM = nn.op.renormalize_top_p_top_k_prob


@dataclass
class SamplingSite:
    """One place where tokens are sampled, or probabilities renormalised.

    Attributes
    ----------
    form : str
        What TVM computes there, as the report names it.
    kernel : str
        The function that serves it.
    root : relax.Call
        What is replaced.
    name : str
        The variable that the root is bound to.
    operands : tuple of relax.Expr
        Tensors that the function takes, in its order.
    problems : list of str
        Why no function serves it.
    notes : list of str
        What there is to know of a site that is served.
    scalars : tuple of int
        Numbers that the function takes after the tensors.
    """

    form: str
    kernel: str
    root: rx.Call
    name: str
    operands: tuple[rx.Expr, ...]
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    scalars: tuple[int, ...] = ()


def find_sampling(function: rx.Function, mod: tvm.IRModule) -> list[SamplingSite]:
    """Return every sampling site of a function, in the order of the bindings."""
    graph = Graph(function)
    found = (
        _multinomial(binding) or _sorted_draw(graph, mod, binding) or _renorm(graph, mod, binding)
        for binding in graph.bindings
    )
    return [site for site in found if site is not None]


def _multinomial(binding: rx.VarBinding) -> SamplingSite | None:
    call = binding.value
    if op_name(call) != "relax.multinomial_from_uniform":
        return None
    kernel = "flashinfer.sampling.parallel_sampling_from_prob"
    site = SamplingSite(
        "multinomial_from_uniform", kernel, call, binding.var.name, tuple(call.args)
    )
    site.problems += _dtype_problems(site, ("float32", "float32", ("int32", "int64")))
    site.notes.append(
        "a token is drawn when the running sum is above the random number, as by TVM on CPU; TVM's "
        "CUDA kernel draws it from 1e-6 below on"
    )
    return site


def _sorted_draw(graph: Graph, mod: tvm.IRModule, binding: rx.VarBinding) -> SamplingSite | None:
    draw = _call_tir(mod, binding.value, "get_index_from_sorted")
    if draw is None:
        return None
    sums, indices, total, uniform, rows = draw[1]
    renorm = _call_tir(mod, graph.value(total), "get_renorm_prob")
    if renorm is None or not _same(graph, renorm[1][0], sums):
        return None
    top_p, top_k = renorm[1][1:]
    probs = _summed(graph, sums)
    if probs is None:
        return None
    inputs = (probs, indices, top_p, top_k, uniform, rows)
    if not _are_of_tvm(_SAMPLE, inputs, (draw[0], renorm[0])):
        return None
    kernel = "flashinfer.sampling.sample_from_sorted"
    form = "sample_top_p_top_k_from_sorted_prob"
    site = SamplingSite(form, kernel, binding.value, binding.var.name, inputs)
    integers = ("int32", "int64")
    site.problems += _dtype_problems(
        site, ("float32", "int32", "float32", integers, "float32", integers)
    )
    return site


def _renorm(graph: Graph, mod: tvm.IRModule, binding: rx.VarBinding) -> SamplingSite | None:
    division = binding.value
    if op_name(division) != "relax.divide":
        return None
    kept, total = division.args
    total = graph.value(total)
    if op_name(total) != "relax.sum" or not _same(graph, total.args[0], kept):
        return None
    if [int(x) for x in total.attrs.axis or ()] != [1] or not total.attrs.keepdims:
        return None
    chosen = _call_tir(mod, graph.value(kept), "filter_with_top_p_top_k")
    cutoff = chosen and _call_tir(mod, graph.value(chosen[1][1]), "get_renorm_cutoff")
    if not cutoff:
        return None
    probs, (ordered, sums, top_p, top_k) = chosen[1][0], cutoff[1]
    summed = _summed(graph, sums)
    if summed is None or not _same(graph, summed, ordered):
        return None
    inputs = (probs, ordered, top_p, top_k)
    if not _are_of_tvm(_RENORM, inputs, (chosen[0], cutoff[0])):
        return None
    kernel = "flashinfer.sampling.renorm_from_sorted"
    form = "renormalize_top_p_top_k_prob"
    site = SamplingSite(form, kernel, division, binding.var.name, inputs)
    site.problems += _dtype_problems(site, ("float32", "float32", "float32", ("int32", "int64")))
    if _is_sorted(graph, ordered, probs):
        # The cut-off is then a threshold, which is found without the order. TVM keeps one token at
        # least, where a top_k of 0 keeps all in ours.
        site.kernel, site.scalars = "flashinfer.sampling.top_k_top_p_renorm_probs", (1,)
        one = rx.const(1, str(top_k.ty.dtype))
        site.operands = (probs, rx.op.maximum(top_k, one), top_p)
        site.notes.append("the rows need not be sorted for it")
    return site


def _is_sorted(graph: Graph, ordered: rx.Expr, probs: rx.Expr) -> bool:
    """Return whether rows are those of probabilities in descending order."""
    call = graph.value(ordered)
    return (
        op_name(call) == "relax.sort"
        and bool(call.attrs.descending)
        and int(call.attrs.axis) in (1, -1)
        and _same(graph, call.args[0], probs)
    )


def _call_tir(
    mod: tvm.IRModule, value: Any, name: str
) -> tuple[tvm.tirx.PrimFunc, list[rx.Expr]] | None:
    """Return the PrimFunc and the tensors of a call of one with this name, or none."""
    if op_name(value) != "relax.call_tir" or not isinstance(value.args[0], GlobalVar):
        return None
    if not value.args[0].name_hint.startswith(name) or len(value.args) > 2:
        return None
    return mod[value.args[0]], list(value.args[1].fields)


def _same(graph: Graph, one: rx.Expr, other: rx.Expr) -> bool:
    """Return whether two expressions stand for one value."""
    return graph.value(one).same_as(graph.value(other))


def _summed(graph: Graph, sums: rx.Expr) -> rx.Expr | None:
    """Return what an expression is the running sum of along its last axis, or None."""
    call = graph.value(sums)
    if op_name(call) != "relax.cumsum" or call.attrs.exclusive:
        return None
    of = call.args[0]
    same_dtype = str(call.ty.dtype) == str(of.ty.dtype)
    return of if same_dtype and int(call.attrs.axis) in (1, -1) else None


def _are_of_tvm(
    function: Callable[..., nn.Tensor],
    inputs: Sequence[rx.Expr],
    found: Sequence[tvm.tirx.PrimFunc],
) -> bool:
    """Return whether PrimFuncs are those that a function of TVM's frontend makes of the inputs."""
    if not all(isinstance(x.ty, rx.TensorType) and x.ty.shape is not None for x in inputs):
        return False
    builder = rx.BlockBuilder()
    params = [rx.Var(f"x{i}", x.ty) for i, x in enumerate(inputs)]
    try:
        with builder.function("reference", params):
            result = function(*(nn.wrap_nested(x, x.name) for x in params))
            builder.emit_func_output(result._expr)
    except Exception:  # inputs that the frontend does not take are none of its making
        return False
    made = [f for f in builder.get().functions.values() if isinstance(f, tvm.tirx.PrimFunc)]
    return all(
        any(tvm_ffi.structural_equal(ours, theirs, map_free_vars=True) for theirs in made)
        for ours in found
    )


def _dtype_problems(site: SamplingSite, served: Sequence[str | tuple[str, ...]]) -> list[str]:
    """Return which operands have a dtype that the function does not take."""
    problems = []
    for operand, dtypes in zip(site.operands, served, strict=True):
        allowed = (dtypes,) if isinstance(dtypes, str) else dtypes
        dtype = str(operand.ty.dtype)
        if dtype not in allowed:
            name = getattr(operand, "name", "an operand")
            problems.append(f"{name} is {dtype}; {site.kernel} takes {' or '.join(allowed)}")
    return problems

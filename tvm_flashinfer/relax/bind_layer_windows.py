"""A pass that tells each attention call of a paged KV cache which window its layer has."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import relax as rx

from tvm_flashinfer.relax.config import ATTN_KINDS, PagedKVCacheConfig
from tvm_flashinfer.relax.graph import Graph, number, op_name

_METHOD = "vm.builtin.attention_kv_cache_"

#: Calls that attend to new tokens, and what takes their place: the window comes third. Their first
#: arguments are the cache, the layer and the scale of the softmax.
WRAPPED = {
    f"{_METHOD}attention_with_fused_qkv": "flashinfer.cache_attention_in_window",
    f"{_METHOD}self_attention": "flashinfer.cache_self_attention_in_window",
    f"{_METHOD}attention_with_shared_kv": "flashinfer.cache_shared_attention_in_window",
    "flashinfer.cache_attention_with_sinks": "flashinfer.cache_attention_with_sinks_in_window",
}

#: What the functions take for a layer that sees all tokens.
FULL_LAYER = -1


@tvm.transform.module_pass(opt_level=0, name="BindLayerWindows")
class BindLayerWindows:
    """Let the calls of a cache with layers that slide say what window their layer has.

    TVM's cache gives the new tokens of a step to one function, whatever the layer, and does not
    tell it which one that is. So a request with more new tokens than the window can be served only
    by calls that name the window, which this pass makes of the others. They work on a cache of
    TVM's own kernels too, which they leave as it is. The pass has to run before TVM lowers
    ``relax.call_dps_packed``, and `DispatchKVCacheCreation` runs it by itself.

    Parameters
    ----------
    layer_kinds : sequence of str
        The kind of each layer of the model: ``"mha_sliding"`` for those with a window. Without one
        of these the module is returned as it is.
    window : int
        Tokens of the window that the cache is created with.

    Attributes
    ----------
    bound : int
        How many calls of the last module name the window now.
    left : list of str
        Functions of the last module with a call whose layer is no constant. Such a call stays.

    Raises
    ------
    ValueError
        For kinds or a window that no cache has, and for a call of a layer without a kind.
    """

    def __init__(self, layer_kinds: Sequence[str], window: int) -> None:
        self.layer_kinds = tuple(layer_kinds)
        self.window = int(window)
        unknown = sorted(set(self.layer_kinds) - set(ATTN_KINDS))
        if unknown or not self.layer_kinds:
            raise ValueError(
                f"layer_kinds has {unknown or 'no layer'}; expected the kind of each layer, one of "
                f"{', '.join(ATTN_KINDS)}"
            )
        if self.window < 1:
            raise ValueError(f"window is {window}, expected the tokens of the window, 1 or more")
        self.bound = 0
        self.left: list[str] = []

    def transform_module(self, mod: tvm.IRModule, _ctx: tvm.transform.PassContext) -> tvm.IRModule:
        """Rewrite a module; functions without such calls stay the same objects."""
        self.bound, self.left = 0, []
        if "mha_sliding" not in self.layer_kinds:
            return mod
        rewriter = _Rewriter(mod, self)
        for var, function in mod.functions_items():
            if isinstance(function, rx.Function) and _has_calls(function):
                rewriter.rewrite(var, function)
        return rewriter.builder_.get() if self.bound else mod

    def window_of(self, layer: int, function: str) -> int:
        """Return what the call of a layer is told."""
        if not 0 <= layer < len(self.layer_kinds):
            raise ValueError(
                f"{function} attends in layer {layer}, but layer_kinds has {len(self.layer_kinds)} "
                "layers; give the kinds of all layers of the model"
            )
        return self.window if self.layer_kinds[layer] == "mha_sliding" else FULL_LAYER


def bind_windows_of(
    mod: tvm.IRModule, configs: Sequence[PagedKVCacheConfig]
) -> tuple[tvm.IRModule, str]:
    """Run `BindLayerWindows` for the caches that a module creates.

    Returns
    -------
    mod : tvm.IRModule
        The module as it was when the caches differ, since a call does not tell which one it has.
    note : str
        For the report: what becomes of a request with more new tokens than the window. Empty when
        no layer slides.
    """
    windows = {
        (c.layer_kinds, c.layer_sliding_window_size if c.has_sliding_layers else 0) for c in configs
    }
    sliding = [window for _, window in windows if window]
    if not sliding:
        return mod, ""
    refused = f"more new tokens of a request than the window of {sliding[0]} are refused: "
    if len(windows) > 1:
        return mod, refused + "the module creates caches of different layers, so no call names one"
    bind = BindLayerWindows(*windows.pop())
    mod = bind(mod)
    if bind.left:
        return mod, f"{refused}the layer of a call is no constant in {', '.join(bind.left)}"
    if not bind.bound:
        return mod, f"{refused}no call in the module names its window, see BindLayerWindows"
    return mod, f"{bind.bound} calls of the module name the window of their layer"


def _wrapped(expr: rx.Expr) -> str | None:
    """Return what takes the place of a call, or None for an expression of another kind."""
    if op_name(expr) != "relax.call_dps_packed" or not isinstance(expr.args[0], rx.ExternFunc):
        return None
    return WRAPPED.get(str(expr.args[0].global_symbol))


def _has_calls(function: rx.Function) -> bool:
    return any(_wrapped(binding.value) for binding in Graph(function).bindings)


@rx.expr_functor.mutator
class _Rewriter(rx.PyExprMutator):
    """Puts the calls that name the window in the place of the others."""

    def __init__(self, mod: tvm.IRModule, bind: BindLayerWindows) -> None:
        super().__init__(mod)
        self.bind = bind
        self.name = ""

    def rewrite(self, var: tvm.ir.GlobalVar, function: rx.Function) -> None:
        """Rewrite one function."""
        self.name = var.name_hint
        self.builder_.update_func(var, self.visit_expr(function))

    def visit_call_(self, call: rx.Call) -> rx.Expr:
        """Add the window to the arguments of a call of the cache."""
        name = _wrapped(call)
        call = super().visit_call_(call)
        if name is None or not isinstance(call.args[1], rx.Tuple):
            return call
        cache, layer, sm_scale, *tensors = call.args[1].fields
        layer_id = number(self._value(layer))
        if layer_id is None:
            if self.name not in self.bind.left:
                self.bind.left.append(self.name)
            return call
        self.bind.bound += 1
        window = rx.prim_value(self.bind.window_of(int(layer_id), self.name))
        arguments = rx.Tuple([cache, layer, sm_scale, window, *tensors])
        return rx.Call(call.op, [rx.ExternFunc(name), arguments], call.attrs, call.ty_args)

    def _value(self, expr: rx.Expr) -> rx.Expr:
        """Return what a variable is bound to, where another pass has made one of the layer."""
        while isinstance(expr, rx.Var):
            value = self.lookup_binding(expr)
            if value is None:
                break
            expr = value
        return expr

"""Step functions of a model: attention over page tables at fixed addresses, for CUDA graphs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import tvm
from tvm import relax as rx
from tvm import te, tirx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op
from tvm.relax.frontend.nn import spec as nn_spec
from tvm.target import Target

from tvm_flashinfer.kernels.spec import KernelSpec, unsupported_reasons
from tvm_flashinfer.relax._compat import FUSES_IN_PLACE, StringImm
from tvm_flashinfer.relax.report import NATIVE, CompileReport, ReportRow, attach_report
from tvm_flashinfer.relax.ship import link_kernels, resolve_ship
from tvm_flashinfer.relax.slots import arch_text
from tvm_flashinfer.relax.support import CPU_DTYPES, TARGETS, target_archs
from tvm_flashinfer.steps.config import CONFIG_FUNCTION, DECODE, PREFILL, StepConfig

#: TVM's number for a function that is fused with nothing.
_OPAQUE = 8


class StepCache:
    """What a model is given in the place of TVM's ``PagedKVCache``.

    Its ``attention_with_fused_qkv`` emits calls of ``flashinfer.*`` over tensors that are arguments
    of the function, where TVM's object holds them itself and moves them from step to step.

    Parameters
    ----------
    config : StepConfig
    pages : sequence of nn.Tensor
        (num_pages, 2, num_kv_heads, page_size, head_dim) for each layer.
    positions, slots : nn.Tensor
        (n,) int32 for the rows of the step: the position of a token in its sequence, and where its
        keys go, ``page * page_size + offset``, or -1 for a row of no sequence.
    page_indptr, page_indices, last_page_len : nn.Tensor
        (B + 1,), (any,) and (B,) int32: the page table after the tokens of the step.
    qo_indptr : nn.Tensor, optional
        (B + 1,) int32, where the rows of a sequence start; without it every sequence has one.
    """

    def __init__(
        self,
        config: StepConfig,
        pages: Sequence[nn.Tensor],
        positions: nn.Tensor,
        slots: nn.Tensor,
        page_indptr: nn.Tensor,
        page_indices: nn.Tensor,
        last_page_len: nn.Tensor,
        qo_indptr: nn.Tensor | None = None,
    ) -> None:
        self.config = config
        self.pages = list(pages)
        self.positions, self.slots = positions, slots
        self.table = (page_indptr, page_indices, last_page_len)
        self.qo_indptr = qo_indptr

    def attention_with_fused_qkv(
        self, layer_id: int, qkv: nn.Tensor, num_qo_heads: int, sm_scale: float
    ) -> nn.Tensor:
        """Rotate, append to the pages of a layer, and attend, as TVM's method of this name does.

        Parameters
        ----------
        layer_id : int
        qkv : nn.Tensor
            (b, s, num_qo_heads + 2 * num_kv_heads, head_dim), where ``b * s`` is n.
        num_qo_heads : int
        sm_scale : float

        Returns
        -------
        o : nn.Tensor
            (b, s, num_qo_heads, head_dim).
        """
        config = self.config
        b, s, heads, dim = qkv.shape
        expected = (config.num_qo_heads, config.num_qo_heads + 2 * config.num_kv_heads)
        if (num_qo_heads, heads, dim) != (*expected, config.head_dim):
            raise ValueError(
                f"layer {layer_id} attends with {num_qo_heads} query heads, {heads} heads in qkv "
                f"and head_dim {dim}; the step functions are for {expected[0]}, {expected[1]} and "
                f"{config.head_dim}"
            )
        if not 0 <= layer_id < len(self.pages):
            raise ValueError(
                f"layer {layer_id} attends, and the step functions have pages for "
                f"{len(self.pages)} layers; raise num_layers of StepConfig"
            )
        rows = op.reshape(qkv, (b * s, heads, dim))
        q, pages = self._append(layer_id, rows)
        numbers = (-1, 0.0, float(sm_scale))  # window_left, logits_soft_cap
        indices = self.table
        name, causal = "flashinfer.attention_paged_decode", ()
        if self.qo_indptr is not None:
            name, causal = "flashinfer.attention_paged", (1,)
            indices = (self.qo_indptr, *indices)
        o = op.extern(name, [q, pages, *indices, *causal, *numbers], _placeholder(q))
        return op.reshape(o, (b, s, num_qo_heads, dim))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the model uses `{name}` of its cache; in step functions there is "
            "attention_with_fused_qkv alone"
        )

    def _append(self, layer_id: int, rows: nn.Tensor) -> tuple[nn.Tensor, nn.Tensor]:
        """Emit the split of qkv and the append, and return the queries and the pages after it."""
        config, pages = self.config, self.pages[layer_id]
        n, _, dim = rows.shape
        q = nn.Tensor.placeholder((n, config.num_qo_heads, dim), config.dtype, "q")
        pages, q = op.tensor_ir_inplace_op(
            _rotate_and_append(config, n),
            "rotate_and_append",
            [pages, rows, self.positions, self.slots],
            inplace_indices=[0, -1],
            out=[_placeholder(pages), q],
        )
        return q, pages


def _placeholder(x: nn.Tensor) -> nn.Tensor:
    """Return a tensor of the same shape and dtype, as the output of a call is described."""
    return nn.Tensor.placeholder(x.shape, x.dtype)


def _rotate_and_append(config: StepConfig, rows: Any) -> tirx.PrimFunc:
    """Return the function of pages, qkv, positions, slots, and the output q."""
    numbers = [
        tirx.const(config.rope_theta, "float64"),
        tirx.const(config.rope_scale, "float64"),
        tirx.const(config.rotary_dim or config.head_dim, "int64"),
        json.dumps(config.rope_scaling),
    ]
    # Symbols are those of the function alone.
    n = rows if isinstance(rows, int) else tirx.Var("n", "int64")
    num_pages = tirx.Var("num_pages", "int64")
    heads = config.num_qo_heads + 2 * config.num_kv_heads
    pages, qkv, positions, slots = (
        te.placeholder(_int64(shape), dtype, name=name)
        for name, shape, dtype in (
            ("pages", config.page_shape(num_pages), config.dtype),
            ("qkv", (n, heads, config.head_dim), config.dtype),
            ("positions", (n,), "int32"),
            ("slots", (n,), "int32"),
        )
    )

    def call(ins: Sequence[Any], outs: Sequence[Any]) -> Any:
        name = "flashinfer.split_qkv_rotary_append"
        return tirx.call_packed(name, *ins[1:], *numbers, ins[0], outs[0])

    inputs = [pages, qkv, positions, slots]
    shape = _int64((n, config.num_qo_heads, config.head_dim))
    q = te.extern([shape], inputs, call, name="q", dtype=[config.dtype])
    # A call of the host, which no rule for kernels may schedule.
    return _private([*inputs, q]).with_attr("tirx.is_scheduled", True)


def _int64(shape: Sequence[Any]) -> list[Any]:
    """Return sizes as Relax has them: functions with others cannot be fused."""
    return [tirx.IntImm("int64", size) if isinstance(size, int) else size for size in shape]


def _private(tensors: Sequence[te.Tensor]) -> tirx.PrimFunc:
    """Return a function that the module may name."""
    return te.create_prim_func(tensors).without_attr("global_symbol")


def _store(x: nn.Tensor, into: nn.Tensor) -> nn.Tensor:
    """Emit a copy of logits (B, 1, v) into an argument of the function, and return it as (B, v)."""
    source = te.placeholder(_int64(x.shape), x.dtype, name="x")
    copy = te.compute(source.shape, lambda *at: source(*at), name="stored")
    func = _private([source, copy])
    if not FUSES_IN_PLACE:
        func = func.with_attr("op_pattern", _OPAQUE)
    stored = op.tensor_ir_inplace_op(func, "store", [x, into], [1], _placeholder(into))
    # TVM defines what a function returns inside of the captured part and does not hand it out,
    # unless something follows that cannot be captured, as functions of its runtime.
    shape = (into.shape[0], into.shape[2])
    call = rx.call_pure_packed(
        "vm.builtin.reshape",
        stored._expr,
        rx.ShapeExpr(shape),
        ty_args=rx.TensorType(shape, into.dtype),
    )
    return op.wrap_nested(call, "logits")


def export_steps(
    model: nn.Module,
    config: StepConfig,
    target: Target,
    *,
    decode: Callable[[nn.Tensor, StepCache], nn.Tensor] | None = None,
    prefill: Callable[[nn.Tensor, nn.Tensor, StepCache], nn.Tensor] | None = None,
    ship: str | None = None,
) -> tuple[tvm.IRModule, list[str]]:
    """Export a model as step functions, which `tvm_flashinfer.steps.StepRunner` runs.

    The model is one that is written for TVM's ``PagedKVCache`` and calls
    ``attention_with_fused_qkv`` alone; it gets a `StepCache` instead. All arguments of the decode
    functions are said to have fixed addresses (``num_input`` 0), so that TVM captures a step as one
    CUDA graph when the module is compiled with ``relax.backend.use_cuda_graph``.

    Parameters
    ----------
    model : nn.Module
        Converted to ``config.dtype``.
    config : StepConfig
    target : tvm.target.Target
        Of kind ``cuda`` or ``llvm``.
    decode : callable, optional
        Maps tokens (B, 1) int32 and the cache to logits (B, 1, vocab_size) float32;
        ``model.decode`` when it is left out.
    prefill : callable, optional
        Maps tokens (1, n) and the rows (m,) int32 whose logits are wanted, and the cache, to
        logits (1, m, vocab_size); ``model.prefill`` when it is left out.
    ship : str, optional
        See `DispatchAttention`.

    Returns
    -------
    mod : tvm.IRModule
    params : list of str
        The names of the weights in the order that the functions take them.

    Raises
    ------
    ValueError
        When no kernel serves ``config``, with the reasons, and when a layer attends with other
        sizes than it says.
    """
    _check(config, target)
    ship = resolve_ship(ship, target)
    functions = {PREFILL: _prefill_spec(config, prefill or model.prefill)}
    for size in config.batch_sizes:
        functions[DECODE.format(size)] = _decode_spec(config, size, decode or model.decode)
    module_spec = nn_spec.ModuleSpec(model, list(functions), list(functions.values()))
    with target:
        mod, params, _ = model.export_tvm(spec=module_spec, allow_extern=True)
    for size in config.batch_sizes:
        name = DECODE.format(size)
        mod[name] = mod[name].with_attr("num_input", 0)
    builder = rx.BlockBuilder(mod)
    with builder.function(CONFIG_FUNCTION, []):
        builder.emit_func_output(StringImm(config.to_json()))
    mod = link_kernels(builder.get(), _kernels(config, target), target, ship)
    return _with_report(mod, config, target, ship), [name for name, _ in params]


def _prefill_spec(config: StepConfig, prefill: Callable) -> nn_spec.MethodSpec:
    def method(
        tokens: Any, logit_positions: Any, qo_indptr: Any, positions: Any, slots: Any,
        page_indptr: Any, page_indices: Any, last_page_len: Any, pages: Any,
    ) -> nn.Tensor:  # fmt: skip
        table = (page_indptr, page_indices, last_page_len)
        cache = StepCache(config, pages, positions, slots, *table, qo_indptr)
        return prefill(tokens, logit_positions, cache)

    tensors = {
        "tokens": [1, "num_tokens"],
        "logit_positions": ["num_logits"],
        "qo_indptr": ["num_offsets"],
        "positions": ["num_tokens"],
        "slots": ["num_tokens"],
        "page_indptr": ["num_offsets"],
        "page_indices": ["num_indices"],
        "last_page_len": ["num_sequences"],
    }
    return _method_spec(config, method, tensors, {})


def _decode_spec(config: StepConfig, size: int, decode: Callable) -> nn_spec.MethodSpec:
    def method(
        tokens: Any, positions: Any, slots: Any, page_indptr: Any, page_indices: Any,
        last_page_len: Any, logits: Any, pages: Any,
    ) -> nn.Tensor:  # fmt: skip
        table = (page_indptr, page_indices, last_page_len)
        cache = StepCache(config, pages, positions, slots, *table)
        return _store(decode(tokens, cache), logits)

    tensors = {
        "tokens": [size, 1],
        "positions": [size],
        "slots": [size],
        "page_indptr": [size + 1],
        "page_indices": ["num_indices"],
        "last_page_len": [size],
    }
    logits = {"logits": nn_spec.Tensor([size, 1, config.vocab_size], "float32")}
    return _method_spec(config, method, tensors, logits)


def _method_spec(
    config: StepConfig, method: Callable, tensors: dict[str, list], others: dict[str, Any]
) -> nn_spec.MethodSpec:
    page = nn_spec.Tensor(config.page_shape("num_pages"), config.dtype)
    specs = {name: nn_spec.Tensor(shape, "int32") for name, shape in tensors.items()} | others
    specs["pages"] = nn_spec.Tuple("pages", [page] * config.num_layers)
    return nn_spec.MethodSpec(method, list(specs), list(specs.values()), "packed", "none")


def _check(config: StepConfig, target: Target) -> None:
    kind = target.kind.name
    if kind not in TARGETS:
        reasons = [f"the target is {kind!r}; there are kernels for {' and '.join(TARGETS)}"]
    elif kind == "cuda":
        reasons = [why for spec in _kernels(config, target) for why in unsupported_reasons(spec)]
    else:
        reasons = []
        if config.dtype not in CPU_DTYPES:
            reasons = [f"the dtype is {config.dtype}; on CPU there are {', '.join(CPU_DTYPES)}"]
    if config.rope_scaling.get("rope_type") == "longrope":
        reasons.append("the RoPE scaling is longrope, whose factors TVM's cache passes alone")
    if reasons:
        lines = "".join(f"\n  - {reason}" for reason in reasons)
        raise ValueError(f"these step functions cannot be served:{lines}")


def _kernels(config: StepConfig, target: Target) -> list[KernelSpec]:
    if target.kind.name != "cuda":
        return []
    archs = target_archs(target)
    attention = KernelSpec("batch_attention", config.dtype, config.head_dim, archs=archs)
    return [*(KernelSpec(kind, archs=archs) for kind in ("common", "rope")), attention]


def _with_report(mod: tvm.IRModule, config: StepConfig, target: Target, ship: str) -> tvm.IRModule:
    rows = []
    for name in (PREFILL, *map(DECODE.format, config.batch_sizes)):
        kernels = {
            "append": "split_qkv_rotary_append",
            "attention": "attention_paged" if name == PREFILL else "attention_paged_decode",
        }
        for what, kernel in kernels.items():
            rows.append(ReportRow(name, what, NATIVE, f"flashinfer.{kernel}", arch_text(target)))
    return attach_report(mod, CompileReport(target.kind.name, ship, rows))

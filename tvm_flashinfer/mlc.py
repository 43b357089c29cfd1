"""What MLC LLM expects of TVM and a released TVM lacks, supplied when MLC LLM imports TVM.

Nothing is changed on disk, and nothing at all where another program imports TVM. `CHANGES` has the
names that are added where TVM has none, and the functions of MLC LLM that are wrapped, where TVM
does something else under a name. ``tvm-flashinfer doctor`` lists them.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

from tvm_flashinfer.when_imported import HookWarning, when_imported

_MLC = "mlc_llm"

#: TVM's number of the pattern of operators that are not fused.
_OPAQUE = 8


@dataclass(frozen=True)
class Change:
    """One thing that is supplied.

    Parameters
    ----------
    name : str
        What is added or wrapped, such as ``"tvm.relax.StringImm"``.
    reason : str
        What a released TVM has or does in its place.
    needed : callable
        Whether the imported TVM, or the environment, asks for it.
    apply : callable
        Supplies it.
    """

    name: str
    reason: str
    needed: Callable[[], bool]
    apply: Callable[[], None]


def imports_tvm() -> bool:
    """Return whether MLC LLM is being imported, which is when it imports TVM."""
    spec = getattr(sys.modules.get(_MLC), "__spec__", None)
    return bool(getattr(spec, "_initializing", False))


@functools.cache
def install() -> None:
    """Supply what is missing, once; for a process in which `imports_tvm`."""
    for change in CHANGES:
        try:
            if change.needed():
                change.apply()
        except Exception as error:  # the others may do
            warnings.warn(f"{change.name} is not supplied: {error}", HookWarning, stacklevel=2)


def _alias(name: str, reason: str, make: Callable[[], Any]) -> Change:
    """Return the change that puts what `make` returns where TVM has no such name."""

    def owner() -> Any:
        found: Any = sys.modules["tvm"]
        for part in name.split(".")[1:-1]:
            found = getattr(found, part, None)
        return found

    attribute = name.rpartition(".")[2]
    return Change(
        name,
        reason,
        lambda: owner() is not None and not hasattr(owner(), attribute),
        lambda: setattr(owner(), attribute, make()),
    )


def _wrapper(
    name: str, reason: str, wrap: Callable[[Any], Any], needed: Callable[[], bool] | None = None
) -> Change:
    """Return the change that replaces something of a module of MLC LLM once that is imported.

    `name` is that of the module, a colon, and what is replaced in it.
    """
    module_name, _, path = name.partition(":")
    *parents, attribute = path.split(".")

    def replace(module: ModuleType) -> None:
        owner: Any = module
        for parent in parents:
            owner = getattr(owner, parent)
        setattr(owner, attribute, wrap(getattr(owner, attribute)))

    apply = functools.partial(when_imported, module_name, replace)
    return Change(name.replace(":", "."), reason, needed or _has_typed_buffers, apply)


def _late(module: str, name: str) -> Callable[[Any], Any]:
    """Return a function of `tvm_flashinfer.relax`, which is imported when it is called."""

    def wrap(original: Any) -> Any:
        return getattr(importlib.import_module(f"tvm_flashinfer.relax.{module}"), name)(original)

    return wrap


def _always() -> bool:
    return True


def _has_typed_buffers() -> bool:
    """Return whether parameters of a PrimFunc are buffers themselves, as since TVM 0.26."""
    from tvm.tirx import buffer

    return hasattr(buffer, "BufferType")


def _is_before_027() -> bool:
    from tvm import ir

    return _has_typed_buffers() and not hasattr(ir, "GenericConst")


def _runs_without_library() -> bool:
    return os.environ.get("SKIP_LOADING_MLCLLM_SO", "0") != "0"


def _skip_unknown_objects() -> None:
    from tvm_ffi import registry

    registry._SKIP_UNKNOWN_OBJECTS = True


def _ir(name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module("tvm.ir"), name)


def _s_tir(name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module("tvm.s_tir"), name)


def _dtype_imm() -> type:
    from tvm import DataType, ir, relax

    class DataTypeImm(type):
        """A constant that holds a dtype is one of TVM's `GenericConst`."""

        def __call__(cls, dtype: str) -> Any:
            return ir.GenericConst(DataType(dtype), relax.AnyType())

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, ir.GenericConst) and isinstance(value.value, DataType | str)

    return DataTypeImm("DataTypeImm", (), {})


def _tensor_constant() -> type:
    from tvm import ir, relax, runtime

    class TensorConstant(type):
        """A constant that holds a tensor is one of TVM's `GenericConst`."""

        def __call__(cls, tensor: Any) -> Any:
            return relax.const(tensor)

        def __instancecheck__(cls, value: Any) -> bool:
            return isinstance(value, ir.GenericConst) and isinstance(value.value, runtime.Tensor)

    return TensorConstant("Constant", (), {})


def _stmt_functor() -> SimpleNamespace:
    import tvm_ffi

    def post_order_visit(node: Any, visit: Callable[[Any], None]) -> None:
        tvm_ffi.structural_walk(node, (tvm_ffi.Object, visit), order="post")

    return SimpleNamespace(post_order_visit=post_order_visit, substitute=_substitute)


def _substitute(node: Any, replacements: Mapping[Any, Any]) -> Any:
    import tvm_ffi
    from tvm import tirx

    return tvm_ffi.structural_map(node, (tirx.Var, lambda var: replacements.get(var, var)))


def _buffer_map() -> property:
    return property(lambda function: {param: param for param in _buffers(function)})


def _buffers(function: Any) -> Iterator[Any]:
    from tvm.tirx.buffer import BufferType

    return (param for param in function.params if isinstance(param.ty, BufferType))


def _lift_global_buffers(_original: Callable[..., Any]) -> Callable[..., Any]:
    from tvm import relax, s_tir, tirx

    block_type = getattr(s_tir, "SBlock", None) or tirx.SBlock
    realize_type = getattr(s_tir, "SBlockRealize", None) or tirx.SBlockRealize

    def remove_global_buf_alloc(function: Any) -> tuple[Any, list[Any]]:
        """Make the buffers that a function allocates in global memory its last parameters."""
        block = function.body.block
        lifted = [buffer for buffer in block.alloc_buffers if buffer.scope() == "global"]
        if not lifted:
            return function, []
        rest = block_type(
            iter_vars=[],
            reads=[],
            writes=[],
            name_hint=block.name_hint,
            body=block.body,
            alloc_buffers=[buffer for buffer in block.alloc_buffers if buffer.scope() != "global"],
            annotations=block.annotations,
        )
        function = tirx.PrimFunc(
            params=[*function.params, *lifted],
            body=realize_type(iter_values=[], predicate=True, block=rest),
            ret_type=function.ret_type,
            attrs=function.attrs,
        )
        return function, [relax.TensorType(buffer.shape, buffer.dtype) for buffer in lifted]

    return remove_global_buf_alloc


def _without_scalars(original: Callable[..., Any]) -> Callable[..., Any]:
    def resolve(function: Any, call: Any, types: Any) -> Any:
        """Resolve with tensors alone, whose places among the parameters scalars would shift."""
        from tvm import relax

        tensors = [arg for arg in call.args[1].fields if isinstance(arg.ty, relax.TensorType)]
        seen_function = SimpleNamespace(
            params=list(_buffers(function)), buffer_map=function.buffer_map
        )
        seen_call = SimpleNamespace(args=[call.args[0], relax.Tuple(tensors)], ty_args=call.ty_args)
        return original(seen_function, seen_call, types)

    return resolve


class _Overlay:
    """A module of TVM, as one module of MLC LLM sees it: with a function in place of another."""

    def __init__(self, module: ModuleType, **replaced: Any) -> None:
        self.__dict__.update(replaced, __wrapped__=module)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["__wrapped__"], name)


def _without_tensor_cores(dlight: ModuleType) -> _Overlay:
    """Return TVM's schedules with one of matrix products that uses no tensor intrinsics."""

    class Matmul(dlight.gpu.Matmul):
        def apply(self, func: Any, target: Any, tunable: bool) -> Any:
            """Schedule a function as TVM does where it is told not to tensorize."""
            func = func.with_attr("dlight.do_not_tensorize", 1)
            return super().apply(func, target, tunable)

    return _Overlay(dlight, gpu=_Overlay(dlight.gpu, Matmul=Matmul))


def _scalars_apart(tvm: ModuleType) -> _Overlay:
    """Return TVM with a pass that has functions of scalars not fused."""
    transform = tvm.relax.transform

    @tvm.transform.module_pass(opt_level=0)
    def keep_apart(mod: Any, _ctx: Any) -> Any:
        for var, function in mod.functions_items():
            if isinstance(function, tvm.tirx.PrimFunc):
                if len(list(_buffers(function))) < len(function.params):
                    mod.update_func(var, function.with_attr("op_pattern", _OPAQUE))
        return mod

    def annotate() -> Any:
        return tvm.transform.Sequential([transform.AnnotateTIROpPattern(), keep_apart])

    return _Overlay(
        tvm,
        relax=_Overlay(tvm.relax, transform=_Overlay(transform, AnnotateTIROpPattern=annotate)),
    )


def _scalars_before_outputs(module: ModuleType) -> _Overlay:
    def tensor_ir_op(func: Any, name_hint: str, args: Any, out: Any) -> Any:
        outputs = len(out) if isinstance(out, list | tuple) else 1
        given = args if isinstance(args, list | tuple) else [args]
        return module.tensor_ir_op(_reordered(func, given, outputs), name_hint, args, out)

    return _Overlay(module, tensor_ir_op=tensor_ir_op)


def _reordered(function: Any, args: Sequence[Any], num_outputs: int) -> Any:
    """Return a PrimFunc whose last parameters are its outputs, and whose scalars have given types.

    It is the function itself when that is so already.
    """
    from tvm import tirx

    buffers = set(_buffers(function))
    num_scalars = 0
    while function.params[-1 - num_scalars] not in buffers:
        num_scalars += 1
    if num_scalars == 0:
        return function
    params = list(function.params)
    scalars, body = [], function.body
    for var, arg in zip(params[-num_scalars:], args[-num_scalars:], strict=True):
        dtype = str(arg.ty.dtype)
        if dtype != str(var.ty.dtype):
            given = tirx.Var(var.name, dtype)
            body = _substitute(body, {var: given.astype(var.ty.dtype)})
            var = given
        scalars.append(var)
    tensors = params[:-num_scalars]
    reordered = [*tensors[:-num_outputs], *scalars, *tensors[-num_outputs:]]
    return tirx.PrimFunc(reordered, body, ret_type=function.ret_type, attrs=function.attrs)


#: In the order in which they are made.
CHANGES: tuple[Change, ...] = (
    Change(
        "tvm_ffi.registry._SKIP_UNKNOWN_OBJECTS",
        "MLC LLM registers types of its C++ library also where SKIP_LOADING_MLCLLM_SO is set",
        _runs_without_library,
        _skip_unknown_objects,
    ),
    _alias("tvm.relax.StringImm", "TVM 0.27 has tvm.ir.StringImm", _ir("StringImm")),
    _alias("tvm.relax.DataTypeImm", "TVM 0.27 has tvm.ir.GenericConst of a dtype", _dtype_imm),
    _alias("tvm.relax.Constant", "TVM 0.27 has tvm.ir.GenericConst of a tensor", _tensor_constant),
    _alias(
        "tvm.ir.GenericConst.data",
        "TVM 0.27 calls the tensor of a constant value",
        lambda: property(lambda constant: constant.value),
    ),
    _alias("tvm.tirx.StringImm", "TVM 0.27 has tvm.ir.StringImm", _ir("StringImm")),
    _alias("tvm.tirx.SBlock", "TVM 0.27 has tvm.s_tir.SBlock", _s_tir("SBlock")),
    _alias(
        "tvm.tirx.SBlockRealize", "TVM 0.27 has tvm.s_tir.SBlockRealize", _s_tir("SBlockRealize")
    ),
    _alias(
        "tvm.tirx.stmt_functor",
        "TVM 0.27 has tvm_ffi.structural_walk and structural_map",
        _stmt_functor,
    ),
    _alias(
        "tvm.tirx.PrimFunc.buffer_map",
        "since TVM 0.26 a parameter that is a buffer has a BufferType",
        _buffer_map,
    ),
    _alias(
        "tvm.ir.Var.name_hint",
        "TVM 0.26 and 0.27 have Var.name",
        lambda: property(lambda var: var.name),
    ),
    _wrapper(
        "mlc_llm.compiler_pass.lift_global_buffer_alloc:remove_global_buf_alloc",
        "since TVM 0.26 a buffer is a parameter, and a PrimFunc is made without a buffer_map",
        _lift_global_buffers,
    ),
    _wrapper(
        "mlc_llm.compiler_pass.lift_global_buffer_alloc:_resolve_tir_var_mapping",
        "since TVM 0.26 call_tir passes scalars before the outputs",
        _without_scalars,
    ),
    *(
        _wrapper(
            name,
            "since TVM 0.26 tensor_ir_op passes scalars before the outputs, with their own types",
            _scalars_before_outputs,
        )
        for name in (
            "mlc_llm.compiler_pass.attach_sampler:nn",
            "mlc_llm.op.moe_misc:op",
            "mlc_llm.op.triton:nn",
            "mlc_llm.model.vision.image_processing:op",
        )
    ),
    *(
        _wrapper(
            f"mlc_llm.compiler_pass.{module}:dl",
            "TVM 0.26 and 0.27 crash where they tensorize a product of float16 (sm_80, sm_90)",
            _without_tensor_cores,
        )
        for module in ("pipeline", "low_batch_specialization")
    ),
    _wrapper(
        "mlc_llm.compiler_pass.pipeline:tvm",
        "TVM 0.26 fuses functions that take sizes of a shape into one that cannot be built",
        _scalars_apart,
        _is_before_027,
    ),
    *(
        _wrapper(
            f"mlc_llm.nn.rnn_state:RNNState.create_{which}_func",
            "TVM 0.26 and 0.27 take a scalar of a block for a buffer that is used undeclared",
            _late("mlc_rnn_state", f"{which}_function"),
        )
        for which in ("get", "set")
    ),
    _wrapper(
        "mlc_llm.interface.compiler_flags:OptimizationFlags.update",
        "TVM from PyPI has no cuBLAS, CUTLASS or all-reduce over IPC, which the presets ask for",
        _late("mlc_compile", "update_flags"),
        _always,
    ),
    _wrapper(
        "mlc_llm.interface.compile:_compile",
        "it says at its end what serves the model",
        _late("mlc_compile", "compile_model"),
        _always,
    ),
    _wrapper(
        "mlc_llm.compiler_pass.dispatch_kv_cache_creation:DispatchKVCacheCreation",
        "it swallows errors, knows no window of layers, and leaves caches that slide to TVM",
        _late("mlc_compile", "dispatch_pass"),
        _always,
    ),
)

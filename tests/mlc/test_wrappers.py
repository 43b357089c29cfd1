"""The changes of MLC LLM's functions keep what these compute."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend import nn
from tvm.script import tirx as T
from tvm_ffi import Shape

from tvm_flashinfer import mlc
from tvm_flashinfer.relax import mlc_rnn_state


def run(function: tirx.PrimFunc, *arguments: Any) -> None:
    tvm.compile(tvm.IRModule({"main": function}), "llvm")["main"](*arguments)


def tensor(array: np.ndarray) -> Any:
    return tvm.runtime.tensor(array)


@T.prim_func(s_tir=True)
def fill(var_result: T.handle, value: T.int32):
    """Scalars after the output, as MLC LLM writes them."""
    n = T.int32()
    result = T.match_buffer(var_result, (n, 1), "int32")
    for i in T.serial(n):
        with T.sblock("block"):
            v = T.axis.spatial(n, i)
            result[v, 0] = value + v


@T.prim_func(s_tir=True)
def ends(var_sums: T.handle, var_ends: T.handle, rows: T.int64):
    """A scalar that is in the shape of a buffer, and has the type of what is passed."""
    sums = T.match_buffer(var_sums, (rows * 3,), "int32")
    found = T.match_buffer(var_ends, (3,), "int32")
    for i in T.serial(3):
        with T.sblock("block"):
            v = T.axis.spatial(3, i)
            found[v] = sums[(v + 1) * rows - 1]


def test_scalar_gets_the_type_of_its_argument() -> None:
    function = mlc._reordered(fill, [tirx.Var("vocab_size", "int64")], 1)
    assert str(function.params[0].ty.dtype) == "int64"
    result = tensor(np.zeros((4, 1), "int32"))
    run(function, 7, result)
    assert result.numpy().ravel().tolist() == [7, 8, 9, 10]


def test_scalar_of_a_shape() -> None:
    sums = nn.Tensor(_expr=rx.Var("sums", rx.TensorType([12], "int32")))
    function = mlc._reordered(ends, [sums, tirx.Var("n", "int64")], 1)
    found = tensor(np.zeros(3, "int32"))
    run(function, tensor(np.arange(12, dtype="int32")), 4, found)
    assert found.numpy().tolist() == [3, 7, 11]


def test_function_in_order_stays() -> None:
    function = mlc._reordered(fill, [tirx.Var("n", "int64")], 1)
    assert mlc._reordered(function, [tirx.Var("n", "int64")], 1) is function


def test_tensor_ir_op_of_an_overlay() -> None:
    """The module sees TVM's operators, and this one with its own order."""
    overlay = mlc._scalars_before_outputs(nn.op)
    assert overlay.reshape is nn.op.reshape
    builder = rx.BlockBuilder()
    n = tirx.Var("n", "int64")
    with builder.function("main", [rx.Var("n_", rx.ShapeType([n]))]):
        with builder.dataflow():
            out = nn.Tensor.placeholder([4, 1], "int32")
            filled = overlay.tensor_ir_op(fill, "fill", [n], out)
            result = builder.emit_output(filled._expr)
        builder.emit_func_output(result)
    mod = builder.get()
    rx.analysis.well_formed(mod)
    vm = rx.VirtualMachine(tvm.compile(mod, "llvm"), tvm.cpu())
    assert vm["main"](Shape([5])).numpy().ravel().tolist() == [5, 6, 7, 8]


def test_functions_of_scalars_are_not_fused() -> None:
    """The others are annotated as before, and the rest of TVM is seen as it is."""
    overlay = mlc._scalars_apart(tvm)
    assert overlay.relax.transform.FuseOps is tvm.relax.transform.FuseOps
    assert overlay.IRModule is tvm.IRModule
    mod = tvm.IRModule({"fill": mlc._reordered(fill, [tirx.Var("n", "int64")], 1), "add": add_one})
    patterns = [
        {var.name_hint: int(f.attrs["op_pattern"]) for var, f in annotate()(mod).functions_items()}
        for annotate in (
            tvm.relax.transform.AnnotateTIROpPattern,
            overlay.relax.transform.AnnotateTIROpPattern,
        )
    ]
    assert patterns[1] == {**patterns[0], "fill": 8}
    assert patterns[0]["fill"] != 8
    assert patterns[0]["add"] != 8


PRODUCT = """
import sys
import tvm
from tvm import relax, tirx
from tvm.s_tir import dlight
from tvm_flashinfer import mlc

x = relax.Var("x", relax.TensorType([1, tirx.Var("m", "int64"), 256], "float16"))
w = relax.Var("w", relax.TensorType([256, 512], "float16"))
builder = relax.BlockBuilder()
with builder.function("main", [x, w]):
    builder.emit_func_output(builder.emit(relax.op.matmul(x, w)))
mod = relax.transform.LegalizeOps()(builder.get())
target = {"kind": "cuda", "arch": sys.argv[1], "max_threads_per_block": 1024}
target |= {"max_shared_memory_per_block": 49152, "thread_warp_size": 32}
ours = mlc._without_tensor_cores(dlight)
with tvm.target.Target(target):
    scheduled = ours.ApplyDefaultSchedule(ours.gpu.Matmul())(mod).script()
print("blockIdx.x" in scheduled, "wmma" in scheduled)
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a"])
def test_products_of_float16(arch: str, python_path: str) -> None:
    """In a process of its own: TVM's own schedule of the first two ends in a segmentation fault."""
    done = subprocess.run(
        [sys.executable, "-c", PRODUCT, arch],
        env={**os.environ, "PYTHONPATH": python_path},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "False"]


@T.prim_func(s_tir=True)
def add_one(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
    """An operator that can be fused."""
    for i in range(4):
        with T.sblock("block"):
            v = T.axis.spatial(4, i)
            y[v] = x[v] + T.float32(1)


@T.prim_func(s_tir=True)
def two_steps(x: T.Buffer((4,), "float32"), y: T.Buffer((4,), "float32")):
    """A value in global memory between two loops."""
    between = T.sblock_alloc_buffer((4,), "float32")
    for i in range(4):
        with T.sblock("first"):
            v = T.axis.spatial(4, i)
            between[v] = x[v] + T.float32(1)
    for i in range(4):
        with T.sblock("second"):
            v = T.axis.spatial(4, i)
            y[v] = between[v] * T.float32(3)


def test_buffers_become_parameters() -> None:
    lift = mlc._lift_global_buffers(lambda function: None)
    function, types = lift(two_steps)
    (kind,) = types
    assert list(kind.shape.values) == [4]
    assert str(kind.dtype) == "float32"
    x = np.arange(4, dtype="float32")
    y, between = (tensor(np.zeros(4, "float32")) for _ in range(2))
    run(function, tensor(x), y, between)
    assert (between.numpy() == x + 1).all()
    assert (y.numpy() == 3 * (x + 1)).all()
    assert lift(function) == (function, [])


def test_shapes_are_found_past_scalars() -> None:
    function = mlc._reordered(fill, [tirx.Var("n", "int64")], 1)
    x = rx.Var("x", rx.TensorType([4], "int32"))
    call = SimpleNamespace(args=["callee", rx.Tuple([x, rx.prim_value(1)])], ty_args=["types"])
    seen = []
    resolve = mlc._without_scalars(lambda *arguments: seen.append(arguments))
    with_map = SimpleNamespace(params=function.params, buffer_map={})
    resolve(with_map, call, [])
    ((given, given_call, _),) = seen
    assert [param.name for param in given.params] == ["result"]
    assert list(given_call.args[1].fields) == [x]
    assert given_call.ty_args == ["types"]


@pytest.mark.parametrize("shape", [(3,), (2, 3)])
def test_states_of_rnn(shape: tuple[int, ...], rng) -> None:
    """The next state is in the slot after the current one, and the last slot before the first."""
    slots, history = 4, 3
    get = mlc_rnn_state.create_get_func(shape, "float32", slots, history, 0)
    set_next = mlc_rnn_state.create_set_func(shape, "float32", slots, tirx.Var("h", "int64"), 1)
    assert [f.attrs["global_symbol"] for f in (get, set_next)] == [
        "rnn_state_get_0",
        "rnn_state_set_1",
    ]
    storage = rng.standard_normal((slots, history, *shape)).astype("float32")
    sequences, current = np.array([2, 0], "int32"), np.array([1, 2], "int32")
    got = tensor(np.zeros((2, *shape), "float32"))
    run(get, tensor(storage), tensor(sequences), tensor(current), got)
    assert (got.numpy() == storage[sequences, current]).all()
    state = rng.standard_normal((2, *shape)).astype("float32")
    written = tensor(storage.copy())
    run(set_next, written, tensor(sequences), tensor(current), tensor(state))
    storage[sequences, [2, 0]] = state
    assert (written.numpy() == storage).all()

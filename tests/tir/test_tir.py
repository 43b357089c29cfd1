"""`tvm_flashinfer.tir`: IR and numbers of what is compiled with a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tvm
from cache_oracle import pack_bits
from tvm import relax as rx
from tvm import te, tirx
from tvm.s_tir import dlight

from tvm_flashinfer import ops, tir

CUDA = {"kind": "cuda", "arch": "sm_90a", "max_threads_per_block": 1024,
        "max_shared_memory_per_block": 49152, "thread_warp_size": 32}  # fmt: skip


def module(shapes: list[tuple], dtype: str, *functions: Any) -> tvm.IRModule:
    """``main`` of tensors, which returns what each function of tensor expressions makes of them."""
    symbols: dict[str, Any] = {}

    def size(dim: int | str) -> Any:
        return symbols.setdefault(dim, tirx.Var(dim, "int64")) if isinstance(dim, str) else dim

    builder = rx.BlockBuilder()
    params = [
        rx.Var(f"x{i}", rx.TensorType([size(dim) for dim in shape], dtype))
        for i, shape in enumerate(shapes)
    ]
    with builder.function("main", params):
        with builder.dataflow():
            made = [
                builder.emit(builder.call_te(function, *params, primfunc_name_hint="made"))
                for function in functions
            ]
            output = builder.emit_output(rx.Tuple(made))
        builder.emit_func_output(output)
    mod = builder.get()
    rx.analysis.well_formed(mod)
    return mod


def run(mod: tvm.IRModule, target: Any, device: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    vm = rx.VirtualMachine(tvm.compile(mod, target), device)
    return [x.numpy() for x in vm["main"](*(tvm.runtime.tensor(x, device) for x in arrays))]


def target_of(device: Any) -> Any:
    if device.dlpack_device_type() == 1:
        return tvm.target.Target("llvm")
    return tvm.target.Target({**CUDA, "arch": "sm_" + device.compute_version.replace(".", "")})


MASKS = [
    # Of the tensor, and of what it stands for: requests, heads, rows and keys.
    ((3, 1, 5, 7), (3, 1, 5, 7)),
    ((3, 2, 4, 8), (3, 2, 4, 8)),
    ((3, 1, 1, 13), (3, 1, 3, 13)),
    ((1, 1, 3, 1), (2, 1, 3, 9)),
    ((1, 2, 1, 1), (3, 2, 1, 1)),
]


@pytest.mark.parametrize(("shape", "whole"), MASKS, ids=str)
def test_packed_mask(rng, device, shape, whole):
    """Bits of whole bytes for each head of each sequence; unit dimensions stand for all."""
    requests, heads, rows, keys = whole
    each = tir.packed_mask_bytes(rows, keys)
    mod = module(
        [shape],
        "bool",
        lambda mask: tir.packed_mask(mask, *whole),
        lambda mask: tir.mask_indptr(requests * heads, each),
    )
    mask = rng.random(shape) < 0.5
    packed, indptr = run(mod, target_of(device), device, mask)
    want_indptr, want = pack_bits(np.broadcast_to(mask, whole).reshape(-1, rows, keys))
    np.testing.assert_array_equal(indptr, want_indptr)
    np.testing.assert_array_equal(packed.reshape(-1), want)


def test_symbolic_mask(rng):
    """Compiled once for every batch and length."""
    mod = module(
        [("b", 1, "n", "m")],
        "bool",
        lambda mask: tir.packed_mask(mask, mask.shape[0], 1, mask.shape[2], mask.shape[3]),
    )
    for shape in ((2, 1, 3, 5), (1, 1, 1, 17)):
        mask = rng.random(shape) < 0.5
        (packed,) = run(mod, target_of(tvm.cpu()), tvm.cpu(), mask)
        np.testing.assert_array_equal(packed.reshape(-1), pack_bits(mask[:, 0])[1])


def test_scheduled_for_a_gpu():
    """The default rules bind the bytes to threads."""
    mask = te.placeholder((2, 1, 5, 7), "bool", name="mask")
    function = te.create_prim_func([mask, tir.packed_mask(mask, 2, 1, 5, 7)])
    with tvm.target.Target(CUDA):
        scheduled = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(
            tvm.IRModule({"f": function})
        )
    assert "threadIdx.x" in scheduled["f"].script()


def test_packed_call(rng, device):
    """A packed function called by a PrimFunc, which passes tensors of its device."""
    shape = ("b", "n", 4, 64)
    dtype = "float16"

    def attention(q: te.Tensor, k: te.Tensor, v: te.Tensor) -> te.Tensor:
        numbers = [1, -1, 0.0, 0.25]
        return tir.packed_call("attention_dense", [q, k, v], numbers, q.shape, str(q.dtype))

    mod = module([shape] * 3, dtype, attention)
    text = mod.script()
    assert 'T.call_packed("flashinfer.attention_dense"' in text
    arrays = [rng.standard_normal((2, 5, 4, 64)).astype(dtype) for _ in range(3)]
    (got,) = run(mod, target_of(device), device, *arrays)
    want = ops.attention(*arrays, causal=True, sm_scale=0.25)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)

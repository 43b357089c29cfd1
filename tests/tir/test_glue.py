"""`tvm_flashinfer.tir`: layouts, 8-bit keys, rotary embedding and calls, scheduled for a target."""

from __future__ import annotations

from typing import Any

import numpy as np
import oracle
import pytest
import tvm
from batches import normal
from device_tensors import numpy_dtype, to_device
from test_split_qkv_rotary import SCALINGS
from test_tir import CUDA, target_of
from tvm import relax as rx
from tvm import te

from tvm_flashinfer import ops, tir


def placeholders(*arrays: np.ndarray) -> list[te.Tensor]:
    """Tensors of the shapes and dtypes of arrays."""
    return [te.placeholder(a.shape, a.dtype.name, name=f"x{i}") for i, a in enumerate(arrays)]


def results(
    device: Any, arrays: list[np.ndarray], made: Any, inputs: list[te.Tensor]
) -> list[np.ndarray]:
    """What a scheduled PrimFunc computes of arrays."""
    outputs = list(made) if isinstance(made, list | tuple) else [made]
    target = target_of(device)
    function = tir.prim_func([*inputs, *outputs], target).with_attr("global_symbol", "main")
    compiled = tvm.compile(tvm.IRModule({"main": function}), target=target)
    held = [tvm.runtime.tensor(x, device) for x in arrays]
    outs = [tvm.runtime.empty([int(n) for n in x.shape], str(x.dtype), device) for x in outputs]
    compiled["main"](*held, *outs)
    return [x.numpy() for x in outs]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_pad_and_cut(rng, device, dtype):
    """Zeros behind each head, and the head again."""
    x = normal(rng, (2, 3, 72), dtype)
    (t,) = placeholders(x)
    (padded,) = results(device, [x], tir.padded_head_dim(t, 80), [t])
    np.testing.assert_array_equal(padded[..., :72], x)
    assert not padded[..., 72:].astype(np.float32).any()
    (t,) = placeholders(padded)
    np.testing.assert_array_equal(results(device, [padded], tir.cut_head_dim(t, 72), [t])[0], x)


def test_heads_swapped(rng, device):
    """Lengths and heads change places."""
    x = normal(rng, (2, 5, 3, 64), "float16")
    (t,) = placeholders(x)
    (got,) = results(device, [x], tir.heads_swapped(t), [t])
    np.testing.assert_array_equal(got, x.swapaxes(1, 2))


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_of_8_bits(rng, device, dtype, stored):
    """As the append of pages rounds rows: to nearest even, saturated, NaN kept."""
    x = normal(rng, (40, 2, 64), dtype) * np.array(3, dtype)
    x[0, 0, :8] = [0, -0.0, np.nan, np.inf, -np.inf, 6e4, -6e4, 1e-7]
    (t,) = placeholders(x)
    (got,) = results(device, [x], tir.quantized(t, 0.25, stored), [t])
    cpu = tvm.cpu(0)
    pages = to_device(np.zeros((3, 2, 2, 16, 64), numpy_dtype(stored)), cpu)
    slots = np.arange(40, dtype=np.int32)
    ops.append_paged_kv_cache(pages.tensor, x, x, slots, k_scale=0.25, v_scale=0.25)
    want, _ = oracle.gathered(pages.numpy(), slots)
    nan = np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(np.uint8)[~nan], want.view(np.uint8)[~nan])
    (t,) = placeholders(want)
    (back,) = results(device, [want], tir.dequantized(t, 0.25, dtype), [t])
    np.testing.assert_array_equal(back, (want.astype(np.float32) * 0.25).astype(dtype))


@pytest.mark.parametrize("stored", ["float8_e4m3fn", "float8_e5m2"])
def test_every_code_of_8_bits(device, stored):
    """What each of the 256 codes stands for, infinities and the smallest numbers too."""
    codes = np.arange(256, dtype=np.uint8).view(numpy_dtype(stored))
    (t,) = placeholders(codes)
    (got,) = results(device, [codes], tir.dequantized(t, 1.0, "float32"), [t])
    np.testing.assert_array_equal(got, codes.astype(np.float32))


@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize("scaling", ["none", "gptj", "llama3"])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_split_rotary(rng, device, dtype, scaling, rotary_dim):
    """Against float64, and values to the bit."""
    qkv = normal(rng, (9, 8, 64), dtype)
    positions = rng.integers(0, 500, 9).astype(np.int32)
    tensors = placeholders(qkv, positions)
    made = tir.split_rotary(
        *tensors, 4, 2, rope_theta=5e5, rope_scale=0.5, rotary_dim=rotary_dim,
        rope_scaling=SCALINGS[scaling],
    )  # fmt: skip
    q, k, v = results(device, [qkv, positions], made, tensors)
    np.testing.assert_array_equal(v, qkv[:, 6:])
    for got, part in ((q, qkv[:, :4]), (k, qkv[:, 4:6])):
        kwargs: dict[str, Any] = dict(
            theta=5e5, scale=0.5, rotary_dim=rotary_dim, rope_scaling=SCALINGS[scaling]
        )
        exact = oracle.rotary(part, positions, **kwargs)
        tolerance = 4e-3 if dtype == "float16" else 2e-4
        np.testing.assert_allclose(got, exact, atol=tolerance)


@pytest.mark.parametrize("kind", ["cuda", "llvm"])
def test_schedules(kind):
    """Threads on a GPU, parallel loops on a CPU; functions say that they are scheduled."""
    target = tvm.target.Target(CUDA if kind == "cuda" else "llvm")
    x = te.placeholder((2, 5, 3, 64), "float16", name="x")
    for made in (tir.heads_swapped(x), tir.padded_head_dim(x, 80), tir.quantized(x, 0.5)):
        function = tir.prim_func([x, made], target)
        text = function.script()
        assert ("threadIdx.x" if kind == "cuda" else "T.parallel") in text
        assert bool(function.attrs["tirx.is_scheduled"])
    plain = tir.prim_func([x, tir.heads_swapped(x)])
    assert "T.grid" in plain.script()


def test_shapes_that_do_not_fit():
    """Refused when they are written down."""
    x = te.placeholder((2, 64), "float16", name="x")
    with pytest.raises(ValueError, match=r"`head_dim` is 32.*64 up"):
        tir.padded_head_dim(x, 32)
    with pytest.raises(ValueError, match=r"`head_dim` is 80.*64 at most"):
        tir.cut_head_dim(x, 80)
    with pytest.raises(ValueError, match=r"\(B, S, N, H\)"):
        tir.heads_swapped(x)
    with pytest.raises(ValueError, match="float8_e4m3fn or float8_e5m2"):
        tir.quantized(x, 1.0, "int8")
    with pytest.raises(ValueError, match="`scale` is 0"):
        tir.quantized(x, 0.0)
    with pytest.raises(ValueError, match=r"flashinfer\.rmsnorm is written.*`Written`"):
        tir.packed_prim_func("rmsnorm", [x, x, 1e-6])


def run_main(builder: rx.BlockBuilder, device: Any, *arrays: np.ndarray) -> list[np.ndarray]:
    """Compile the module of a builder, and call its main function."""
    mod = builder.get()
    rx.analysis.well_formed(mod)
    vm = rx.VirtualMachine(tvm.compile(mod, target_of(device)), device)
    found = vm["main"](*(tvm.runtime.tensor(x, device) for x in arrays))
    return [x.numpy() for x in (found if len(arrays) > 3 else [found])]


def test_any_function_from_a_prim_func(rng, device):
    """Two outputs of a norm, by `call_tir`."""
    x, residual = (normal(rng, (5, 64), "float16") for _ in range(2))
    weight = normal(rng, (64,), "float16")
    inputs = placeholders(x, residual, weight)
    outs = [tir.Written((5, 64), "float16")] * 2
    function = tir.packed_prim_func("fused_add_rmsnorm", [*inputs, 1e-5, *outs])
    assert 'T.call_packed("flashinfer.fused_add_rmsnorm"' in function.script()
    builder = rx.BlockBuilder()
    params = [rx.Var(t.name, rx.TensorType(t.shape, t.dtype)) for t in inputs]
    with builder.function("main", params):
        ty = rx.TensorType((5, 64), "float16")
        made = builder.emit(
            rx.call_tir(builder.add_func(function, "norm"), params, out_ty=[ty, ty])
        )
        both = builder.emit(rx.op.concat([rx.TupleGetItem(made, i) for i in range(2)], 1))
        builder.emit_func_output(both)
    (got,) = run_main(builder, device, x, residual, weight)
    want = np.concatenate(ops.fused_add_rmsnorm(x, residual, weight, eps=1e-5), 1)
    np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-3)


def test_a_function_that_changes_a_tensor(rng, device):
    """Pages in place, by `call_tir_inplace`; texts among the arguments."""
    qkv = normal(rng, (3, 4, 64), "float16")
    pages = np.zeros((2, 2, 1, 16, 64), np.float16)
    positions, slots = (np.array(x, np.int32) for x in ([4, 9, 2], [3, 20, -1]))
    inputs = placeholders(qkv, positions, slots)
    function = tir.packed_prim_func(
        "split_qkv_rotary_append",
        [
            *inputs, 1e4, 1.0, 64, "{}", tir.Written(pages.shape, "float16"),
            tir.Written((3, 2, 64), "float16"),
        ],
    )  # fmt: skip
    builder = rx.BlockBuilder()
    shapes = [qkv, positions, slots, pages]
    params = [rx.Var(f"x{i}", rx.TensorType(a.shape, a.dtype.name)) for i, a in enumerate(shapes)]
    with builder.function("main", params):
        types = [params[3].ty, rx.TensorType((3, 2, 64), "float16")]
        made = builder.emit(
            rx.op.call_tir_inplace(
                builder.add_func(function, "append"), params, [3, -1], out_ty=types
            )
        )
        builder.emit_func_output(made)
    after, q = run_main(builder, device, qkv, positions, slots, pages)
    want_pages = pages.copy()
    want = ops.split_qkv_rotary_append(qkv, positions, slots, want_pages, 2)
    np.testing.assert_allclose(q, want, rtol=2e-3, atol=2e-3)
    np.testing.assert_allclose(after, want_pages, rtol=2e-3, atol=2e-3)

"""Norms and gated activations against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, normal
from device_tensors import DeviceTensor, poisoned, synchronize, to_device
from refusals import refused, unchanged

from tvm_flashinfer import ops as typed

NORMS = ("rmsnorm", "gemma_rmsnorm")
GATES = ("silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul")
#: Rows and dimensions: less than a vector, odd, of models, and more than registers hold.
SHAPES = [(1, 1), (3, 7), (5, 64), (2, 100), (9, 4096), (700, 129), (2, 40000)]


def normed(x: np.ndarray, weight: np.ndarray, name: str, eps: float, real: type) -> np.ndarray:
    """The norm of the last axis in the arithmetic of `real`."""
    x, weight = x.astype(real), weight.astype(real)
    scale = 1 / np.sqrt((x * x).mean(-1, keepdims=True) + real(eps))
    return x * scale * (weight + real("gemma" in name))


def check_norm(
    got: np.ndarray, x: np.ndarray, weight: np.ndarray, name: str, eps: float, what: str = "norm"
) -> None:
    """Compare with float64; a single element has no row to compare with but itself."""
    exact = normed(x, weight, name, eps, np.float64)
    plain = normed(x, weight, name, eps, np.float32).astype(x.dtype)
    oracle.assert_rows_close(got, exact, plain, oracle.FLOOR[x.dtype.name], what)


def gated(x: np.ndarray, name: str) -> np.ndarray:
    """The gated activation in float64."""
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    if name.startswith("silu"):
        return gate / (1 + np.exp(-gate)) * up
    if "tanh" in name:
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        return gate * (1 + np.tanh(inner)) / 2 * up
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return gate * (1 + erf(gate / math.sqrt(2))) / 2 * up


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norm(ops, device, rng, dtype, shape, name):
    """Rows of any length, the inputs left as they were."""
    x, weight = normal(rng, shape, dtype), normal(rng, shape[1:], dtype)
    args = {"x": to_device(x, device), "weight": to_device(weight, device, byte_offset=2)}
    if dtype == "float32":
        args["weight"] = to_device(weight, device, byte_offset=4)
    out = poisoned(shape, dtype, device)
    with unchanged(args):
        getattr(ops, name)(*(a.tensor for a in args.values()), 1e-5, out.tensor)
        got = out.numpy()
    out.assert_guards_intact("out")
    check_norm(got, x, weight, name, 1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_and_norm(ops, device, rng, dtype, shape, name, in_place):
    """The sum is what is stored, to the bit, and the norm that of the sum."""
    x, residual = normal(rng, shape, dtype), normal(rng, shape, dtype)
    weight = normal(rng, shape[1:], dtype)
    given = [to_device(a, device) for a in (x, residual, weight)]
    out, total = given[:2] if in_place else [poisoned(shape, dtype, device) for _ in range(2)]
    function = getattr(ops, name.replace("rmsnorm", "fused_add_rmsnorm"))
    function(*(a.tensor for a in given), 1e-5, out.tensor, total.tensor)
    for holder in (out, total):
        holder.assert_guards_intact("output")
    kept = given[2:] if in_place else given
    for holder, before in zip(kept, (x, residual, weight)[-len(kept) :], strict=True):
        np.testing.assert_array_equal(holder.numpy(), before)
    summed = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    np.testing.assert_array_equal(total.numpy(), summed)
    check_norm(out.numpy(), summed, weight, name, 1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_of_a_fused_tensor(ops, device, rng, dtype, head_dim, in_place):
    """The queries of fused projections, each head normed; in place the other heads stay."""
    fused = normal(rng, (5, 8, head_dim), dtype)
    weight = normal(rng, (head_dim,), dtype)
    held = to_device(fused, device, byte_offset=16)
    heads = held.view(lambda a: a[:, 2:6])
    out = heads if in_place else poisoned((5, 4, head_dim), dtype, device)
    ops.rmsnorm(heads.tensor, to_device(weight, device).tensor, 1e-6, out.tensor)
    check_norm(out.numpy(), fused[:, 2:6], weight, "rmsnorm", 1e-6)
    after = held.numpy()
    np.testing.assert_array_equal(after[:, :2], fused[:, :2])
    np.testing.assert_array_equal(after[:, 6:], fused[:, 6:])
    if not in_place:
        np.testing.assert_array_equal(after, fused)


@pytest.mark.parametrize("name", GATES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (9, 64), (4, 11008), (300, 20)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gates(ops, device, rng, dtype, shape, name):
    """Large gates of either sign too, which neither overflow nor lose their tail."""
    rows, dim = shape
    x = normal(rng, (rows, 2 * dim), dtype)
    x[:, :dim:3] *= 6
    x[:, dim:] = 1 + np.abs(x[:, dim:])
    out = poisoned(shape, dtype, device)
    getattr(ops, name)(to_device(x, device).tensor, out.tensor)
    got = out.numpy()
    out.assert_guards_intact("out")
    exact = gated(x, name)
    error = np.abs(got.astype(np.float64) - exact)
    # One rounding of the result, and a few of float32 on the way.
    step = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 4e-6}[dtype]
    tiny = {"float16": 2.0**-24, "bfloat16": 1e-30, "float32": 1e-30}[dtype]
    bound = np.abs(exact) * (step + 4e-6) + np.abs(x[:, :dim].astype(np.float64)) * 4e-7 + tiny
    assert (error <= bound).all(), (error / bound).max()


@pytest.mark.parametrize("name", GATES)
def test_gates_of_extreme_values(ops, device, name):
    """Gates far from 0 pass or close; NaN stays NaN."""
    x = np.array([[3e4, -3e4, 0.0, np.nan, 2, 2, 2, 2]], np.float32)
    out = poisoned((1, 4), "float32", device)
    getattr(ops, name)(to_device(x, device).tensor, out.tensor)
    got = out.numpy()[0]
    np.testing.assert_allclose(got[:3], [6e4, 0, 0], rtol=1e-6, atol=1e-30)
    assert np.isnan(got[3])


def test_strided_rows_of_a_gate(ops, device, rng):
    """Rows with gaps between them."""
    wide = normal(rng, (6, 96), "float16")
    x = to_device(wide, device, byte_offset=0).view(lambda a: a[:, 16:80])
    out = poisoned((6, 32), "float16", device)
    ops.silu_and_mul(x.tensor, out.tensor)
    exact = gated(wide[:, 16:80], "silu_and_mul")
    np.testing.assert_allclose(out.numpy(), exact, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("rows", [0, 3])
def test_no_elements(ops, device, rows):
    """Neither rows nor dimensions, and nothing is written."""
    dim = 0 if rows else 8
    x, weight = (to_device(np.zeros(s, np.float16), device) for s in ((rows, dim), (dim,)))
    out = poisoned((rows, dim), "float16", device)
    ops.rmsnorm(x.tensor, weight.tensor, 1e-6, out.tensor)
    ops.silu_and_mul(to_device(np.zeros((rows, 2 * dim), np.float16), device).tensor, out.tensor)
    out.assert_guards_intact()


def test_a_row_of_zeros(ops, device):
    """Without an eps it is 0 / 0, and with one 0."""
    x, weight = np.zeros((2, 32), np.float32), np.ones(32, np.float32)
    out = poisoned((2, 32), "float32", device)
    ops.rmsnorm(to_device(x, device).tensor, to_device(weight, device).tensor, 1e-6, out.tensor)
    assert not out.numpy().any()


def test_overlaps(ops, device, rng):
    """An output is an input element by element, or apart from it."""
    x = to_device(normal(rng, (6, 64), "float16"), device)
    weight = to_device(normal(rng, (64,), "float16"), device)
    shifted = x.view(lambda a: a[1:])
    first = x.view(lambda a: a[:-1])
    says = ("overlap", r"\bout\b", r"\bx\b")
    with unchanged({"x": x}), refused(ValueError, *says):
        ops.rmsnorm(first.tensor, weight.tensor, 1e-6, shifted.tensor)
    residual = to_device(normal(rng, (6, 64), "float16"), device)
    with unchanged({"x": x}), refused(ValueError, "overlap", r"\bsum\b", r"\bx\b"):
        ops.fused_add_rmsnorm(
            *(a.tensor for a in (x, residual, weight)), 1e-6,
            poisoned((6, 64), "float16", device).tensor, x.tensor,
        )  # fmt: skip
    with unchanged({"x": x}), refused(ValueError, "overlap", r"\bout\b", r"\bsum\b"):
        ops.fused_add_rmsnorm(*(a.tensor for a in (x, residual, weight)), 1e-6, *[x.tensor] * 2)


def _host(x: Any) -> np.ndarray:
    synchronize(x.device)
    return x.numpy()


def test_typed(device, rng):
    """Names, defaults and results that are allocated."""
    x, residual = (normal(rng, (4, 64), "float16") for _ in range(2))
    weight = normal(rng, (64,), "float16")
    held: list[DeviceTensor] = [to_device(a, device) for a in (x, residual, weight)]
    tensors = [a.tensor for a in held]
    for name in NORMS:
        got = getattr(typed, name)(tensors[0], tensors[2])
        check_norm(_host(got), x, weight, name, 1e-6, name)
        fused = getattr(typed, name.replace("rmsnorm", "fused_add_rmsnorm"))
        out, total = fused(*tensors, eps=1e-5)
        summed = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
        np.testing.assert_array_equal(_host(total), summed)
        check_norm(_host(out), summed, weight, name, 1e-5, name)
    for name in GATES:
        got = _host(getattr(typed, name)(tensors[0]))
        np.testing.assert_allclose(got, gated(x, name), rtol=2e-3, atol=1e-4)

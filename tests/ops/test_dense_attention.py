"""Requests of equal length: `bind_attention("dense")`, `single_prefill` and `single_decode`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from batches import DTYPES, normal
from cache_calls import needs_cache_kernel
from cache_oracle import Extras, assert_request
from device_tensors import DeviceTensor, poisoned, synchronize, to_device
from refusals import refused

NAN_SCRATCH = np.full(8, np.nan, np.float32)


def _inputs(rng: Any, shape: tuple[int, ...], heads: tuple[int, int], dtype: str) -> list:
    batch, n, m, d, vo = shape
    q = normal(rng, (batch, n, heads[0], d), dtype)
    return [
        q,
        normal(rng, (batch, m, heads[1], d), dtype),
        normal(rng, (batch, m, heads[1], vo), dtype),
    ]


def _dense(
    ops: Any, device: Any, arrays: list, extras: Extras, options: dict, scale: float, **kwargs: Any
) -> None:
    """Call and compare every request with float64, with and without LSE."""
    q, k, v = arrays
    tensors = kwargs.get("tensors") or [to_device(x, device) for x in arrays]
    heads = [
        None if x is None else to_device(x.astype(np.float32), device).tensor
        for x in (extras.sinks, extras.alibi_slopes)
    ]
    bound = ops.bind_attention("dense", json.dumps(options), *heads)
    o = poisoned((*q.shape[:3], v.shape[3]), q.dtype.name, device)
    lse = poisoned(q.shape[:3], "float32", device)
    bound(*(x.tensor for x in tensors), o.tensor, lse.tensor, int(extras.causal), scale)
    synchronize(device)
    for name, tensor in (("o", o), ("lse", lse)):
        tensor.assert_guards_intact(name)
    got, logs = o.numpy(), lse.numpy()
    for b in range(len(q)):
        assert_request(got[b], logs[b], q[b], k[b], v[b], extras, scale, f"request {b}")
    without = poisoned(got.shape, q.dtype.name, device)
    bound(*(x.tensor for x in tensors), without.tensor, None, int(extras.causal), scale)
    synchronize(device)
    np.testing.assert_array_equal(without.numpy(), got)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1, 64, 64), (3, 5, 17, 64, 64), (2, 70, 200, 128, 128), (4, 1, 300, 128, 128),
     (2, 33, 9, 64, 64), (2, 24, 40, 192, 128)],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_shapes(ops, device, rng, dtype, shape, causal):
    """More rows than keys, more keys than rows, decode, wider queries than values."""
    needs_cache_kernel(device, dtype, shape[3])
    arrays = _inputs(rng, shape, (8, 2), dtype)
    _dense(ops, device, arrays, Extras(causal=causal), {}, shape[3] ** -0.5)


@pytest.mark.parametrize("heads", [(4, 4), (6, 1), (7, 1), (28, 4), (32, 1)], ids=str)
def test_head_ratios(ops, device, rng, heads):
    """Groups of 1, 6, 7 and 32."""
    arrays = _inputs(rng, (2, 19, 50, 64, 64), heads, "float16")
    _dense(ops, device, arrays, Extras(causal=True), {}, 0.2)


def test_variants(ops, device, rng):
    """A window, a soft cap, sinks and slopes."""
    arrays = _inputs(rng, (2, 21, 90, 64, 64), (4, 2), "float16")
    per_head = rng.standard_normal(4).astype(np.float32)
    base = Extras(causal=True)
    for extras, options in (
        (replace(base, soft_cap=8.0), {"logits_soft_cap": 8.0}),
        (replace(base, sinks=per_head), {}),
        (replace(base, alibi_slopes=np.abs(per_head)), {}),
    ):
        _dense(ops, device, arrays, extras, options, 0.125)


def test_window(ops, device, rng):
    """`window_left` keys up to the diagonal are what plain attention over those keys sees."""
    q, k, v = _inputs(rng, (2, 1, 90, 64, 64), (4, 2), "float16")
    bound = ops.bind_attention("dense", json.dumps({"window_left": 12}), None, None)
    o = poisoned(q.shape, "float16", device)
    tensors = [to_device(x, device).tensor for x in (q, k, v)]
    bound(*tensors, o.tensor, None, 1, 0.125)
    synchronize(device)
    lse = np.zeros((1, 4), np.float32)
    for b in range(2):
        near = k[b, -13:], v[b, -13:]
        exact = ops.bind_attention("dense", "{}", None, None)
        alone = poisoned((1, 1, 4, 64), "float16", device)
        part = [to_device(x[None], device).tensor for x in (q[b], *near)]
        exact(*part, alone.tensor, to_device(lse[None], device).tensor, 0, 0.125)
        synchronize(device)
        np.testing.assert_allclose(o.numpy()[b], alone.numpy()[0], 2e-3, 2e-3)


def test_slices_of_one_tensor(ops, device, rng):
    """q, k and v cut from one fused tensor (B, n, Hq + 2 Hkv, d)."""
    fused = normal(rng, (3, 11, 8, 64), "float16")
    whole = to_device(fused, device)
    cuts = [np.s_[:, :, :4], np.s_[:, :, 4:6], np.s_[:, :, 6:]]
    tensors = [whole.view(lambda x, cut=cut: x[cut]) for cut in cuts]
    arrays = [fused[cut] for cut in cuts]
    _dense(ops, device, arrays, Extras(causal=True), {}, 0.125, tensors=tensors)


@pytest.mark.parametrize("shape", [(0, 4, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing(ops, device, rng, shape):
    """No requests, no rows, no keys."""
    batch, n, m = shape
    arrays = _inputs(rng, (batch, n, m, 64, 64), (4, 2), "float16")
    _dense(ops, device, arrays, Extras(), {}, 0.125)


def _single(ops: Any, device: Any, arrays: list, causal: int, layout: int, flat: bool) -> None:
    """As MLC calls them: (1, s, H, d) and (t, H, d), the output as (1, s, H * d)."""
    q, k, v = arrays
    heads = (lambda x: np.ascontiguousarray(x.swapaxes(-3, -2))) if layout else (lambda x: x)
    keys, values = to_device(heads(k), device), to_device(heads(v), device)
    shape = (1, q.shape[-3], q.shape[-2] * v.shape[-1]) if flat else (*q.shape[:-1], v.shape[-1])
    o = poisoned(shape, q.dtype.name, device)
    common = [to_device(q, device).tensor, keys.tensor, values.tensor]
    scratch = to_device(NAN_SCRATCH, device).tensor
    if causal < 0:
        ops.single_decode(*common, scratch, layout, 0, 1.0, 0.0, o.tensor)
    else:
        ops.single_prefill(*common, scratch, causal, layout, 0, 1, 1.0, 0.0, o.tensor)
    synchronize(device)
    o.assert_guards_intact("o")
    q, k, v = (x.reshape(x.shape[-3:]) for x in arrays)
    got = o.numpy().reshape(*q.shape[:2], v.shape[-1])
    bound = ops.bind_attention("dense", "{}", None, None)
    logs = poisoned((1, *q.shape[:2]), "float32", device)
    again = poisoned((1, *got.shape), q.dtype.name, device)
    tensors = [to_device(x[None], device).tensor for x in (q, k, v)]
    bound(*tensors, again.tensor, logs.tensor, max(causal, 0), q.shape[-1] ** -0.5)
    synchronize(device)
    extras = Extras(causal=causal == 1)
    assert_request(got, logs.numpy()[0], q, k, v, extras, q.shape[-1] ** -0.5, "single")


@pytest.mark.parametrize("layout", [0, 1])
@pytest.mark.parametrize("group", [1, 4, 6, 7, 8])
def test_single(ops, device, rng, group, layout):
    """Every group, both layouts of k and v, causal or not, and decode."""
    q = normal(rng, (1, 30, 2 * group, 128), "float16")
    k, v = (normal(rng, (47, 2, 128), "float16") for _ in range(2))
    _single(ops, device, [q, k, v], 1, layout, flat=True)
    _single(ops, device, [q, k[None], v[None]], 0, layout, flat=False)
    _single(ops, device, [q[:, :1], k, v], -1, layout, flat=True)


def _spoiled(x: DeviceTensor, cut: Any) -> Any:
    return x.view(cut).tensor


def test_refusals(ops, device, rng):
    """Shapes that do not fit are refused with the argument's name."""
    q, k, v = (to_device(x, device) for x in _inputs(rng, (2, 4, 6, 64, 64), (4, 2), "float16"))
    o = poisoned((2, 4, 4, 64), "float16", device)
    bound = ops.bind_attention("dense", "{}", None, None)
    good = [q.tensor, k.tensor, v.tensor, o.tensor, None, 1, 0.125]

    def bad(index: int, value: Any, *says: str) -> None:
        with refused((ValueError, TypeError), *says):
            bound(*(value if i == index else x for i, x in enumerate(good)))

    bad(0, _spoiled(q, lambda x: x[0]), r"`q`", "batch_size")
    bad(1, _spoiled(k, lambda x: x[:1]), r"`k`")
    bad(2, _spoiled(v, lambda x: x[:, :5]), r"`v`")
    bad(3, _spoiled(o, lambda x: x[:, :3]), r"`o`")
    bad(0, _spoiled(q, lambda x: x[:, ::2]), r"`o`|`q`")
    bad(1, _spoiled(k, lambda x: x[:, :, :, :32]), r"head_dim")
    bad(5, 2, r"`causal`")
    bad(3, q.tensor, "overlap")
    with refused(ValueError, "one request"):
        ops.single_prefill(*good[:3], o.tensor, 1, 0, 0, 1, 1.0, 0.0, o.tensor)
    one = [x.view(lambda a: a[:1]).tensor for x in (q, k, v)]
    with refused(ValueError, "rotary_mode"):
        ops.single_prefill(*one, one[0], 1, 0, 1, 1, 1.0, 0.0, o.tensor)
    with refused(ValueError, "`o`"):
        ops.single_decode(*one, one[0], 0, 0, 1.0, 0.0, o.tensor)

"""`split_qkv_rotary` and `bind_split_qkv_rotary` against float64 rotary embedding."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, normal
from device_tensors import DeviceTensor, poisoned, to_device

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SCALINGS = {
    "none": {},
    "gptj": {"rope_type": "gptj"},
    "llama3": LLAMA3,
    "linear": {"rope_type": "linear", "factor": 4.0},
}


def _split(
    ops: Any,
    device: Any,
    qkv: np.ndarray | DeviceTensor,
    positions: np.ndarray,
    heads: tuple[int, int],
    *,
    apply_rope: int = 1,
    theta: float = 10000.0,
    scale: float = 1.0,
    rotary_dim: int | None = None,
    scaling: dict[str, Any] | None = None,
    bound: bool = False,
) -> list[np.ndarray]:
    """q, k, v on the host; the bytes around them and the inputs must be intact."""
    placed = qkv if isinstance(qkv, DeviceTensor) else to_device(qkv, device)
    n, _, d = placed.layout.shape
    dtype = placed.layout.dtype.name
    outs = [poisoned((n, h, d), dtype, device) for h in (heads[0], heads[1], heads[1])]
    index = to_device(positions.astype(np.int32), device, byte_offset=4)
    before = placed.raw()
    rotary = (theta, scale, d if rotary_dim is None else rotary_dim, json.dumps(scaling or {}))
    tensors = [placed.tensor, index.tensor, *(x.tensor for x in outs)]
    if bound:
        ops.bind_split_qkv_rotary(*rotary)(*tensors, apply_rope)
    else:
        ops.split_qkv_rotary(*tensors, apply_rope, *rotary)
    np.testing.assert_array_equal(placed.raw(), before)
    for name, out in zip("qkv", outs, strict=True):
        out.assert_guards_intact(name)
    return [x.numpy() for x in outs]


def _check(
    got: list[np.ndarray],
    qkv: np.ndarray,
    positions: np.ndarray,
    heads: tuple[int, int],
    *,
    theta: float = 10000.0,
    scale: float = 1.0,
    rotary_dim: int | None = None,
    scaling: dict[str, Any] | None = None,
) -> None:
    d = qkv.shape[-1]
    rotary_dim = d if rotary_dim is None else rotary_dim
    kwargs: dict[str, Any] = dict(
        theta=theta, scale=scale, rotary_dim=rotary_dim, rope_scaling=scaling
    )
    parts = np.split(qkv, [heads[0], heads[0] + heads[1]], axis=1)
    np.testing.assert_array_equal(got[2], parts[2], err_msg="v is copied")
    for name, actual, part in zip("qk", got, parts, strict=False):
        exact = oracle.rotary(part, positions, **kwargs)
        plain = oracle.rotary(part, positions, plain=True, **kwargs)
        oracle.assert_rows_close(actual, exact, plain, oracle.FLOOR[qkv.dtype.name], name)
        np.testing.assert_array_equal(
            actual[..., rotary_dim:], part[..., rotary_dim:], err_msg=f"the tail of {name}"
        )


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_float64(ops, device, rng, dtype, head_dim, scaling):
    """Every dtype, head dimension and kind of scaling."""
    heads = (6, 2)
    qkv = normal(rng, (37, 10, head_dim), dtype)
    positions = rng.integers(0, 4000, 37)
    kwargs: dict[str, Any] = dict(theta=500000.0, scaling=SCALINGS[scaling])
    got = _split(ops, device, qkv, positions, heads, **kwargs)
    _check(got, qkv, positions, heads, **kwargs)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("rotary_dim", [2, 16, 32, 64, 96, 128])
def test_partial_rotary(ops, device, rng, rotary_dim, scaling):
    """Dimensions from rotary_dim on are copied."""
    heads = (4, 1)
    qkv = normal(rng, (9, 6, 128), "float32")
    positions = rng.integers(0, 100, 9)
    kwargs: dict[str, Any] = dict(rotary_dim=rotary_dim, scaling=SCALINGS[scaling])
    got = _split(ops, device, qkv, positions, heads, **kwargs)
    _check(got, qkv, positions, heads, **kwargs)


@pytest.mark.parametrize(("theta", "scale"), [(1e4, 1.0), (1e6, 0.25), (1e4, 2.5), (150.0, 1.0)])
def test_theta_and_scale(ops, device, rng, theta, scale):
    """The base and the factor of the positions."""
    qkv = normal(rng, (20, 4, 64), "float32")
    positions = rng.integers(0, 2000, 20)
    kwargs: dict[str, Any] = dict(theta=theta, scale=scale)
    got = _split(ops, device, qkv, positions, (2, 1), **kwargs)
    _check(got, qkv, positions, (2, 1), **kwargs)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_large_positions(ops, device, rng, dtype):
    """Positions up to 131071: sines of large angles are not the fast, wrong ones."""
    qkv = normal(rng, (40, 4, 128), dtype)
    positions = np.concatenate([[131071, 131070, 100000], rng.integers(30000, 131072, 37)])
    got = _split(ops, device, qkv, positions, (2, 1), theta=500000.0)
    _check(got, qkv, positions, (2, 1), theta=500000.0)


@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_without_rope_everything_is_copied(ops, device, rng, dtype, bound):
    """apply_rope 0 splits to the bit, NaN values included."""
    qkv = normal(rng, (11, 8, 64), dtype)
    qkv[3, 2] = np.nan
    got = _split(ops, device, qkv, np.arange(11), (4, 2), apply_rope=0, bound=bound)
    whole = np.concatenate(got, axis=1)
    np.testing.assert_array_equal(whole.view(np.uint8), qkv.view(np.uint8))


def test_position_zero_is_the_identity(ops, device, rng):
    """Position 0 rotates by nothing."""
    qkv = normal(rng, (5, 4, 64), "float16")
    got = _split(ops, device, qkv, np.zeros(5), (2, 1))
    np.testing.assert_array_equal(np.concatenate(got, axis=1), qkv)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_bound_form_gives_the_same(ops, device, rng, scaling):
    """The function that bind_split_qkv_rotary returns gives the same bits."""
    qkv = normal(rng, (21, 6, 64), "float16")
    positions = rng.integers(0, 5000, 21)
    kwargs: dict[str, Any] = dict(theta=2e4, scale=0.5, rotary_dim=32, scaling=SCALINGS[scaling])
    direct = _split(ops, device, qkv, positions, (4, 1), **kwargs)
    bound = _split(ops, device, qkv, positions, (4, 1), bound=True, **kwargs)
    for a, b in zip(direct, bound, strict=True):
        np.testing.assert_array_equal(a.view(np.uint16), b.view(np.uint16))


def test_bound_functions_are_independent(ops, device, rng):
    """Two bound functions alive at once keep their own parameters."""
    qkv = normal(rng, (6, 4, 64), "float32")
    positions = np.arange(6) * 7
    settings = [(1e4, 1.0, 64, "{}"), (1e2, 0.5, 32, json.dumps(SCALINGS["gptj"]))]
    bound = [ops.bind_split_qkv_rotary(*x) for x in settings]
    for function, (theta, scale, rotary_dim, text) in zip(bound, settings, strict=True):
        outs = [poisoned((6, h, 64), "float32", device) for h in (2, 1, 1)]
        index = to_device(positions.astype(np.int32), device)
        placed = to_device(qkv, device)
        function(placed.tensor, index.tensor, *(x.tensor for x in outs), 1)
        _check(
            [x.numpy() for x in outs], qkv, positions, (2, 1), theta=theta, scale=scale,
            rotary_dim=rotary_dim, scaling=json.loads(text),
        )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_input(ops, device, rng, dtype):
    """The fused tensor as a slice of a wider tensor with gaps between rows and heads."""
    qkv = normal(rng, (13, 4, 64), dtype)
    wide = np.full((13, 6, 80), np.nan, qkv.dtype)
    wide[:, 1:5, 16:] = qkv
    placed = to_device(wide, device, byte_offset=64).view(lambda a: a[:, 1:5, 16:])
    positions = np.arange(13)
    got = _split(ops, device, placed, positions, (2, 1))
    _check(got, qkv, positions, (2, 1))


def test_no_rows(ops, device):
    """A batch without tokens writes nothing."""
    got = _split(ops, device, np.zeros((0, 4, 64), np.float16), np.zeros(0), (2, 1))
    assert [x.shape[0] for x in got] == [0, 0, 0]


def test_many_rows(ops, device, rng):
    """Thousands of tokens of many heads."""
    qkv = normal(rng, (3000, 12, 64), "float16")
    positions = np.arange(3000)
    got = _split(ops, device, qkv, positions, (8, 2))
    _check(got, qkv, positions, (8, 2))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("none", [1.0, 1e-1, 1e-2, 1e-3]),
        ("linear", [0.25, 0.025, 0.0025, 0.00025]),
        # rotations = 8192 f / 2 pi: above 4 kept, below 1 divided by 8, between them blended.
        ("llama3", [1.0, 1e-1, 1e-2, 1e-3 * (0.125 + 0.875 * (8.192 / (2 * np.pi) - 1) / 3)]),
    ],
)
def test_oracle_frequencies(name, expected):
    """The oracle's own inverse frequencies, by hand: theta 10^4, 8 dimensions."""
    np.testing.assert_allclose(oracle.rotary_inv_freq(8, 1e4, SCALINGS[name]), expected)

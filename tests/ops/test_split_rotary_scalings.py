"""The split of QKV with yarn and longrope, against float64; test_cache_attention_tvm has TVM's."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, normal
from cache_oracle import rotate
from device_tensors import poisoned, to_device
from refusals import refused
from test_cache_attention_rotary import YARN

HQ, HKV = 4, 2
LONGROPE = {
    "rope_type": "longrope",
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 20,
}


def _check(
    bound: Any, device: Any, qkv: np.ndarray, positions: np.ndarray, last: Any, **rope: Any
) -> None:
    n, _, d = qkv.shape
    dtype = qkv.dtype.name
    outs = [poisoned((n, h, d), dtype, device) for h in (HQ, HKV, HKV)]
    index = to_device(positions.astype(np.int32), device, byte_offset=4)
    bound(to_device(qkv, device).tensor, index.tensor, *(x.tensor for x in outs), last)
    parts = np.split(qkv, [HQ, HQ + HKV], axis=1)
    np.testing.assert_array_equal(outs[2].numpy(), parts[2])
    for out, part, name in zip(outs[:2], parts[:2], "qk", strict=True):
        exact = rotate(part, positions, **rope)
        plain = rotate(part, positions, plain=True, **rope)
        oracle.assert_rows_close(out.numpy(), exact, plain, oracle.FLOOR[dtype], name)


@pytest.mark.parametrize("rotary_dim", [64, 40, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_yarn(ops, device, rng, dtype, rotary_dim):
    """Both frequencies of every pair."""
    qkv, positions = normal(rng, (33, HQ + 2 * HKV, 64), dtype), rng.integers(0, 4000, 33)
    bound = ops.bind_split_qkv_rotary(5e5, 1.0, rotary_dim, json.dumps(YARN))
    _check(bound, device, qkv, positions, 1, theta=5e5, rotary_dim=rotary_dim, scaling=YARN)


@pytest.mark.parametrize("rows", [20, 21])
@pytest.mark.parametrize("dtype", DTYPES)
def test_longrope(ops, device, rng, dtype, rows):
    """The first half of the factors for calls of more rows than the original length."""
    rotary_dim = 48
    qkv, positions = normal(rng, (rows, HQ + 2 * HKV, 64), dtype), rng.integers(0, 4000, rows)
    factors = rng.uniform(1, 30, rotary_dim).astype(np.float32)
    table = to_device(factors, device, byte_offset=4)
    bound = ops.bind_split_qkv_rotary(1e4, 1.0, rotary_dim, json.dumps(LONGROPE))
    used = factors[: rotary_dim // 2] if rows > 20 else factors[rotary_dim // 2 :]
    for _ in range(2):  # the table is read from a device once
        _check(
            bound, device, qkv, positions, table.tensor, theta=1e4, rotary_dim=rotary_dim,
            scaling=LONGROPE, ext_factors=used,
        )  # fmt: skip


def test_refusals(ops, device, rng):
    """A table where none is wanted, none where one is, and one of the wrong size."""
    qkv = normal(rng, (3, HQ + 2 * HKV, 64), "float16")
    table = to_device(np.ones(64, np.float32), device).tensor
    short = to_device(np.ones(32, np.float32), device).tensor
    plain = ops.bind_split_qkv_rotary(1e4, 1.0, 64, "{}")
    longrope = ops.bind_split_qkv_rotary(1e4, 1.0, 64, json.dumps(LONGROPE))
    for bound, last, error, says in (
        (plain, table, TypeError, "apply_rope"),
        (longrope, 1, TypeError, "ext_factors"),
        (longrope, short, ValueError, "ext_factors"),
    ):
        with refused(error, says):
            _check(bound, device, qkv, np.arange(3), last)

"""Rotary embedding outside of attention against float64: `apply_rope` and its siblings."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, indptr_of, is_cuda, normal
from device_tensors import DeviceTensor, poisoned, synchronize, to_device
from refusals import refused, unchanged
from test_split_qkv_rotary import SCALINGS

from tvm_flashinfer import ops as typed

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}


def check(got: np.ndarray, x: np.ndarray, positions: np.ndarray, **settings: Any) -> None:
    """Compare rotated heads with float64; what is not rotated is a copy."""
    kwargs = {"theta": 1e4, "scale": 1.0, "rotary_dim": x.shape[-1], "rope_scaling": None}
    kwargs |= settings
    exact = oracle.rotary(x, positions, **kwargs)
    plain = oracle.rotary(x, positions, plain=True, **kwargs)
    oracle.assert_rows_close(got, exact, plain, oracle.FLOOR[x.dtype.name], "rotated")
    rest = kwargs["rotary_dim"]
    np.testing.assert_array_equal(got[..., rest:], x[..., rest:])


def same_numbers(got: np.ndarray, want: np.ndarray, device: Any) -> None:
    """The same bits on CPU; on CUDA, where kernels may add in another order, one rounding apart."""
    if not is_cuda(device):
        np.testing.assert_array_equal(got.view(np.uint8), want.view(np.uint8))
        return
    step = {"float16": 2.0**-10, "bfloat16": 2.0**-7}[want.dtype.name]
    wide = [x.astype(np.float32) for x in (got, want)]
    np.testing.assert_allclose(*wide, rtol=step, atol=step / 16)


class Heads:
    """Queries and keys that are slices of one fused tensor, and where they go."""

    def __init__(
        self, rng: Any, device: Any, rows: int, dim: int, dtype: str, in_place: bool
    ) -> None:
        self.fused = normal(rng, (rows, 8, dim), dtype)
        self.held = to_device(self.fused, device, byte_offset=32)
        self.inputs = [self.held.view(cut) for cut in (lambda a: a[:, :4], lambda a: a[:, 4:6])]
        shapes = [x.layout.shape for x in self.inputs]
        self.outputs: list[DeviceTensor] = (
            self.inputs if in_place else [poisoned(s, dtype, device) for s in shapes]
        )

    @property
    def tensors(self) -> list[Any]:
        """Queries and keys, then where they go."""
        return [x.tensor for x in (*self.inputs, *self.outputs)]

    def check(self, positions: np.ndarray, **settings: Any) -> None:
        """Compare with float64; other heads of the fused tensor are as they were."""
        for out, x in zip(self.outputs, (self.fused[:, :4], self.fused[:, 4:6]), strict=True):
            out.assert_guards_intact("output")
            check(out.numpy(), x, positions, **settings)
        after = self.held.numpy()
        np.testing.assert_array_equal(after[:, 6:], self.fused[:, 6:])
        if self.outputs is not self.inputs:
            np.testing.assert_array_equal(after, self.fused)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_rope(ops, device, rng, dtype, head_dim, scaling, in_place):
    """Every dtype and kind of scaling, into other tensors and in place."""
    heads = Heads(rng, device, 37, head_dim, dtype, in_place)
    positions = rng.integers(0, 4000, 37).astype(np.int32)
    text = json.dumps(SCALINGS[scaling])
    q, k, *outs = heads.tensors
    where = to_device(positions, device, byte_offset=4)
    ops.apply_rope(q, k, where.tensor, 5e5, 1.0, head_dim, text, *outs)
    heads.check(positions, theta=5e5, rope_scaling=SCALINGS[scaling])


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("scaling", ["none", "gptj"])
@pytest.mark.parametrize("rotary_dim", [0, 2, 32, 48, 96])
def test_partial_rotation(ops, device, rng, rotary_dim, scaling, in_place):
    """Dimensions from rotary_dim on are copied, or left where they are."""
    heads = Heads(rng, device, 9, 128, "float16", in_place)
    positions = rng.integers(0, 100, 9).astype(np.int32)
    q, k, *outs = heads.tensors
    where = to_device(positions, device).tensor
    text = json.dumps(SCALINGS[scaling])
    ops.apply_rope(q, k, where, 1e4, 0.5, rotary_dim, text, *outs)
    heads.check(positions, scale=0.5, rotary_dim=rotary_dim, rope_scaling=SCALINGS[scaling])


@pytest.mark.parametrize("rows", [1, 300, 3000])
def test_equals_the_split(ops, device, rng, rows):
    """The bits of split_qkv_rotary, with yarn too, whose pairs have two frequencies."""
    qkv = normal(rng, (rows, 8, 128), "bfloat16")
    positions = to_device(rng.integers(0, 9000, rows).astype(np.int32), device).tensor
    held = to_device(qkv, device)
    for scaling in (SCALINGS["llama3"], YARN):
        outs = [poisoned((rows, h, 128), "bfloat16", device) for h in (4, 2, 2, 4, 2)]
        settings = (1e6, 1.0, 128, json.dumps(scaling))
        ops.split_qkv_rotary(held.tensor, positions, *(x.tensor for x in outs[:3]), 1, *settings)
        inputs = [held.view(cut).tensor for cut in (lambda a: a[:, :4], lambda a: a[:, 4:6])]
        ops.apply_rope(*inputs, positions, *settings, *(x.tensor for x in outs[3:]))
        for split, applied in zip(outs[:2], outs[3:], strict=True):
            same_numbers(applied.numpy(), split.numpy(), device)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (128, 48), (80, 80), (64, 6)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_cos_sin_cache(ops, device, rng, dtype, head_dim, rotary_dim, interleaved, in_place):
    """A table of the usual angles rotates as they do."""
    heads = Heads(rng, device, 21, head_dim, dtype, in_place)
    positions = rng.integers(0, 500, 21).astype(np.int32)
    angles = np.arange(500)[:, None] * oracle.rotary_inv_freq(rotary_dim, 1e4)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    q, k, *outs = heads.tensors
    held = [to_device(positions, device).tensor, to_device(table, device, byte_offset=4).tensor]
    ops.apply_rope_cos_sin_cache(q, k, *held, interleaved, *outs)
    scaling = {"rope_type": "gptj"} if interleaved else None
    heads.check(positions, rotary_dim=rotary_dim, rope_scaling=scaling)


def test_positions_beyond_the_table(ops, device, rng, monkeypatch):
    """Refused where the host can read them, or is asked to; never read."""
    heads = Heads(rng, device, 3, 64, "float16", False)
    table = to_device(np.ones((5, 64), np.float32), device).tensor
    q, k, *outs = heads.tensors
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    for bad in (-1, 5):
        where = to_device(np.array([0, bad, 4], np.int32), device).tensor
        with refused(ValueError, r"`positions`\[1\]", "5 positions"):
            ops.apply_rope_cos_sin_cache(q, k, where, table, 0, *outs)


@pytest.mark.parametrize("lengths", [(5,), (3, 0, 9, 1), (0, 0, 40), (1,) * 70], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_requests_with_offsets(ops, device, rng, dtype, lengths):
    """Positions from where a request starts: the historic function, in place."""
    rows, batch = sum(lengths), len(lengths)
    heads = Heads(rng, device, rows, 64, dtype, True)
    offsets = rng.integers(0, 1000, batch).astype(np.int32)
    indptr = indptr_of(lengths)
    positions = np.concatenate([o + np.arange(n) for o, n in zip(offsets, lengths, strict=True)])
    q, k = heads.tensors[:2]
    held = [to_device(x, device).tensor for x in (indptr, offsets)]
    ops.batch_qk_apply_rotary_in_place(q, k, *held, batch, 4, 2, 64, 0.5, 2e4)
    heads.check(positions, theta=2e4, scale=0.5)


def test_overlapping_heads(ops, device, rng):
    """Heads of q that are heads of k too, and outputs that are shifted by a head."""
    held = to_device(normal(rng, (6, 8, 64), "float16"), device)
    where = to_device(np.arange(6, dtype=np.int32), device).tensor
    q, k, shifted = (
        held.view(cut).tensor
        for cut in (lambda a: a[:, :4], lambda a: a[:, 3:6], lambda a: a[:, 1:5])
    )
    apart = held.view(lambda a: a[:, 6:]).tensor
    rest = (where, 1e4, 1.0, 64, "{}")
    with unchanged({"qkv": held}):
        with refused(ValueError, "overlap", r"\bq_out\b", r"\bk"):
            ops.apply_rope(q, k, *rest, q, k)
        with refused(ValueError, "overlap", r"\bq_out\b", r"\bq\b"):
            ops.apply_rope(q, apart, *rest, shifted, apart)
        with refused(ValueError, "share memory", r"\bq_out\b"):
            repeated = held.view(lambda a: np.broadcast_to(a[:, :1], (6, 4, 64))).tensor
            ops.apply_rope(q, apart, *rest, repeated, apart)


def test_typed(device, rng):
    """Names, defaults and results that are allocated."""
    x = normal(rng, (7, 6, 64), "float16")
    q, k = (to_device(np.ascontiguousarray(a), device).tensor for a in (x[:, :4], x[:, 4:]))
    positions = rng.integers(0, 100, 7).astype(np.int32)
    where = to_device(positions, device).tensor
    for scaling in (None, {"rope_type": "gptj"}):
        outs = typed.apply_rope(q, k, where, rope_theta=500.0, rope_scaling=scaling)
        synchronize(device)
        for got, given in zip(outs, (x[:, :4], x[:, 4:]), strict=True):
            check(got.numpy(), given, positions, theta=500.0, rope_scaling=scaling)
    angles = np.arange(100)[:, None] * oracle.rotary_inv_freq(64, 1e4)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    outs = typed.apply_rope_cos_sin_cache(q, k, where, to_device(table, device).tensor)
    synchronize(device)
    check(outs[1].numpy(), x[:, 4:], positions)

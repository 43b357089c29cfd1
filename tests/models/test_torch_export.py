"""Attention of models that `torch.export` brings, against PyTorch on CPU."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax as rx

torch = pytest.importorskip("torch", reason="PyTorch is in the extra `torch` alone")
sys.path.insert(0, str(Path(__file__).parents[1] / "relax"))

from attention_modules import called, dispatched  # noqa: E402
from tvm.relax.frontend.torch import from_exported_program  # noqa: E402

sdpa = torch.nn.functional.scaled_dot_product_attention
DENSE = "flashinfer.attention_dense"
MASKED = "flashinfer.attention_dense_masked"
BIASED = "flashinfer.attention_dense_biased"


def exported(function: Callable[..., Any], args: tuple, dynamic: Any = None) -> tvm.IRModule:
    """A function of tensors as a Relax module."""

    class Module(torch.nn.Module):
        def forward(self, a, b=None, c=None, d=None):
            return function(*(x for x in (a, b, c, d) if x is not None))

    shapes = None
    if dynamic is not None:
        names = ("a", "b", "c", "d")[: len(args)]
        shapes = dict(zip(names, dynamic, strict=True))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(Module(), args, dynamic_shapes=shapes)
        return from_exported_program(program, unwrap_unit_return_tuple=True)


def check(
    function: Callable[..., Any],
    args: tuple,
    calls: list[str],
    dynamic: Any = None,
    run_with: tuple | None = None,
) -> None:
    """Export, rewrite, and compare with PyTorch."""
    after = dispatched(exported(function, args, dynamic), strict=True)
    assert called(after) == calls
    args = run_with or args
    vm = rx.VirtualMachine(tvm.compile(after, target="llvm"), tvm.cpu())
    got = vm["main"](*(tvm.runtime.tensor(x.numpy()) for x in args)).numpy()
    np.testing.assert_allclose(got, function(*args).numpy(), rtol=2e-5, atol=2e-5)


def qkv(heads: int = 4, kv_heads: int = 4, rows: int = 5, keys: int = 7) -> tuple:
    torch.manual_seed(0)
    return (
        torch.randn(2, heads, rows, 16),
        torch.randn(2, kv_heads, keys, 16),
        torch.randn(2, kv_heads, keys, 16),
    )


def test_plain() -> None:
    check(lambda q, k, v: sdpa(q, k, v), qkv(), [DENSE])


def test_scale() -> None:
    check(lambda q, k, v: sdpa(q, k, v, scale=0.3), qkv(), [DENSE])


@pytest.mark.parametrize("rows", [5, 7, 1])
def test_causal(rows: int) -> None:
    check(lambda q, k, v: sdpa(q, k, v, is_causal=True), qkv(rows=rows), [DENSE])


def test_more_rows_than_keys() -> None:
    """PyTorch's causal mask is top-left; no kernel has it then, so it becomes bits."""
    check(lambda q, k, v: sdpa(q, k, v, is_causal=True), qkv(rows=9), [MASKED])


@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (2, 4, 5, 7), (5, 7), (2, 1, 1, 7)], ids=str)
def test_boolean_mask(shape: tuple[int, ...]) -> None:
    mask = torch.rand(shape) > 0.3
    check(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), (*qkv(), mask), [MASKED])


def test_rows_without_keys() -> None:
    mask = torch.rand(2, 1, 5, 7) > 0.3
    mask[:, :, 2] = False
    check(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), (*qkv(), mask), [MASKED])


@pytest.mark.parametrize("how", ["enable_gqa", "expand", "repeat_interleave"])
def test_grouped_heads(how: str) -> None:
    def attention(q, k, v):
        if how == "enable_gqa":
            return sdpa(q, k, v, enable_gqa=True, is_causal=True)
        if how == "repeat_interleave":
            return sdpa(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), is_causal=True)
        k, v = (x[:, :, None].expand(2, 2, 2, 7, 16).reshape(2, 4, 7, 16) for x in (k, v))
        return sdpa(q, k, v, is_causal=True)

    check(attention, qkv(kv_heads=2, rows=7), [DENSE])


def test_window() -> None:
    """A sliding window as Mistral and Gemma make it."""

    def attention(q, k, v):
        rows, keys = torch.arange(7)[:, None], torch.arange(7)[None]
        return sdpa(q, k, v, attn_mask=(keys <= rows) & (keys > rows - 3))

    check(attention, qkv(rows=7), [DENSE])


def test_last_rows_of_a_cache() -> None:
    """Causal, aligned at the last key."""

    def attention(q, k, v):
        rows, keys = torch.arange(5)[:, None] + 2, torch.arange(7)[None]
        return sdpa(q, k, v, attn_mask=keys <= rows)

    check(attention, qkv(), [DENSE])


def test_heads_moved_by_the_model() -> None:
    """A block of a GPT: one projection, heads split and joined, symbolic batch and length."""
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(1)) / 8

    def block(x, w):
        batch, length, width = x.shape
        q, k, v = (x @ w).split(width, 2)
        q, k, v = (y.view(batch, length, 4, 16).transpose(1, 2) for y in (q, k, v))
        out = sdpa(q, k, v, is_causal=True)
        return out.transpose(1, 2).reshape(batch, length, width)

    dim = torch.export.Dim
    check(
        block,
        (torch.randn(2, 6, 64), weight),
        [DENSE],
        ({0: dim("batch", min=1, max=64), 1: dim("length", min=2, max=512)}, None),
        (torch.randn(3, 9, 64), weight),
    )


def rotated(x):
    """Rotary embedding as Llama's code has it."""
    half = x.shape[-1] // 2
    places, pairs = (torch.arange(n, dtype=torch.float32) for n in (x.shape[2], half))
    angles = places[:, None] * 10000.0 ** (-pairs / half)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def test_block_of_llama() -> None:
    """RMS norm, rotary embedding, grouped heads, and a gated network around attention."""
    torch.manual_seed(0)
    weights = [torch.randn(64, 64), torch.randn(64, 32), torch.randn(64, 32), torch.randn(64, 64)]

    def block(x):
        batch, length, _ = x.shape
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)
        q, k, v = ((y @ w / 8).view(batch, length, -1, 16).transpose(1, 2) for w in weights[:3])
        q, k = rotated(q), rotated(k)
        k, v = (
            z[:, :, None].expand(-1, -1, 2, -1, -1).reshape(batch, 4, length, 16) for z in (k, v)
        )
        scores = q @ k.transpose(2, 3) / 4
        hidden = torch.full((length, length), torch.finfo(x.dtype).min).triu(1)
        out = torch.softmax(scores + hidden, -1, dtype=torch.float32).to(x.dtype) @ v
        x = x + out.transpose(1, 2).reshape(batch, length, 64) @ weights[3] / 8
        return x * torch.sigmoid(x)

    check(block, (torch.randn(2, 6, 64),), [DENSE])


def test_encoder_and_decoder() -> None:
    """As in Whisper: all see all, causal, and a decoder that sees the encoder's states."""
    torch.manual_seed(0)
    weights = [torch.randn(64, 192) for _ in range(2)]
    cross = [torch.randn(64, 64), torch.randn(64, 128)]

    def heads(x):
        return x.view(*x.shape[:2], 4, 16).transpose(1, 2)

    def joined(x):
        return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], 64)

    def model(sound, text):
        q, k, v = map(heads, (sound @ weights[0] / 8).split(64, 2))
        sound = sound + joined(sdpa(q, k, v))
        q, k, v = map(heads, (text @ weights[1] / 8).split(64, 2))
        text = text + joined(sdpa(q, k, v, is_causal=True))
        k, v = map(heads, (sound @ cross[1] / 8).split(64, 2))
        return text + joined(sdpa(heads(text @ cross[0] / 8), k, v))

    dim = torch.export.Dim
    batch = dim("batch", min=1, max=64)
    check(
        model,
        (torch.randn(2, 9, 64), torch.randn(2, 5, 64)),
        [DENSE] * 3,
        ({0: batch, 1: dim("frames", min=2, max=512)}, {0: batch, 1: dim("words", min=2, max=512)}),
        (torch.randn(3, 12, 64), torch.randn(3, 4, 64)),
    )


@pytest.mark.parametrize("cap", [None, 5.0])
def test_written_by_hand(cap: float | None) -> None:
    """Products, a mask and a softmax, as models without the operator have them."""

    def attention(q, k, v):
        scores = q @ k.transpose(-1, -2) / 4
        if cap:
            scores = cap * torch.tanh(scores / cap)
        hidden = torch.triu(torch.ones(7, 7), diagonal=1).bool()
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.softmax(scores, -1) @ v

    check(attention, qkv(rows=7), [DENSE])


def test_multihead_attention() -> None:
    """`torch.nn.MultiheadAttention`."""
    torch.manual_seed(0)
    layer = torch.nn.MultiheadAttention(64, 4, batch_first=True).eval()
    x = torch.randn(2, 6, 64)
    check(lambda x: layer(x, x, x, need_weights=False)[0].detach(), (x,), [DENSE])


@pytest.mark.parametrize("shape", [(2, 1, 5, 7), (1, 4, 5, 7), (5, 7)], ids=str)
def test_added_numbers(shape: tuple[int, ...]) -> None:
    """A mask of any numbers, such as those of relative positions."""
    args = (*qkv(), torch.randn(shape))
    check(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), args, [BIASED])


def test_relative_positions() -> None:
    """T5: a table of buckets that is looked up, and no scale."""
    torch.manual_seed(0)
    table = torch.randn(8, 4)

    def attention(q, k, v):
        places = torch.arange(7)[None] - torch.arange(5)[:, None]
        bias = table[places.clamp(-4, 3) + 4].permute(2, 0, 1)[None]
        return torch.softmax(q @ k.transpose(-1, -2) + bias, -1) @ v

    check(attention, qkv(), [BIASED])


def test_alibi() -> None:
    """Slopes of distances beside a causal mask."""

    def attention(q, k, v):
        slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625]).view(1, 4, 1, 1)
        scores = q @ k.transpose(-1, -2) / 4 + slopes * torch.arange(7).float()
        seen = torch.ones(7, 7, dtype=torch.bool).tril()
        return torch.softmax(scores.masked_fill(~seen, float("-inf")), -1) @ v

    check(attention, qkv(rows=7), [BIASED])

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


def test_added_numbers_are_refused() -> None:
    """A mask of any numbers stays with TVM, and is named."""
    from tvm_flashinfer.relax import StrictModeError

    args = (*qkv(), torch.randn(2, 1, 5, 7))
    mod = exported(lambda q, k, v, m: sdpa(q, k, v, attn_mask=m), args)
    with pytest.raises(StrictModeError, match="added to scores"):
        dispatched(mod, strict=True)

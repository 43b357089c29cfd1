"""The bound functions against TVM's own CPU kernels, called with the same arguments.

TVM's kernels start their maxima at -5e4 and their sums at 1, so a row that sees no key differs by
contract; the requests here have keys for every row. TVM's 16-bit CPU kernels round rotated queries
and keys, ours do not: the dtype is float32.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tvm
from batches import normal
from cache_calls import CacheBatch, CacheSpec, make_cache_batch
from cache_oracle import random_tree, rotate
from calls import passed
from device_tensors import poisoned, to_device
from tvm.relax.frontend.nn.llm import (
    _decode_kernels,
    _prefill_kernels,
    position_embedding,
)

# The package has functions of the same name as this module.
tree_attn = importlib.import_module("tvm.relax.frontend.nn.llm.tree_attn")

HQ, HKV, D = 4, 2, 32


@functools.cache
def _built(kind: str, scaling: tuple[tuple[str, Any], ...] = (), **settings: Any) -> Callable:
    rope = dict(scaling)
    if kind == "prefill_paged":
        make = _prefill_kernels._attention_prefill_cpu
        window = settings.get("window")
        if window and "sliding_window_size" not in inspect.signature(make).parameters:
            pytest.skip("this TVM has no windows of layers in paged prefill")
        named = {} if window is None else {"sliding_window_size": window}
        func = make(
            HKV, HQ, D, "float32", settings["sliding"], rope, settings["page_size"], **named
        )
    elif kind == "decode_paged":
        func = _decode_kernels._attention_decode_cpu(
            HKV, HQ, D, "float32", settings["sliding"], rope, settings["page_size"]
        )
    elif kind == "prefill_ragged":
        func = _prefill_kernels._attention_prefill_ragged_cpu(HKV, HQ, D, D, "float32", rope)
    elif kind == "tree_paged":
        func = tree_attn.tree_attn_with_paged_kv_cache_cpu(HKV, HQ, D, "float32", rope)
    elif kind == "tree_ragged":
        func = tree_attn.tree_attn_cpu(HKV, HQ, D, "float32", rope)
    else:
        with pytest.MonkeyPatch.context() as patch:
            # TVM 0.26 and 0.27 ask a buffer for its truth, which raises: longrope cannot be built.
            patch.setattr(tvm.ir.Var, "__bool__", lambda _: True)
            func = position_embedding.llama_rope_with_position_map(
                settings["theta"], settings["scale"], settings["d"], HQ, HKV, "float32", rope,
                settings["rotary_dim"],
            )  # fmt: skip
    module = tvm.IRModule({"main": func.with_attr("global_symbol", "main")})
    return tvm.compile(module, target="llvm")["main"]


def _compare(ops: Any, batch: CacheBatch, theirs: Callable, tolerance: float = 2e-5) -> None:
    batch.call(ops)
    ours = batch.outputs()
    for name in ("o", "lse"):
        batch.args[name] = poisoned(batch.args[name].layout.shape, "float32", batch.device)
    theirs(*passed(batch.args, {}))
    for got, expected, name in zip(ours, batch.outputs(), ("o", "lse"), strict=True):
        np.testing.assert_allclose(got, expected, tolerance, tolerance, err_msg=name)


def _batch(rng: np.random.Generator, slot: str, **changes: Any) -> CacheBatch:
    spec = CacheSpec(slot, heads=(HQ, HKV), head_dim=D, dtype="float32", **changes)
    batch = make_cache_batch(rng, tvm.cpu(0), spec)
    pages = batch.args.get("pages")
    if pages is not None:  # TVM's CPU kernels take no offset of the pages, and multiply NaN by 0.
        batch.args["pages"] = to_device(np.nan_to_num(pages.numpy()), tvm.cpu(0))
    return batch


KV, QO = [37, 129, 5, 64], [5, 40, 1, 7]
SLIDING = [(21, 4), (77, 33), (0, 0), (17, 17)]


@pytest.mark.parametrize("rotary_mode", [0, 1])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("slot", ["prefill_paged", "decode_paged"])
def test_sliding_pages(ops, rng, slot, page_size, rotary_mode):
    """A global window with sinks, with and without positions inside attention."""
    qo = QO if slot == "prefill_paged" else None
    batch = _batch(
        rng, slot, kv_lens=KV, qo_lens=qo, page_size=page_size, sliding=SLIDING,
        rotary_mode=rotary_mode,
    )  # fmt: skip
    theirs = _built(slot, sliding=True, page_size=page_size)
    # Angles of thousands of radians: TVM rounds them to float, which is 2^-13 there.
    _compare(ops, batch, theirs, 2e-3 if rotary_mode else 2e-5)


@pytest.mark.parametrize("window", [41, 64, 1024])
def test_layer_window(ops, rng, window):
    """With causal 1 the sliding slot of TVM 0.27 sees the last W - r - 1 keys."""
    batch = _batch(
        rng, "prefill_paged", kv_lens=KV, qo_lens=QO, causal=1,
        sliding=[(0, 0), (3, 0), (0, 0), (15, 0)], options={"layer_window": window},
    )  # fmt: skip
    _compare(ops, batch, _built("prefill_paged", sliding=True, page_size=16, window=window))


@pytest.mark.parametrize("causal", [0, 1])
def test_plain_pages(ops, rng, causal):
    """The slots that do not slide."""
    batch = _batch(rng, "prefill_paged", kv_lens=KV, qo_lens=[5, 40, 1, 7], causal=causal)
    _compare(ops, batch, _built("prefill_paged", sliding=False, page_size=16))


@pytest.mark.parametrize("rotary_mode", [0, 1])
@pytest.mark.parametrize("causal", [0, 1])
def test_ragged(ops, rng, causal, rotary_mode):
    """Ragged keys."""
    batch = _batch(
        rng, "prefill_ragged", kv_lens=[5, 40, 1, 9], qo_lens=[5, 40, 1, 9], causal=causal,
        rotary_mode=rotary_mode,
    )  # fmt: skip
    _compare(ops, batch, _built("prefill_ragged"), 2e-3 if rotary_mode else 2e-5)


@pytest.mark.parametrize("kind", ["chain", "star", "forest"])
def test_tree_paged(ops, rng, kind):
    """TVM's kernel has page size 16 and no positions."""
    trees = [random_tree(rng, n, kind) for n in (7, 40, 1, 13)]
    batch = _batch(rng, "tree_paged", kv_lens=KV, qo_lens=[7, 40, 1, 7],
                   trees=trees)  # fmt: skip
    _compare(ops, batch, _built("tree_paged"))


@pytest.mark.parametrize("rotary_mode", [0, 1])
@pytest.mark.parametrize("kind", ["chain", "star", "forest"])
def test_tree_ragged(ops, rng, kind, rotary_mode):
    """Every key is a row, and has its position."""
    nodes = [7, 40, 1, 13]
    trees = [random_tree(rng, n, kind) for n in nodes]
    batch = _batch(rng, "tree_ragged", kv_lens=nodes, qo_lens=nodes, trees=trees,
                   rotary_mode=rotary_mode)  # fmt: skip
    _compare(ops, batch, _built("tree_ragged"), 2e-3 if rotary_mode else 2e-5)


YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 20,
}


def _split(bound: Any, qkv: np.ndarray, positions: np.ndarray, last: Any) -> list[np.ndarray]:
    n, _, d = qkv.shape
    cpu = tvm.cpu(0)
    outs = [poisoned((n, h, d), "float32", cpu) for h in (HQ, HKV, HKV)]
    inputs = [to_device(qkv, cpu), to_device(positions.astype(np.int32), cpu)]
    bound(*(x.tensor for x in inputs), *(x.tensor for x in outs), last)
    return [x.numpy() for x in outs]


@pytest.mark.parametrize("theta", [10000.0, 1e6])
@pytest.mark.parametrize("d", [64, 128])
def test_yarn(ops, rng, d, theta):
    """The frequencies of both elements of every pair are TVM's."""
    qkv, positions = normal(rng, (50, HQ + 2 * HKV, d), "float32"), np.arange(50) * 7
    with_log = {**YARN, "inv_theta_log_scale": 1 / (2 * np.log(theta))}
    settings: dict[str, Any] = dict(theta=theta, scale=1.0, d=d, rotary_dim=d)
    theirs = _split(_built("rotary", tuple(with_log.items()), **settings), qkv, positions, 1)
    for scaling in (YARN, with_log):
        bound = ops.bind_split_qkv_rotary(theta, 1.0, d, json.dumps(scaling))
        ours = _split(bound, qkv, positions, 1)
        for got, expected in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(got, expected, 2e-4, 2e-4)
    exact = rotate(qkv[:, :HQ], positions, theta=theta, scaling=YARN)
    np.testing.assert_allclose(ours[0], exact, 2e-4, 2e-4)


@pytest.mark.parametrize("rotary_dim", [64, 48])
@pytest.mark.parametrize("rows", [20, 21])
def test_longrope(ops, rng, rows, rotary_dim):
    """Factors of long inputs when a call has more rows than the original length."""
    d, theta = 64, 10000.0
    qkv, positions = normal(rng, (rows, HQ + 2 * HKV, d), "float32"), np.arange(rows) * 11
    factors = rng.uniform(1, 30, rotary_dim).astype(np.float32)
    tensor = to_device(factors, tvm.cpu(0)).tensor
    settings: dict[str, Any] = dict(theta=theta, scale=1.0, d=d, rotary_dim=rotary_dim)
    theirs = _split(_built("rotary", tuple(LONGROPE.items()), **settings), qkv, positions, tensor)
    bound = ops.bind_split_qkv_rotary(theta, 1.0, rotary_dim, json.dumps(LONGROPE))
    ours = _split(bound, qkv, positions, tensor)
    for got, expected in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(got, expected, 2e-4, 2e-4)
    used = factors[: rotary_dim // 2] if rows > 20 else factors[rotary_dim // 2 :]
    exact = rotate(
        qkv[:, :HQ], positions, theta=theta, rotary_dim=rotary_dim, scaling=LONGROPE,
        ext_factors=used,
    )  # fmt: skip
    np.testing.assert_allclose(ours[0], exact, 2e-4, 2e-4)

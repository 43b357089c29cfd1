"""Random specs of every op, in poisoned pages, workspaces and outputs, against float64.

A second run gives the same bits, a batch what its requests give one by one, decode what prefill
does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import oracle
import pytest
from batches import DTYPES, Spec, is_cuda, normal
from cache_calls import FLOAT8, SLOTS, CacheSpec, make_cache_batch
from cache_oracle import random_tree, rotate
from calls import passed
from device_tensors import DeviceTensor, numpy_dtype, poisoned, synchronize, to_device
from functions import DECODE, MAKERS, RAGGED, batch_for, served
from fuzzing import budget
from hypothesis import given
from hypothesis import strategies as st
from mla_calls import CUDA_DIMS, MLASpec, mla_call

SEEDS = st.integers(0, 2**32 - 1)
DATA = st.data()


def draw_heads(draw: Any) -> tuple[int, int]:
    """Query and KV heads."""
    kv_heads = draw(st.sampled_from([1, 2, 3]), "kv_heads")
    return kv_heads * draw(st.sampled_from([1, 2, 3, 4, 5, 7, 8, 16]), "group"), kv_heads


def draw_type(draw: Any, device: Any) -> tuple[str, int]:
    """A dtype and a head dimension that the device serves."""
    if is_cuda(device):
        return draw(st.sampled_from(DTYPES[1:]), "dtype"), draw(st.sampled_from([64, 128]), "d")
    return draw(st.sampled_from(DTYPES), "dtype"), 2 * draw(st.integers(1, 48), "d / 2")


def draw_lens(draw: Any, most: int, size: int | None = None) -> list[int]:
    """Lengths of requests, some of them 0."""
    lens = st.one_of(st.integers(0, 3), st.integers(0, most))
    least, limit = (1, 5) if size is None else (size, size)
    return draw(st.lists(lens, min_size=least, max_size=limit), f"lens to {most}")


def same_bits(now: Any, before: Any) -> None:
    """Every byte is as it was, those of NaN too."""
    for x, old in zip(now, before, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), old.view(np.uint8))


@pytest.mark.parametrize("function", MAKERS)
@given(data=DATA, seed=SEEDS)
@budget(25)
def test_attention(function: str, data: Any, seed: int, attend: Any) -> None:
    """With plans and without: lengths, groups, dimensions, pages, windows, views, scales."""
    draw = data.draw
    dtype, head_dim = draw_type(draw, attend.device)
    kv_lens = draw_lens(draw, 150)
    planned = function.startswith("planned")
    spec = Spec(
        kv_lens,
        None if function in DECODE else draw_lens(draw, 40, len(kv_lens)),
        heads=draw_heads(draw),
        head_dim=head_dim,
        page_size=draw(st.integers(1, 20), "page_size"),
        dtype=dtype,
        causal=function not in DECODE and draw(st.booleans(), "causal"),
        window_left=draw(st.integers(-1, 60), "window_left") if planned else -1,
        sm_scale=draw(st.floats(0.01, 2), "sm_scale"),
    )
    assert served(attend.device, function, spec)
    batch = batch_for(function, np.random.default_rng(seed), spec)
    call = attend.call(function, batch, views=draw(st.booleans(), "views"))
    first = call.plan_run_check()
    call.fresh_outputs()
    same_bits(call.plan_run_check(), first)
    if function in RAGGED:
        return
    for b, request in enumerate(batch.requests):
        part = batch.part(b)
        got = [attend.call(function, part).plan_run_check()]
        if function in DECODE:
            as_prefill = replace(part, spec=replace(part.spec, qo_lens=[1]))
            prefill = function.replace("decode", "paged")
            got.append(attend.call(prefill, as_prefill).plan_run_check())
        for o, lse in got:
            whole = [x[request.rows].astype(np.float64) for x in first]
            scale = np.abs(request.v.astype(np.float64)).max(initial=1)
            # Weights are rounded to the dtype there, relative to maxima that go by tiles.
            rounded = 4 * oracle.FLOOR[dtype] if is_cuda(attend.device) else 0
            close = 2 * oracle.FLOOR[dtype] + 1e-6 + rounded
            np.testing.assert_allclose(o.astype(np.float64), whole[0], atol=close * scale)
            np.testing.assert_allclose(lse, whole[1], rtol=2e-5, atol=2e-5 + rounded)


def draw_cache_spec(draw: Any, device: Any, slot: str, rng: np.random.Generator) -> CacheSpec:
    """All that a call without a plan may have, as far as it goes together."""
    dtype, head_dim = draw_type(draw, device)
    kv_lens = draw_lens(draw, 150)
    heads = draw_heads(draw)
    spec = CacheSpec(
        slot,
        kv_lens,
        heads=heads,
        head_dim=head_dim,
        page_size=draw(st.integers(1, 20), "page_size"),
        dtype=dtype,
        sm_scale=draw(st.floats(0.01, 1), "sm_scale"),
        rotary_mode=draw(st.integers(0, 1), "rotary_mode"),
    )
    trees = slot.startswith("tree")
    if slot != "decode_paged":
        rows = draw_lens(draw, 30, len(kv_lens))
        spec.qo_lens = kv_lens if slot == "tree_ragged" else rows
    if trees:
        spec.qo_lens = [min(n, m) for n, m in zip(spec.qo_lens or [], kv_lens, strict=True)]
        spec.trees = [random_tree(rng, n) for n in spec.qo_lens]
    if slot.startswith("mask"):
        sizes = zip(spec.rows, kv_lens, strict=True)
        spec.masks = [rng.random(size) < rng.random() for size in sizes]
    if not trees and slot != "decode_paged":
        spec.causal = draw(st.integers(0, 1), "causal")
    if not trees and draw(st.booleans(), "window"):
        spec.options["window_left"] = draw(st.integers(0, 60), "window_left")
    if slot.endswith("paged") and draw(st.booleans(), "sliding"):
        pairs = [(draw(st.integers(0, 40)), draw(st.floats(0, 1))) for _ in kv_lens]
        # The sink lies before the window's start, and both in the sequence.
        spec.sliding = [
            (sink + gap, sink)
            for n, (gap, share) in zip(kv_lens, pairs, strict=True)
            for sink in [int(share * n)]
        ]
    if draw(st.booleans(), "cap"):
        spec.options["logits_soft_cap"] = draw(st.sampled_from([0.5, 8.0, 50.0]), "soft_cap")
    if draw(st.booleans(), "8 bits") and head_dim % 16 == 0:
        spec.kv_dtype = draw(st.sampled_from(FLOAT8), "kv_dtype")
        spec.options.update(k_scale=0.25, v_scale=0.5)
    if draw(st.booleans(), "sinks"):
        spec.sinks = normal(rng, heads[:1], "float32")
    if draw(st.booleans(), "slopes"):
        spec.alibi_slopes = rng.random(heads[0]).astype(np.float32) / 8
    if spec.rotary_mode:
        # float32 holds an angle of a thousand to 1e-4, which one key alone shows.
        scale = 1 / 64 if dtype == "float32" else 0.5
        spec.rope = {"theta": draw(st.sampled_from([1e4, 5e5]), "theta"), "scale": scale}
        spec.options["rotary_dim"] = 2 * draw(st.integers(1, head_dim // 2), "rotary_dim / 2")
    return spec


@pytest.mark.parametrize("slot", SLOTS)
@given(data=DATA, seed=SEEDS)
@budget(25)
def test_slots(slot: str, data: Any, seed: int, ops: Any, device: Any) -> None:
    """Everything that the functions without a plan have, at once."""
    rng = np.random.default_rng(seed)
    batch = make_cache_batch(rng, device, draw_cache_spec(data.draw, device, slot, rng))
    first = batch.run_check(ops)
    for name in ("o", "lse"):
        batch.args[name].reset()
    same_bits(batch.run_check(ops), first)


@given(data=DATA, seed=SEEDS)
@budget(25)
def test_latent_attention(data: Any, seed: int, ops: Any, device: Any, workspaces: Any) -> None:
    """MLA with a plan, in slices of one tensor and in parts."""
    draw, kv_lens = data.draw, draw_lens(data.draw, 150)
    dims = 16 * draw(st.integers(1, 8), "ckv / 16"), 8 * draw(st.integers(1, 8), "kpe / 8")
    spec = MLASpec(
        kv_lens,
        draw_lens(draw, 20, len(kv_lens)),
        heads=draw(st.integers(1, 20), "heads"),
        dims=CUDA_DIMS if is_cuda(device) else dims,
        page_size=draw(st.integers(1, 20), "page_size"),
        dtype=draw(st.sampled_from(DTYPES[is_cuda(device) :]), "dtype"),
        causal=draw(st.booleans(), "causal"),
    )
    views = draw(st.booleans(), "views")
    call = mla_call(ops, device, workspaces, np.random.default_rng(seed), spec, views=views)
    first = call.plan_run_check()
    for name in ("o", "lse"):
        call.run_args[name].reset()
    same_bits(call.plan_run_check(), first)


def draw_pool(draw: Any, rng: np.random.Generator) -> np.ndarray:
    """Pages (P, 2, Hkv, S, d) of any bits, NaN too."""
    dtype = numpy_dtype(draw(st.sampled_from([*DTYPES, *FLOAT8]), "dtype"))
    sizes = (draw(st.integers(1, n), "size") for n in (6, 3, 20, 40))
    pages, heads, size, d = sizes
    shape = (pages, 2, heads, size, d)
    return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


@given(data=DATA, seed=SEEDS)
@budget(30)
def test_pages(data: Any, seed: int, ops: Any, device: Any) -> None:
    """Rows that are appended, read back, copied and moved keep their bits; all others too."""
    rng, draw = np.random.default_rng(seed), data.draw
    pool = draw_pool(draw, rng)
    num_pages, _, heads, size, d = pool.shape
    pages = to_device(pool, device)
    n = draw(st.integers(0, num_pages * size), "n")
    slots = rng.permutation(num_pages * size)[:n].astype(np.int32)
    slots[rng.random(n) < 0.2] = -1
    k, v = (
        rng.integers(0, 256, (n, heads, d, pool.itemsize), np.uint8).view(pool.dtype)[..., 0]
        for _ in range(2)
    )
    given_rows = [to_device(x, device).tensor for x in (k, v, slots)]
    ops.append_paged_kv_cache(pages.tensor, *given_rows)
    pool = oracle.appended(pool, k, v, slots)
    source, target = (draw(st.integers(0, num_pages - 1), "page") for _ in range(2))
    length = draw(st.integers(0, size), "length")
    ops.copy_single_page(pages.tensor, source, target, length)
    pool[target, :, :, :length] = pool[source, :, :, :length]
    moves = rng.permutation(num_pages * size).astype(np.int32)
    moves = moves[: len(moves) // 2 * 2].reshape(2, -1)
    cuts = np.sort(rng.integers(0, moves.shape[1] + 1, 2))
    indptr = np.array([0, *cuts], np.int32)
    lists = [to_device(x, device).tensor for x in (indptr, moves)]
    ops.compact_kv_copy(pages.tensor, *lists, len(indptr) - 1)
    pool = oracle.compacted(pool, indptr, moves)
    same_bits([pages.numpy()], [pool])
    pages.assert_guards_intact("pages")
    wanted = slots[slots >= 0]
    out = [poisoned((2, len(wanted), heads, d), pool.dtype.name, device) for _ in range(2)]
    where = to_device(wanted, device).tensor
    ops.debug_get_kv(pages.tensor, where, *(x.tensor for x in out), 1)
    same_bits([np.ascontiguousarray(x.numpy()[1]) for x in out], oracle.gathered(pool, wanted))


@given(data=DATA, seed=SEEDS)
@budget(30)
def test_states(data: Any, seed: int, ops: Any, device: Any) -> None:
    """Merging, some of the states empty, by both functions; then sinks."""
    rng, draw = np.random.default_rng(seed), data.draw
    dtype = draw(st.sampled_from(DTYPES), "dtype")
    n, heads, d = (draw(st.integers(low, high), "size") for low, high in ((0, 40), (1, 9), (8, 96)))
    values = [normal(rng, (n, heads, d), dtype) for _ in range(2)]
    sums = [(normal(rng, (n, heads), "float32") * 9).astype(np.float32) for _ in range(2)]
    for v, s in zip(values, sums, strict=True):
        empty = rng.random((n, heads)) < 0.3
        s[empty], v[empty] = -np.inf, 0
    states = [to_device(x, device) for x in (values[0], sums[0], values[1], sums[1])]
    merged = poisoned((n, heads, d), dtype, device), poisoned((n, heads), "float32", device)
    ops.merge_state(*(x.tensor for x in (*states, *merged)))
    ops.merge_state_in_place(*(x.tensor for x in states))
    same_bits([x.numpy() for x in states[:2]], [x.numpy() for x in merged])
    v, s = oracle.merge(values[0], sums[0], values[1], sums[1])
    close = 4 * oracle.FLOOR[dtype] + 1e-6
    np.testing.assert_allclose(merged[0].numpy().astype(np.float64), v, atol=close * 5)
    np.testing.assert_allclose(merged[1].numpy(), s, rtol=1e-5, atol=1e-5)
    sinks = normal(rng, (heads,), "float32")
    ops.apply_attention_sinks(*(x.tensor for x in merged), to_device(sinks, device).tensor)
    total = np.logaddexp2(s, sinks.astype(np.float64) * oracle.LOG2E)
    exact = np.where(np.isneginf(s)[..., None], 0, v * np.exp2(s - total)[..., None])
    np.testing.assert_allclose(merged[0].numpy().astype(np.float64), exact, atol=close * 10)
    np.testing.assert_allclose(merged[1].numpy(), total, rtol=1e-5, atol=1e-5)


@given(data=DATA, seed=SEEDS)
@budget(30)
def test_rotary(data: Any, seed: int, ops: Any, device: Any) -> None:
    """Queries and keys are rotated, values copied; strided rows, part of a head, positions."""
    rng, draw = np.random.default_rng(seed), data.draw
    dtype, heads = draw(st.sampled_from(DTYPES), "dtype"), draw_heads(draw)
    n, d = draw(st.integers(0, 30), "n"), 2 * draw(st.integers(1, 64), "d / 2")
    rope = {
        "theta": draw(st.sampled_from([1e4, 5e5]), "theta"),
        "scale": draw(st.sampled_from([1.0, 0.25]), "scale"),
        "rotary_dim": 2 * draw(st.integers(1, d // 2), "rotary_dim / 2"),
    }
    total = heads[0] + 2 * heads[1]
    qkv = normal(rng, (n, total, d), dtype)
    positions = rng.integers(0, 4000, n).astype(np.int32)
    gap = draw(st.integers(0, 2), "gap")
    fused: DeviceTensor = to_device(qkv, device, strides=((total + gap) * d, d, 1))
    outs = [poisoned((n, h, d), dtype, device) for h in (heads[0], heads[1], heads[1])]
    ops.split_qkv_rotary(
        *passed({"qkv": fused, "positions": to_device(positions, device), "q": outs[0],
                 "k": outs[1], "v": outs[2]}, {}),
        1, rope["theta"], rope["scale"], rope["rotary_dim"], "{}",
    )  # fmt: skip
    synchronize(device)
    parts = np.split(qkv, [heads[0], heads[0] + heads[1]], axis=1)
    for name, out, x in zip("qk", outs, parts, strict=False):
        out.assert_guards_intact(name)
        exact = rotate(x, positions, scaling=None, **rope)
        plain = rotate(x, positions, scaling=None, plain=True, **rope)
        oracle.assert_rows_close(out.numpy(), exact, plain, oracle.FLOOR[dtype], name)
    same_bits([outs[2].numpy()], [np.ascontiguousarray(parts[2])])

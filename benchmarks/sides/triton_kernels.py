"""The Triton kernels of the benchmark."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

PROMPT_CONFIGS = [
    triton.Config({"rows": rows, "keys": keys}, num_warps=warps, num_stages=stages)
    for rows, keys, warps, stages in (
        (128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2),
    )
]  # fmt: skip
DECODE_CONFIGS = [
    triton.Config({"keys": keys}, num_warps=warps, num_stages=stages)
    for keys, warps, stages in ((64, 4, 3), (128, 4, 2), (128, 4, 3), (128, 8, 3))
]


def tuned(kernel: Any, configs: list[Any], key: list[str]) -> Any:
    """A kernel with a tuner of its own."""
    return triton.autotune(configs=configs, key=key)(kernel)


@triton.jit
def prompts(
    q, k, v, o, lse, scale, length, heads, kv_heads, dim: tl.constexpr, rows: tl.constexpr,
    keys: tl.constexpr,
):  # fmt: skip
    """Causal attention of prompts of one length; a program has a block of rows of one head."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    request, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    kv_head = head // (heads // kv_heads)
    row = block * rows + tl.arange(0, rows)
    column = tl.arange(0, dim)
    there = row[:, None] < length
    # Offsets of long batches do not fit into 32 bits.
    start = request.to(tl.int64) * length
    q_at = ((start + row[:, None]) * heads + head) * dim + column[None]
    queries = tl.load(q + q_at, mask=there, other=0.0)
    most = tl.full([rows], float("-inf"), tl.float32)
    total = tl.zeros([rows], tl.float32)
    result = tl.zeros([rows, dim], tl.float32)
    whole = block * rows // keys * keys  # keys that all rows of the block see
    last = tl.minimum((block + 1) * rows, length)
    for first in range(0, whole, keys):
        key = first + tl.arange(0, keys)
        at = ((start + key[:, None]) * kv_heads + kv_head) * dim + column[None]
        scores = tl.dot(queries, tl.trans(tl.load(k + at))) * scale
        new = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + at)
        result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None])
        most = new
    for first in range(whole, last, keys):
        key = first + tl.arange(0, keys)
        at = ((start + key[:, None]) * kv_heads + kv_head) * dim + column[None]
        inside = key[:, None] < length
        scores = tl.dot(queries, tl.trans(tl.load(k + at, mask=inside, other=0.0))) * scale
        scores = tl.where(row[:, None] >= key[None], scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(weights, 1)
        values = tl.load(v + at, mask=inside, other=0.0)
        result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None])
        most = new
    tl.store(o + q_at, (result / total[:, None]).to(o.dtype.element_ty), mask=there)
    tl.store(lse + (start + row) * heads + head, most + tl.log2(total), mask=row < length)


@triton.jit
def decode_parts(
    q, pages, table, table_first, lengths, part_o, part_lse, scale, length, heads, kv_heads, each,
    parts: tl.constexpr, group: tl.constexpr, padded: tl.constexpr, dim: tl.constexpr,
    page_size: tl.constexpr, keys: tl.constexpr,
):  # fmt: skip
    """One query row over a part of the keys; a program has the heads that share a KV head."""
    request, kv_head = tl.program_id(0) // kv_heads, tl.program_id(0) % kv_heads
    part = tl.program_id(1)
    member, column = tl.arange(0, padded), tl.arange(0, dim)
    head = kv_head * group + member
    there = member < group
    queries = tl.load(
        q + (request * heads + head[:, None]) * dim + column[None], mask=there[:, None], other=0.0
    )
    count = tl.load(lengths + request)
    where = table + tl.load(table_first + request)
    most = tl.full([padded], float("-inf"), tl.float32)
    total = tl.zeros([padded], tl.float32)
    result = tl.zeros([padded, dim], tl.float32)
    end = tl.minimum((part + 1) * each, count)
    for first in range(part * each, end, keys):
        key = first + tl.arange(0, keys)
        inside = key < end
        page = tl.load(where + key // page_size, mask=inside, other=0).to(tl.int64)
        # Pages are (pages, 2, kv_heads, page_size, dim).
        at = ((page * 2 * kv_heads + kv_head) * page_size + key % page_size)[:, None] * dim
        at += column[None]
        keys_of = tl.load(pages + at, mask=inside[:, None], other=0.0)
        values = tl.load(pages + at + kv_heads * page_size * dim, mask=inside[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys_of)) * scale
        scores = tl.where(inside[None], scores, float("-inf"))
        new = tl.maximum(most, tl.max(scores, 1))
        weights = tl.exp2(scores - new[:, None])
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(weights, 1)
        result = tl.dot(weights.to(values.dtype), values, result * shrink[:, None])
        most = new
    row = (request * heads + head) * parts + part
    found = total > 0
    safe = tl.where(found, total, 1.0)
    tl.store(
        part_o + row[:, None] * dim + column[None], result / safe[:, None], mask=there[:, None]
    )
    logarithm = tl.where(found, most + tl.log2(safe), float("-inf"))
    tl.store(part_lse + row, logarithm, mask=there)


@triton.jit
def add_parts(part_o, part_lse, o, lse, parts: tl.constexpr, up: tl.constexpr, dim: tl.constexpr):
    """The parts of one row of one head into its output."""
    row = tl.program_id(0)
    part, column = tl.arange(0, up), tl.arange(0, dim)
    there = part < parts
    logarithms = tl.load(part_lse + row * parts + part, mask=there, other=float("-inf"))
    most = tl.max(logarithms, 0)
    weights = tl.exp2(logarithms - most)
    total = tl.sum(weights, 0)
    values = tl.load(
        part_o + (row * parts + part)[:, None] * dim + column[None], mask=there[:, None], other=0.0
    )
    result = tl.sum(values * weights[:, None], 0) / total
    tl.store(o + row * dim + column, result.to(o.dtype.element_ty))
    tl.store(lse + row, most + tl.log2(total))

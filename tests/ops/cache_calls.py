"""Calls of the functions that `bind_attention*` returns, in TVM's argument orders."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from batches import indptr_of, is_cuda, normal
from cache_oracle import Extras, assert_request, pack_bits
from calls import Args, passed
from device_tensors import DeviceTensor, numpy_dtype, poisoned, synchronize, to_device

PAGED = ("prefill_paged", "decode_paged", "tree_paged", "mask_paged")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")

#: Attention over keys and values without a plan.
SLOTS = (
    "prefill_paged",
    "decode_paged",
    "prefill_ragged",
    "tree_paged",
    "tree_ragged",
    "mask_paged",
    "mask_ragged",
)


def needs_cache_kernel(device: Any, dtype: str, head_dim: int) -> None:
    """Skip what CUDA refuses by contract."""
    if is_cuda(device) and (dtype == "float32" or head_dim % 16 or head_dim > 256):
        pytest.skip("CUDA serves 16-bit dtypes and head dimensions that are multiples of 16")


@dataclass
class CacheSpec:
    """Shape of a batch; `sliding` gives (window offset, sink size) of each request."""

    slot: str
    kv_lens: Sequence[int]
    qo_lens: Sequence[int] | None = None
    heads: tuple[int, int] = (4, 2)
    head_dim: int = 64
    head_dim_vo: int | None = None
    page_size: int = 16
    dtype: str = "float16"
    kv_dtype: str | None = None
    sliding: Sequence[tuple[int, int]] | None = None
    sm_scale: float | None = None
    rotary_mode: int = 0
    rope: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    causal: int = 0
    trees: Sequence[np.ndarray] | None = None
    masks: Sequence[np.ndarray] | None = None
    sinks: np.ndarray | None = None
    alibi_slopes: np.ndarray | None = None

    @property
    def stored(self) -> str:
        """The dtype of keys and values."""
        return self.kv_dtype or self.dtype

    @property
    def rows(self) -> list[int]:
        """Query rows of each request."""
        return [1] * len(self.kv_lens) if self.qo_lens is None else list(self.qo_lens)

    @property
    def scale(self) -> float:
        """The softmax scale in use."""
        return self.head_dim**-0.5 if self.sm_scale is None else self.sm_scale


@dataclass
class CacheBatch:
    """Host arrays of a call, and its arguments by name in TVM's order."""

    spec: CacheSpec
    device: Any
    q: np.ndarray
    keys: list[np.ndarray]
    values: list[np.ndarray]
    q_positions: np.ndarray
    k_positions: np.ndarray
    args: Args

    def extras(self, b: int) -> Extras:
        """What request b has besides, as the oracle takes it."""
        spec = self.spec
        rows = indptr_of(spec.rows)
        window = spec.options.get("layer_window", 0) if spec.causal else 0
        extras = Extras(
            causal=bool(spec.causal) and not window,
            layer_window=window,
            tree=None if spec.trees is None else spec.trees[b],
            mask=None if spec.masks is None else spec.masks[b],
            window_left=spec.options.get("window_left", -1),
            soft_cap=spec.options.get("logits_soft_cap", 0.0),
            sinks=spec.sinks,
            alibi_slopes=spec.alibi_slopes,
            alibi_by_position=spec.options.get("alibi_by_position", False),
        )
        if spec.rotary_mode:
            extras.rope = {
                "theta": spec.rope.get("theta", 10000.0),
                "scale": spec.rope.get("scale", 1.0),
                "rotary_dim": spec.options.get("rotary_dim"),
                "scaling": spec.options.get("rope_scaling"),
            }
        if spec.rotary_mode or extras.alibi_by_position:
            extras.q_positions = self.q_positions[rows[b] : rows[b + 1]]
            if spec.slot == "tree_ragged":
                extras.k_positions = self.q_positions[indptr_of(spec.kv_lens)[b] :][
                    : spec.kv_lens[b]
                ]
            else:
                extras.k_positions = self.k_positions[b] + np.arange(spec.kv_lens[b])
        return extras

    def call(self, ops: Any, **changes: Any) -> None:
        """Bind with the options and call."""
        options = json.dumps(self.spec.options)
        if self.spec.sinks is None and self.spec.alibi_slopes is None:
            bound = getattr(ops, f"bind_attention_{self.spec.slot}")(options)
        else:
            heads = [
                None if x is None else to_device(x.astype(np.float32), self.device).tensor
                for x in (self.spec.sinks, self.spec.alibi_slopes)
            ]
            bound = ops.bind_attention(self.spec.slot, options, *heads)
        bound(*passed(self.args, changes))

    def outputs(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and LSE on the host; the bytes around them must be intact."""
        synchronize(self.device)
        for name in ("o", "lse"):
            self.args[name].assert_guards_intact(name)
        return self.args["o"].numpy(), self.args["lse"].numpy()

    def check(self) -> tuple[np.ndarray, np.ndarray]:
        """Compare the outputs with the oracle."""
        o, lse = self.outputs()
        rows = indptr_of(self.spec.rows)
        for b, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            part = slice(rows[b], rows[b + 1])
            what = f"request {b} of {self.spec.slot} ({len(self.q[part])} rows, {len(k)} keys)"
            extras = self.extras(b)
            if self.spec.kv_dtype is not None:
                k, v = dequantized(self.spec, k, v)
            assert_request(o[part], lse[part], self.q[part], k, v, extras, self.spec.scale, what)
        return o, lse

    def run_check(self, ops: Any) -> tuple[np.ndarray, np.ndarray]:
        """Call and check."""
        self.call(ops)
        return self.check()


def dequantized(spec: CacheSpec, k: np.ndarray, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The true keys and values, exactly."""
    scales = [spec.options.get(name, 1.0) for name in ("k_scale", "v_scale")]
    return k.astype(np.float64) * scales[0], v.astype(np.float64) * scales[1]


def quantized(rng: np.random.Generator, shape: Sequence[int], dtype: str, scale: float) -> Any:
    """What stands for standard normal values in an 8-bit dtype."""
    return (normal(rng, shape, "float32") / np.float32(scale)).astype(numpy_dtype(dtype))


def _ints(values: Any, device: Any) -> DeviceTensor:
    return to_device(np.asarray(values, np.int32), device, byte_offset=4)


def _pages(
    rng: np.random.Generator, spec: CacheSpec, keys: list[np.ndarray], values: list[np.ndarray]
) -> tuple[np.ndarray, Args]:
    """A pool of shuffled pages whose unused slots are NaN, and the page tables."""
    size, batch = spec.page_size, len(keys)
    sliding = spec.sliding or [(0, 0)] * batch
    slots = [len(k) + offset - sink for k, (offset, sink) in zip(keys, sliding, strict=True)]
    counts = [-(-n // size) if len(k) else 0 for n, k in zip(slots, keys, strict=True)]
    num_pages = sum(counts) + 3
    indices = rng.permutation(num_pages)[: sum(counts)].astype(np.int32)
    indptr = indptr_of(counts)
    heads, d = spec.heads[1], spec.head_dim
    pool = np.full((num_pages, 2, heads, size, d), np.nan, numpy_dtype(spec.stored))
    for b, (offset, sink) in enumerate(sliding):
        mine = indices[indptr[b] : indptr[b + 1]]
        j = np.arange(len(keys[b]))
        slot = np.where(j < sink, j, j - sink + offset)
        for which, tokens in enumerate((keys[b], values[b])):
            pool[mine[slot // size], which, :, slot % size] = tokens
    last = [n - (c - 1) * size if c else 0 for n, c in zip(slots, counts, strict=True)]
    info: Any = last
    if spec.sliding is not None:
        used = [pair if c else (0, 0) for pair, c in zip(sliding, counts, strict=True)]
        info = [last, [x for x, _ in used], [x for _, x in used]]
    return pool, {"page_indptr": indptr, "page_indices": indices, "length_info": info}


def make_cache_batch(rng: np.random.Generator, device: Any, spec: CacheSpec) -> CacheBatch:
    """Random requests and the arguments of a call, with byte offsets in every index tensor."""
    hq, hkv = spec.heads
    vo = spec.head_dim_vo or spec.head_dim
    n, batch = sum(spec.rows), len(spec.kv_lens)
    q = normal(rng, (n, hq, spec.head_dim), spec.dtype)
    scales = [spec.options.get(name, 1.0) for name in ("k_scale", "v_scale")]
    keys, values = (
        [quantized(rng, (m, hkv, d), spec.stored, scale) for m in spec.kv_lens]
        for d, scale in zip((spec.head_dim, vo), scales, strict=True)
    )
    q_positions = rng.integers(0, 3000, n).astype(np.int32)
    k_positions = rng.integers(0, 2000, batch).astype(np.int32)
    args: Args = {"q": to_device(q, device)}
    tree: Args = {}
    if spec.trees is not None:
        nodes = np.concatenate([np.zeros((0, 2), np.int32), *spec.trees])
        tree = {
            "tree_indptr": _ints(indptr_of([len(t) for t in spec.trees]), device),
            "tree_mask": _ints(nodes, device),
        }
    if spec.slot != "decode_paged":
        args["qo_indptr"] = _ints(indptr_of(spec.rows), device)
    at_q, at_k = _ints(q_positions, device), _ints(k_positions, device)
    if spec.slot in PAGED:
        pool, tables = _pages(rng, spec, keys, values)
        args["pages"] = to_device(pool, device, byte_offset=32)
        args.update({name: _ints(x, device) for name, x in tables.items()})
        args.update(k_rope_pos_offset=at_k, q_rope_position=at_q)
    else:
        args["k"] = to_device(
            np.concatenate([normal(rng, (0, hkv, spec.head_dim), spec.stored), *keys]), device
        )
        args["v"] = to_device(
            np.concatenate([normal(rng, (0, hkv, vo), spec.stored), *values]), device
        )
        args["kv_indptr"] = _ints(indptr_of(spec.kv_lens), device)
        args["q_rope_position"] = at_q
        if spec.slot != "tree_ragged":
            args["k_rope_pos_offset"] = at_k
        else:
            args.update(tree)
    args["o"] = poisoned((n, hq, vo), spec.dtype, device)
    args["lse"] = poisoned((n, hq), "float32", device)
    if spec.slot.startswith(("prefill", "mask")):
        args["causal"] = spec.causal
    args.update(
        rotary_mode=spec.rotary_mode,
        rope_scale=spec.rope.get("scale", 1.0 if spec.rotary_mode else math.nan),
        rope_theta=spec.rope.get("theta", 10000.0 if spec.rotary_mode else math.nan),
        sm_scale=spec.scale,
    )
    if spec.slot == "tree_paged":
        args.update(tree)
    if spec.masks is not None:
        mask_indptr, packed_mask = pack_bits(spec.masks)
        args["mask_indptr"] = _ints(mask_indptr, device)
        args["packed_mask"] = to_device(packed_mask, device, byte_offset=3)
    return CacheBatch(spec, device, q, keys, values, q_positions, k_positions, args)

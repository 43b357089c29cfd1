"""Steps of multi-head latent attention on a cache, as DeepSeek's models call it, beside float64."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from cache_models import NUM_LAYERS, Model, numpy_dtype
from device_tensors import synchronize
from tvm.relax.frontend.nn.llm.kv_cache import AttnKind
from tvm_ffi import Shape

from tvm_flashinfer.relax._compat import HAS_LAYER_WINDOW


def builtin(name: str) -> Callable[..., Any]:
    """A function of TVM's runtime."""
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")


def planned_cache(model: Model, page_size: int, device: Any) -> Any:
    """The cache that a CUDA model makes: its attention has plans. On CPU too."""
    function = lambda name: tvm_ffi.get_global_func(f"flashinfer.{name}")  # noqa: E731
    d_qk, d_v = model.mla_head_dims
    options = json.dumps({"head_dim_qk": d_qk, "head_dim_vo": d_v})
    sizes = [8, 1024, 256, page_size, 0, *([1024] if HAS_LAYER_WINDOW else [])]
    merge = function("merge_state_in_place")
    return builtin("paged_attention_kv_cache_create")(
        Shape(sizes), Shape([0, NUM_LAYERS]), model.num_qo_heads, 1, model.head_dim,
        model.v_head_dim, Shape([int(AttnKind.MLA)] * NUM_LAYERS), False, model.rope_mode, 1.0, 1e4,
        None, tvm.runtime.empty((), model.dtype, device), None,
        function("append_paged_mla_kv_cache"),
        function("cache_slot")("prefill_ragged", options, True, 0), *[[]] * 6,
        function("cache_slot")("mla", "{}", True, 0), [merge, merge],
        function("bind_split_qkv_rotary")(1e4, 1.0, 2, "{}"), function("copy_single_page_mla"),
        function("debug_get_kv_mla"), function("compact_kv_copy"),
    )  # fmt: skip


def softmax_of(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last dimension."""
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Latent:
    """Gives steps to a cache and to the oracle, and keeps the largest error."""

    def __init__(self, cache: Any, model: Model, device: Any) -> None:
        self.cache, self.model, self.device = cache, model, device
        self.sm_scale = 1.4 * model.head_dim**-0.5
        self.rng = np.random.default_rng(0)
        self.held: dict[tuple[int, int], np.ndarray] = {}
        self.error = 0.0

    def add(self, *seqs: int) -> None:
        """Make empty sequences."""
        for seq in seqs:
            builtin("kv_state_add_sequence")(self.cache, seq)

    def fork(self, parent: int, child: int, at: int) -> None:
        """Start a sequence from the first `at` tokens of another one."""
        builtin("kv_state_fork_sequence")(self.cache, parent, child, at)
        for layer in range(NUM_LAYERS):
            self.held[child, layer] = self.held[parent, layer][:at]

    def step(self, seqs: Sequence[int], lens: Sequence[int], *, with_new: bool) -> None:
        """Append latent keys, and attend to the pages; `with_new` also to given new keys.

        Decode finds its new tokens in the pages. A prefill attends to them before compression and
        to the past in the pages, and merges.
        """
        model, tokens = self.model, sum(lens)
        starts = np.cumsum([0, *lens])
        builtin("kv_state_begin_forward")(self.cache, Shape(seqs), Shape(lens))
        for layer in range(NUM_LAYERS):
            kv = self._random(tokens, model.head_dim)
            builtin("attention_kv_cache_append_mla_kv")(self.cache, layer, self._given(kv))
            past = [self.held.get((seq, layer), np.zeros((0, model.head_dim))) for seq in seqs]
            for i, seq in enumerate(seqs):
                new = kv[starts[i] : starts[i + 1]].astype(np.float64)
                self.held[seq, layer] = np.concatenate([past[i], new])
            if with_new:
                self._self_attention(layer, lens)
            if with_new and all(len(x) == 0 for x in past):
                continue
            self._cross_attention(
                layer, starts, past if with_new else [self.held[seq, layer] for seq in seqs]
            )
        builtin("kv_state_end_forward")(self.cache)
        synchronize(self.device)

    def _cross_attention(self, layer: int, starts: np.ndarray, keys: list[np.ndarray]) -> None:
        model, tokens = self.model, int(starts[-1])
        q = self._random(tokens, model.num_qo_heads, model.head_dim)
        o = self._empty((tokens, model.num_qo_heads, model.v_head_dim), model.dtype)
        lse = self._empty((tokens, model.num_qo_heads), "float32")
        attend = builtin("attention_kv_cache_cross_attention")
        attend(self.cache, layer, self.sm_scale, self._given(q), o, lse)
        for i, x in enumerate(keys):
            rows = slice(starts[i], starts[i + 1])
            scores = np.einsum("nhd,md->hnm", q[rows].astype(np.float64), x) * self.sm_scale
            got, got_lse = o.numpy()[rows], lse.numpy()[rows]
            if len(x) == 0:
                assert (got == 0).all()
                assert np.isneginf(got_lse).all()
                continue
            values = x[:, : model.v_head_dim]
            self._check(got, np.einsum("hnm,md->nhd", softmax_of(scores), values))
            self._check(got_lse, np.log2(np.exp(scores).sum(-1)).T)

    def _self_attention(self, layer: int, lens: Sequence[int]) -> None:
        h, tokens, (d_qk, d_v) = self.model.num_qo_heads, sum(lens), self.model.mla_head_dims
        q, k, v = (self._random(tokens, h, d) for d in (d_qk, d_qk, d_v))
        o = self._empty((tokens, h, d_v), self.model.dtype)
        lse = self._empty((tokens, h), "float32")
        given = map(self._given, (q, k, v))
        builtin("attention_kv_cache_self_attention")(
            self.cache, layer, self.sm_scale, *given, o, lse
        )
        start = 0
        for n in lens:
            rows = slice(start, start + n)
            start += n
            scores = np.einsum("nhd,mhd->hnm", *(x[rows].astype(np.float64) for x in (q, k)))
            scores = np.where(np.tril(np.ones((n, n), bool)), scores * self.sm_scale, -np.inf)
            self._check(o.numpy()[rows], np.einsum("hnm,mhd->nhd", softmax_of(scores), v[rows]))
        # Merging a state with itself doubles its weight and leaves its values.
        merge = builtin("attention_kv_cache_merge_attn_output_inplace")
        before, before_lse = o.numpy().copy(), lse.numpy().copy()
        merge(self.cache, o, lse, self._given(before), self._given(before_lse))
        self._check(o.numpy(), before.astype(np.float64))
        self._check(lse.numpy(), before_lse + 1)

    def check_contents(self, seq: int) -> None:
        """Read a sequence back and compare."""
        length = len(self.held[seq, 0])
        kv = self._empty((NUM_LAYERS, length, self.model.head_dim), self.model.dtype)
        builtin("attention_kv_cache_debug_get_kv_mla")(self.cache, seq, 0, length, kv)
        for layer in range(NUM_LAYERS):
            np.testing.assert_array_equal(kv.numpy()[layer], self.held[seq, layer])

    def run(self) -> None:
        """Prompts, chunks on a past, a fork and decode, with prompts of one token among them."""
        self.add(0, 1, 3, 4)
        # TVM makes no plan for these steps: before there is one, and after.
        self.step([3], [1], with_new=True)
        self.step([0, 1], [20, 5], with_new=True)
        self.step([4], [1], with_new=True)
        self.step([0, 1], [1, 1], with_new=False)
        self.step([1], [18], with_new=True)
        self.fork(0, 2, 10)  # inside of a page
        for _ in range(3):
            self.step([2, 1, 0, 3], [1, 1, 1, 1], with_new=False)
        for seq in range(5):
            self.check_contents(seq)

    def _random(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(numpy_dtype(self.model.dtype))

    def _empty(self, shape: Sequence[int], dtype: str) -> Any:
        return tvm.runtime.empty(shape, dtype, self.device)

    def _given(self, x: np.ndarray) -> Any:
        return tvm.runtime.tensor(np.ascontiguousarray(x), self.device)

    def _check(self, got: np.ndarray, expected: np.ndarray) -> None:
        error = np.abs(np.asarray(got, np.float64) - expected).max()
        self.error = max(self.error, float(np.inf if np.isnan(error) else error))

"""Multi-head latent attention, as DeepSeek's models call the cache: TVM has none on CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import tvm
import tvm_ffi
from tvm_ffi import Shape

from tvm_flashinfer.relax import read_report

SM_SCALE = 0.2


def builtin(name: str) -> Callable:
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")


def softmax_of(scores: np.ndarray) -> np.ndarray:
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


class Latent:
    """Steps on a cache of MLA, and the same in float64."""

    def __init__(self, driver) -> None:
        self.driver, self.model = driver, driver.model
        self.held: dict[tuple[int, int], np.ndarray] = {}

    def step(self, seqs: Sequence[int], lens: Sequence[int], *, with_new: bool) -> None:
        """Append latent keys, and attend to the pages; `with_new` also to given new keys.

        Decode finds its new tokens in the pages. A prefill attends to them before compression and
        to the past in the pages, and merges.
        """
        driver, model = self.driver, self.model
        h, d_latent, tokens = model.num_qo_heads, model.v_head_dim, sum(lens)
        d_qk, d_v = model.mla_head_dims
        builtin("kv_state_begin_forward")(driver.cache, Shape(seqs), Shape(lens))
        for layer in range(2):
            kv = driver.random(tokens, model.head_dim)
            builtin("attention_kv_cache_append_mla_kv")(driver.cache, layer, _given(kv))
            q = driver.random(tokens, h, model.head_dim)
            o = tvm.runtime.empty((tokens, h, d_latent), model.dtype)
            lse = tvm.runtime.empty((tokens, h), "float32")
            past = [self.held.get((seq, layer), np.zeros((0, model.head_dim))) for seq in seqs]
            starts = np.cumsum([0, *lens])
            for i, seq in enumerate(seqs):
                new = kv[starts[i] : starts[i + 1]].astype(np.float64)
                self.held[seq, layer] = np.concatenate([past[i], new])
            if with_new:
                self._self_attention(layer, lens, h, d_qk, d_v)
            if with_new and all(len(x) == 0 for x in past):
                continue
            builtin("attention_kv_cache_cross_attention")(
                driver.cache, layer, SM_SCALE, _given(q), o, lse
            )
            keys = past if with_new else [self.held[seq, layer] for seq in seqs]
            for i, x in enumerate(keys):
                rows = slice(starts[i], starts[i + 1])
                scores = np.einsum("nhd,md->hnm", q[rows].astype(np.float64), x) * SM_SCALE
                got, got_lse = o.numpy()[rows], lse.numpy()[rows]
                if len(x) == 0:
                    assert (got == 0).all()
                    assert np.isneginf(got_lse).all()
                    continue
                expected = np.einsum("hnm,md->nhd", softmax_of(scores), x[:, :d_latent])
                driver.check(got, expected)
                driver.check(got_lse, np.log2(np.exp(scores).sum(-1)).T)
        builtin("kv_state_end_forward")(driver.cache)

    def _self_attention(self, layer: int, lens: Sequence[int], h: int, d_qk: int, d_v: int) -> None:
        driver, tokens = self.driver, sum(lens)
        q, k, v = (driver.random(tokens, h, d) for d in (d_qk, d_qk, d_v))
        o = tvm.runtime.empty((tokens, h, d_v), self.model.dtype)
        lse = tvm.runtime.empty((tokens, h), "float32")
        attend = builtin("attention_kv_cache_self_attention")
        attend(driver.cache, layer, SM_SCALE, _given(q), _given(k), _given(v), o, lse)
        start = 0
        for n in lens:
            rows = slice(start, start + n)
            start += n
            scores = np.einsum("nhd,mhd->hnm", q[rows].astype(np.float64), k[rows]) * SM_SCALE
            scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
            driver.check(o.numpy()[rows], np.einsum("hnm,mhd->nhd", softmax_of(scores), v[rows]))
        # Merging a state with itself doubles its weight and leaves its values.
        merge = builtin("attention_kv_cache_merge_attn_output_inplace")
        before, before_lse = o.numpy().copy(), lse.numpy().copy()
        merge(driver.cache, o, lse, _given(before), _given(before_lse))
        driver.check(o.numpy(), before)
        driver.check(lse.numpy(), before_lse + 1)

    def check_contents(self, seq: int) -> None:
        """Read a sequence back and compare."""
        length = len(self.held[seq, 0])
        kv = tvm.runtime.empty((2, length, self.model.head_dim), self.model.dtype)
        builtin("attention_kv_cache_debug_get_kv_mla")(self.driver.cache, seq, 0, length, kv)
        for layer in range(2):
            self.driver.check(kv.numpy()[layer], self.held[seq, layer])


def _given(x: np.ndarray) -> tvm.runtime.Tensor:
    return tvm.runtime.tensor(np.ascontiguousarray(x), tvm.cpu())


@pytest.mark.parametrize("page_size", [16, 3])
def test_mla(page_size: int, drive) -> None:
    driver = drive("mla", page_size=page_size)
    latent = Latent(driver)
    driver.add(0, 1)
    latent.step([0, 1], [20, 5], with_new=True)
    latent.step([0, 1], [1, 1], with_new=False)
    latent.step([1], [18], with_new=True)  # a chunk on a past
    driver.fork(0, 2, 10)  # inside of a page
    for layer in range(2):
        latent.held[2, layer] = latent.held[0, layer][:10]
    for _ in range(3):
        latent.step([2, 1, 0], [1, 1, 1], with_new=False)
    for seq in (0, 1, 2):
        latent.check_contents(seq)
    assert driver.error < 2e-5


def test_report(compile_model) -> None:
    report = read_report(compile_model("mla"))
    rows = {row.slot: row for row in report.rows if "mla" in row.site}
    assert rows["mla"].kernel == "flashinfer.bind_attention_mla"
    assert rows["append"].kernel == "flashinfer.append_paged_mla_kv_cache"
    assert report.fallbacks == []


def test_tvm_has_no_cache_of_mla_on_cpu(compile_model) -> None:
    with pytest.raises(Exception, match="create_tir_mla_cache"):
        compile_model("mla")["create_tir_mla_cache"]

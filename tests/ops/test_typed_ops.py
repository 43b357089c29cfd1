"""`tvm_flashinfer.ops`: names, defaults and results that are allocated, against float64."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import oracle
import pytest
import tvm
from batches import Batch, Spec, indptr_of, is_cuda, make_batch, normal
from cache_oracle import Extras, assert_request, pack_bits, rotate
from device_tensors import synchronize, to_device

from tvm_flashinfer import ops as typed

SCALE = 64**-0.5


@pytest.fixture(params=["tvm", "numpy"])
def put(request: Any, device: Any) -> Any:
    """Makes a tensor of a NumPy array: one of TVM, or on CPU the array itself."""
    if request.param == "numpy":
        if is_cuda(device):
            pytest.skip("NumPy arrays are on CPU")
        return np.ascontiguousarray
    return lambda x: tvm.runtime.tensor(x, device)


def host(x: Any, device: Any) -> np.ndarray:
    synchronize(device)
    return x if isinstance(x, np.ndarray) else x.numpy()


def check(o: np.ndarray, lse: Any, batch: Batch, causal: bool = False) -> None:
    extras = Extras(causal=causal)
    for b, (rows, k, v) in enumerate(batch.requests):
        logs = None if lse is None else lse[rows]
        assert_request(o[rows], logs, batch.q[rows], k, v, extras, SCALE, f"request {b}")


def test_single(rng, device, put):
    q, k, v = (normal(rng, (n, heads, 64), "float16") for n, heads in ((9, 4), (20, 2), (20, 2)))
    args = [put(x) for x in (q, k, v)]
    o = host(typed.single_prefill(*args, causal=True), device)
    assert_request(o, None, q, k, v, Extras(causal=True), SCALE, "prefill")
    turned = [put(np.ascontiguousarray(x.swapaxes(0, 1))) for x in (k, v)]
    np.testing.assert_array_equal(
        host(typed.single_prefill(args[0], *turned, causal=True, layout="HND"), device), o
    )
    one = host(typed.single_decode(put(q[:1]), *args[1:]), device)
    assert_request(one, None, q[:1], k, v, Extras(), SCALE, "decode")


@pytest.mark.parametrize("masked", [False, True])
def test_dense(rng, device, put, masked):
    q = normal(rng, (2, 5, 4, 64), "float16")
    k, v = (normal(rng, (2, 12, 2, 64), "float16") for _ in range(2))
    masks = rng.random((2, 5, 12)) < 0.7
    mask = typed.pack_mask(masks)
    for ours, theirs in zip(mask, pack_bits(masks), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    o = typed.attention(
        *(put(x) for x in (q, k, v)),
        mask=tuple(put(x) for x in mask) if masked else None,
        causal=True,
        window=6,
        logits_soft_cap=4.0,
    )
    for b in range(2):
        extras = Extras(causal=True, window_left=5, soft_cap=4.0, mask=masks[b] if masked else None)
        assert_request(host(o, device)[b], None, q[b], k[b], v[b], extras, SCALE, f"request {b}")


def test_dense_with_a_bias(rng, device, put):
    q = normal(rng, (2, 5, 4, 64), "float16")
    k, v = (normal(rng, (2, 12, 2, 64), "float16") for _ in range(2))
    bias = normal(rng, (1, 4, 5, 12), "float16")
    args = [put(x) for x in (q, k, v)]
    o = typed.attention(*args, bias=put(bias), causal=True, sm_scale=SCALE)
    for b in range(2):
        extras = Extras(causal=True, bias=bias[0])
        assert_request(host(o, device)[b], None, q[b], k[b], v[b], extras, SCALE, f"request {b}")
    mask = tuple(put(x) for x in typed.pack_mask(np.ones((2, 5, 12), bool)))
    with pytest.raises(ValueError, match="minus infinity"):
        typed.attention(*args, bias=put(bias), mask=mask)


def test_ragged(rng, device, put):
    batch = make_batch(rng, Spec((9, 0, 30), (3, 2, 30), layout="NHD"), paged=False)
    spec = batch.spec
    k, v = (np.concatenate(x) for x in (batch.keys, batch.values))
    indptrs = indptr_of(spec.rows), indptr_of(spec.kv_lens)
    args = [put(x) for x in (batch.q, k, v, *indptrs)]
    check(host(typed.attention_ragged(*args, causal=True), device), None, batch, causal=True)
    prefill = typed.BatchPrefill(typed.Workspaces.allocate(args[0], 16 << 20, 1 << 20))
    prefill.plan(*indptrs, np.array(spec.kv_lens, np.int32), *spec.heads, 64, causal=True)
    o, lse = prefill.run_ragged(*args)
    check(host(o, device), host(lse, device), batch, causal=True)


def test_paged(rng, device, put):
    spec = Spec((40, 16, 3), (5, 1, 3))
    batch = make_batch(rng, spec)
    tables = batch.page_indptr, batch.page_indices, batch.last_page_len
    q, pages, rows = (put(x) for x in (batch.q, batch.pool, indptr_of(spec.rows)))
    on_device = [put(x) for x in tables]
    o, lse = typed.attention_paged(q, pages, rows, *on_device, causal=True)
    check(host(o, device), host(lse, device), batch, causal=True)
    prefill = typed.BatchPrefill(typed.Workspaces.allocate(q, 16 << 20, 1 << 20))
    prefill.plan(
        indptr_of(spec.rows), tables[0], np.array(spec.kv_lens, np.int32), *spec.heads, 64,
        page_size=16, causal=True,
    )  # fmt: skip
    parts = [put(np.ascontiguousarray(batch.pool[:, i])) for i in range(2)]
    planned, logs = prefill.run_paged(q, *parts, rows, *on_device)
    check(host(planned, device), host(logs, device), batch, causal=True)


def test_decode(rng, device, put):
    batch = make_batch(rng, Spec((40, 16, 3)))
    tables = [put(x) for x in (batch.page_indptr, batch.page_indices, batch.last_page_len)]
    q, pages = put(batch.q), put(batch.pool)
    o, lse = typed.decode_paged(q, pages, *tables)
    check(host(o, device), host(lse, device), batch)
    decode = typed.BatchDecode(typed.Workspaces.allocate(q, 16 << 20, 1 << 20))
    decode.plan(batch.page_indptr, *batch.spec.heads, 64, page_size=16, q_dtype="float16")
    parts = [put(np.ascontiguousarray(batch.pool[:, i])) for i in range(2)]
    planned, logs = decode.run(q, *parts, *tables)
    check(host(planned, device), host(logs, device), batch)


def test_states(rng, device, put):
    """Merging attention over two parts of the keys is attention over both."""
    q = normal(rng, (3, 2, 64), "float16")
    k, v = (normal(rng, (20, 2, 64), "float16") for _ in range(2))
    parts = [oracle.attention(q, k[at], v[at], sm_scale=SCALE) for at in (np.s_[:7], np.s_[7:])]
    states = [(put(part.o.astype("float16")), put(part.lse.astype("float32"))) for part in parts]
    merged, lse = typed.merge_state(*states[0], *states[1])
    whole = oracle.attention(q, k, v, sm_scale=SCALE)
    np.testing.assert_allclose(host(merged, device), whole.o, atol=2e-3)
    np.testing.assert_allclose(host(lse, device), whole.lse, atol=1e-4)
    typed.merge_state_in_place(*states[0], *states[1])
    np.testing.assert_array_equal(host(states[0][0], device), host(merged, device))
    sinks = rng.standard_normal(2).astype("float32")
    typed.apply_attention_sinks(merged, lse, put(sinks))
    total = np.log2(2**whole.lse + np.exp(sinks))
    np.testing.assert_allclose(host(lse, device), total, atol=1e-4)
    np.testing.assert_allclose(
        host(merged, device), whole.o * 2 ** (whole.lse - total)[..., None], atol=2e-3
    )


def test_rotary_and_append(rng, device, put):
    qkv = normal(rng, (5, 8, 64), "float16")
    positions = rng.integers(0, 100, 5).astype(np.int32)
    q, k, v = typed.split_qkv_rotary(put(qkv), put(positions), 4, 2, rope_theta=500.0)
    np.testing.assert_allclose(
        host(q, device), rotate(qkv[:, :4], positions, theta=500.0), atol=4e-3
    )
    np.testing.assert_array_equal(host(v, device), qkv[:, 6:])
    pages = put(np.zeros((3, 2, 2, 4, 64), np.float16))
    where = np.array([4, 5, -1, 8, 11], np.int32)
    typed.append_paged_kv_cache(pages, k, v, put(where))
    typed.copy_single_page(pages, 1, 0, 1)
    stored = host(pages, device)
    np.testing.assert_array_equal(stored[2, 0, :, 3], host(k, device)[4])
    np.testing.assert_array_equal(stored[0, 1, :, 0], host(v, device)[0])


def test_sampling(rng, device, put):
    probs = rng.dirichlet(np.ones(50), 3).astype("float32")
    uniform, rows = rng.random(7).astype("float32"), rng.integers(0, 3, 7).astype(np.int32)
    got = host(typed.sample_from_probs(*(put(x) for x in (probs, uniform, rows))), device)
    sums = probs[rows].astype(np.float64).cumsum(-1)
    np.testing.assert_array_equal(got, (sums <= uniform[:, None]).sum(-1))


def test_refusals(rng, device):
    """What the packed functions cannot see is refused here, by name."""
    q = to_device(normal(rng, (1, 4, 64), "float16"), device).tensor
    with pytest.raises(ValueError, match=r"`layout` is 'DNH'"):
        typed.single_decode(tvm.runtime.empty((1, 4, 64), "float16"), q, q, layout="DNH")
    with pytest.raises(ValueError, match=r"`window` is 0"):
        typed.attention(*[np.zeros((1, 1, 1, 16), np.float16)] * 3, window=0)
    with pytest.raises(ValueError, match="bool of"):
        typed.pack_mask(np.zeros((2, 3), bool))
    with pytest.raises(ValueError, match="no plan"):
        typed.BatchPrefill(typed.Workspaces(q, q, q)).run_ragged(*[np.zeros((1, 1, 16))] * 5)

    class Foreign:
        shape = (1, 1, 1, 16)

    with pytest.raises(TypeError, match=r"Foreign.*`out`"):
        typed.attention(Foreign(), Foreign(), Foreign())


def test_every_name_says_what_it_calls():
    """Docstrings name the packed function, and each parameter is described."""
    for name in typed.__all__:
        public = getattr(typed, name)
        assert inspect.getdoc(public), name
        if inspect.isfunction(public) and name != "pack_mask":
            assert "``flashinfer." in public.__doc__, name
    assert typed.__all__ == sorted(typed.__all__)

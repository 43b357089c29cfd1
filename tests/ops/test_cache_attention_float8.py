"""8-bit keys and values in attention without a plan, against float64 over what they stand for."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
import tvm
from batches import DTYPES, indptr_of, is_cuda, normal
from cache_calls import FLOAT8, CacheSpec, make_cache_batch, needs_cache_kernel, quantized
from cache_oracle import Extras, assert_request, random_tree
from device_tensors import numpy_dtype, poisoned, to_device
from oracle import LOG2E
from refusals import assert_refused, bad, cut, dtype, refused, unchanged

KV = [37, 0, 1, 65, 530, 64]
QO = [5, 3, 1, 65, 20, 0]
SCALES = {"k_scale": 0.37, "v_scale": 1.9}
SLOTS = (
    "prefill_paged", "decode_paged", "prefill_ragged", "tree_paged", "tree_ragged", "mask_paged",
)  # fmt: skip


def _spec(rng: np.random.Generator, slot: str, **changes: Any) -> CacheSpec:
    changes.setdefault("options", SCALES)
    kv, qo = KV, None if slot == "decode_paged" else QO
    if slot.startswith("prefill"):
        changes.setdefault("causal", 1)
    elif slot == "mask_paged":
        changes["masks"] = [rng.random((n, m)) < 0.6 for n, m in zip(QO, KV, strict=True)]
    elif slot == "tree_paged":
        changes["trees"] = [random_tree(rng, n) for n in (9, 0, 1, 65, 70, 0)]
        kv = [37, 3, 1, 65, 530, 64]
    elif slot == "tree_ragged":
        kv = qo = [1, 9, 0, 70, 130, 2]
        changes["trees"] = [random_tree(rng, n) for n in kv]
    return CacheSpec(slot, kv, qo, **changes)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_slots(ops, device, rng, dtype, kv_dtype, slot):
    """Every slot, with scales that are no powers of two; unused slots are NaN."""
    needs_cache_kernel(device, dtype, 64)
    spec = _spec(rng, slot, dtype=dtype, kv_dtype=kv_dtype)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("head_dim", [16, 48, 80, 100, 112, 128, 256])
@pytest.mark.parametrize("slot", ["prefill_paged", "decode_paged", "prefill_ragged"])
def test_head_dims(ops, device, rng, slot, head_dim):
    """Also such as are no multiple of a vector."""
    needs_cache_kernel(device, "float16", head_dim)
    if is_cuda(device) and head_dim not in (80, 128, 256):
        pytest.skip("each head_dim is a kernel to compile, and these are like the others")
    spec = _spec(rng, slot, kv_dtype="float8_e4m3fn", head_dim=head_dim)
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("heads", [(4, 4), (3, 1), (8, 2), (14, 2), (16, 2), (71, 1)], ids=str)
@pytest.mark.parametrize(
    ("kv_dtype", "page_size"), [("float8_e4m3fn", 5), ("float8_e5m2", 1), ("float8_e4m3fn", 16)]
)
def test_groups(ops, device, rng, kv_dtype, page_size, heads):
    """Decode with every number of query heads per KV head, over sliding pages with sinks."""
    sliding = [(21, 4), (0, 0), (3, 1), (0, 0), (77, 33), (17, 17)]
    spec = _spec(
        rng, "decode_paged", kv_dtype=kv_dtype, heads=heads, page_size=page_size, sliding=sliding
    )
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("rotary_mode", [0, 1])
def test_all_at_once(ops, device, rng, slot, rotary_mode):
    """Cap, slopes, sinks and positions are of the true scores."""
    options = {**SCALES, "logits_soft_cap": 30, "rotary_dim": 48}
    spec = _spec(
        rng, slot, kv_dtype="float8_e4m3fn", sm_scale=0.4, rotary_mode=rotary_mode,
        options=options, alibi_slopes=np.array([0.5, 0.25, 0.1, 0.0]),
        sinks=np.array([0.0, 1.0, -2.0, 4.0]),
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_layer_window(ops, device, rng, kv_dtype):
    """The pages before the rows, of which every row sees the end."""
    spec = CacheSpec(
        "prefill_paged", [1, 15, 99, 513], [3, 1, 130, 40], kv_dtype=kv_dtype, causal=1,
        options={**SCALES, "layer_window": 100},
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("slot", ["prefill_paged", "prefill_ragged"])
@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_both_scales_count(ops, device, rng, kv_dtype, slot):
    """Pages of one token, 100 rows over 128 keys: twice a scale is no scale missed."""
    spec = CacheSpec(
        slot, [128], [100], heads=(64, 16), head_dim=128, page_size=1,
        kv_dtype=kv_dtype, causal=1, options={"k_scale": 0.25, "v_scale": 0.5},
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_values_narrower_than_keys(ops, device, rng, kv_dtype):
    """Keys of 192 and values of 128."""
    spec = CacheSpec(
        "prefill_ragged", [99], [99], heads=(16, 16), head_dim=192, head_dim_vo=128,
        kv_dtype=kv_dtype, causal=1, options=SCALES,
    )  # fmt: skip
    make_cache_batch(rng, device, spec).run_check(ops)


@pytest.mark.parametrize("kv_dtype", FLOAT8)
def test_dense(ops, device, rng, kv_dtype):
    """Requests of equal length take the same scales."""
    q = normal(rng, (2, 19, 8, 64), "float16")
    k, v = (quantized(rng, (2, 50, 2, 64), kv_dtype, SCALES[f"{name}_scale"]) for name in "kv")
    o, lse = poisoned(q.shape, "float16", device), poisoned(q.shape[:3], "float32", device)
    ops.bind_attention("dense", json.dumps(SCALES), None, None)(
        *(to_device(x, device).tensor for x in (q, k, v)), o.tensor, lse.tensor, 1, 0.2
    )
    true = [x.astype(np.float64) * SCALES[f"{name}_scale"] for name, x in (("k", k), ("v", v))]
    for b, name in enumerate(("first", "second")):
        keys, values = true[0][b], true[1][b]
        extras = Extras(causal=True)
        assert_request(o.numpy()[b], lse.numpy()[b], q[b], keys, values, extras, 0.2, name)


def _codes(kv_dtype: str) -> np.ndarray:
    return np.arange(256, dtype=np.uint8).view(numpy_dtype(kv_dtype))


@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("rows", [1, 20])
def test_every_value(ops, device, kv_dtype, rows):
    """All 256 codes as values of lone keys: the output is each of them, infinity and NaN too."""
    codes = _codes(kv_dtype).reshape(4, 1, 64)
    q = to_device(np.zeros((4 * rows, 1, 64), numpy_dtype("bfloat16")), device)
    zeros = np.zeros((4, 1, 64), codes.dtype)
    o, lse = (
        poisoned((4 * rows, 1, 64), "bfloat16", device),
        poisoned((4 * rows, 1), "float32", device),
    )
    ints = [
        to_device(np.asarray(x, np.int32), device).tensor
        for x in (np.arange(5) * rows, np.arange(5), np.zeros(4 * rows), np.zeros(4))
    ]
    ops.bind_attention_prefill_ragged("{}")(
        q.tensor, ints[0], to_device(zeros, device).tensor, to_device(codes, device).tensor,
        ints[1], ints[2], ints[3], o.tensor, lse.tensor, 0, 0, 1.0, 1e4, 1.0,
    )  # fmt: skip
    expected = np.repeat(codes.astype(np.float32), rows, axis=0)
    np.testing.assert_array_equal(o.numpy().astype(np.float32), expected)
    np.testing.assert_array_equal(lse.numpy(), 0)


@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("rotary_mode", [0, 1])
def test_every_key(ops, device, kv_dtype, rotary_mode):
    """All finite codes as elements of lone keys, picked by rows of the identity: LSE has each."""
    codes = _codes(kv_dtype)
    codes = np.where(np.isfinite(codes.astype(np.float32)), codes, np.zeros_like(codes))
    q = np.tile(np.eye(64, dtype=np.float16)[:, None], (4, 1, 1))
    o, lse = poisoned((256, 1, 64), "float16", device), poisoned((256, 1), "float32", device)
    ints = [
        to_device(np.asarray(x, np.int32), device).tensor
        for x in (np.arange(5) * 64, np.arange(5), np.zeros(256), np.zeros(4))
    ]
    keys = to_device(codes.reshape(4, 1, 64), device).tensor
    # Position 0 turns nothing, but takes the way of rotated keys.
    ops.bind_attention_prefill_ragged('{"k_scale": 0.25}')(
        to_device(q, device).tensor, ints[0], keys, to_device(np.zeros((4, 1, 64), codes.dtype),
        device).tensor, ints[1], ints[2], ints[3], o.tensor, lse.tensor, 0, rotary_mode, 1.0, 1e4,
        1.0,
    )  # fmt: skip
    expected = codes.astype(np.float64) * 0.25 * LOG2E
    # The exponentials of CUDA are approximate: those of 0 add up to 1 with an error of some bits.
    atol = 1e-6 if is_cuda(device) else 0
    np.testing.assert_allclose(lse.numpy()[:, 0], expected, rtol=1e-6, atol=atol)


@pytest.mark.parametrize("heads", [4, 40])
@pytest.mark.parametrize("kv_dtype", FLOAT8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_latent(ops, rng, dtype, kv_dtype, heads):
    """MLA on CPU: one scale for the row that is key and value."""
    cpu, scale, d, vo, size = tvm.cpu(0), 0.37, 576, 512, 16
    kv_lens, rows = [13, 0, 1, 129, 40], [1, 2, 1, 9, 0]
    keys = [quantized(rng, (m, 1, d), kv_dtype, scale) for m in kv_lens]
    counts = [-(-m // size) for m in kv_lens]
    at, ptr = indptr_of(counts), indptr_of(rows)
    pool = np.full((sum(counts), size, d), np.nan, numpy_dtype(kv_dtype))
    for b, tokens in enumerate(keys):
        pool[at[b] : at[b + 1]].reshape(-1, d)[: len(tokens)] = tokens[:, 0]
    last = [m - (c - 1) * size if c else 0 for m, c in zip(kv_lens, counts, strict=True)]
    q = normal(rng, (sum(rows), heads, d), dtype)
    o, lse = poisoned((len(q), heads, vo), dtype, cpu), poisoned((len(q), heads), "float32", cpu)
    ints = [
        to_device(np.asarray(x, np.int32), cpu).tensor
        for x in (ptr, at, np.arange(sum(counts)), last)
    ]
    ops.bind_attention_mla(json.dumps({"kv_scale": scale}))(
        to_device(q, cpu).tensor, ints[0], to_device(pool, cpu).tensor, *ints[1:], o.tensor,
        lse.tensor, 1, d**-0.5,
    )  # fmt: skip
    for b, k in enumerate(keys):
        part = slice(ptr[b], ptr[b + 1])
        true = k.astype(np.float64) * scale
        assert_request(
            o.numpy()[part], lse.numpy()[part], q[part], true, true[..., :vo],
            Extras(causal=True), d**-0.5, f"request {b}",
        )  # fmt: skip


@pytest.mark.parametrize("slot", ["prefill_paged", "prefill_ragged", "tree_paged"])
def test_hidden_nan(ops, rng, slot):
    """On CPU a NaN among the values reaches the rows that see it alone."""
    spec = _spec(rng, slot, kv_dtype="float8_e4m3fn")
    batch = make_cache_batch(rng, tvm.cpu(0), spec)
    batch.call(ops)
    before, _ = batch.outputs()
    name, at = ("v", sum(KV[:4]) + 529) if slot == "prefill_ragged" else ("pages", None)
    held = batch.args[name].numpy()
    if at is None:
        ptr, table = batch.args["page_indptr"].numpy(), batch.args["page_indices"].numpy()
        held[table[ptr[4] + 529 // 16], 1, :, 529 % 16] = np.nan
    else:
        held[at] = np.nan
    batch.args[name] = to_device(held, tvm.cpu(0))
    batch.call(ops)
    after, _ = batch.outputs()
    hit = np.isnan(after.astype(np.float32)).any((1, 2))
    end = sum(QO[:5])
    assert hit[end - 1]
    assert not hit[: end - 20].any()
    assert not hit[end:].any()
    assert hit.sum() < 20
    np.testing.assert_array_equal(after[~hit], before[~hit])


@pytest.mark.parametrize("scale", ["0", "-0.5", "true", '"1"', "1e-60", "1e60", "null"])
@pytest.mark.parametrize("name", ["k_scale", "v_scale"])
def test_scales_are_positive_numbers(ops, name, scale):
    """Refused where they are bound, except null, which is none."""
    options = f'{{"{name}": {scale}}}'
    for bind in (ops.bind_attention_decode_paged, ops.bind_append_paged_kv_cache):
        if scale == "null":
            bind(options)
            continue
        with refused(ValueError, name):
            bind(options)


def test_scales_that_are_no_numbers(ops):
    """JSON has no NaN and no infinity; where a parser takes them they are refused as well."""
    for scale in (math.nan, math.inf):
        for name, bind in (
            ("k_scale", ops.bind_attention_prefill_ragged),
            ("v_scale", ops.bind_append_paged_kv_cache),
            ("kv_scale", ops.bind_attention_mla),
            ("kv_scale", ops.bind_append_paged_mla_kv_cache),
        ):
            with refused(ValueError, "options"):
                bind(json.dumps({name: scale}))


def test_names_of_scales(ops):
    """A latent row has one scale; keys and values have one each."""
    with refused(ValueError, "k_scale", "kv_scale"):
        ops.bind_attention_mla('{"k_scale": 0.5}')
    with refused(ValueError, "kv_scale", "v_scale"):
        ops.bind_attention_decode_paged('{"kv_scale": 0.5}')


def test_slots_of_caches_have_no_scales(ops):
    """TVM's cache has no 8-bit pages, so its slots refuse the scales of such."""
    for planned in (False, True):
        with refused(ValueError, "v_scale", "float8"):
            ops.cache_slot("decode_paged", '{"v_scale": 0.5}', planned, 0)


def test_scales_of_keys_that_are_not_8_bit(ops, device, rng):
    """Refused: whoever bound them expects another cache."""
    for name in ("k_scale", "v_scale"):
        spec = CacheSpec("decode_paged", [9], options={name: 0.5})
        batch = make_cache_batch(rng, device, spec)
        with unchanged(batch.args), refused(ValueError, "pages", "float16", "0.5"):
            batch.call(ops)


def test_scale_that_overflows(ops, device, rng):
    """The product of both scales must be a number of float32."""
    spec = CacheSpec(
        "decode_paged", [9], kv_dtype="float8_e5m2", sm_scale=1e20, options={"k_scale": 1e20}
    )
    batch = make_cache_batch(rng, device, spec)
    with unchanged(batch.args), refused(ValueError, "sm_scale"):
        batch.call(ops)


@pytest.mark.parametrize(
    ("slot", "case"),
    [
        ("decode_paged", bad("int8", "pages", dtype("int8"), TypeError, "pages", "float8_e4m3fn")),
        ("decode_paged", bad("uint8", "pages", dtype("uint8"), TypeError, "pages", "uint8")),
        ("decode_paged", bad("wider", "pages", dtype("float32"), TypeError, "float16 as `q`")),
        ("decode_paged", bad("8-bit", "q", dtype("float8_e4m3fn"), TypeError, "`q` is float8")),
        ("decode_paged", bad("8-bit", "o", dtype("float8_e4m3fn"), TypeError, "`o` is float8")),
        ("prefill_ragged", bad("other", "v", dtype("float8_e5m2"), TypeError, "`v`", "e4m3fn")),
        ("prefill_ragged", bad("16-bit", "v", dtype("float16"), TypeError, "`v`", "e4m3fn")),
        ("prefill_ragged", bad("16-bit", "k", dtype("float16"), TypeError, "`v`", "float16")),
        ("prefill_ragged", bad("rows", "k", cut(lambda a: a[:-1]), ValueError, "`v`")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.id,
)  # fmt: skip
def test_dtypes(ops, device, rng, slot, case):
    """Integers, mixed dtypes, and 8-bit queries and outputs."""
    case = case.values[0]
    spec = CacheSpec(slot, [9, 4], [1, 1], kv_dtype="float8_e4m3fn")
    batch = make_cache_batch(rng, device, spec)
    if slot == "decode_paged":
        batch.args.pop("qo_indptr", None)
    bound = getattr(ops, f"bind_attention_{slot}")("{}")
    assert_refused(bound, batch.args, case, device)

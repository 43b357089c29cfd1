"""Merge, rotary and page calls with one argument spoiled: the right exception, nothing written."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import oracle
import pytest
from batches import indptr_of, is_cuda, normal
from calls import Args, passed
from device_tensors import poisoned, relabelled, to_device
from refusals import (
    NOT_FINITE,
    UNSUPPORTED,
    Bad,
    assert_refused,
    bad,
    cut,
    dtype,
    edit,
    other_device,
    refused,
    strided_copy,
    unchanged,
    value,
)


def _merge_args(device: Any, rng: np.random.Generator) -> Args:
    return {
        "v_a": to_device(normal(rng, (9, 4, 64), "float16"), device),
        "s_a": to_device(normal(rng, (9, 4), "float32"), device),
        "v_b": to_device(normal(rng, (9, 4, 64), "float16"), device),
        "s_b": to_device(normal(rng, (9, 4), "float32"), device),
        "v_merged": poisoned((9, 4, 64), "float16", device),
        "s_merged": poisoned((9, 4), "float32", device),
    }


def _merge_is_right(ops: Any, args: Args) -> None:
    states = [args[x].numpy() for x in ("v_a", "s_a", "v_b", "s_b")]
    ops.merge_state(*passed(args, {}))
    v, s = oracle.merge(*states)
    np.testing.assert_allclose(args["v_merged"].numpy().astype(np.float32), v, atol=2e-3)
    np.testing.assert_allclose(args["s_merged"].numpy(), s, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "case",
    [
        *(
            case
            for name in ("v_a", "v_b", "v_merged")
            for case in (
                bad("another dtype", name, dtype("bfloat16"), TypeError, "bfloat16"),
                bad("rank 2", name, cut(lambda a: a[:, 0])),
                bad("a row less", name, cut(lambda a: a[:-1]), ValueError, "v_|s_"),
                bad("strided", name, strided_copy, ValueError, name, "contiguous|strid"),
                bad("other device", name, other_device, ValueError, "v_|s_"),
                bad("none", name, value(None), TypeError, "rgument"),
            )
        ),
        *(
            case
            for name in ("s_a", "s_b", "s_merged")
            for case in (
                bad("float16", name, dtype("float16"), TypeError),
                bad("rank 1", name, cut(lambda a: a[:, 0])),
                bad("a head less", name, cut(lambda a: a[:, :-1])),
                bad("strided", name, strided_copy, ValueError, name, "contiguous|strid"),
                bad("other device", name, other_device),
            )
        ),
    ],
)
def test_merge_state(ops, device, rng, case):
    """Each argument of merge_state."""
    args = _merge_args(device, rng)
    assert_refused(ops.merge_state, args, case, device)
    _merge_is_right(ops, args)


@pytest.mark.parametrize(
    "case",
    [
        bad("another dtype", "v", dtype("bfloat16"), TypeError, "bfloat16"),
        bad("int32", "v_other", dtype("int32"), TypeError),
        bad("a row less", "v_other", cut(lambda a: a[:-1])),
        bad("float16", "s_other", dtype("float16"), TypeError),
        bad("a head less", "s", cut(lambda a: a[:, :-1]), ValueError, r"\bs\b"),
        bad("strided", "v", strided_copy, ValueError, r"\bv\b", "contiguous|strid"),
        bad("other device", "s_other", other_device),
    ],
)
def test_merge_state_in_place(ops, device, rng, case):
    """Each argument of merge_state_in_place."""
    given = list(_merge_args(device, rng).values())[:4]
    args = dict(zip(("v", "s", "v_other", "s_other"), given, strict=True))
    assert_refused(ops.merge_state_in_place, args, case, device)
    expected, _ = oracle.merge(*(x.numpy() for x in given))
    ops.merge_state_in_place(*passed(args, {}))
    np.testing.assert_allclose(given[0].numpy().astype(np.float32), expected, atol=2e-3)


def _rotary_args(device: Any, rng: np.random.Generator) -> Args:
    return {
        "qkv": to_device(normal(rng, (7, 8, 64), "float16"), device),
        "position_map": to_device(np.arange(7, dtype=np.int32) * 9, device),
        "q": poisoned((7, 4, 64), "float16", device),
        "k": poisoned((7, 2, 64), "float16", device),
        "v": poisoned((7, 2, 64), "float16", device),
        "apply_rope": 1,
        "rope_theta": 1e4,
        "rope_scale": 1.0,
        "rotary_dim": 64,
        "rope_scaling": "{}",
    }


YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1}
ROTARY = [
    bad("odd", "rotary_dim", value(63)),
    bad("above head_dim", "rotary_dim", value(66)),
    bad("negative", "rotary_dim", value(-2)),
    bad("zero", "rope_theta", value(0.0)),
    bad("negative", "rope_theta", value(-1e4)),
    *(bad(str(x), "rope_theta", value(x)) for x in NOT_FINITE),
    *(bad(str(x), "rope_scale", value(x)) for x in NOT_FINITE),
    bad("no JSON", "rope_scaling", value("{rope"), ValueError, "rope_scaling|JSON"),
    bad("a list", "rope_scaling", value("[1]"), ValueError, "rope_scaling|JSON"),
    bad("yarn", "rope_scaling", value(json.dumps(YARN)), ValueError, "yarn", "original_max_pos"),
    bad("unknown", "rope_scaling", value('{"rope_type": "x1"}'), UNSUPPORTED, "x1", "llama3"),
    bad("no factor", "rope_scaling", value('{"rope_type": "llama3"}'), ValueError, "factor"),
    bad(
        "zero factor",
        "rope_scaling",
        value('{"rope_type": "linear", "factor": 0}'),
        ValueError,
        "factor",
    ),
]
# What the bound form can see only when it is called, since it is made without a head dimension.
LATE = {"rotary_dim-above_head_dim"}


@pytest.mark.parametrize(
    "case",
    [
        bad("int32", "qkv", dtype("int32"), TypeError),
        bad("rank 2", "qkv", cut(lambda a: a[:, 0])),
        bad("a head less", "qkv", cut(lambda a: a[:, :-1]), ValueError, "head|qkv"),
        bad("a row less", "qkv", cut(lambda a: a[:-1]), ValueError, "qkv|position_map"),
        bad("other device", "qkv", other_device, ValueError, "qkv|position_map"),
        bad("none", "qkv", value(None), TypeError, "rgument"),
        bad("int64", "position_map", dtype("int64"), TypeError),
        bad("a row less", "position_map", cut(lambda a: a[:-1])),
        bad("strided", "position_map", strided_copy),
        bad("another dtype", "q", dtype("bfloat16"), TypeError, "bfloat16"),
        bad("a head less", "q", cut(lambda a: a[:, :-1]), ValueError, r"\bq\b|head"),
        bad("strided", "q", strided_copy, ValueError, r"\bq\b", "contiguous|strid"),
        bad("strided", "k", strided_copy, ValueError, r"\bk\b", "contiguous|strid"),
        bad("rank 2", "v", cut(lambda a: a[:, 0])),
        bad("other device", "v", other_device),
        *ROTARY,
    ],
)
def test_split_qkv_rotary(ops, device, rng, case):
    """Each argument of split_qkv_rotary."""
    args = _rotary_args(device, rng)
    assert_refused(ops.split_qkv_rotary, args, case, device)
    ops.split_qkv_rotary(*passed(args, {}))
    exact = oracle.rotary(
        args["qkv"].numpy()[:, :4], np.arange(7) * 9, theta=1e4, scale=1.0, rotary_dim=64
    )
    np.testing.assert_allclose(args["q"].numpy().astype(np.float32), exact, atol=4e-3)


@pytest.mark.parametrize(
    "case",
    [
        *(c for c in ROTARY if c.id not in LATE),
    ],
)
def test_bind_split_qkv_rotary(ops, case: Bad):
    """Parameters are refused when they are bound, not at the first token."""
    args = {
        "rope_theta": 1e4,
        "rope_scale": 1.0,
        "rotary_dim": 64,
        "rope_scaling": "{}",
    }
    assert_refused(ops.bind_split_qkv_rotary, args, case, None)


def test_bound_rotary_dim_above_head_dim(ops, device, rng):
    """A rotary_dim that does not fit the tensors is refused by the bound function."""
    args = _rotary_args(device, rng)
    bound = ops.bind_split_qkv_rotary(1e4, 1.0, 128, "{}")
    with unchanged(args), refused(ValueError, "rotary_dim", "128", "64"):
        bound(*passed(args, {})[:6])


def _append_args(device: Any, rng: np.random.Generator) -> Args:
    return {
        "pages": to_device(normal(rng, (4, 2, 2, 16, 64), "float16"), device),
        "k": to_device(normal(rng, (3, 2, 64), "float16"), device),
        "v": to_device(normal(rng, (3, 2, 64), "float16"), device),
        "position_map": to_device(np.array([5, 63, 0], np.int32), device),
    }


APPEND = [
    bad("int32", "pages", dtype("int32"), TypeError),
    bad("rank 4", "pages", cut(lambda a: a[:, 0])),
    bad("three halves", "pages", cut(lambda a: a[:, :1])),
    bad("other device", "pages", other_device, ValueError, r"pages|\bk\b"),
    bad("none", "pages", value(None), TypeError, "rgument"),
    bad("another dtype", "k", dtype("bfloat16"), TypeError, "bfloat16"),
    bad("a head less", "v", cut(lambda a: a[:, :-1]), ValueError, r"\bv\b|head"),
    bad("a row less", "k", cut(lambda a: a[:-1]), ValueError, r"\bk\b|\bv\b|position_map"),
    bad("strided", "k", strided_copy, ValueError, r"\bk\b", "contiguous|strid"),
    bad("int64", "position_map", dtype("int64"), TypeError),
    bad("a row less", "position_map", cut(lambda a: a[:-1])),
]


@pytest.mark.parametrize("case", APPEND)
def test_append(ops, device, rng, case):
    """Each argument of append_paged_kv_cache."""
    args = _append_args(device, rng)
    assert_refused(ops.append_paged_kv_cache, args, case, device)
    pool, k, v, positions = (x.numpy() for x in args.values())
    ops.append_paged_kv_cache(*passed(args, {}))
    expected = oracle.appended(pool, k, v, positions)
    np.testing.assert_array_equal(args["pages"].numpy(), expected)


PAST_POOL = bad(
    "past the pool", "position_map", edit(1, 64), ValueError, "position_map", "64", r"\b1\b"
)


@pytest.mark.parametrize("case", [PAST_POOL])
def test_append_contents(ops, device, rng, case, monkeypatch):
    """A position past the pool is refused where contents are checked."""
    if is_cuda(device):
        monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    assert_refused(ops.append_paged_kv_cache, _append_args(device, rng), case, device)


def test_append_past_the_pool_unchecked(ops, device, rng):
    """On CUDA without the check a position past the pool is not written, and others are."""
    args = _append_args(device, rng)
    pool, k, v, _ = (x.numpy() for x in args.values())
    positions = np.array([5, 64, 1 << 30], np.int32)
    args["position_map"] = to_device(positions, device)
    if not is_cuda(device):
        with unchanged(args), refused(ValueError, "position_map", "64"):
            ops.append_paged_kv_cache(*passed(args, {}))
        return
    ops.append_paged_kv_cache(*passed(args, {}))
    expected = oracle.appended(pool, k[:1], v[:1], positions[:1])
    np.testing.assert_array_equal(args["pages"].numpy(), expected)
    args["pages"].assert_guards_intact("pages")


@pytest.mark.parametrize(
    "case",
    [
        bad("int32", "pages", dtype("int32"), TypeError),
        bad("rank 4", "pages", cut(lambda a: a[:, 0])),
        bad("past the pool", "src_page", value(4), ValueError, "src_page", r"\b4\b"),
        bad("negative", "src_page", value(-1)),
        bad("past the pool", "tgt_page", value(99), ValueError, "tgt_page", r"\b99\b", r"\b4\b"),
        bad("negative", "tgt_page", value(-2)),
        bad("above the size", "copy_length", value(17), ValueError, "copy_length", "17"),
        bad("negative", "copy_length", value(-1)),
        bad("text", "copy_length", value("9"), TypeError, "rgument"),
    ],
)
def test_copy_single_page(ops, device, rng, case):
    """Each argument of copy_single_page; the numbers are on the host, so always checked."""
    pool = normal(rng, (4, 2, 2, 16, 64), "float16")
    args = {"pages": to_device(pool, device), "src_page": 2, "tgt_page": 0, "copy_length": 9}
    assert_refused(ops.copy_single_page, args, case, device)
    ops.copy_single_page(*passed(args, {}))
    pool[0, :, :, :9] = pool[2, :, :, :9]
    np.testing.assert_array_equal(args["pages"].numpy(), pool)


COMPACT = [
    bad("int32", "pages", dtype("int32"), TypeError),
    bad("int64", "copy_length_indptr", dtype("int64"), TypeError),
    bad("int64", "src_dst_pos", dtype("int64"), TypeError),
    bad("rank 1", "src_dst_pos", cut(lambda a: a[0])),
    bad("three rows", "src_dst_pos", lambda _o, d: to_device(np.zeros((3, 4), np.int32), d)),
    bad("negative", "batch_size", value(-1)),
    bad("too many", "batch_size", value(5), ValueError, "batch_size|copy_length_indptr"),
]
COMPACT_CONTENTS = [
    bad("not monotone", "copy_length_indptr", edit(1, 5)),
    bad("past the moves", "copy_length_indptr", edit(2, 9)),
    bad("source", "src_dst_pos", edit((0, 2), 64), ValueError, "src_dst_pos", "64"),
    bad("target", "src_dst_pos", edit((1, 3), -1), ValueError, "src_dst_pos", "-1"),
]


def _compact(ops: Any, device: Any, rng: np.random.Generator, case: Bad) -> None:
    pool = normal(rng, (4, 2, 2, 16, 64), "float16")
    moves = np.array([[1, 2, 40, 41], [30, 31, 50, 51]], np.int32)
    args = {
        "pages": to_device(pool, device),
        "copy_length_indptr": to_device(indptr_of([2, 2]), device),
        "src_dst_pos": to_device(moves, device),
        "batch_size": 2,
    }
    assert_refused(ops.compact_kv_copy, args, case, device)
    ops.compact_kv_copy(*passed(args, {}))
    expected = oracle.compacted(pool, indptr_of([2, 2]), moves)
    np.testing.assert_array_equal(args["pages"].numpy(), expected)


@pytest.mark.parametrize("case", COMPACT)
def test_compact(ops, device, rng, case):
    """Each argument of compact_kv_copy."""
    _compact(ops, device, rng, case)


@pytest.mark.parametrize("case", COMPACT_CONTENTS)
def test_compact_contents(ops, device, rng, case, monkeypatch):
    """Moves outside the pool are refused where contents are checked."""
    if is_cuda(device):
        monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    _compact(ops, device, rng, case)


DEBUG_CONTENTS = [
    bad("past the pool", "position_map", edit(1, 64), ValueError, "position_map", "64"),
    bad("negative", "position_map", edit(0, -1), ValueError, "position_map", "-1"),
]
DEBUG = [
    bad("past the layers", "layer_id", value(2), ValueError, "layer_id", r"\b2\b"),
    bad("negative", "layer_id", value(-1)),
    bad("another dtype", "k", dtype("bfloat16"), TypeError, "bfloat16"),
    bad("a position less", "v", cut(lambda a: a[:, :-1]), ValueError, r"\b[kv]\b|position_map"),
    bad("rank 3", "k", cut(lambda a: a[0])),
    bad("strided", "v", strided_copy, ValueError, r"\bv\b", "contiguous|strid"),
    bad("int64", "position_map", dtype("int64"), TypeError),
]


@pytest.mark.parametrize("case", [*DEBUG, *DEBUG_CONTENTS])
def test_debug_get(ops, device, rng, case, monkeypatch):
    """Each argument of debug_get_kv, and the contents of its positions."""
    if is_cuda(device):
        monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    pool = normal(rng, (4, 2, 2, 16, 64), "float16")
    args = {
        "pages": to_device(pool, device),
        "position_map": to_device(np.array([5, 63, 0], np.int32), device),
        "k": poisoned((2, 3, 2, 64), "float16", device),
        "v": poisoned((2, 3, 2, 64), "float16", device),
        "layer_id": 1,
    }
    assert_refused(ops.debug_get_kv, args, case, device)
    ops.debug_get_kv(*passed(args, {}))
    for name, expected in zip("kv", oracle.gathered(pool, np.array([5, 63, 0])), strict=True):
        np.testing.assert_array_equal(args[name].numpy()[1], expected)


@pytest.mark.parametrize("device_type", [4, 8], ids=["opencl", "metal"])
def test_unserved_devices(ops, rng, device_type):
    """Tensors of a device that has no kernels are refused with the ones that have."""
    import tvm

    args = _merge_args(tvm.cpu(0), rng)
    foreign = [relabelled(x, device_type) for x in args.values()]
    with unchanged(args), refused(UNSUPPORTED, "(?i)cpu", "(?i)cuda"):
        ops.merge_state(*foreign)
    _merge_is_right(ops, args)


def test_deeply_nested_options_are_refused(ops):
    """TVM's parser recurses: what would overflow its stack is not given to it."""
    for depth in (17, 100_000):
        with pytest.raises(ValueError, match="nested"):
            ops.bind_attention_decode_paged("[" * depth)


def test_planned_slots_check_their_options(ops):
    """Whichever kernels serve a slot, wrong options are refused, and none is dropped."""
    with pytest.raises(ValueError, match="JSON"):
        ops.cache_slot("decode_paged", "junk {{{", True, 0)
    assert ops.cache_slot("decode_paged", "{}", True, 0)[0] == "flashinfer"
    for option in ('{"logits_soft_cap": 50}', '{"window_left": 50}'):
        assert ops.cache_slot("decode_paged", option, True, 0)[0] == "tirx"


@pytest.mark.parametrize("settings", [(1e4, 1e300), (1e-300, 1.0)], ids=["scale", "theta"])
def test_settings_that_overflow_float32_are_refused(ops, settings):
    """Finite in double, but the angles would be infinite and the result NaN."""
    with pytest.raises(ValueError, match="finite"):
        ops.bind_split_qkv_rotary(*settings, 64, "{}")

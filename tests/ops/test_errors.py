"""Attention calls with one argument spoiled: the right exception, its text, and nothing written.

After each refusal the same objects serve a good call, whose result is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import Spec, is_cuda, make_batch
from calls import Call, decode, paged_prefill, ragged_prefill
from device_tensors import relabelled, to_device
from refusals import (
    NOT_FINITE,
    UNSUPPORTED,
    Bad,
    assert_refused,
    assert_says,
    bad,
    cut,
    dtype,
    edit,
    other_device,
    refused,
    sparse_last,
    strided_copy,
    unchanged,
    value,
)

PAGED = Spec((40, 17, 5), (5, 17, 2), (4, 2), causal=True)


@pytest.fixture
def paged(ops, device, workspaces, rng) -> Call:
    """A good paged prefill: 24 rows; pages 3, 2, 1 of an 11-page pool."""
    return paged_prefill(ops, device, workspaces, make_batch(rng, PAGED), views=True)


@pytest.fixture
def ragged(ops, device, workspaces, rng) -> Call:
    """A good ragged prefill of the same lengths."""
    spec = Spec(PAGED.kv_lens, PAGED.qo_lens, causal=True, layout="NHD")
    return ragged_prefill(ops, device, workspaces, make_batch(rng, spec, paged=False), views=True)


@pytest.fixture
def decoding(ops, device, workspaces, rng) -> Call:
    """A good decode of the same lengths."""
    return decode(ops, device, workspaces, make_batch(rng, Spec(PAGED.kv_lens)), views=True)


def _plan_refused(call: Call, case: Bad) -> None:
    function = getattr(call.ops, call.plan_name)
    with unchanged(call.run_args):
        assert_refused(function, call.plan_args, case, call.device)
    call.plan_run_check()


def _run_refused(call: Call, case: Bad) -> None:
    call.plan()
    args = {**call.run_args, "plan": call.plan_value}
    with unchanged(call.run_args):
        assert_refused(getattr(call.ops, call.run_name), args, case, call.device)
    call.run()
    call.check()


def _small(device: Any, kind: type, shape: tuple[int, ...] = (1 << 16,)) -> Any:
    return to_device(np.zeros(shape, kind), device)


def _floats(_old: Any, device: Any) -> Any:
    return _small(device, np.float32)


def _a_byte_off(_old: Any, device: Any) -> Any:
    return to_device(np.zeros(1 << 16, np.uint8), device, byte_offset=1)


def _not_on_host(_old: Any, device: Any) -> Any:
    small = _small(device, np.uint8)
    return small if is_cuda(device) else relabelled(small, 2)


WORKSPACES = [
    bad("a byte off", "float_workspace", _a_byte_off),
    bad("a byte off", "int_workspace", _a_byte_off),
    bad("float32", "float_workspace", _floats, TypeError),
    bad("float32", "int_workspace", _floats, TypeError),
    bad("rank 2", "int_workspace", lambda _o, d: _small(d, np.uint8, (4, 4))),
    bad("other device", "int_workspace", lambda _o, d: other_device(_small(d, np.uint8), d)),
    bad("none", "float_workspace", value(None), TypeError, "rgument"),
]
NUMBERS = [
    bad("zero", "num_qo_heads", value(0)),
    bad("zero", "num_kv_heads", value(0)),
    bad("negative", "num_kv_heads", value(-2)),
    bad("ratio", "num_qo_heads", value(5), ValueError, r"\b5\b", r"\b2\b", "num_qo_heads|ratio"),
    bad("zero", "page_size", value(0)),
    bad("negative", "page_size", value(-16)),
    bad("zero", "head_dim_qk", value(0), UNSUPPORTED),
    bad("negative", "head_dim_vo", value(-64), UNSUPPORTED),
    bad("negative", "batch_size", value(-1)),
    bad("short", "batch_size", value(2)),
    bad("long", "batch_size", value(4)),
    bad("true", "enable_cuda_graph", value(True), UNSUPPORTED),
    bad("text", "page_size", value("16"), TypeError, "rgument"),
]


@pytest.mark.parametrize(
    "case",
    [
        *WORKSPACES,
        *NUMBERS,
        bad("not on the host", "pinned_int_workspace", _not_on_host),
        bad("int64", "qo_indptr", dtype("int64"), TypeError),
        bad("float32", "kv_indptr", dtype("float32"), TypeError),
        bad("int64", "kv_len", dtype("int64"), TypeError),
        bad("rank 2", "qo_indptr", cut(lambda a: a[None])),
        bad("strided", "kv_len", strided_copy),
        bad("none", "qo_indptr", value(None), TypeError, "rgument"),
        bad("not monotone", "qo_indptr", edit(2, 3), ValueError, "qo_indptr", r"\b[12]\b"),
        bad("first", "qo_indptr", edit(0, 1)),
        bad("not monotone", "kv_indptr", edit(1, 6), ValueError, "kv_indptr", r"\b[12]\b"),
        bad("first", "kv_indptr", edit(0, -1)),
        bad("negative", "kv_len", edit(1, -1), ValueError, "kv_len", r"\b1\b"),
        bad("more than the pages hold", "kv_len", edit(2, 17), ValueError, "kv_len", r"\b17\b"),
        bad("too many", "total_num_rows", value(25), ValueError, "total_num_rows|rows", "25"),
        bad("negative", "total_num_rows", value(-1)),
        bad("one", "num_colocated_ctas", value(1), UNSUPPORTED),
    ],
)
def test_prefill_plan(paged, case):
    """Each argument of batch_prefill_plan."""
    _plan_refused(paged, case)


@pytest.mark.parametrize(
    "case",
    [
        *WORKSPACES,
        *NUMBERS,
        bad("not on the host", "pinned_int_workspace", _not_on_host),
        bad("int64", "page_indptr", dtype("int64"), TypeError),
        bad("rank 2", "page_indptr", cut(lambda a: a[None])),
        bad("not monotone", "page_indptr", edit(1, 6), ValueError, "page_indptr", r"\b[12]\b"),
        bad("first", "page_indptr", edit(0, 1)),
        bad("cap", "logits_soft_cap", value(30.0), ValueError, "bind_attention_decode_paged"),
        bad("int32", "empty_q", dtype("int32"), TypeError),
        bad("another", "empty_kv", dtype("float32"), TypeError),
    ],
)
def test_decode_plan(decoding, case):
    """Each argument of batch_decode_plan."""
    _plan_refused(decoding, case)


QUERIES = [
    bad("another dtype", "q", dtype("bfloat16"), TypeError, "bfloat16"),
    bad("int32", "q", dtype("int32"), TypeError),
    bad("other device", "q", other_device),
    bad("rank 2", "q", cut(lambda a: a[:, 0])),
    bad("a row less", "q", cut(lambda a: a[:-1]), ValueError, r"\bq\b|\bo\b|rows"),
    bad("a head less", "q", cut(lambda a: a[:, :-1]), ValueError, r"\bq\b|\bo\b|head"),
    bad("narrow", "q", cut(lambda a: a[..., :32]), UNSUPPORTED, "32"),
    bad("last stride 2", "q", sparse_last, ValueError, r"\bq\b", "strid|contiguous"),
    bad("none", "q", value(None), TypeError, "rgument"),
]
OUTPUTS = [
    bad("another dtype", "o", dtype("float32"), TypeError),
    bad("other device", "o", other_device),
    bad("rank 2", "o", cut(lambda a: a[:, 0])),
    bad("a row less", "o", cut(lambda a: a[:-1])),
    bad("narrow", "o", cut(lambda a: a[..., :32])),
    bad("strided", "o", strided_copy, ValueError, r"\bo\b", "contiguous|strid"),
    bad("none", "o", value(None), TypeError, "rgument"),
    bad("float16", "lse", dtype("float16"), TypeError),
    bad("rank 1", "lse", cut(lambda a: a[:, 0])),
    bad("a row less", "lse", cut(lambda a: a[:-1])),
    bad("strided", "lse", strided_copy, ValueError, r"\blse\b", "contiguous|strid"),
    bad("other device", "lse", other_device),
]
SCALARS = [
    *(bad(str(x), "sm_scale", value(x)) for x in NOT_FINITE),
    bad("two", "layout", value(2)),
    bad("negative", "layout", value(-1)),
    bad("not the plan's", "window_left", value(7), ValueError, "window_left", "plan"),
    bad("none", "plan", value(None), TypeError, "rgument"),
    bad("empty", "plan", value([]), ValueError, "plan"),
    bad("garbage", "plan", value([1, 2, 3]), ValueError, "plan"),
    bad("float32", "float_workspace", _floats, TypeError),
    bad("other device", "int_workspace", lambda _o, d: other_device(_small(d, np.uint8), d)),
]
MASKS = [
    bad("custom", "mask_mode", value(2), ValueError, "mask_mode", "bind_attention_mask_paged"),
    bad("negative", "mask_mode", value(-1)),
    bad("not the plan's", "mask_mode", value(0), ValueError, "mask_mode|causal", "plan"),
]
PAGES = [
    bad("another dtype", "k_pages", dtype("bfloat16"), TypeError, "bfloat16"),
    bad("other device", "v_pages", other_device),
    bad("rank 5", "k_pages", cut(lambda a: a[None])),
    bad("a page less", "v_pages", cut(lambda a: a[:-1]), ValueError, "k_pages|v_pages"),
    bad("another page size", "k_pages", cut(lambda a: a[:, :, :8]), ValueError, "page"),
    bad("a head less", "v_pages", cut(lambda a: a[:, :1]), ValueError, "head|v_pages"),
    bad("narrow", "k_pages", cut(lambda a: a[..., :32]), UNSUPPORTED, "32"),
    bad("last stride 2", "v_pages", sparse_last, ValueError, "v_pages", "strid|contiguous"),
    bad("none", "v_pages", value(None), TypeError, "rgument"),
    bad("int64", "page_indptr", dtype("int64"), TypeError),
    bad("int64", "page_indices", dtype("int64"), TypeError),
    bad("float32", "last_page_len", dtype("float32"), TypeError),
    bad("rank 2", "page_indices", cut(lambda a: a[None])),
    bad("strided", "page_indices", strided_copy),
    bad("an element less", "page_indptr", cut(lambda a: a[:-1])),
    bad("an element less", "last_page_len", cut(lambda a: a[:-1])),
    bad("other device", "page_indices", other_device),
    bad("none", "last_page_len", value(None), TypeError, "rgument"),
]
QO_INDPTR = [
    bad("int64", "qo_indptr", dtype("int64"), TypeError),
    bad("an element less", "qo_indptr", cut(lambda a: a[:-1]), ValueError, "indptr"),
    bad("other device", "qo_indptr", other_device),
]


@pytest.mark.parametrize("case", [*QUERIES, *OUTPUTS, *SCALARS, *MASKS, *PAGES, *QO_INDPTR])
def test_paged_run(paged, case):
    """Each argument of batch_prefill_paged_run."""
    _run_refused(paged, case)


@pytest.mark.parametrize("case", [*QUERIES, *OUTPUTS, *SCALARS, *PAGES])
def test_decode_run(decoding, case):
    """Each argument of batch_decode_run."""
    _run_refused(decoding, case)


@pytest.mark.parametrize(
    "case",
    [
        *QUERIES,
        *OUTPUTS,
        *SCALARS,
        *MASKS,
        *QO_INDPTR,
        bad("another dtype", "k", dtype("bfloat16"), TypeError, "bfloat16"),
        bad("other device", "v", other_device),
        bad("rank 4", "k", cut(lambda a: a[None])),
        bad("a token less", "v", cut(lambda a: a[:-1]), ValueError, r"\b[kv]\b"),
        bad("a head less", "k", cut(lambda a: a[:, :1]), ValueError, r"head|\b[kv]\b"),
        bad("narrow", "k", cut(lambda a: a[..., :32]), UNSUPPORTED, "32"),
        bad("last stride 2", "v", sparse_last, ValueError, r"\bv\b", "strid|contiguous"),
        bad("int64", "kv_indptr", dtype("int64"), TypeError),
        bad("an element less", "kv_indptr", cut(lambda a: a[:-1]), ValueError, "indptr"),
        bad("none", "k", value(None), TypeError, "rgument"),
    ],
)
def test_ragged_run(ragged, case):
    """Each argument of batch_prefill_ragged_run."""
    _run_refused(ragged, case)


CONTENTS = [
    bad("not monotone", "page_indptr", edit(1, 6), ValueError, "page_indptr", r"\b[12]\b"),
    bad("first", "page_indptr", edit(0, -1)),
    bad("past the indices", "page_indptr", edit(3, 7), ValueError, "page_indptr|page_indices"),
    bad("past the pool", "page_indices", edit(4, 11), ValueError, "page_indices", "11", r"\b4\b"),
    bad("negative", "page_indices", edit(0, -1), ValueError, "page_indices", "-1", r"\b0\b"),
    bad("above the size", "last_page_len", edit(1, 17), ValueError, "last_page_len", "17", "16"),
    bad("zero with pages", "last_page_len", edit(2, 0), ValueError, "last_page_len", r"\b2\b"),
    bad("negative", "last_page_len", edit(0, -3), ValueError, "last_page_len", "-3"),
]
QO_CONTENTS = [
    bad("not monotone", "qo_indptr", edit(2, 3), ValueError, "qo_indptr", r"\b[12]\b"),
    bad("first", "qo_indptr", edit(0, 1)),
    bad("past the rows", "qo_indptr", edit(3, 25), ValueError, "qo_indptr", "25"),
]


def _check_contents(device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA contents are only looked at when the user asks for it."""
    if is_cuda(device):
        monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")


@pytest.mark.parametrize("case", [*CONTENTS, *QO_CONTENTS])
def test_paged_run_contents(paged, case, monkeypatch):
    """Contents of the index tensors of a paged prefill."""
    _check_contents(paged.device, monkeypatch)
    _run_refused(paged, case)


@pytest.mark.parametrize("case", CONTENTS)
def test_decode_run_contents(decoding, case, monkeypatch):
    """Contents of the index tensors of a decode."""
    _check_contents(decoding.device, monkeypatch)
    _run_refused(decoding, case)


@pytest.mark.parametrize(
    "case",
    [
        *QO_CONTENTS,
        bad("not monotone", "kv_indptr", edit(1, 60), ValueError, "kv_indptr", r"\b[12]\b"),
        bad("first", "kv_indptr", edit(0, 2)),
        bad("past the keys", "kv_indptr", edit(3, 63), ValueError, "kv_indptr", "63", "62"),
    ],
)
def test_ragged_run_contents(ragged, case, monkeypatch):
    """Contents of the index tensors of a ragged prefill."""
    _check_contents(ragged.device, monkeypatch)
    _run_refused(ragged, case)


@pytest.mark.parametrize(
    "change",
    [
        {"heads": (8, 2)},
        {"heads": (4, 4)},
        {"head_dim": 128},
        {"kv_lens": (40, 17), "qo_lens": (5, 17)},
        {"page_size": 32},
        {"qo_lens": (5, 17, 3)},
    ],
    ids=str,
)
def test_plan_of_another_batch(ops, device, workspaces, rng, paged, change):
    """A plan of other heads, head dimension, requests, page size or rows is refused by run."""
    other = Spec(**{**PAGED.__dict__, **change})
    stale = paged_prefill(ops, device, workspaces, make_batch(rng, other)).plan()
    paged.plan()
    with unchanged(paged.run_args), refused(ValueError, "plan|rows|batch_size"):
        paged.run(plan=stale)
    paged.run()
    paged.check()


def test_plan_without_window(ops, device, workspaces, rng):
    """Planned with a window and run without, and the other way round."""
    spec = Spec((300,), (40,), causal=True, window_left=20)
    call = paged_prefill(ops, device, workspaces, make_batch(rng, spec))
    call.plan()
    with unchanged(call.run_args), refused(ValueError, "window_left", "plan"):
        call.run(window_left=-1)
    call.plan(window_left=-1)
    with unchanged(call.run_args), refused(ValueError, "window_left", "plan"):
        call.run()
    call.plan_run_check()


def test_plans_of_another_kind(paged, decoding):
    """A decode plan given to prefill, and a prefill plan given to decode."""
    paged.plan()
    decoding.plan()
    for call, plan in ((paged, decoding.plan_value), (decoding, paged.plan_value)):
        with unchanged(call.run_args), refused(ValueError, "plan"):
            call.run(plan=plan)
        call.run()
        call.check()


@pytest.mark.parametrize("argument", ["float_workspace", "int_workspace", "pinned_int_workspace"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_small_workspaces(ops, device, workspaces, rng, kind, argument):
    """16 bytes are enough, or refused by plan with need and have; usable afterwards."""
    spec = Spec((3000, 40), heads=(4, 2), head_dim=128)
    make = paged_prefill if kind == "prefill" else decode
    call = make(ops, device, workspaces, make_batch(rng, spec))
    where = call.plan_args[argument].device
    tiny = to_device(np.zeros(16, np.uint8), where)
    try:
        call.plan(**{argument: tiny})
    except ValueError as error:
        assert_says(error, argument, r"\b16\b")
        tiny.assert_guards_intact(argument)
    else:
        call.run(**({argument: tiny} if argument in call.run_args else {}))
        tiny.assert_guards_intact(argument)
        call.check()
        call.fresh_outputs()
    call.plan_run_check()


@pytest.mark.parametrize("make", [paged_prefill, decode], ids=["prefill", "decode"])
@pytest.mark.parametrize(
    ("kind", "head_dim", "names"),
    [("float32", 64, ("float16", "bfloat16")), ("float16", 80, ("64", "128", "256"))],
)
def test_kernels_that_are_not_there(ops, device, workspaces, rng, make, kind, head_dim, names):
    """What CUDA has no kernel for is refused with what it has; CPU serves it."""
    spec = Spec((40, 3), heads=(4, 2), head_dim=head_dim, dtype=kind)
    call = make(ops, device, workspaces, make_batch(rng, spec))
    if not is_cuda(device):
        call.plan_run_check()
        return
    with unchanged(call.run_args), refused(UNSUPPORTED, *names):
        call.plan()
        call.run()
    good = Spec((40, 3), heads=(4, 2), head_dim=64)
    make(ops, device, workspaces, make_batch(rng, good)).plan_run_check()


def test_argument_counts(paged):
    """A call with an argument less or more is a TypeError."""
    args = [getattr(x, "tensor", x) for x in paged.plan_args.values()]
    for wrong in (args[:-1], [*args, 0]):
        with refused(TypeError, "rgument"):
            paged.ops.batch_prefill_plan(*wrong)
    paged.plan_run_check()


@pytest.mark.parametrize("kind", [decode, paged_prefill])
def test_changed_plans_are_refused(ops, device, workspaces, rng, kind):
    """Kernels index with every number of a plan, also with those that are the kernel's own."""
    call = kind(ops, device, workspaces, make_batch(rng, Spec((5, 9, 30), heads=(4, 2))))
    plan = list(call.plan())
    for i in range(1, len(plan)):
        with refused(ValueError, "changed after it was made"):
            call.run(plan=[*plan[:i], plan[i] + 1, *plan[i + 1 :]])
    for wrong in ([*plan, 0], plan[:-1]):
        with refused(ValueError, "changed after|not made by"):
            call.run(plan=wrong)
    call.plan_run_check()


@pytest.mark.parametrize("kind", [decode, paged_prefill])
def test_the_workspace_of_another_plan(ops, device, workspaces, rng, kind):
    """What was planned lies in the int workspace, so a run wants that one."""
    call = kind(ops, device, workspaces, make_batch(rng, Spec((5, 9, 30), heads=(4, 2))))
    call.plan()
    other = to_device(workspaces.int_workspace.numpy(), device)
    with refused(ValueError, "int_workspace", "another tensor", "same workspaces"):
        call.run(int_workspace=other)
    call.run()
    call.check()


def test_rows_that_belong_to_no_request_are_refused(ops, device, workspaces, rng, monkeypatch):
    """They would keep what the output held before."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    call = paged_prefill(ops, device, workspaces, make_batch(rng, Spec((7, 9), (3, 2))))
    call.plan()
    short = to_device(np.array([0, 3, 4], np.int32), device)
    with pytest.raises(ValueError, match="ends at 4"):
        call.run(qo_indptr=short)

"""MLA calls with one argument spoiled: the right exception, its text, and nothing written."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import tvm
from batches import normal
from device_tensors import to_device
from graphs import Graph, Stream
from mla_calls import MLACall, MLASpec, mla_call
from refusals import (
    NOT_FINITE,
    assert_refused,
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
from test_overlaps import over

SPEC = MLASpec((40, 17, 5), (5, 17, 2), heads=3, causal=True)


@pytest.fixture
def mla(ops, device, workspaces, rng) -> MLACall:
    """A good batch: 24 rows; pages 3, 2, 1 of an 8-page pool."""
    return mla_call(ops, device, workspaces, rng, SPEC)


@pytest.mark.parametrize(
    "case",
    [
        bad("int64", "qo_indptr", dtype("int64"), TypeError),
        bad("float32", "kv_indptr", dtype("float32"), TypeError),
        bad("int64", "kv_len", dtype("int64"), TypeError),
        bad("rank 2", "qo_indptr", cut(lambda a: a[None])),
        bad("short", "kv_indptr", cut(lambda a: a[:-1])),
        bad("strided", "kv_len", strided_copy),
        bad("not monotone", "qo_indptr", edit(2, 3), ValueError, "qo_indptr", r"\b[12]\b"),
        bad("first", "kv_indptr", edit(0, 1)),
        bad("negative", "kv_len", edit(1, -1), ValueError, "kv_len", r"\b1\b"),
        bad("none in its pages", "kv_len", edit(2, 0), ValueError, "kv_len", r"\b2\b"),
        bad("no page size fits", "kv_len", edit(2, 90), ValueError, "no page size", r"\b90\b"),
        bad("zero", "num_heads", value(0)),
        bad("zero", "head_dim_ckv", value(0)),
        bad("too many", "num_heads", value(2**31 // 24 + 1), ValueError, "2\\^31"),
        bad("none", "qo_indptr", value(None), TypeError, "rgument"),
    ],
)
def test_plan(mla, case):
    """Each argument of batch_mla_plan."""
    with unchanged(mla.run_args):
        assert_refused(mla.ops.batch_mla_plan, mla.plan_args, case, mla.device)
    mla.plan_run_check()


@pytest.mark.parametrize(
    "case",
    [
        bad("none", "plan", value(None), TypeError, "rgument"),
        bad("empty", "plan", value([]), ValueError, "batch_mla_plan"),
        bad("another dtype", "q_nope", dtype("bfloat16"), TypeError, "bfloat16"),
        bad("another dtype", "q_pe", dtype("bfloat16"), TypeError),
        bad("another dtype", "kpe", dtype("float32"), TypeError),
        bad("other device", "ckv", other_device),
        bad("rank 2", "q_nope", cut(lambda a: a[:, 0])),
        bad("a row less", "q_pe", cut(lambda a: a[:-1])),
        bad("a head less", "q_nope", cut(lambda a: a[:, :-1])),
        bad("narrow", "q_nope", cut(lambda a: a[..., :256]), ValueError, "head_dim_ckv", "256"),
        bad("narrow", "ckv", cut(lambda a: a[..., :256])),
        bad("a page less", "kpe", cut(lambda a: a[:-1])),
        bad("a slot less", "ckv", cut(lambda a: a[:, :-1])),
        bad("last stride 2", "kpe", sparse_last, ValueError, r"\bkpe\b", "strid|contiguous"),
        bad("int64", "page_indices", dtype("int64"), TypeError),
        bad("short", "page_indices", cut(lambda a: a[:-1]), ValueError, "page_indices", "plan"),
        bad("other device", "page_indices", other_device),
        bad("another dtype", "o", dtype("float32"), TypeError),
        bad("narrow", "o", cut(lambda a: a[..., :256])),
        bad("strided", "o", strided_copy),
        bad("float16", "lse", dtype("float16"), TypeError),
        bad("a row less", "lse", cut(lambda a: a[:-1])),
        bad("not the plan's", "mask_mode", value(0), ValueError, "mask_mode", "plan"),
        bad("custom", "mask_mode", value(2)),
        bad("not the plan's", "num_heads", value(4), ValueError, "num_heads", "plan"),
        bad("not the pages'", "page_size", value(17), ValueError, "page_size|ckv"),
        bad("base e", "return_lse_base_on_e", value(True), ValueError, "base 2"),
        *(bad(str(x), "sm_scale", value(x)) for x in NOT_FINITE),
    ],
)
def test_run(mla, case):
    """Each argument of batch_mla_run."""
    mla.plan()
    with unchanged(mla.run_args):
        assert_refused(mla.ops.batch_mla_run, mla.run_args, case, mla.device)
    mla.run()
    mla.check()


def test_a_page_size_that_the_plan_did_not_have(ops, device, workspaces, rng, mla):
    """The plan is not told the page size: lengths that do not fit the run's pages are refused."""
    other = mla_call(ops, device, workspaces, rng, MLASpec((40, 17, 5), (5, 17, 2), 3, causal=True,
                                                           page_size=24))  # fmt: skip
    plan = other.plan()
    with unchanged(mla.run_args), refused(ValueError, "page_size", r"\b16\b", "plan"):
        mla.run(plan=plan)


def test_plans_of_another_kind_or_batch(ops, device, workspaces, rng, mla):
    """A plan of fewer rows, and one that was edited."""
    plan = list(mla.plan())
    fewer = mla_call(ops, device, workspaces, rng, MLASpec((40,), (5,), 3, causal=True)).plan()
    edited = plan[:-1]
    for wrong in (fewer, edited):
        with unchanged(mla.run_args), refused(ValueError, "plan"):
            mla.run(plan=wrong)
    mla.run(plan=plan)
    mla.check()


@pytest.mark.parametrize("output", ["o", "lse"])
@pytest.mark.parametrize("name", ["q_nope", "q_pe", "ckv", "kpe"])
def test_outputs_over_inputs(ops, device, workspaces, rng, output, name):
    """Kernels write some rows while they read others."""
    mla = mla_call(ops, device, workspaces, rng, SPEC, views=False)
    mla.plan()
    shifted = over(mla.run_args[name], mla.run_args[output], 128)
    with unchanged(mla.run_args), refused(ValueError, "overlap", rf"\b{output}\b", name):
        mla.run(**{output: shifted})
    lse = over(mla.run_args["o"], mla.run_args["lse"])
    with unchanged(mla.run_args), refused(ValueError, "overlap", "lse", r"\bo\b"):
        mla.run(lse=lse)


def test_memory_bound(ops, rng, monkeypatch):
    """On CPU parts that lie apart are copied, within the bound of the environment."""
    cpu = tvm.cpu(0)
    names = ("float_workspace", "int_workspace", "pinned_int_workspace")
    spaces = SimpleNamespace(**{x: tvm.runtime.empty((64,), "uint8", cpu) for x in names})
    spec = MLASpec((3000,), heads=1)
    apart = mla_call(ops, cpu, spaces, rng, spec, views=False)
    slices = mla_call(ops, cpu, spaces, rng, spec)
    monkeypatch.setenv("TVM_FLASHINFER_MAX_WORKSPACE_BYTES", str(3 << 20))
    slices.plan_run_check()
    apart.plan()
    with unchanged(apart.run_args), refused(ValueError, "MAX_WORKSPACE_BYTES"):
        apart.run()


@pytest.mark.parametrize("index", [-1, 8, 2**31 - 1])
def test_pages_outside(device, monkeypatch, mla, index):
    """A page that is not there is named, on CUDA when contents are checked."""
    monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    mla.plan()
    indices = mla.run_args["page_indices"].numpy()
    indices[4] = index
    with unchanged(mla.run_args), refused(ValueError, "page_indices", r"\b4\b", str(index)):
        mla.run(page_indices=to_device(indices, device).tensor)


@pytest.mark.cuda
def test_small_workspaces(ops, cuda, cuda_workspaces, rng):
    """A plan that does not fit is refused with need and have; both are usable afterwards."""
    call = mla_call(ops, cuda, cuda_workspaces, rng, MLASpec((9000, 17), (1, 2), heads=3))
    tiny = to_device(np.zeros(16, np.uint8), cuda).tensor
    for name in ("float_workspace", "int_workspace"):
        with refused(ValueError, name, r"\b16\b"):
            call.plan(**{name: tiny})
    call.plan_run_check()


@pytest.mark.cuda
def test_what_cuda_does_not_serve(ops, cuda, cuda_workspaces, rng):
    """float32, other head dimensions, views that are not aligned."""
    narrow = mla_call(ops, cuda, cuda_workspaces, rng, MLASpec((9,), heads=2, dims=(64, 16)))
    with refused(ValueError, "head_dim_ckv", r"\b64\b", r"\b512\b"):
        narrow.plan()
    single = mla_call(ops, cuda, cuda_workspaces, rng, MLASpec((9,), heads=2, dtype="float32"))
    single.plan()
    with refused(ValueError, "float32"):
        single.run()
    call = mla_call(ops, cuda, cuda_workspaces, rng, MLASpec((9,), heads=2))
    call.plan()
    q = to_device(normal(rng, (1, 2, 64), "float16"), cuda, strides=(132, 66, 1))
    with refused(ValueError, "16 bytes"):
        call.run(q_pe=q.tensor)
    with refused(ValueError, "sm_scale"):
        call.run(sm_scale=-1.0)
    call.run()
    call.check()


@pytest.mark.cuda
def test_plans_are_not_captured(ops, cuda, cuda_workspaces, rng):
    """A graph would run with the schedule of one step."""
    call = mla_call(ops, cuda, cuda_workspaces, rng, MLASpec((40, 9), (1, 3)))
    call.plan_run_check()

    def body() -> None:
        for action in (call.plan, call.run):
            with refused(RuntimeError, "captured into a CUDA graph", "outside of the graph"):
                action()

    stream = Stream(cuda)
    with unchanged(call.run_args):
        Graph(stream, body).close()
    stream.close()
    call.plan_run_check()

"""The cases: their truth is that of the op tests, and errors of every output are seen."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from oracle import attention

from benchmarks import work
from benchmarks.__main__ import build_sides
from benchmarks.cases import attention64, make_case
from benchmarks.machine import Processor
from benchmarks.measure import Options, measure
from benchmarks.sides import ours

ROOT = Path(__file__).resolve().parents[2]
TINY = [row.name for row in work.TINY]
OUTPUTS = {
    "rotary": "qkv", "merge": "vs", "rotary_append": "qo", "rope": ("q_out", "k_out"),
    "add_rmsnorm": ("o", "sum"), "gemma_add_rmsnorm": ("o", "sum"),
}  # fmt: skip


@pytest.mark.parametrize("name", TINY)
def test_every_kind_of_row(name: str) -> None:
    """Ours and TVM's kernels are right and are timed, by the same buffers."""
    case = make_case(work.ROWS[name], Processor(32 << 10))
    sides, absent = build_sides(case, ["ours", "tir"])
    found = measure(case, sides, Options(repeats=2, pause=0.0), 1e-6)
    assert {*found, *absent} == {"ours", "tir"}
    assert "us" in found["ours"], found
    assert all("us" in side for side in found.values()), found
    if "tir" in absent:
        assert name in ("tiny-mla", "tiny-host-plan")


@pytest.mark.parametrize(
    "name", [name for name in TINY if "host-plan" not in name and "model" not in name]
)
def test_a_wrong_element_is_seen(name: str) -> None:
    case = make_case(work.ROWS[name], Processor(4 << 10))
    side = ours.build(case)
    side.calls[0]()
    _, largest, *_ = case.machine.numbers(case.errors(0))
    assert largest <= case.tolerance[0]
    for output in OUTPUTS.get(case.row.kind, "o"):
        tensor = case.buffers[0][output]
        kept = tensor.copy()
        if output == "o" and hasattr(case, "where"):
            page, place = (int(x[-1]) for x in case.where)
            tensor[page, 1, -1, place, -1] += 1
        elif hasattr(case, "sampled_rows"):
            tensor[int(case.sampled_rows[0]), 0, 0] += 1
        else:
            tensor[(-1,) * tensor.ndim] += 1
        _, largest, *_ = case.machine.numbers(case.errors(0))
        assert largest > 0.5, output
        tensor[...] = kept


@pytest.mark.parametrize("feature", ["llama", "whisper"])
def test_model_that_is_wrong_by_more_than_twice_its_peer(feature: str) -> None:
    """Of a model that is right to float16 in float32: no error of TVM's side allows for that."""
    row = next(row for row in work.TINY if row.feature == feature)
    case = make_case(row, Processor(32 << 10))
    sides, _ = build_sides(case, ["ours", "tir"])
    assert case.tolerance[1] < 1e-4
    side = sides[0]
    right = side.returned

    def rounded(i: int) -> Any:
        return tvm.runtime.tensor(right(i).numpy().astype("float16").astype("float32"))

    side.returned = lambda i: None if right(i) is None else rounded(i)
    found = measure(case, sides, Options(repeats=2, pause=0.0), 1e-6)
    assert "wrong output" in found["ours"]["refused"]
    assert "us" in found["tir"]


@pytest.mark.parametrize("causal", [False, True])
def test_reference_is_that_of_the_op_tests(causal: bool) -> None:
    rng = np.random.default_rng(0)
    n, m = 5, 11
    q, k, v = (rng.standard_normal((rows, heads, 8)) for rows, heads in ((n, 6), (m, 2), (m, 2)))
    seen = np.arange(n)[:, None] + m - n >= np.arange(m)[None] if causal else None
    found = attention64(Processor(), q, k, v, 0.3, seen)
    expected = attention(q, k, v, sm_scale=0.3, causal=causal)[0]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_partial_pages_and_their_page_table() -> None:
    """The last page of each request is used in part, and pages lie in random order."""
    row = work.Row("odd", "paged", 3, 37, 9, (4, 2), 32, "float32")
    case = make_case(row, Processor(32 << 10))
    assert list(case.host["last"]) == [5, 5, 5]
    assert sorted(case.host["page_indices"]) != list(case.host["page_indices"])
    found = measure(case, build_sides(case, ["ours", "tir"])[0], Options(2, 0.0), 1e-6)
    assert all("us" in side for side in found.values()), found


def test_enough_buffers_to_leave_the_cache() -> None:
    machine = Processor(1 << 20)
    for row in work.TINY:
        if not row.bytes or row.kind.startswith("host"):
            continue
        case = make_case(row, machine)
        assert case.cold
        assert len(case.buffers) * row.bytes >= machine.rotate_bytes
        assert all(a is not b for a, b in zip(case.buffers, case.buffers[1:], strict=False))


def test_buffers_differ(case: Any) -> None:
    """A side that answers for one buffer with another's output is wrong."""
    assert not np.allclose(case.expected[0], case.expected[1])


def test_kernel_of_a_plan_is_read_where_plans_have_it() -> None:
    """Places and numbers are those of the C++ code."""
    header = (ROOT / "csrc/ops/attention_plan.h").read_text(encoding="utf-8")
    assert f"kSize = {ours.PLAN_HEADER};" in header
    latent = (ROOT / "csrc/ops/batch_mla.cc").read_text(encoding="utf-8")
    part = re.search(r"struct MLAPlanPart {(.*?)kSize", latent, re.DOTALL)[1]
    assert re.findall(r"int64_t (\w+);", part)[ours.MLA_PLACE] == "on_sm90"
    table = (ROOT / "csrc/kernels/cuda/kernel_table.h").read_text(encoding="utf-8")
    kinds = re.search(r"enum PlanKind : int64_t {(.*?)};", table, re.DOTALL)[1]
    assert {int(n) for n in re.findall(r"= (\d+)", kinds)} == set(ours.PLAN_KERNELS)

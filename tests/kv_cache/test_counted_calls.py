"""What TVM's cache calls in a step is ours: the counter of the native library shows it."""

from __future__ import annotations

from typing import Any

import tvm
from cache_models import NUM_LAYERS

from tvm_flashinfer import call_counts, reset_call_counts


def calls_of(driver: Any, seqs: list[int], lens: list[int]) -> dict[str, dict[str, int]]:
    """The calls of one step."""
    reset_call_counts()
    driver.step(seqs, lens)
    return call_counts()


def test_calls_of_a_step(drive_on: Any, device: Any) -> None:
    """One of each function in each layer: without plans on CPU, with them on CUDA."""
    driver = drive_on("head64")
    driver.add(0, 1)
    here, other = ("cpu", "cuda") if device == tvm.cpu() else ("cuda", "cpu")
    planned = here == "cuda"
    common = {"append_paged_kv_cache", "split_qkv_rotary"}
    new = "batch_prefill_ragged_run" if planned else "attention_prefill_ragged"
    past = "batch_prefill_paged_run" if planned else "attention_prefill_paged"
    decode = "batch_decode_run" if planned else "attention_decode_paged"
    for lens, attention in (
        ([20, 3], {new}),
        ([5, 18], {new, past, "merge_state_in_place"}),
        ([1, 1], {decode}),
    ):
        counts = calls_of(driver, [0, 1], lens)
        assert counts[other] == {}
        runs = {op: n for op, n in counts[here].items() if not op.endswith("_plan")}
        assert runs == dict.fromkeys(common | attention, NUM_LAYERS)
        assert any(op.endswith("_plan") for op in counts[here]) == planned
    assert driver.error <= driver.tolerance

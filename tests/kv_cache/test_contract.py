"""The calls that the installed TVM makes, against the arguments that our functions take."""

from __future__ import annotations

import pytest
import tvm_ffi

from tvm_flashinfer.relax import contract_probe
from tvm_flashinfer.relax.contract_probe import ACCEPTED, contract_differences, recorded_calls


def test_this_tvm_calls_what_we_take() -> None:
    """Every function of the cache is reached, and called as ours is."""
    assert contract_differences() == []


def test_other_calls_are_named_with_both_argument_lists() -> None:
    """One argument more, and a function that is not called at all."""
    wanted = {"append": (*ACCEPTED["append"], "int"), "bake_bread": ("int",)}
    append, bread = contract_differences(wanted)
    assert append.startswith("append is called with 4 arguments (float16[5], ")
    assert append.endswith("expected 5 (float16[5], float16[3], float16[3], int32[1], int)")
    assert bread == "bake_bread is never called; expected (int)"


def test_the_list_is_that_of_the_functions() -> None:
    """Our functions take as many arguments as the list says, and object to one more."""
    functions = {
        "append": "append_paged_kv_cache",
        "copy_page": "copy_single_page",
        "compact_copy": "compact_kv_copy",
        "debug_get_kv": "debug_get_kv",
        "merge_state": "merge_state_in_place",
        "prefill_plan": "batch_prefill_plan",
        "decode_plan": "batch_decode_plan",
        "prefill_ragged_run": "batch_prefill_ragged_run",
        "prefill_paged_run": "batch_prefill_paged_run",
        "decode_paged_run": "batch_decode_run",
    }
    made = {
        name: tvm_ffi.get_global_func(f"flashinfer.{function}")
        for name, function in functions.items()
    }
    made["split_rotary"] = tvm_ffi.get_global_func("flashinfer.bind_split_qkv_rotary")(
        1e4, 1.0, 64, "{}"
    )
    for name in ("prefill_ragged", "prefill_paged", "decode_paged", "tree_ragged", "tree_paged"):
        made[name] = tvm_ffi.get_global_func("flashinfer.cache_slot")(name, "{}", False, 0)[1]
    assert made.keys() == ACCEPTED.keys()
    for name, function in made.items():
        for count, fits in ((len(ACCEPTED[name]), True), (len(ACCEPTED[name]) + 1, False)):
            with pytest.raises((TypeError, ValueError), match="rgument") as caught:
                function(*["nothing that any function takes"] * count)
            assert ("Mismatched number of arguments" not in str(caught.value)) == fits, name


def test_the_probe_does_not_change_tvm() -> None:
    """It makes caches of its own; a second time gives the same."""
    assert recorded_calls() == recorded_calls()
    assert contract_probe.ACCEPTED is ACCEPTED

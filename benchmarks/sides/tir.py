"""TVM's TIR kernels, compiled as its KV cache compiles them: what users have without us."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import tvm
from tvm.relax.frontend.nn.llm import kv_cache
from tvm.s_tir import dlight as dl

from ..moves import THETA
from ..work import CKV, GATES, KPE, NORMS, WINDOW, Row
from . import Absent, Side
from .ours import cache_arguments, move_arguments, whole_model

# The package has a function of the module's name.
trees = importlib.import_module("tvm.relax.frontend.nn.llm.tree_attn")


def _functions(row: Row, target: tvm.target.Target) -> dict[str, Any]:
    """What makes the PrimFunc of each kind on a GPU."""
    (qo, kv), d, dtype, slides = row.heads, row.head_dim, row.dtype, bool(row.feature)
    rope = (THETA, 1.0, d, qo, kv, dtype, {}, d)
    return {
        "decode": lambda: kv_cache._attention_decode(kv, qo, d, dtype, False, {}, target),
        "paged": lambda: kv_cache._attention_prefill(kv, qo, d, dtype, False, {}, target),
        "ragged": lambda: kv_cache._attention_prefill_ragged(kv, qo, d, d, dtype, {}, target),
        "mla": lambda: kv_cache._attention_prefill_mla(
            qo, CKV, KPE, dtype, False, target, row.page_size
        ),
        "rotary": lambda: kv_cache.llama_rope_with_position_map(*rope),
        "append": lambda: kv_cache._kv_cache_transpose_append(kv, d, dtype),
        "merge": lambda: kv_cache._merge_state_inplace(qo, d, dtype, target),
        "copy_page": lambda: kv_cache._copy_single_page(kv, row.page_size, d, dtype, target),
        "compact": lambda: kv_cache._compact_kv_copy(kv, d, dtype, target),
        "slot_decode": lambda: kv_cache._attention_decode(kv, qo, d, dtype, slides, {}, target),
        "slot_prefill": lambda: kv_cache._attention_prefill(
            kv, qo, d, dtype, slides, {}, target, sliding_window_size=WINDOW
        ),
        "slot_tree_paged": lambda: trees.tree_attn_with_paged_kv_cache(
            kv, qo, d, dtype, {}, target
        ),
        "slot_tree_ragged": lambda: trees.tree_attn(kv, qo, d, dtype, {}, target),
    }


def _processor_functions(row: Row) -> dict[str, Any]:
    """The same for the processor, where TVM has one."""
    (qo, kv), d, dtype, slides = row.heads, row.head_dim, row.dtype, bool(row.feature)
    rope = (THETA, 1.0, d, qo, kv, dtype, {}, d)
    return {
        "decode": lambda: kv_cache._attention_decode_cpu(kv, qo, d, dtype, False, {}),
        "paged": lambda: kv_cache._attention_prefill_cpu(kv, qo, d, dtype, False, {}),
        "ragged": lambda: kv_cache._attention_prefill_ragged_cpu(kv, qo, d, d, dtype, {}),
        "rotary": lambda: kv_cache.llama_rope_with_position_map(*rope),
        "append": lambda: kv_cache._kv_cache_transpose_append(kv, d, dtype),
        "merge": lambda: kv_cache._merge_state_inplace_cpu(dtype),
        "copy_page": lambda: kv_cache._copy_single_page_cpu(kv, row.page_size, d, dtype),
        "compact": lambda: kv_cache._compact_kv_copy_cpu(kv, d, dtype),
        "slot_decode": lambda: kv_cache._attention_decode_cpu(kv, qo, d, dtype, slides, {}),
        "slot_prefill": lambda: kv_cache._attention_prefill_cpu(
            kv, qo, d, dtype, slides, {}, sliding_window_size=WINDOW
        ),
        "slot_tree_paged": lambda: trees.tree_attn_with_paged_kv_cache_cpu(kv, qo, d, dtype, {}),
        "slot_tree_ragged": lambda: trees.tree_attn_cpu(kv, qo, d, dtype, {}),
    }


@functools.cache
def _compiled(
    kind: str, heads: tuple[int, int], dim: int, dtype: str, page_size: int, feature: str,
    gpu: bool, target: str,
) -> Any:  # fmt: skip
    """A kernel, once for all rows that differ in lengths alone."""
    row = Row(
        "", kind, 1, heads=heads, head_dim=dim, dtype=dtype, page_size=page_size, feature=feature
    )
    where = tvm.target.Target(_TARGETS[target])
    makers = _functions(row, where) if gpu else _processor_functions(row)
    if kind not in makers:
        raise Absent("TVM has no such kernel for a processor")
    module = tvm.IRModule({"main": makers[kind]().with_attr("global_symbol", "main")})
    with where:
        if gpu:
            module = dl.ApplyDefaultSchedule(dl.gpu.Fallback())(module)
        return tvm.compile(module, target=where)["main"]


#: Targets by their text, since a target cannot be the key of a cache.
_TARGETS: dict[str, Any] = {}


def build(case: Any) -> Side:
    """TVM's kernel of the row's slot."""
    row, machine = case.row, case.machine
    kind = "decode" if row.kind == "host_run" else row.kind
    if kind == "model":
        return whole_model("tir", case, None)
    if kind == "host_plan":
        raise Absent("TVM's kernels have no plan")
    if kind in ("rotary_append", "rope", "softmax", *NORMS, *GATES):
        from . import tir_rows

        calls = tir_rows.calls_of(case, machine.target)
        return Side("tir", calls, "TIR, dlight" if machine.kind == "cuda" else "TIR")
    text = str(machine.target)
    _TARGETS[text] = machine.target
    kernel = _compiled(
        kind, row.heads, row.head_dim, row.dtype, row.page_size, row.feature,
        machine.kind == "cuda", text,
    )  # fmt: skip
    attention = kind in ("decode", "paged", "ragged", "mla")
    if kind.startswith("slot"):
        arguments_of = lambda case, i: case.arguments(i)  # noqa: E731
    else:
        arguments_of = cache_arguments if attention else move_arguments
    given = [arguments_of(case, i) for i in range(len(case.buffers))]
    calls = [lambda a=arguments: kernel(*a) for arguments in given]
    return Side(
        "tir", calls, "TIR, dlight's fallback schedule" if machine.kind == "cuda" else "TIR"
    )

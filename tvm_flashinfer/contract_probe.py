"""What the imported TVM calls the functions of its KV cache with, compared with what ours take.

A tiny cache on CPU is made with functions that record their arguments and compute nothing, and it
is driven through every slot. A TVM that calls differently shows here, and not in a request that is
served.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import tvm
import tvm_ffi
from tvm_ffi import Shape

# TVM's numbers of the kind of a layer and of the mode of RoPE. The enums lie in the compiler, and a
# process that only runs models has none.
_MHA, _MLA, _ROPE_NORMAL = 0, 1, 1

_LAYER_WINDOW = 1024
_HEADS, _KV_HEADS, _DIM, _PAGE, _LAYERS = 4, 2, 8, 4, 1
_LATENT_DIM, _QK_DIM, _VO_DIM = 6, 5, 3  # of MLA: values in the cache, and the new tokens
_DATA, _INDEX = "float16", "int32"

_Q, _I1, _I2, _LSE = f"{_DATA}[3]", f"{_INDEX}[1]", f"{_INDEX}[2]", "float32[2]"
_POOL, _PAGES, _BYTES = f"{_DATA}[5]", f"{_DATA}[4]", "uint8[1]"
_ROPE = ("int", "float", "float", "float")  # rotary_mode, scale, theta, sm_scale
_ROWS = f"{_DATA}[3]"  # pages of MLA
_PAGED = (_Q, _I1, _POOL, _I1, _I1, _I1, _I1, _I1, _Q, _LSE)
_RUN = ("int", "float", "float", "float")  # enable_pdl, sm_scale, rcp_scale, rcp_theta

#: What our functions take, by slot. Tensors are spelt as dtype and rank.
ACCEPTED: dict[str, tuple[str, ...]] = {
    "split_rotary": (_Q, _I1, _Q, _Q, _Q, "int"),
    "append": (_POOL, _Q, _Q, _I1),
    "copy_page": (_POOL, "int", "int", "int"),
    "compact_copy": (_POOL, _I1, _I2, "int"),
    "debug_get_kv": (_POOL, _I1, _PAGES, _PAGES, "int"),
    "merge_state": (_Q, _LSE, _Q, _LSE),
    "prefill_ragged": (_Q, _I1, _Q, _Q, _I1, _I1, _I1, _Q, _LSE, "int", *_ROPE),
    "prefill_paged": (*_PAGED, "int", *_ROPE),
    "decode_paged": (_Q, _POOL, *(_I1,) * 5, _Q, _LSE, *_ROPE),
    "tree_ragged": (_Q, _I1, _Q, _Q, _I1, _I1, _I1, _I2, _Q, _LSE, *_ROPE),
    "tree_paged": (*_PAGED, *_ROPE, _I1, _I2),
    "prefill_plan": (
        *(_BYTES,) * 3, *(_I1,) * 3, *("int",) * 13,
    ),
    "decode_plan": (
        *(_BYTES,) * 3, _I1, *("int",) * 6, "float", "int", "int", f"{_DATA}[1]", f"{_DATA}[1]",
    ),
    "prefill_ragged_run": (
        _BYTES, _BYTES, "array", _Q, _Q, _Q, _I1, _I1, _Q, _LSE, "int", "int", "int", *_RUN,
    ),
    "prefill_paged_run": (
        _BYTES, _BYTES, "array", _Q, _PAGES, _PAGES, *(_I1,) * 4, _Q, _LSE, "int", "int", "int",
        *_RUN,
    ),
    "decode_paged_run": (
        _BYTES, _BYTES, "array", _Q, _PAGES, _PAGES, *(_I1,) * 3, _Q, _LSE, "int", "int", *_RUN,
    ),
    "append_mla": (_ROWS, f"{_DATA}[2]", _I1),
    "copy_page_mla": (_ROWS, "int", "int", "int"),
    "debug_get_kv_mla": (_ROWS, _I1, f"{_DATA}[3]", "int"),
    "mla": (_Q, _I1, _ROWS, _I1, _I1, _I1, _Q, _LSE, "int", "float"),
    "mla_plan": (*(_BYTES,) * 3, *(_I1,) * 3, "int", "int", "int"),
    "mla_run": (
        _BYTES, _BYTES, "array", _Q, _Q, _ROWS, _ROWS, _I1, _Q, _LSE, "int", "int", "int", "float",
        "int",
    ),
}  # fmt: skip

Calls = dict[str, set[tuple[str, ...]]]


def _kind(argument: Any) -> str:
    if hasattr(argument, "shape") and hasattr(argument, "dtype"):
        return f"{argument.dtype}[{len(argument.shape)}]"
    if isinstance(argument, int):
        return "int"
    if isinstance(argument, float):
        return "float"
    return "array" if isinstance(argument, tvm_ffi.Array) else type(argument).__name__


def recorded_calls() -> Calls:
    """Return the argument lists that TVM calls each function with, spelt as in `ACCEPTED`."""
    calls: Calls = defaultdict(set)

    def record(name: str, result: Any = None) -> Any:
        def function(*arguments: Any) -> Any:
            calls[name].add(tuple(map(_kind, arguments)))
            return result

        return tvm_ffi.convert(function)

    plan = tvm_ffi.convert([1, 2, 3])
    unplanned = {
        name: ["tirx", record(name)]
        for name in (
            "prefill_ragged", "prefill_paged", "decode_paged", "tree_paged", "tree_ragged", "mla",
        )
    }  # fmt: skip
    planned = {
        **unplanned,
        **{
            name: ["flashinfer", record(f"{name}_run"), record(plan_name, plan)]
            for name, plan_name in (
                ("prefill_ragged", "prefill_plan"),
                ("prefill_paged", "prefill_plan"),
                ("decode_paged", "decode_plan"),
                ("mla", "mla_plan"),
            )
        },
    }
    for slots in (unplanned, planned):
        _drive(_create(_MHA, slots, record))
    planned["prefill_ragged"] += [_QK_DIM, _VO_DIM]
    for slots in (unplanned, planned):
        _drive_mla(_create(_MLA, slots, record))
    return calls


def _create(kind: int, slots: dict[str, list[Any]], record: Callable[..., Any]) -> Any:
    merge = record("merge_state")
    create = tvm.get_global_func("vm.builtin.paged_attention_kv_cache_create")
    sizes = [4, 64, 32, _PAGE, 0]
    if kind == _MLA:
        heads = (_HEADS, 1, _DIM, _LATENT_DIM)
        appends, suffix = (None, record("append_mla")), "_mla"
        attention = (slots["prefill_ragged"], *[[]] * 6, slots["mla"])
    else:
        heads = (_HEADS, _KV_HEADS, _DIM, _DIM)
        appends, suffix = (record("append"), None), ""
        attention = (
            slots["prefill_ragged"], slots["prefill_paged"], slots["decode_paged"],
            ["tirx", record("prefill_window")], ["tirx", record("decode_window")],
            slots["tree_paged"], slots["tree_ragged"], [],
        )  # fmt: skip
    rest = (
        Shape([0, _LAYERS]), *heads, Shape([kind] * _LAYERS), False, _ROPE_NORMAL, 1.0, 1e4, None,
        tvm.runtime.empty((), _DATA, tvm.cpu()), *appends, *attention, [merge, merge],
        record("split_rotary"), record(f"copy_page{suffix}"), record(f"debug_get_kv{suffix}"),
        record("compact_copy"),
    )  # fmt: skip
    try:
        return create(Shape([*sizes, _LAYER_WINDOW]), *rest)
    except Exception:  # TVM 0.26 takes no window of layers
        return create(Shape(sizes), *rest)


def _state(name: str) -> Callable[..., Any]:
    return tvm.get_global_func(f"vm.builtin.kv_state_{name}")


def _attention(name: str) -> Callable[..., Any]:
    return tvm.get_global_func(f"vm.builtin.attention_kv_cache_{name}")


def _empty(*shape: int, dtype: str = _DATA) -> Any:
    return tvm.runtime.empty(shape, dtype, tvm.cpu())


def _drive(cache: Any) -> None:
    """Prefill, prefill on a past, decode, fork inside a page, read back, grow and commit trees."""

    def step(sequences: list[int], lengths: list[int], tree: list[int] | None = None) -> None:
        parents = None if tree is None else Shape(tree)
        _state("begin_forward")(cache, Shape(sequences), Shape(lengths), parents)
        rows = sum(lengths)
        heads = _HEADS + 2 * _KV_HEADS
        qkv, out = _empty(rows, heads, _DIM), _empty(rows, _HEADS, _DIM)
        _attention("attention_with_fused_qkv")(cache, 0, 1.0, qkv, out)
        _state("end_forward")(cache)

    for sequence in (0, 1):
        _state("add_sequence")(cache, sequence)
    step([0, 1], [5, 3])
    step([0, 1], [2, 4])
    step([0, 1], [1, 1])
    _state("fork_sequence")(cache, 0, 2, 5)
    kv = _empty(_LAYERS, 3, _KV_HEADS, _DIM)
    _attention("debug_get_kv")(cache, 1, 0, 3, kv, kv)
    step([1], [4], [-1, 0, 0, 1])
    _attention("commit_accepted_token_tree_nodes")(cache, Shape([1]), Shape([2]))
    step([1], [3], [-1, 0, 0])
    step([1], [1], [2])  # a node that joins a tree of which nothing was accepted yet


def _drive_mla(cache: Any) -> None:
    """The same of latent attention: a prefill attends to new tokens and to those in the pages."""

    def step(length: int, *, is_new: bool) -> None:
        _state("begin_forward")(cache, Shape([0]), Shape([length]), None)
        _attention("append_mla_kv")(cache, 0, _empty(length, _DIM))
        lse = _empty(length, _HEADS, dtype="float32")
        q, v = (_empty(length, _HEADS, dim) for dim in (_QK_DIM, _VO_DIM))
        if is_new:
            _attention("self_attention")(cache, 0, 1.0, q, q, v, v, lse)
        q, o = (_empty(length, _HEADS, dim) for dim in (_DIM, _LATENT_DIM))
        _attention("cross_attention")(cache, 0, 1.0, q, o, lse)
        _attention("merge_attn_output_inplace")(cache, o, lse, o, lse)
        _state("end_forward")(cache)

    _state("add_sequence")(cache, 0)
    step(5, is_new=True)
    step(3, is_new=True)
    step(1, is_new=False)
    _state("fork_sequence")(cache, 0, 1, 6)
    _attention("debug_get_kv_mla")(cache, 1, 0, 3, _empty(_LAYERS, 3, _DIM))


def contract_differences(accepted: dict[str, tuple[str, ...]] = ACCEPTED) -> list[str]:
    """Return how the imported TVM calls the functions of its cache other than ours take.

    Parameters
    ----------
    accepted : dict
        The argument list of each function; ours by default.

    Returns
    -------
    differences : list of str
        One sentence each; none when they fit.
    """
    calls = recorded_calls()
    differences = []
    for name, expected in accepted.items():
        seen = calls.get(name, set())
        if not seen:
            differences.append(f"{name} is never called; expected ({', '.join(expected)})")
        for got in sorted(seen - {expected}):
            differences.append(
                f"{name} is called with {len(got)} arguments ({', '.join(got)}), expected "
                f"{len(expected)} ({', '.join(expected)})"
            )
    return differences

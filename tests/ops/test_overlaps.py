"""Outputs that share memory with an input, or with each other, are refused before anything runs.

Kernels write some rows while they read others. Merged states alone may be one of the two states.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from batches import Spec, indptr_of, normal
from calls import Call
from device_tensors import DeviceTensor, poisoned, to_device, view_of
from functions import DECODE, RAGGED, batch_for, each
from refusals import refused, unchanged


def over(tensor: DeviceTensor, like: DeviceTensor, at: int = 0) -> DeviceTensor:
    """A tensor of the shape and dtype of `like` that starts at byte `at` of another's memory."""
    layout = like.layout
    steps = [step // layout.dtype.itemsize for step in layout.strides]
    start = tensor.layout.__array_interface__["data"][0]
    start -= tensor._stage.__array_interface__["data"][0]
    return view_of(tensor._owner, layout.dtype, layout.shape, steps, start + at)


def inputs_of(function: str, call: Call) -> list[str]:
    """The tensors that a call reads, large enough to hold an output."""
    keys = {"k", "v", "k_pages", "v_pages", "pages", "q"}
    return [name for name in call.run_args if name in keys]


@each()
def test_output_of_attention(attend, rng, function):
    """An output over q, keys, values or pages: at their start, and shifted."""
    spec = Spec((130, 64), (9, 64), (2, 2), causal=True)
    call = attend.call(function, batch_for(function, rng, spec))
    call.plan()
    for output in ("o", "lse"):
        for name in inputs_of(function, call):
            for at in (0, 128):
                bad = over(call.run_args[name], call.run_args[output], at)
                says = ("overlap", rf"\b{output}\b", rf"\b{name}\b")
                with unchanged(call.run_args), refused(ValueError, *says):
                    call.run(**{output: bad})
    call.run()
    call.check()


@each()
def test_outputs_over_each_other_and_index_tensors(attend, rng, function):
    """The LSE in the memory of o, and where an index tensor lies."""
    spec = Spec((130, 64), (9, 64), (2, 2), causal=True)
    call = attend.call(function, batch_for(function, rng, spec))
    call.plan()
    lse = over(call.run_args["o"], call.run_args["lse"])
    with unchanged(call.run_args), refused(ValueError, "overlap", r"\bo\b", r"\blse\b"):
        call.run(lse=lse)
    index = "kv_indptr" if function in RAGGED else "page_indptr"
    # The tables lie where lse is to be written.
    held = call.run_args["lse"]
    table = view_of(held._owner, np.int32, call.run_args[index].layout.shape, (1,), 256)
    table.copyfrom(call.run_args[index].numpy())
    with refused(ValueError, "overlap", r"\blse\b", index):
        call.run(**{index: table})
    call.run()
    call.check()


@each(*DECODE)
def test_neighbours_in_one_allocation_are_served(attend, rng, function):
    """Outputs that begin where the queries end are no overlap."""
    spec = Spec((130, 64), heads=(2, 2))
    batch = batch_for(function, rng, spec)
    call = attend.call(function, batch)
    both = np.concatenate([batch.q, np.full_like(batch.q, np.nan)])
    held = to_device(both, attend.device)
    call.run_args["q"] = held.view(lambda a: a[:2])
    call.run_args["o"] = held.view(lambda a: a[2:])
    call.plan_run_check()


def test_states(ops, device, rng):
    """A merged state may be the first or the second state, and no shifted part of one."""
    shape = (6, 2, 64)
    v = [to_device(normal(rng, shape, "float16"), device) for _ in range(2)]
    s = [to_device(normal(rng, shape[:2], "float32"), device) for _ in range(2)]
    fresh = [poisoned(shape, "float16", device), poisoned(shape[:2], "float32", device)]
    inputs = [v[0], s[0], v[1], s[1]]
    ops.merge_state(*(x.tensor for x in (*inputs, *fresh)))
    expected = [x.numpy() for x in fresh]
    for wrong in (over(v[0], v[0], 128), over(v[1], v[1], 2), over(s[0], v[0])):
        with unchanged(dict(enumerate(inputs))), refused(ValueError, "overlap", "v_merged"):
            ops.merge_state(*(x.tensor for x in inputs), wrong, fresh[1].tensor)
    with unchanged(dict(enumerate(inputs))), refused(ValueError, "overlap", "v_other"):
        ops.merge_state_in_place(v[0].tensor, s[0].tensor, over(v[0], v[0], 128), s[1].tensor)
    ops.merge_state(*(x.tensor for x in inputs), v[1].tensor, s[1].tensor)
    for got, want in zip((v[1], s[1]), expected, strict=True):
        np.testing.assert_array_equal(got.numpy(), want)


def test_split_rotary_and_pages(ops, device, rng):
    """Queries over the fused tensor, keys over queries; rows to append inside the pages."""
    n, qo_heads, kv_heads, d = 5, 4, 2, 64
    dtype = "float16"
    qkv = to_device(normal(rng, (n, qo_heads + 2 * kv_heads, d), dtype), device)
    # In an allocation that values fit into as well, so that they reach no other tensor.
    positions = to_device(np.arange(4096, dtype=np.int32), device).view(lambda array: array[:n])
    q = poisoned((n, qo_heads, d), dtype, device)
    k, v = (poisoned((n, kv_heads, d), dtype, device) for _ in range(2))
    for name, outs in {
        "qkv": (over(qkv, q, 64), k.tensor, v.tensor),
        "k": (q.tensor, over(q, k), v.tensor),
        "v": (q.tensor, k.tensor, over(k, v, 2)),
        "position_map": (q.tensor, k.tensor, over(positions, v)),
    }.items():
        held = dict(enumerate((qkv, positions, q, k, v)))
        with unchanged(held), refused(ValueError, "overlap", rf"\b{name}\b"):
            ops.split_qkv_rotary(qkv.tensor, positions.tensor, *outs, 1, 1e4, 1.0, d, "{}")
    pages = to_device(normal(rng, (3, 2, kv_heads, 16, d), dtype), device)
    new = to_device(normal(rng, (n, kv_heads, d), dtype), device)
    moves = to_device(np.zeros((2, 4), np.int32), device)
    indptr = to_device(indptr_of([2, 2]), device)
    layers = [poisoned((1, n, kv_heads, d), dtype, device) for _ in range(2)]
    tensors: list[Any] = [x.tensor for x in (pages, new, positions, indptr, moves, *layers)]
    pool, rows, where, offsets, _, keys, values = tensors
    for function, args in (
        (ops.append_paged_kv_cache, (pool, over(pages, new, 64), rows, where)),
        (ops.append_paged_kv_cache, (pool, rows, rows, over(pages, positions))),
        (ops.compact_kv_copy, (pool, offsets, over(pages, moves), 2)),
        (ops.debug_get_kv, (pool, where, keys, over(pages, layers[0], 4), 0)),
        (ops.debug_get_kv, (pool, where, keys, over(layers[0], layers[1], 4), 0)),
    ):
        with unchanged({"pages": pages, "k": layers[0]}), refused(ValueError, "overlap"):
            function(*args)
    ops.append_paged_kv_cache(pool, rows, rows, where)
    ops.debug_get_kv(pool, where, keys, values, 0)
    np.testing.assert_array_equal(layers[0].numpy()[0], new.numpy())

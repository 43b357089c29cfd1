"""PrimFuncs of tensor expressions, scheduled for a target."""

from __future__ import annotations

from collections.abc import Sequence

import tvm
from tvm import s_tir, te, tirx
from tvm.s_tir import dlight
from tvm.target import Target


def prim_func(tensors: Sequence[te.Tensor], target: Target | None = None) -> tirx.PrimFunc:
    """Return the PrimFunc of some tensor expressions, scheduled where a target is given.

    Parameters
    ----------
    tensors : sequence of te.Tensor
        Its parameters in order: placeholders, then what is computed of them.
    target : tvm.target.Target, optional
        On a GPU elements are bound to threads; on a CPU the outer loops run in parallel. Left out,
        the function is left to the passes of a pipeline.

    Returns
    -------
    function : tirx.PrimFunc
        One with a schedule says so by its attribute ``tirx.is_scheduled``, and no pass makes
        another.
    """
    function = te.create_prim_func(list(tensors)).without_attr("global_symbol")
    if target is None:
        return function
    if target.kind.name == "llvm":
        return _for_cpu(function).with_attr("tirx.is_scheduled", True)
    with target:
        scheduled = dlight.ApplyDefaultSchedule(dlight.gpu.Fallback())(
            tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
        )
    return scheduled["main"].without_attr("global_symbol")


def _for_cpu(function: tirx.PrimFunc) -> tirx.PrimFunc:
    schedule = s_tir.Schedule(function)
    root = schedule.get_sblock("root")
    for block in schedule.get_child_blocks(root):
        loops = schedule.get_loops(block)
        if len(loops) > 1:  # the last one is a head: short, and read in order
            schedule.parallel(schedule.fuse(*loops[:-1]))
    return schedule.mod["main"]

"""flashinfer-python's kernels, just-in-time compiled, by its wrappers.

They are compiled by `python -m benchmarks build-peers`, which takes minutes, and not while rows are
timed. A library that was built elsewhere by the same command is taken from `flashinfer/data/aot` of
the installed package, as flashinfer-python does itself.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from ..cases import Case
from ..work import CKV, GATES, KPE, NORMS, Row
from . import Absent, Side

WORKSPACE_BYTES = 256 << 20
CUDA_CORES, FA2, FA3 = (f"flashinfer-{name}" for name in ("cuda-cores", "fa2", "fa3"))


@functools.cache
def _installed() -> Any:
    """The package.

    Raises
    ------
    Absent
        Where it cannot be imported.
    """
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise Absent(f"flashinfer-python cannot be imported: {error}") from error


def specification(name: str, row: Row) -> Any:
    """What flashinfer-python compiles for a row on one of its kernels.

    Raises
    ------
    Absent
        Where it has no such kernel.
    """
    kind = {"host_run": "decode", "host_plan": "decode"}.get(row.kind, row.kind)
    if kind in ("rotary", "copy_page", "compact", "model") or kind.startswith("slot"):
        raise Absent("flashinfer-python has no such operation")
    if kind in (*NORMS, *GATES, "rope", "rotary_append", "softmax"):
        raise Absent("such rows are there to decide between ours and TVM's")
    if not row.planned:
        raise Absent("see the row with a plan")
    _installed()
    import torch

    modules = importlib.import_module("flashinfer.jit.attention.modules")
    dtype, index, d = getattr(torch, row.dtype), torch.int32, row.head_dim
    if kind in ("append", "merge"):
        if name != CUDA_CORES:
            raise Absent("no matrix products: see flashinfer-cuda-cores")
        file = {"append": "page", "merge": "cascade"}[kind]
        return getattr(importlib.import_module(f"flashinfer.jit.{file}"), f"gen_{file}_module")()
    if name == CUDA_CORES:
        if kind != "decode":
            raise Absent("only decode has a kernel for CUDA cores")
        return modules.gen_batch_decode_module(dtype, dtype, dtype, index, d, d, 0, False, False)
    backend = name.rpartition("-")[2]
    if kind == "mla":
        return modules.gen_batch_mla_module(backend, dtype, dtype, dtype, index, CKV, KPE, False)
    if kind == "decode" and name == FA3:
        raise Absent("flashinfer-python runs decode on FA2 or on CUDA cores")
    return modules.gen_batch_prefill_module(
        backend, dtype, dtype, dtype, index, d, d, 0, False, False, False
    )


def build_modules(rows: Iterable[Row], report: Callable[[str], None], only: Iterable[str]) -> None:
    """Compile what rows need, all at once: ninja's jobs are divided among the libraries."""
    found: dict[str, Any] = {}
    for row in rows:
        for name in only:
            try:
                spec = specification(name, row)
            except Absent:
                continue
            if not spec.is_compiled:
                found[spec.name] = spec
    os.environ.setdefault("MAX_JOBS", str(max(1, (os.cpu_count() or 1) // max(1, len(found)))))

    def build(spec: Any) -> None:
        spec.build(False)
        report(f"built {spec.jit_library_path}")

    with ThreadPoolExecutor(max(1, len(found))) as pool:
        list(pool.map(build, found.values()))


def _wrapper(case: Case, name: str, flashinfer: Any) -> Any:
    """The wrapper that serves a row, not planned yet."""
    row = case.row
    space = case.machine.put(np.zeros(WORKSPACE_BYTES, np.uint8))
    backend = name.rpartition("-")[2]
    if row.kind == "mla":
        return flashinfer.mla.BatchMLAPagedAttentionWrapper(space, backend=backend)
    if row.kind == "ragged":
        return flashinfer.BatchPrefillWithRaggedKVCacheWrapper(space, "NHD", backend=backend)
    if row.kind == "paged":
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(space, "HND", backend=backend)
    return flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        space, "HND", use_tensor_cores=name != CUDA_CORES
    )


def _planner(case: Case, wrapper: Any) -> Callable[[], None]:
    """What makes the wrapper's plan; lengths are those of the host, as servers have them."""
    import torch

    row, host = case.row, {key: torch.from_numpy(x) for key, x in case.host.items()}
    (qo, kv), d, dtype = row.heads, row.head_dim, getattr(torch, row.dtype)
    types = {"q_data_type": dtype, "kv_data_type": dtype}
    if row.kind == "mla":
        arguments = (
            host["qo_indptr"], host["kv_indptr"], case.shared["page_indices"], host["kv_len"], qo,
            CKV, KPE, row.page_size, False, row.sm_scale, dtype, dtype,
        )  # fmt: skip
        types = {}
    elif row.kind == "ragged":
        arguments = (host["qo_indptr"], host["kv_indptr"], qo, kv, d)
        types |= {"causal": True, "sm_scale": row.sm_scale}
    elif row.kind == "paged":
        table = (host["kv_indptr"], case.shared["page_indices"], host["last"])
        arguments = (host["qo_indptr"], *table, qo, kv, d, row.page_size)
        types |= {"causal": True, "sm_scale": row.sm_scale}
    else:
        table = (host["kv_indptr"], case.shared["page_indices"], host["last"])
        arguments = (*table, qo, kv, d, row.page_size)
        types |= {"sm_scale": row.sm_scale}
    return lambda: wrapper.plan(*arguments, **types)


def _run(case: Case, wrapper: Any, i: int) -> Callable[[], object]:
    """One call of a planned wrapper."""
    buffer, kind = case.buffers[i], case.row.kind
    q, o, lse = buffer["q"], buffer["o"], buffer["lse"]
    if kind == "mla":
        pages = buffer["pages"]
        parts = (q[..., :CKV], q[..., CKV:], pages[..., :CKV], pages[..., CKV:])
        return lambda: wrapper.run(*parts, out=o, lse=lse, return_lse=True)
    inputs = (buffer["k"], buffer["v"]) if kind == "ragged" else (buffer["pages"],)
    return lambda: wrapper.run(q, *inputs, out=o, lse=lse, return_lse=True)


def _moves(case: Case, flashinfer: Any) -> Side:
    """Appends and merges."""
    calls = []
    if case.row.kind == "append":
        import torch

        slots, pages = case.shared["slots"], case.pages
        whole = torch.arange(pages, dtype=torch.int32, device=slots.device)
        # All pages belong to one request, so that a position in it is a slot.
        table = (
            whole,
            *(case.machine.put(np.array(x, np.int32)) for x in ([0, pages], [case.row.page_size])),
        )
        for x in case.buffers:
            given = (x["k"], x["v"], torch.zeros_like(slots), slots, x["o"], *table, "HND")
            calls.append(lambda a=given: flashinfer.append_paged_kv_cache(*a))
    else:
        for x in case.buffers:
            given = tuple(x[name] for name in ("v", "s", "v_other", "s_other"))
            calls.append(lambda a=given: flashinfer.merge_state_in_place(*a))
    return Side(CUDA_CORES, calls, case.row.kind)


def _build(name: str, case: Any) -> Side:
    row = case.row
    if case.machine.kind == "cpu":
        raise Absent("flashinfer-python needs a GPU")
    spec = specification(name, row)
    if not spec.is_compiled:
        raise Absent("its kernels are not built: run `python -m benchmarks build-peers`")
    flashinfer = _installed()
    if row.kind in ("append", "merge"):
        return _moves(case, flashinfer)
    wrapper = _wrapper(case, name, flashinfer)
    plan = _planner(case, wrapper)
    plan()
    kernel = name.removeprefix("flashinfer-")
    if row.kind == "host_plan":

        def make() -> None:
            plan()
            case.made = [wrapper]

        return Side(name, [make], kernel)
    return Side(name, [_run(case, wrapper, i) for i in range(len(case.buffers))], kernel)


def build_cuda_cores(case: Case) -> Side:
    """Decode without tensor cores, appends and merges."""
    return _build(CUDA_CORES, case)


def build_fa2(case: Case) -> Side:
    """The kernels that all GPUs have; decode as prompts of one row."""
    return _build(FA2, case)


def build_fa3(case: Case) -> Side:
    """The kernels of Hopper."""
    return _build(FA3, case)

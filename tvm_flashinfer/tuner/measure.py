"""Measuring a kernel on a GPU: tensors, a plan that follows a tactic, a check, and the clock."""

from __future__ import annotations

import functools
import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from tvm_flashinfer.tuner.grid import Limits, ModelShape, Point, Tactic
from tvm_flashinfer.tuner.search import TacticError, entry_fields
from tvm_flashinfer.tuning import FORMAT

#: Where a plan says its kernel, behind the header, and the numbers of the kernels.
_HEADER = 17
_KERNELS = {1: "fa2", 2: "cuda_core", 4: "fa3", 5: "batch_attention", 6: "fa3_copy"}

#: Calls in turn read keys of at least so many bytes, more than a cache of the GPU holds.
_ROTATED_BYTES = 256 << 20

#: Largest difference between the outputs of two kernels, a few roundings of 16 bits: absolute
#: below 1, relative above.
_TOLERANCE = {"float16": 4e-3, "bfloat16": 3e-2}

_REPEATS, _REPEAT_SECONDS, _MAX_CALLS = 5, 6e-3, 200

_LATENT, _ROTARY = 512, 64


class Measurement:
    """Times kernels for the points of a model on one device.

    Every kernel writes over NaN first and is compared with the one that was measured first for the
    point. Times are the median over repeats of the mean over calls that are issued back to back.

    Parameters
    ----------
    shape : ModelShape
    identity : mapping
        ``gpu`` and ``versions`` of the files that plans are told tactics by.
    device : tvm.runtime.Device
        On CPU, which has one kernel, plans are not asked which they are for.
    limits : Limits
        Those of the points.
    """

    def __init__(
        self, shape: ModelShape, identity: Mapping[str, Any], device: Any, limits: Limits
    ) -> None:
        self.shape, self.identity, self.device, self.limits = shape, identity, device, limits
        self._on_cpu = device.dlpack_device_type() == 1
        rng = np.random.default_rng(0)
        bits = self._bits(rng.standard_normal(1 << 22, np.float32))
        dims = (_LATENT, _ROTARY) if shape.is_mla else (shape.head_dim_qk, shape.head_dim_vo)
        heads = 1 if shape.is_mla else shape.num_kv_heads
        self._num_pages = limits.max_bytes // (shape.token_bytes * shape.page_size)
        tokens = self._num_pages * shape.page_size
        #: Keys and values, or the two parts of MLA's, as bits without a shape.
        self._pools = [self._on(np.resize(bits, tokens * heads * dim)) for dim in dims]
        self._pages = rng.permutation(self._num_pages).astype(np.int32)
        rows = limits.max_batch if shape.is_mla else max(limits.max_batch, limits.max_rows)
        self._q = self._on(np.resize(bits[7:], rows * shape.num_qo_heads * max(dims)))
        self._q_pe = self._on(np.resize(bits, rows * shape.num_qo_heads * _ROTARY))
        self._out = tvm.runtime.empty(self._q.shape, "uint16", device)
        self._spaces = [
            tvm.runtime.empty((size,), "uint8", where)
            for size, where in ((256 << 20, device), (8 << 20, device), (8 << 20, tvm.cpu()))
        ]
        self._expected: tuple[Point, np.ndarray] | None = None

    def __call__(self, point: Point, tactic: Tactic) -> float:
        """Return the seconds of a call.

        Raises
        ------
        TacticError
            The kernel does not run, or its result is not that of the others.
        """
        self._follow(point, tactic)
        try:
            runs = self._runs(point, tactic)
            self._check(point, runs[0])
            return self._seconds(runs)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, TacticError):
                raise
            raise TacticError(str(error).strip().splitlines()[-1]) from error
        finally:
            _function("clear_tuning")()

    def _follow(self, point: Point, tactic: Tactic) -> None:
        """Let plans take a tactic for a point."""
        entry = {
            **entry_fields(self.shape, point),
            "kernel": tactic.kernel,
            "split_keys": tactic.split_keys,
        }
        text = json.dumps({"format": FORMAT, **self.identity, "entries": [entry]})
        _function("load_tuning")(text, "what is measured")

    def _runs(self, point: Point, tactic: Tactic) -> list[Callable[[], None]]:
        """Return calls of one plan that read different keys."""
        plan, runs = {
            "decode_paged": self._decode,
            "prefill_paged": self._paged,
            "prefill_ragged": self._ragged,
            "mla": self._mla,
        }[point.slot](point)
        if not self._on_cpu:
            if point.slot == "mla":
                found = "sm90" if plan[_HEADER + 2] else "fa2"
            else:
                found = _KERNELS.get(plan[_HEADER], "another kernel")
            if found != tactic.kernel:
                raise TacticError(f"the plan is for {found}; is the kernel built?")
        return runs

    def _decode(self, point: Point) -> tuple[Any, list[Callable[[], None]]]:
        shape, dim = self.shape, self.shape.head_dim_qk
        indptr, last, tables = self._tables(point)
        q, o, lse = self._rows(point)
        plan = _function("batch_decode_plan")(
            *self._spaces, indptr, point.batch, shape.num_qo_heads, shape.num_kv_heads,
            shape.page_size, False, -1, 0.0, dim, dim, q, q,
        )  # fmt: skip
        head = (*self._spaces[:2], plan, q, *self._paged_views(), self._on(indptr))
        tail = (last, o, lse, 1, -1, False, dim**-0.5, 1.0, 1.0)
        return plan, _calls("batch_decode_run", [(*head, table, *tail) for table in tables])

    def _paged(self, point: Point) -> tuple[Any, list[Callable[[], None]]]:
        indptr, last, tables = self._tables(point)
        q, o, lse = self._rows(point)
        rows = _offsets(point.batch, point.rows)
        plan = self._prefill_plan(point, rows, indptr, self.shape.page_size)
        starts, where = self._on(rows), self._on(indptr)
        head = (*self._spaces[:2], plan, q, *self._paged_views(), starts, where)
        scale = self.shape.head_dim_qk**-0.5
        tail = (last, o, lse, int(point.causal), 1, -1, False, scale, 1.0, 1.0)
        return plan, _calls("batch_prefill_paged_run", [(*head, table, *tail) for table in tables])

    def _ragged(self, point: Point) -> tuple[Any, list[Callable[[], None]]]:
        shape, tokens = self.shape, point.batch * point.keys
        q, o, lse = self._rows(point)
        rows, indptr = _offsets(point.batch, point.rows), _offsets(point.batch, point.keys)
        plan = self._prefill_plan(point, rows, indptr, 1)
        starts, where, scale = self._on(rows), self._on(indptr), shape.head_dim_qk**-0.5
        tail = (starts, where, o, lse, int(point.causal), 0, -1, False, scale, 1.0, 1.0)
        dims = (shape.head_dim_qk, shape.head_dim_vo)
        calls = []
        for copy in range(self._copies(tokens)):
            keys_and_values = (
                self._view(pool, (tokens, shape.num_kv_heads, dim), copy)
                for pool, dim in zip(self._pools, dims, strict=True)
            )
            calls.append((*self._spaces[:2], plan, q, *keys_and_values, *tail))
        return plan, _calls("batch_prefill_ragged_run", calls)

    def _mla(self, point: Point) -> tuple[Any, list[Callable[[], None]]]:
        shape, n = self.shape, point.batch * point.rows
        indptr, _, tables = self._tables(point)
        q = self._view(self._q, (n, shape.num_qo_heads, _LATENT))
        q_pe = self._view(self._q_pe, (n, shape.num_qo_heads, _ROTARY))
        o = self._view(self._out, q.shape)
        lse = tvm.runtime.empty((n, shape.num_qo_heads), "float32", self.device)
        plan = _function("batch_mla_plan")(
            *self._spaces, _offsets(point.batch, point.rows), indptr,
            np.full(point.batch, point.keys, np.int32), shape.num_qo_heads, _LATENT, point.causal,
        )  # fmt: skip
        size = shape.page_size
        ckv, kpe = (
            self._view(pool, (self._num_pages, size, dim))
            for pool, dim in zip(self._pools, (_LATENT, _ROTARY), strict=True)
        )
        head = (*self._spaces[:2], plan, q, q_pe, ckv, kpe)
        scale = (128 + _ROTARY) ** -0.5
        tail = (o, lse, int(point.causal), shape.num_qo_heads, size, scale, False)
        return plan, _calls("batch_mla_run", [(*head, table, *tail) for table in tables])

    def _prefill_plan(
        self, point: Point, rows: np.ndarray, indptr: np.ndarray, page_size: int
    ) -> Any:
        shape = self.shape
        return _function("batch_prefill_plan")(
            *self._spaces, rows, indptr, np.full(point.batch, point.keys, np.int32), int(rows[-1]),
            point.batch, shape.num_qo_heads, shape.num_kv_heads, page_size, False,
            shape.head_dim_qk, shape.head_dim_vo, point.causal, -1, -1, False, 0,
        )  # fmt: skip

    def _tables(self, point: Point) -> tuple[np.ndarray, Any, list[Any]]:
        """Return where pages start, the lengths of last pages, and tables of different pages."""
        size = self.shape.page_size
        each = -(-point.keys // size)
        count = each * point.batch
        last = np.full(point.batch, point.keys - (each - 1) * size, np.int32)
        tables = [
            self._on(self._pages[copy * count : (copy + 1) * count].copy())
            for copy in range(self._copies(count * size))
        ]
        return _offsets(point.batch, each), self._on(last), tables

    def _copies(self, tokens: int) -> int:
        """Return how many calls in turn read other keys."""
        wanted = -(-_ROTATED_BYTES // (tokens * self.shape.token_bytes))
        return max(1, min(wanted, self._num_pages * self.shape.page_size // tokens, 16))

    def _paged_views(self) -> tuple[Any, Any]:
        shape = self.shape
        k, v = (
            self._view(pool, (self._num_pages, shape.num_kv_heads, shape.page_size, dim))
            for pool, dim in zip(self._pools, (shape.head_dim_qk, shape.head_dim_vo), strict=True)
        )
        return k, v

    def _rows(self, point: Point) -> tuple[Any, Any, Any]:
        """Return queries, output and LSE."""
        n, heads = point.batch * point.rows, self.shape.num_qo_heads
        return (
            self._view(self._q, (n, heads, self.shape.head_dim_qk)),
            self._view(self._out, (n, heads, self.shape.head_dim_vo)),
            tvm.runtime.empty((n, heads), "float32", self.device),
        )

    def _check(self, point: Point, run: Callable[[], None]) -> None:
        """Compare a kernel with the one that ran first for the point."""
        columns = _LATENT if self.shape.is_mla else self.shape.head_dim_vo
        size = point.batch * point.rows * self.shape.num_qo_heads * columns
        out = self._view(self._out, (size,), dtype="uint16")
        tvm.runtime.tensor(np.full(size, 0xFFFF, np.uint16), self.device).copyto(out)
        run()
        self.device.sync()
        # All of a large output takes longer than the measuring: its ends and some between.
        step = max(1, size // (1 << 21))
        got = self._floats(out.numpy()[::step])
        if np.isnan(got).any():
            raise TacticError("it left a part of the output, or made NaN of it")
        if self._expected is None or self._expected[0] != point:
            self._expected = point, got
        expected = self._expected[1]
        worst = float((np.abs(got - expected) / (1 + np.abs(expected))).max())
        if worst > _TOLERANCE[self.shape.dtype]:
            raise TacticError(f"its result differs from that of another kernel by {worst:.1e}")

    def _seconds(self, runs: list[Callable[[], None]]) -> float:
        start = time.perf_counter()
        for run in runs:
            run()
        self.device.sync()
        once = (time.perf_counter() - start) / len(runs)
        calls = max(2, min(_MAX_CALLS, int(_REPEAT_SECONDS / once)))
        means = []
        for _ in range(_REPEATS):
            start = time.perf_counter()
            for i in range(calls):
                runs[i % len(runs)]()
            self.device.sync()
            means.append((time.perf_counter() - start) / calls)
        return statistics.median(means)

    def _on(self, array: np.ndarray) -> Any:
        return tvm.runtime.tensor(array, self.device)

    def _view(self, bits: Any, shape: Any, copy: int = 0, dtype: str | None = None) -> Any:
        """Return a tensor of the dtype in the memory of another, behind `copy` of its size."""
        offset = copy * 2 * int(np.prod(shape, dtype=np.int64))
        return bits._create_view(shape, dtype or self.shape.dtype, offset)

    def _bits(self, values: np.ndarray) -> np.ndarray:
        if self.shape.dtype == "float16":
            return values.astype(np.float16).view(np.uint16)
        return (values.view(np.uint32) >> 16).astype(np.uint16)

    def _floats(self, bits: np.ndarray) -> np.ndarray:
        if self.shape.dtype == "float16":
            return bits.view(np.float16).astype(np.float32)
        return (bits.astype(np.uint32) << 16).view(np.float32)


def _calls(name: str, arguments: list[tuple[Any, ...]]) -> list[Callable[[], None]]:
    """Return calls of a function; nothing is made in them, so that the host keeps ahead."""
    return [functools.partial(_function(name), *each) for each in arguments]


def _offsets(count: int, each: int) -> np.ndarray:
    return (np.arange(count + 1, dtype=np.int64) * each).astype(np.int32)


def _function(name: str) -> Any:
    return tvm_ffi.get_global_func(f"flashinfer.{name}")

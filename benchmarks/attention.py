"""Attention on a GPU: our packed functions and TVM's TIR kernels on the same tensors, in one run.

    python benchmarks/attention.py [--row NAME] [--json FILE]

Every row is checked before it is timed: outputs are filled with NaN, both sides run, and both are
compared with attention in float64 over the first and last request. Times are the median over
repeats of the mean over a batch of calls that are issued back to back and waited for once, so the
host does not show.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from harness import cuda_device, cuda_target, seconds_of_call, write_results
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache
from tvm.s_tir import dlight as dl

import tvm_flashinfer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from device_tensors import to_device

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, DTYPE = 32, 8, 128, 16, "float16"
SM_SCALE = HEAD_DIM**-0.5


@dataclass
class Row:
    """One piece of work: `batch` requests of `length` keys; decode has one query row each.

    Without `planned` ours is the kernel that makes its schedule on the device.
    """

    name: str
    kind: str
    batch: int
    length: int
    planned: bool = True

    @property
    def bytes(self) -> int:
        """Bytes read and written at least, each once."""
        kv = 2 * self.batch * self.length * NUM_KV_HEADS * HEAD_DIM * 2
        rows = self.batch * (1 if self.kind == "decode" else self.length)
        return kv + 2 * rows * NUM_QO_HEADS * HEAD_DIM * 2

    @property
    def flops(self) -> int:
        """Operations of causal attention, or of decode."""
        keys = self.length if self.kind == "decode" else self.length**2 // 2
        return 4 * self.batch * keys * NUM_QO_HEADS * HEAD_DIM


ROWS = [
    Row("decode-B1-L4096", "decode", 1, 4096),
    Row("decode-B16-L4096", "decode", 16, 4096),
    Row("decode-B64-L4096", "decode", 64, 4096),
    Row("decode-B128-L2048", "decode", 128, 2048),
    Row("ragged-B16-S1024", "ragged", 16, 1024),
    Row("ragged-B4-S4096", "ragged", 4, 4096),
    Row("unplanned-decode-B1-L4096", "decode", 1, 4096, planned=False),
    Row("unplanned-decode-B64-L4096", "decode", 64, 4096, planned=False),
    Row("unplanned-ragged-B4-S4096", "ragged", 4, 4096, planned=False),
]


def tir_kernels(target: tvm.target.Target) -> tvm.runtime.Module:
    """Compile TVM's own kernels for the slots that are timed."""
    functions = {
        "decode": tvm_kv_cache._attention_decode(
            NUM_KV_HEADS, NUM_QO_HEADS, HEAD_DIM, DTYPE, False, {}, target
        ),
        "ragged": tvm_kv_cache._attention_prefill_ragged(
            NUM_KV_HEADS, NUM_QO_HEADS, HEAD_DIM, HEAD_DIM, DTYPE, {}, target
        ),
    }
    module = tvm.IRModule(
        {name: function.with_attr("global_symbol", name) for name, function in functions.items()}
    )
    with target:
        module = dl.ApplyDefaultSchedule(dl.gpu.Fallback())(module)
    return tvm.compile(module, target=target)


def reference(q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> np.ndarray:
    """Attention of one request in float64; q (n, Hq, d), k and v (m, Hkv, d)."""
    group = q.shape[1] // k.shape[1]
    k, v = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    scores = np.einsum("nhd,mhd->hnm", q.astype(np.float64), k) * SM_SCALE
    if causal:
        n, m = scores.shape[1:]
        scores[:, np.arange(n)[:, None] + m - n < np.arange(m)[None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return np.einsum("hnm,mhd->nhd", weights / weights.sum(axis=-1, keepdims=True), v)


class Bench:
    """Tensors of one row, and the two sides that work on them."""

    def __init__(self, row: Row, tir: Any, device: Any) -> None:
        self.row, self.device = row, device
        rng = np.random.default_rng(0)
        on = lambda array: tvm.runtime.tensor(array, device)  # noqa: E731
        batch, length = row.batch, row.length
        rows = batch if row.kind == "decode" else batch * length
        self.q = rng.standard_normal((rows, NUM_QO_HEADS, HEAD_DIM), np.float32).astype(DTYPE)
        self.out = tvm.runtime.empty(self.q.shape, DTYPE, device)
        lse = tvm.runtime.empty(self.q.shape[:2], "float32", device)
        q = on(self.q)
        op = lambda name: tvm_ffi.get_global_func(f"flashinfer.{name}")  # noqa: E731
        spaces = [
            tvm.runtime.empty((size,), "uint8", where)
            for size, where in ((256 << 20, device), (8 << 20, device), (8 << 20, tvm.cpu()))
        ]
        if row.kind == "decode":
            pages_each = length // PAGE_SIZE
            pages = batch * pages_each
            self.kv = rng.standard_normal(
                (pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM), np.float32
            ).astype(DTYPE)
            self.indices = rng.permutation(pages).astype(np.int32)
            indptr = np.arange(batch + 1, dtype=np.int32) * pages_each
            pages = to_device(self.kv, device)
            pool, table, where = pages.tensor, on(self.indices), on(indptr)
            last = on(np.full(batch, PAGE_SIZE, np.int32))
            zeros = on(np.zeros(batch, np.int32))
            # Strided views of keys and values, as TVM's cache passes them.
            keys, values = (pages.view(lambda array, i=i: array[:, i]).tensor for i in range(2))
            plan = op("batch_decode_plan")(
                *spaces, tvm.runtime.tensor(indptr), batch, NUM_QO_HEADS, NUM_KV_HEADS, PAGE_SIZE,
                False, -1, 0.0, HEAD_DIM, HEAD_DIM, q, q,
            )  # fmt: skip
            run, kernel = op("batch_decode_run"), tir["decode"]
            self.ours = lambda: run(
                *spaces[:2], plan, q, keys, values, where, table, last, self.out, lse, 1, -1, False,
                SM_SCALE, 1.0, 1.0,
            )  # fmt: skip
            arguments = (
                q, pool, where, table, last, zeros, zeros, self.out, lse, 0, 1.0, 1e4, SM_SCALE,
            )  # fmt: skip
            slot = "decode_paged"
        else:
            self.k, self.v = (
                rng.standard_normal((rows, NUM_KV_HEADS, HEAD_DIM), np.float32).astype(DTYPE)
                for _ in range(2)
            )
            indptr = np.arange(batch + 1, dtype=np.int32) * length
            k, v, where = on(self.k), on(self.v), on(indptr)
            zeros, positions = on(np.zeros(batch, np.int32)), on(np.arange(rows, dtype=np.int32))
            host = tvm.runtime.tensor(indptr)
            plan = op("batch_prefill_plan")(
                *spaces, host, host, tvm.runtime.tensor(np.full(batch, length, np.int32)), rows,
                batch, NUM_QO_HEADS, NUM_KV_HEADS, 1, False, HEAD_DIM, HEAD_DIM, True, -1, -1,
                False, 0,
            )  # fmt: skip
            run, kernel = op("batch_prefill_ragged_run"), tir["ragged"]
            self.ours = lambda: run(
                *spaces[:2], plan, q, k, v, where, where, self.out, lse, 1, 0, -1, False, SM_SCALE,
                1.0, 1.0,
            )  # fmt: skip
            arguments = (
                q, where, k, v, where, positions, zeros, self.out, lse, 1, 0, 1.0, 1e4, SM_SCALE,
            )  # fmt: skip
            slot = "prefill_ragged"
        self.theirs = lambda: kernel(*arguments)
        if not row.planned:
            unplanned = op("bind_attention")(slot, "{}", None, None)
            self.ours = lambda: unplanned(*arguments)

    def request(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, slice]:
        """q, k, v of one request, and its rows."""
        length = self.row.length
        if self.row.kind == "decode":
            rows = slice(index, index + 1)
            each = length // PAGE_SIZE
            pages = self.kv[self.indices[index * each : (index + 1) * each]]
            k, v = (
                pages[:, i].transpose(0, 2, 1, 3).reshape(length, NUM_KV_HEADS, HEAD_DIM)
                for i in range(2)
            )
            return self.q[rows], k, v, rows
        rows = slice(index * length, (index + 1) * length)
        # The last rows of the request alone: float64 over all of them takes minutes.
        tail = slice(rows.stop - 64, rows.stop)
        return self.q[tail], self.k[rows], self.v[rows], tail

    def check(self, side: Callable[[], None]) -> float:
        """Largest error of a side against float64, after outputs were filled with NaN."""
        tvm.runtime.tensor(np.full(self.q.shape, np.nan, DTYPE), self.device).copyto(self.out)
        side()
        self.device.sync()
        out = self.out.numpy().astype(np.float64)
        if np.isnan(out).any():
            raise AssertionError(f"{self.row.name}: outputs were left unwritten or are NaN")
        worst = 0.0
        for index in {0, self.row.batch - 1}:
            q, k, v, rows = self.request(index)
            expected = reference(q, k, v, causal=self.row.kind != "decode")
            worst = max(worst, np.abs(out[rows] - expected).max())
        if worst > 4e-3:
            raise AssertionError(f"{self.row.name}: error {worst:.1e} against float64")
        return worst


def main() -> None:
    """Run the rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    device = cuda_device()
    tir = tir_kernels(cuda_target(device))
    results = []
    print(
        f"{device.device_name}, TVM {tvm.__version__}, tvm_flashinfer {tvm_flashinfer.__version__}"
    )
    print(f"{'row':28} {'ours us':>9} {'TIR us':>9} {'ratio':>6}  ours")
    for row in ROWS:
        if arguments.row and row.name not in arguments.row:
            continue
        bench = Bench(row, tir, device)
        errors = [bench.check(side) for side in (bench.ours, bench.theirs)]
        ours, theirs = (seconds_of_call(side, device) for side in (bench.ours, bench.theirs))
        bench.check(bench.ours)
        rate = (
            f"{row.bytes / ours / 1e12:.2f} TB/s"
            if row.kind == "decode"
            else f"{row.flops / ours / 1e12:.0f} TFLOP/s"
        )
        print(f"{row.name:28} {ours * 1e6:9.1f} {theirs * 1e6:9.1f} {theirs / ours:6.1f}  {rate}")
        results.append(
            {"row": row.name, "ours_us": ours * 1e6, "tir_us": theirs * 1e6, "rate": rate,
             "error": errors[0], "tir_error": errors[1]}
        )  # fmt: skip
    if arguments.json:
        rows = [f"--row {name}" for name in arguments.row or ()]
        command = " ".join(["python benchmarks/attention.py", *rows])
        write_results(arguments.json, device, command, results)


if __name__ == "__main__":
    main()

"""Attention on a GPU: our packed functions and their peers on the same tensors, in one run.

    python benchmarks/attention.py [--row NAME] [--side NAME] [--json FILE]

Peers are TVM's TIR kernels and, on ragged rows where torch is installed, its SDPA on FA2 and on
cuDNN. Every row is checked before it is timed: outputs are filled with NaN, every side runs, and
each is compared with attention in float64 over the first and last request. Times are the median
over repeats of the mean over a batch of calls that are issued back to back and waited for once, so
the host does not show; the repeats of the sides take turns. Buffers are not rotated: what fits the
L2 cache is hot.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from harness import cuda_device, cuda_target, seconds_of_calls, write_results
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache
from tvm.s_tir import dlight as dl

import tvm_flashinfer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from device_tensors import to_device

NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM, PAGE_SIZE, DTYPE = 32, 8, 128, 16, "float16"
SM_SCALE = HEAD_DIM**-0.5


@dataclass
class Row:
    """One piece of work: `batch` requests of `length` keys.

    Decode has one query row each; prefill, which is causal, as many as keys unless `chunk` says how
    many, which are the last ones. Without `planned` ours is the kernel that makes its schedule on
    the device.
    """

    name: str
    kind: str
    batch: int
    length: int
    planned: bool = True
    chunk: int | None = None

    @property
    def rows_each(self) -> int:
        """Query rows of a request."""
        return 1 if self.kind == "decode" else self.chunk or self.length

    @property
    def bytes(self) -> int:
        """Bytes read and written at least, each once."""
        kv = 2 * self.batch * self.length * NUM_KV_HEADS * HEAD_DIM * 2
        rows = self.batch * self.rows_each
        return kv + 2 * rows * NUM_QO_HEADS * HEAD_DIM * 2

    @property
    def flops(self) -> int:
        """Operations of causal attention, or of decode."""
        keys = self.length * self.rows_each
        if self.kind != "decode":
            keys -= self.rows_each**2 // 2
        return 4 * self.batch * keys * NUM_QO_HEADS * HEAD_DIM


ROWS = [
    Row("decode-B1-L4096", "decode", 1, 4096),
    Row("decode-B16-L4096", "decode", 16, 4096),
    Row("decode-B64-L4096", "decode", 64, 4096),
    Row("decode-B128-L2048", "decode", 128, 2048),
    Row("ragged-B16-S1024", "ragged", 16, 1024),
    Row("ragged-B4-S4096", "ragged", 4, 4096),
    Row("ragged-B1-S16384", "ragged", 1, 16384),
    Row("paged-B16-S1024", "paged", 16, 1024),
    Row("paged-B4-S4096", "paged", 4, 4096),
    Row("paged-B1-S16384", "paged", 1, 16384),
    Row("paged-B8-Q512-L8192", "paged", 8, 8192, chunk=512),
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
        "paged": tvm_kv_cache._attention_prefill(
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
    k, v = (np.repeat(x.astype(np.float64).swapaxes(0, 1), group, axis=0) for x in (k, v))
    scores = q.astype(np.float64).swapaxes(0, 1) @ k.swapaxes(1, 2) * SM_SCALE
    if causal:
        n, m = scores.shape[1:]
        scores[:, np.arange(n)[:, None] + m - n < np.arange(m)[None]] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return (weights / weights.sum(axis=-1, keepdims=True) @ v).swapaxes(0, 1)


#: The kernel of a plan, by what its part begins with.
PLAN_KERNELS = {1: "fa2", 2: "decode", 4: "fa3"}


class Bench:
    """Tensors of one row, and the sides that work on them."""

    def __init__(self, row: Row, tir: Any, device: Any) -> None:
        self.row, self.device = row, device
        self.rng = np.random.default_rng(0)
        batch = row.batch
        rows = batch * row.rows_each
        self.q = self.rng.standard_normal((rows, NUM_QO_HEADS, HEAD_DIM), np.float32).astype(DTYPE)
        self.out = tvm.runtime.empty(self.q.shape, DTYPE, device)
        self.lse = tvm.runtime.empty(self.q.shape[:2], "float32", device)
        self.on_device = self.on(self.q)
        self.spaces = [
            tvm.runtime.empty((size,), "uint8", where)
            for size, where in ((256 << 20, device), (8 << 20, device), (8 << 20, tvm.cpu()))
        ]
        #: What each side calls, and the kernels of plans.
        self.sides: dict[str, Callable[[], object]] = {}
        self.kernels: dict[str, str] = {}
        #: Rows and outputs of requests, in float64.
        self.expected: dict[int, tuple[slice, np.ndarray]] = {}
        #: What the last call of a torch side returned.
        self.returned: Any = None
        if row.kind == "ragged":
            arguments = self.add_ragged()
        else:
            arguments = self.add_paged()
        self.sides["tir"] = lambda: tir[row.kind](*arguments)
        if not row.planned:
            slot = {"decode": "decode_paged", "ragged": "prefill_ragged"}[row.kind]
            unplanned = self.op("bind_attention")(slot, "{}", None, None)
            self.sides["ours"] = lambda: unplanned(*arguments)
        elif row.kind == "ragged" and importlib.util.find_spec("torch"):
            self.add_torch()

    def on(self, array: np.ndarray) -> Any:
        """A tensor on the device."""
        return tvm.runtime.tensor(array, self.device)

    @staticmethod
    def op(name: str) -> Any:
        """One of our packed functions."""
        return tvm_ffi.get_global_func(f"flashinfer.{name}")

    def add_planned(self, plan: Callable[[], Any], run: Callable[[Any], object]) -> None:
        """Our side; and FA2 as one of its own where another kernel was chosen."""
        chosen = plan()
        self.kernels["ours"] = PLAN_KERNELS[chosen[14]]
        self.sides["ours"] = lambda: run(chosen)
        variable = "TVM_FLASHINFER_PREFILL_KERNEL"
        if self.kernels["ours"] != "fa3" or variable in os.environ:
            return
        os.environ[variable] = "fa2"
        fa2 = plan()
        del os.environ[variable]
        self.kernels["ours-fa2"] = PLAN_KERNELS[fa2[14]]
        self.sides["ours-fa2"] = lambda: run(fa2)

    def prefill_plan(self, qo_indptr: np.ndarray, kv_indptr: np.ndarray, page_size: int) -> Any:
        """The plan of a causal prefill."""
        host, (batch, length) = tvm.runtime.tensor, (self.row.batch, self.row.length)
        return self.op("batch_prefill_plan")(
            *self.spaces, host(qo_indptr), host(kv_indptr), host(np.full(batch, length, np.int32)),
            len(self.q), batch, NUM_QO_HEADS, NUM_KV_HEADS, page_size, False, HEAD_DIM, HEAD_DIM,
            True, -1, -1, False, 0,
        )  # fmt: skip

    def add_paged(self) -> tuple[Any, ...]:
        """Our side over pages; the result is what TVM's kernels take."""
        batch, pages_each = self.row.batch, self.row.length // PAGE_SIZE
        pages = batch * pages_each
        self.kv = self.rng.standard_normal(
            (pages, 2, NUM_KV_HEADS, PAGE_SIZE, HEAD_DIM), np.float32
        ).astype(DTYPE)
        self.indices = self.rng.permutation(pages).astype(np.int32)
        indptr = np.arange(batch + 1, dtype=np.int32) * pages_each
        whole = to_device(self.kv, self.device)
        pool, table, where = whole.tensor, self.on(self.indices), self.on(indptr)
        last = self.on(np.full(batch, PAGE_SIZE, np.int32))
        zeros, q = self.on(np.zeros(batch, np.int32)), self.on_device
        # Strided views of keys and values, as TVM's cache passes them.
        keys, values = (whole.view(lambda array, i=i: array[:, i]).tensor for i in range(2))
        floats, ints, _ = self.spaces
        if self.row.kind == "decode":
            decode = self.op("batch_decode_run")
            self.add_planned(
                lambda: self.op("batch_decode_plan")(
                    *self.spaces, tvm.runtime.tensor(indptr), batch, NUM_QO_HEADS, NUM_KV_HEADS,
                    PAGE_SIZE, False, -1, 0.0, HEAD_DIM, HEAD_DIM, q, q,
                ),
                lambda plan: decode(
                    floats, ints, plan, q, keys, values, where, table, last, self.out, self.lse, 1,
                    -1, False, SM_SCALE, 1.0, 1.0,
                ),
            )  # fmt: skip
            return (
                q, pool, where, table, last, zeros, zeros, self.out, self.lse, 0, 1.0, 1e4,
                SM_SCALE,
            )  # fmt: skip
        qo_indptr = np.arange(batch + 1, dtype=np.int32) * self.row.rows_each
        rows, prefill = self.on(qo_indptr), self.op("batch_prefill_paged_run")
        self.add_planned(
            lambda: self.prefill_plan(qo_indptr, indptr, PAGE_SIZE),
            lambda plan: prefill(
                floats, ints, plan, q, keys, values, rows, where, table, last, self.out, self.lse,
                1, 1, -1, False, SM_SCALE, 1.0, 1.0,
            ),
        )  # fmt: skip
        positions = self.on(np.arange(len(self.q), dtype=np.int32))
        return (
            q, rows, pool, where, table, last, zeros, positions, self.out, self.lse, 1, 0, 1.0,
            1e4, SM_SCALE,
        )  # fmt: skip

    def add_ragged(self) -> tuple[Any, ...]:
        """Our side over ragged keys; the result is what TVM's kernels take."""
        self.k, self.v = (
            self.rng.standard_normal((len(self.q), NUM_KV_HEADS, HEAD_DIM), np.float32).astype(
                DTYPE
            )
            for _ in range(2)
        )
        indptr = np.arange(self.row.batch + 1, dtype=np.int32) * self.row.length
        k, v, where, q = self.on(self.k), self.on(self.v), self.on(indptr), self.on_device
        self.ragged = k, v
        floats, ints, _ = self.spaces
        run = self.op("batch_prefill_ragged_run")
        self.add_planned(
            lambda: self.prefill_plan(indptr, indptr, 1),
            lambda plan: run(
                floats, ints, plan, q, k, v, where, where, self.out, self.lse, 1, 0, -1, False,
                SM_SCALE, 1.0, 1.0,
            ),
        )  # fmt: skip
        zeros = self.on(np.zeros(self.row.batch, np.int32))
        positions = self.on(np.arange(len(self.q), dtype=np.int32))
        return (
            q, where, k, v, where, positions, zeros, self.out, self.lse, 1, 0, 1.0, 1e4, SM_SCALE,
        )  # fmt: skip

    def add_torch(self) -> None:
        """Torch's SDPA on the same tensors, with the query heads of a KV head kept together."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        q, k, v = (
            torch.from_dlpack(x).view(self.row.batch, self.row.length, -1, HEAD_DIM).transpose(1, 2)
            for x in (self.on_device, *self.ragged)
        )
        attend = torch.nn.functional.scaled_dot_product_attention

        def side(backend: Any) -> Callable[[], None]:
            def run() -> None:
                with sdpa_kernel(backend):
                    self.returned = attend(q, k, v, is_causal=True, scale=SM_SCALE, enable_gqa=True)

            return run

        for name in ("flash", "cudnn"):
            call = side(getattr(SDPBackend, f"{name.upper()}_ATTENTION"))
            try:
                call()
            except RuntimeError as error:  # torch says so of what a backend does not serve
                print(f"{self.row.name}: torch-{name} does not run: {error}", file=sys.stderr)
                continue
            self.sides[f"torch-{name}"] = call

    def request(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, slice]:
        """q, k, v of one request, and its rows."""
        length, each = self.row.length, self.row.rows_each
        if self.row.kind == "ragged":
            tokens = slice(index * length, (index + 1) * length)
            k, v = self.k[tokens], self.v[tokens]
        else:
            count = length // PAGE_SIZE
            pages = self.kv[self.indices[index * count : (index + 1) * count]]
            k, v = (
                pages[:, i].transpose(0, 2, 1, 3).reshape(length, NUM_KV_HEADS, HEAD_DIM)
                for i in range(2)
            )
        # The last rows of the request alone: float64 over all of them takes minutes.
        rows = slice((index + 1) * each - min(each, 64), (index + 1) * each)
        return self.q[rows], k, v, rows

    def check(self, name: str) -> float:
        """Largest error of a side against float64, after outputs were filled with NaN."""
        tvm.runtime.tensor(np.full(self.q.shape, np.nan, DTYPE), self.device).copyto(self.out)
        self.sides[name]()
        self.device.sync()
        if name.startswith("torch"):
            array = self.returned.transpose(1, 2).reshape(self.q.shape).cpu().numpy()
        else:
            array = self.out.numpy()
        out = array.astype(np.float64)
        if np.isnan(out).any():
            raise AssertionError(f"{self.row.name}: outputs of {name} were left or are NaN")
        worst = 0.0
        for index in {0, self.row.batch - 1}:
            if index not in self.expected:
                q, k, v, rows = self.request(index)
                causal = self.row.kind != "decode"
                self.expected[index] = rows, reference(q, k, v, causal)
            rows, expected = self.expected[index]
            worst = max(worst, np.abs(out[rows] - expected).max())
        if worst > 4e-3:
            raise AssertionError(f"{self.row.name}: error {worst:.1e} of {name} against float64")
        return worst


def main() -> None:
    """Run the rows and print a line for each side of each."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    parser.add_argument(
        "--side", action="append", help="time these alone: ours, ours-fa2, tir, torch-flash, "
        "torch-cudnn",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    device = cuda_device()
    wanted = arguments.side or ["tir"]
    tir = tir_kernels(cuda_target(device)) if "tir" in wanted else {}
    results = []
    print(
        f"{device.device_name}, TVM {tvm.__version__}, tvm_flashinfer {tvm_flashinfer.__version__}"
    )
    for row in ROWS:
        if arguments.row and row.name not in arguments.row:
            continue
        bench = Bench(row, tir, device)
        sides = {
            name: side
            for name, side in bench.sides.items()
            if not arguments.side or name in arguments.side
        }
        errors = {name: bench.check(name) for name in sides}
        seconds = seconds_of_calls(sides, device)
        result: dict[str, Any] = {"row": row.name}
        for name, time in seconds.items():
            bench.check(name)
            rate = (
                f"{row.bytes / time / 1e12:.2f} TB/s"
                if row.kind == "decode"
                else f"{row.flops / time / 1e12:.0f} TFLOP/s"
            )
            kernel = bench.kernels.get(name, "")
            print(f"{row.name:28} {name:12} {kernel:7} {time * 1e6:10.1f} us  {rate}", flush=True)
            side = name.replace("-", "_")
            result |= {f"{side}_us": time * 1e6, f"{side}_error": errors[name]}
            if name == "ours":
                result |= {"rate": rate, "kernel": kernel}
        results.append(result)
        # The sides hold the tensors, of gigabytes, in cycles.
        del bench, sides
        gc.collect()
    if arguments.json:
        rows = [f"--row {name}" for name in arguments.row or ()]
        rows += [f"--side {name}" for name in arguments.side or ()]
        command = " ".join(["python benchmarks/attention.py", *rows])
        write_results(arguments.json, device, command, results)


if __name__ == "__main__":
    main()

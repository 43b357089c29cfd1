"""Decode of latent attention (MLA) on a GPU: our functions and TVM's TIR kernel, in one run.

    python benchmarks/mla.py [--row NAME] [--json FILE]

Both sides read one pool of pages: TVM's kernel the whole, ours its two slices, as TVM's cache
passes them. Rows are checked against float64 over the first and last request, after outputs were
filled with NaN. Times are those of `harness.seconds_of_call`; in row B128 the pages are ten times
the L2 cache. `TVM_FLASHINFER_MLA_KERNEL=fa2` times the kernel of other GPUs on Hopper.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tvm
import tvm_ffi
from harness import cuda_device, cuda_target, seconds_of_call, write_results
from tvm.relax.frontend.nn.llm import kv_cache as tvm_kv_cache
from tvm.s_tir import dlight as dl

import tvm_flashinfer

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from device_tensors import view_of

CKV, KPE, DTYPE = 512, 64, "bfloat16"
#: What TVM compiles its kernel for.
PAGE_SIZE = 16
SM_SCALE = 192**-0.5


@dataclass
class Row:
    """`batch` requests of `length` keys, with one query row each."""

    heads: int
    batch: int
    length: int

    @property
    def name(self) -> str:
        """What `--row` takes."""
        return f"mla-decode-h{self.heads}-B{self.batch}-L{self.length}"

    @property
    def bytes(self) -> int:
        """Bytes read and written at least, each once."""
        return 2 * self.batch * (self.length * (CKV + KPE) + self.heads * (2 * CKV + KPE))

    @property
    def flops(self) -> int:
        """Operations of the two matrix products."""
        return 2 * self.batch * self.length * self.heads * (2 * CKV + KPE)


ROWS = [
    Row(128, 128, 4096),
    Row(64, 128, 4096),
    Row(16, 128, 4096),
    Row(128, 1, 4096),
    Row(16, 64, 1024),
]


def tir_kernel(heads: int, target: tvm.target.Target) -> Any:
    """Compile TVM's own kernel of the slot."""
    function = tvm_kv_cache._attention_prefill_mla(heads, CKV, KPE, DTYPE, False, target, PAGE_SIZE)
    module = tvm.IRModule({"mla": function.with_attr("global_symbol", "mla")})
    with target:
        module = dl.ApplyDefaultSchedule(dl.gpu.Fallback())(module)
    return tvm.compile(module, target=target)


def slices(whole: Any) -> list[Any]:
    """The compressed part of each last dimension and the part with positions, over one memory."""
    *outer, width = whole.shape
    strides = [width * int(np.prod(outer[axis + 1 :])) for axis in range(len(outer))] + [1]
    dtype = np.dtype(ml_dtypes.bfloat16)
    return [
        view_of(whole, dtype, (*outer, size), strides, start * dtype.itemsize)
        for start, size in ((0, CKV), (CKV, KPE))
    ]


class Bench:
    """Tensors of one row, and the two sides that work on them.

    The sides hold no reference to the object: it and its kernels go when the row is done, not when
    the interpreter ends and CUDA may be gone.
    """

    def __init__(self, row: Row, target: tvm.target.Target, device: Any) -> None:
        self.row, self.device = row, device
        rng = np.random.default_rng(0)
        on = lambda array: tvm.runtime.tensor(array, device)  # noqa: E731
        normal = lambda *shape: (  # noqa: E731
            rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)
        )
        batch, each = row.batch, row.length // PAGE_SIZE
        self.q = normal(batch, row.heads, CKV + KPE)
        self.pages = normal(batch * each, PAGE_SIZE, CKV + KPE)
        self.indices = rng.permutation(batch * each).astype(np.int32)
        self.out = out = tvm.runtime.empty((batch, row.heads, CKV), DTYPE, device)
        lse = tvm.runtime.empty((batch, row.heads), "float32", device)
        q, pages = on(self.q), on(self.pages)
        parts = [*slices(q), *slices(pages)]
        rows = np.arange(batch + 1, dtype=np.int32)
        spaces = [
            tvm.runtime.empty((size,), "uint8", where)
            for size, where in ((256 << 20, device), (8 << 20, device), (8 << 20, tvm.cpu()))
        ]
        op = lambda name: tvm_ffi.get_global_func(f"flashinfer.{name}")  # noqa: E731
        host = tvm.runtime.tensor
        plan = op("batch_mla_plan")(
            *spaces, host(rows), host(rows * each), host(np.full(batch, row.length, np.int32)),
            row.heads, CKV, False,
        )  # fmt: skip
        table, run = on(self.indices), op("batch_mla_run")
        self.ours = lambda: run(
            *spaces[:2], plan, *parts, table, out, lse, 0, row.heads, PAGE_SIZE, SM_SCALE,
            False,
        )  # fmt: skip
        kernel = tir_kernel(row.heads, target)["mla"]
        last = on(np.full(batch, PAGE_SIZE, np.int32))
        arguments = (
            q, on(rows), pages, on(rows * each), table, last, out, lse, 0, SM_SCALE,
        )  # fmt: skip
        self.theirs = lambda: kernel(*arguments)

    def check(self, side: Callable[[], None]) -> float:
        """Largest error of a side against float64, after outputs were filled with NaN."""
        nans = np.full(self.out.shape, np.nan, ml_dtypes.bfloat16)
        tvm.runtime.tensor(nans, self.device).copyto(self.out)
        side()
        self.device.sync()
        out = self.out.numpy().astype(np.float64)
        if np.isnan(out).any():
            raise AssertionError(f"{self.row.name}: outputs were left unwritten or are NaN")
        each, worst = self.row.length // PAGE_SIZE, 0.0
        for index in {0, self.row.batch - 1}:
            pages = self.indices[index * each : (index + 1) * each]
            keys = self.pages[pages].reshape(self.row.length, CKV + KPE).astype(np.float64)
            scores = self.q[index].astype(np.float64) @ keys.T * SM_SCALE
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            expected = weights @ keys[:, :CKV] / weights.sum(axis=-1, keepdims=True)
            worst = max(worst, np.abs(out[index] - expected).max())
        if worst > 2e-2:
            raise AssertionError(f"{self.row.name}: error {worst:.1e} against float64")
        return worst


def main() -> None:
    """Run the rows and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--row", action="append", choices=[row.name for row in ROWS])
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    device = cuda_device()
    target = cuda_target(device)
    print(
        f"{device.device_name}, TVM {tvm.__version__}, tvm_flashinfer {tvm_flashinfer.__version__}"
    )
    print(f"{'row':28} {'ours us':>9} {'TIR us':>9} {'ratio':>6}  ours")
    results = []
    for row in ROWS:
        if arguments.row and row.name not in arguments.row:
            continue
        bench = Bench(row, target, device)
        errors = [bench.check(side) for side in (bench.ours, bench.theirs)]
        ours, theirs = (seconds_of_call(side, device) for side in (bench.ours, bench.theirs))
        bench.check(bench.ours)
        rate = f"{row.bytes / ours / 1e12:.2f} TB/s, {row.flops / ours / 1e12:.0f} TFLOP/s"
        print(f"{row.name:28} {ours * 1e6:9.1f} {theirs * 1e6:9.1f} {theirs / ours:6.1f}  {rate}")
        results.append(
            {"row": row.name, "ours_us": ours * 1e6, "tir_us": theirs * 1e6, "rate": rate,
             "error": errors[0], "tir_error": errors[1]}
        )  # fmt: skip
    if arguments.json:
        rows = [f"--row {name}" for name in arguments.row or ()]
        command = " ".join(["python benchmarks/mla.py", *rows])
        if kernel := os.environ.get("TVM_FLASHINFER_MLA_KERNEL"):
            command = f"TVM_FLASHINFER_MLA_KERNEL={kernel} {command}"
        write_results(arguments.json, device, command, results)


if __name__ == "__main__":
    main()

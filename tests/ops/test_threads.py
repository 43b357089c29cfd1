"""Calls from several Python threads at once: tvm-ffi lets go of the GIL while a function runs."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from batches import Spec, make_batch
from calls import decode, ragged_prefill
from device_tensors import synchronize, to_device


class _OwnWorkspaces(NamedTuple):
    float_workspace: Any
    int_workspace: Any
    pinned_int_workspace: Any


def _workspaces(device: Any) -> _OwnWorkspaces:
    import tvm

    def make(size: int, where: Any) -> Any:
        return to_device(np.full(size, 0xFF, np.uint8), where).tensor

    return _OwnWorkspaces(make(32 << 20, device), make(8 << 20, device), make(8 << 20, tvm.cpu(0)))


def test_concurrent_calls(ops, device, rng):
    """Four threads with their own tensors and workspaces give the bits of one thread."""
    calls, expected = [], []
    for i in range(4):
        own = _workspaces(device)
        if i % 2:
            spec = Spec((700, 0, 33 + i), heads=(8, 2))
            calls.append(decode(ops, device, own, make_batch(rng, spec)))
        else:
            spec = Spec((90, 31 + i), (90, 31), causal=True, layout="NHD")
            batch = make_batch(rng, spec, paged=False)
            calls.append(ragged_prefill(ops, device, own, batch))
        expected.append(calls[-1].plan_run_check())

    def work(call: Any) -> None:
        for _ in range(25):
            call.plan()
            call.run()
        synchronize(device)

    for call in calls:
        call.fresh_outputs()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, calls))
    for call, (o, lse) in zip(calls, expected, strict=True):
        got_o, got_lse = call.outputs()
        np.testing.assert_array_equal(got_o.view(np.uint16), o.view(np.uint16))
        np.testing.assert_array_equal(got_lse, lse)


def test_concurrent_refusals(ops, device, rng):
    """Threads whose calls are refused do not disturb those whose calls are served."""
    own = _workspaces(device)
    call = decode(ops, device, own, make_batch(rng, Spec((700, 33), heads=(8, 2))))
    o, _ = call.plan_run_check()

    def refuse(_: int) -> int:
        refusals = 0
        for _ in range(50):
            try:
                ops.copy_single_page(call.run_args["q"].tensor, 0, 0, 0)
            except ValueError:
                refusals += 1
        return refusals

    def serve(_: int) -> int:
        for _ in range(50):
            call.run()
        return 50

    with ThreadPoolExecutor(3) as pool:
        done = [pool.submit(refuse, 0), pool.submit(refuse, 1), pool.submit(serve, 2)]
        assert [x.result() for x in done] == [50, 50, 50]
    got, _ = call.check()
    np.testing.assert_array_equal(got.view(np.uint16), o.view(np.uint16))


OUT_OF_MEMORY = """
import resource, numpy as np, tvm_flashinfer, tvm_ffi
attend = tvm_ffi.get_global_func("flashinfer.bind_attention_prefill_paged")("{}")
i = lambda *values: np.array(values, np.int32)
def call(dim, rows):
    q, o = np.zeros((rows, 1, dim), np.float16), np.zeros((rows, 1, dim), np.float16)
    pages = np.zeros((1, 2, 1, 1, dim), np.float16)
    attend(q, i(0, rows), pages, i(0, 1), i(0), i(1), i(0), np.zeros(rows, np.int32), o,
           np.zeros((rows, 1), np.float32), 0, 0, 1.0, 1e4, 1.0)
call(64, 200)
resource.setrlimit(resource.RLIMIT_AS, (int(3e9),) * 2)
try:
    call(10**6, 200)
except Exception as error:
    print(type(error).__name__, error)
call(64, 200)
print("usable")
"""


def test_out_of_memory_in_a_worker_is_an_exception_of_the_caller():
    """A head so large that the scratch memory of a thread does not fit; usable afterwards."""
    done = subprocess.run(
        [sys.executable, "-c", OUT_OF_MEMORY],
        env={**os.environ, "TVM_FLASHINFER_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "bad_alloc" in done.stdout
    assert done.stdout.endswith("usable\n")

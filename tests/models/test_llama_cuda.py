"""The demo's model on a GPU in float16, and its library where this package is not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from examples.llama.generate import Session, greedy

pytestmark = pytest.mark.cuda

#: Loads the library as any TVM program would, with this package made unimportable.
ALONE = """
import sys
sys.modules["tvm_flashinfer"] = None
import numpy as np, tvm, tvm_ffi
from tvm_ffi import Shape
assert tvm_ffi.get_global_func("flashinfer.merge_state", allow_missing=True) is None
library, weights, tokens, out = sys.argv[1:]
device = tvm.cuda(0)
module = tvm.runtime.load_module(library)
vm = tvm.runtime.vm.VirtualMachine(module, device)
loaded = np.load(weights)
params = [tvm.runtime.tensor(loaded[name], device) for name in loaded.files]
ids = np.load(tokens).astype("int32")
cache = vm["create_flashinfer_paged_kv_cache"](*(Shape([n]) for n in (4, 2048, 512, 16, 0)))
state = lambda name: tvm.get_global_func("vm.builtin.kv_state_" + name)
state("add_sequence")(cache, 0)
def on(array):
    return tvm.runtime.tensor(np.ascontiguousarray(array, "int32"), device)
state("begin_forward")(cache, Shape([0]), Shape([len(ids)]))
prefill = vm["prefill"](on(ids[None]), on(np.arange(len(ids))), cache, params).numpy()[0]
state("end_forward")(cache)
state("begin_forward")(cache, Shape([0]), Shape([1]))
decode = vm["decode"](on([[7]]), cache, params).numpy()[0]
calls = module.get_function("flashinfer.call_counts", query_imports=True)()["cuda"]
assert calls["batch_prefill_ragged_run"] == calls["batch_decode_run"] > 0, calls
np.savez(out, prefill=prefill, decode=decode)
"""


@pytest.fixture(scope="module")
def model(cuda: Any, load_model: Callable[[str, str], Any]) -> Any:
    return load_model("cuda", "float16")


def logits(model: Any, kind: str, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Logits after each token of a prompt, and after one decoded token."""
    session = Session(model, kind)
    session.add(0)
    prefill = session.prefill({0: tokens}, all_positions=True)[0]
    return prefill, session.decode({0: 7})[0][None]


def test_logits_are_as_close_to_float32_as_tvms(
    model: Any, load_model: Callable[[str, str], Any], tokens: np.ndarray
) -> None:
    """At most twice the error of TVM's TIR cache, against float32 on CPU."""
    exact = logits(load_model("cpu", "float32"), "flashinfer", tokens)
    ours, theirs = (logits(model, kind, tokens) for kind in ("flashinfer", "tir"))
    for phase, reference, got, tir in zip(("prefill", "decode"), exact, ours, theirs, strict=True):
        error, tir_error = (np.sqrt(np.mean((x - reference) ** 2)) for x in (got, tir))
        print(f"{phase}: error {error:.4f}, with TVM's kernels {tir_error:.4f}")
        assert np.isfinite(got).all()
        assert error <= 2 * tir_error


def test_greedy_text_is_the_same_as_tvms(model: Any, tokens: np.ndarray) -> None:
    """Most of 64 tokens: float16 may part two right runs, but not from the start."""
    ours, theirs = (
        list(greedy(Session(model, kind), tokens, 64)) for kind in ("flashinfer", "tir")
    )
    common = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=True)) if a != b), 64)
    print(f"the first {common} of 64 tokens are equal")
    assert common >= 8


def test_library_runs_where_this_package_is_not(
    model: Any, tokens: np.ndarray, tmp_path: Path
) -> None:
    """The kernels are in the library: another process without us gives the same logits."""
    names = model.info["params"]
    np.savez(tmp_path / "weights.npz", **dict(zip(names, model.weights, strict=True)))
    np.save(tmp_path / "tokens.npy", tokens)
    subprocess.run(
        [sys.executable, "-c", ALONE, str(model.library), str(tmp_path / "weights.npz"),
         str(tmp_path / "tokens.npy"), str(tmp_path / "out.npz")],
        check=True, timeout=300,
    )  # fmt: skip
    alone = np.load(tmp_path / "out.npz")
    prefill, decode = logits(model, "flashinfer", tokens)
    np.testing.assert_array_equal(alone["prefill"], prefill)
    np.testing.assert_array_equal(alone["decode"], decode)

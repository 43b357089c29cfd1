"""Plans that follow a file of tuning, on a GPU: the kernel is the file's, and its results right."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from batches import Spec, make_batch
from calls import Call, decode, paged_prefill, ragged_prefill
from mla_calls import MLASpec, mla_call
from test_prefill_kernel import is_hopper, kernel_of
from tuning_texts import entry, text_of_here

import tvm_flashinfer
from tvm_flashinfer import clear_tuning, load_tuning
from tvm_flashinfer.kernels.environment import gpus

pytestmark = pytest.mark.cuda

LENS = (700, 300, 513, 1, 0, 2048)
BATCH, KEYS = 8, 1024


@pytest.fixture(autouse=True)
def without_tuning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("TVM_FLASHINFER_PREFILL_KERNEL", raising=False)
    yield
    clear_tuning()


@pytest.fixture
def use(cuda: Any, tmp_path: Path) -> Any:
    """Uses a file that was made on this machine, as it says."""

    def write(*entries: Any) -> Path:
        path = tmp_path / "tuning.json"
        path.write_text(text_of_here(*entries))
        load_tuning(path)
        return path

    return write


def heads_of(spec: Spec) -> dict[str, int]:
    return {
        "num_qo_heads": spec.heads[0], "num_kv_heads": spec.heads[1],
        "head_dim_qk": spec.head_dim, "head_dim_vo": spec.vo,
    }  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("heads", [(8, 8), (4, 2), (16, 4), (16, 2)], ids=str)
@pytest.mark.parametrize(
    ("kernel", "split"),
    [("cuda_core", 0), ("batch_attention", 0), ("fa2", 0), ("fa2", 64), ("fa2", 4096)],
    ids=str,
)
def test_decode(ops, cuda, cuda_workspaces, rng, use, dtype, heads, kernel, split):
    spec = Spec(LENS, heads=heads, head_dim=128, dtype=dtype)
    call = decode(ops, cuda, cuda_workspaces, make_batch(rng, spec))
    default = kernel_of(call.plan())
    assert default == ("cuda_core" if heads[0] // heads[1] < 4 else "fa2")
    use(entry(kernel=kernel, split_keys=split, batch=BATCH, keys=KEYS, **heads_of(spec)))
    call.plan_run_check()
    assert kernel_of(call.plan_value) == kernel
    clear_tuning()
    assert kernel_of(call.plan()) == default


@pytest.mark.parametrize("ragged", [False, True])
@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize(
    ("kernel", "split"), [("fa3", 0), ("batch_attention", 0), ("fa2", 0), ("fa2", 128)], ids=str
)
def test_prefill(ops, cuda, cuda_workspaces, rng, use, ragged, rows, kernel, split):
    if kernel == "fa3" and not is_hopper():
        pytest.skip("FA3 needs a Hopper GPU")
    lens = (700, 300, 513, 300)
    spec = Spec(lens, (rows,) * 4, (8, 2), 128, causal=True, layout="NHD" if ragged else "HND")
    slot, make = ("ragged", ragged_prefill) if ragged else ("paged", paged_prefill)
    call = make(ops, cuda, cuda_workspaces, make_batch(rng, spec, paged=not ragged))
    use(
        entry(f"prefill_{slot}", kernel, split_keys=split, causal=True, batch=4, rows=rows,
              keys=512, **heads_of(spec))
    )  # fmt: skip
    call.plan_run_check()
    assert kernel_of(call.plan_value) == kernel


@pytest.mark.parametrize("kernel", ["fa2", "sm90"])
def test_latent_attention(ops, cuda, cuda_workspaces, rng, use, monkeypatch, kernel):
    if not is_hopper():
        pytest.skip("other GPUs have one kernel of MLA")
    monkeypatch.delenv("TVM_FLASHINFER_MLA_KERNEL", raising=False)
    spec = MLASpec((13, 700, 64, 129), heads=16)
    use(
        entry("mla", kernel, batch=4, keys=256, num_qo_heads=16, num_kv_heads=1, head_dim_qk=512,
              head_dim_vo=512)
    )  # fmt: skip
    call = mla_call(ops, cuda, cuda_workspaces, rng, spec)
    call.plan_run_check()
    assert call.run_args["plan"][19] == (kernel == "sm90")


def test_plans_outlive_the_file(ops, cuda, cuda_workspaces, rng, use):
    """A run follows its plan, whatever is in use by then."""
    spec = Spec(LENS, heads=(16, 4), head_dim=128)
    calls: list[Call] = []
    for kernel in ("cuda_core", "fa2", "batch_attention"):
        use(entry(kernel=kernel, batch=BATCH, keys=KEYS, **heads_of(spec)))
        calls.append(decode(ops, cuda, cuda_workspaces, make_batch(rng, spec)))
        calls[-1].plan()
    clear_tuning()
    for call in (*calls, *calls[::-1]):
        call.fresh_outputs()
        call.run()
        call.check()


def test_chunks_that_the_workspace_does_not_hold(ops, cuda, cuda_workspaces, rng, use):
    """The plan splits as it finds best then, in place of an error."""
    import tvm

    spec = Spec((4096,) * 4, heads=(16, 4), head_dim=128)
    use(entry(kernel="fa2", split_keys=16, batch=4, keys=4096, **heads_of(spec)))
    small = cuda_workspaces._replace(float_workspace=tvm.runtime.empty((6 << 20,), "uint8", cuda))
    decode(ops, cuda, small, make_batch(rng, spec)).plan_run_check()


def test_who_says_how_keys_are_split_is_not_overruled(ops, cuda, cuda_workspaces, rng, use):
    spec = Spec((512,) * 4, (1,) * 4, (8, 2), 128, causal=True)
    call = paged_prefill(ops, cuda, cuda_workspaces, make_batch(rng, spec))
    use(entry("prefill_paged", "batch_attention", batch=4, keys=512, **heads_of(spec)))
    assert kernel_of(call.plan()) == "batch_attention"
    for changes in ({"fixed_split_size": 8}, {"disable_split_kv": True}):
        assert kernel_of(call.plan(**changes)) == "fa2"
        call.fresh_outputs()
        call.run()
        call.check()


PRINT = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/ops"]
import numpy as np, tvm, tvm_flashinfer
from batches import Spec, make_batch
from calls import bound_paged, decode
from conftest import Ops, _poisoned_workspaces
device, ops, rng = tvm.cuda(0), Ops(), np.random.default_rng(0)
for lens in ((700, 300), (600, 400), (100,)):
    batch = make_batch(rng, Spec(lens, heads=(8, 2), head_dim=128))
    call = decode(ops, device, _poisoned_workspaces("cuda"), batch)
    call.plan()
    bound_paged(ops, device, None, batch, decoding=True).run()
"""


def test_choices_are_printed_once_for_each_class(cuda):
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", PRINT.format(tests=str(tests))],
        env={
            **os.environ,
            "TVM_FLASHINFER_DEBUG": "kernels",
            "PYTHONPATH": os.pathsep.join(
                [str(Path(tvm_flashinfer.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
            ),
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("tvm_flashinfer: ")]
    assert len(lines) == 4, done.stderr
    for line, (name, size) in zip(
        lines,
        [("decode_paged", "batch <= 2"), ("attention_decode_paged", "batch <= 2"),
         ("decode_paged", "batch <= 1"), ("attention_decode_paged", "batch <= 1")],
        strict=True,
    ):  # fmt: skip
        assert line.startswith(f"tvm_flashinfer: {name} on cuda:0, {gpus()[0]['name']} (sm_")
        assert size in line

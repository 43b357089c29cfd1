"""Libraries with and without kernels of their own, in processes with and without this package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_cache_cuda import HEADS, KV_HEADS, LAYERS, build
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode

import tvm_flashinfer
from examples.llama.compile import default_target

pytestmark = pytest.mark.cuda

HEAD_DIM, ROWS = 64, 7

#: A prompt and one more token; prints the calls of the library, or else of this package.
SERVE = """
import json, sys
import numpy as np, tvm, tvm_ffi
from tvm_ffi import Shape
from tvm.runtime.vm import VirtualMachine
library, rows, out, counted = sys.argv[1:]
device = tvm.cuda(0)
module = tvm.runtime.load_module(library)
vm = VirtualMachine(module, device)
cache = vm["create"](*(Shape([n]) for n in (1, 64, 16, 16, 0)))
state = lambda name: tvm_ffi.get_global_func("vm.builtin.kv_state_" + name)
state("add_sequence")(cache, 0)
outputs = []
for part in np.split(np.load(rows), [-1]):
    state("begin_forward")(cache, Shape([0]), Shape([len(part)]))
    qkv = tvm.runtime.tensor(np.ascontiguousarray(part[None]), device)
    outputs.append(vm["attend"](qkv, cache).numpy()[0])
    state("end_forward")(cache)
    device.sync()
np.save(out, np.concatenate(outputs))
if counted == "library":
    counts = module.get_function("flashinfer.call_counts", query_imports=True)()
else:
    counts = tvm_ffi.get_global_func("flashinfer.call_counts")()
print(json.dumps(dict(counts["cuda"].items())))
"""
WITHOUT_US = 'import sys; sys.modules["tvm_flashinfer"] = None\n'
WITH_US = "import tvm, tvm_flashinfer.hooks; tvm_flashinfer.hooks._autoload()\n"


@pytest.fixture(scope="module")
def libraries(cuda: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same model, self-contained and shared."""
    folders = {ship: tmp_path_factory.mktemp(ship) for ship in ("self-contained", "shared")}
    for ship, folder in folders.items():
        build(default_target("cuda"), "float16", HEAD_DIM, RopeMode.NORMAL, folder, ship)
    return {ship: folder / "cuda.so" for ship, folder in folders.items()}


def run(
    code: str, library: Path, folder: Path, counted: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run code in a new Python on the same rows."""
    rows = np.random.default_rng(0).standard_normal((ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM))
    np.save(folder / "rows.npy", rows.astype(np.float16))
    path = [str(Path(tvm_flashinfer.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    files = (str(folder / name) for name in ("rows.npy", "out.npy"))
    return subprocess.run(
        [sys.executable, "-c", code, str(library), *files, counted],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def expected(libraries: dict[str, Path], tmp_path_factory: Any) -> np.ndarray:
    """What the self-contained library gives in a process without this package."""
    folder = tmp_path_factory.mktemp("alone")
    done = run(WITHOUT_US + SERVE, libraries["self-contained"], folder, "library")
    assert done.returncode == 0, done.stderr
    check_calls(done.stdout)
    return np.load(folder / "out.npy")


def check_calls(stdout: str) -> None:
    """One of each function in each layer of both steps."""
    calls = json.loads(stdout.splitlines()[-1])
    assert calls["batch_prefill_ragged_run"] >= LAYERS
    assert calls["batch_prefill_paged_run"] >= LAYERS  # decode with four query heads per KV head
    assert calls["append_paged_kv_cache"] == 2 * LAYERS


@pytest.mark.parametrize("runtime_only", [False, True])
@pytest.mark.parametrize("ship", ["self-contained", "shared"])
def test_with_the_package(
    ship: str, runtime_only: bool, libraries: dict[str, Path], expected: np.ndarray, tmp_path: Path
) -> None:
    """Whose calls they are differs, the results do not. The runtime alone finds the GPU too."""
    counted = "library" if ship == "self-contained" else "package"
    environment = {"TVM_USE_RUNTIME_LIB": str(int(runtime_only))}
    done = run(WITH_US + SERVE, libraries[ship], tmp_path, counted, **environment)
    assert done.returncode == 0, done.stderr
    check_calls(done.stdout)
    np.testing.assert_array_equal(np.load(tmp_path / "out.npy"), expected)


def test_shared_without_the_package(libraries: dict[str, Path], tmp_path: Path) -> None:
    done = run(WITHOUT_US + SERVE, libraries["shared"], tmp_path, "package")
    assert done.returncode != 0
    assert "pip install 'tvm-flashinfer>=0.1.0'" in done.stderr


def test_expected_is_attention(expected: np.ndarray) -> None:
    """The first row sees itself alone: it is its value."""
    rows = np.random.default_rng(0).standard_normal((ROWS, HEADS + 2 * KV_HEADS, HEAD_DIM))
    values = rows.astype(np.float16)[0, HEADS + KV_HEADS :].repeat(HEADS // KV_HEADS, axis=0)
    np.testing.assert_allclose(expected[0], values, rtol=0, atol=2e-3)

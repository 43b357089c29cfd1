"""Fixtures of every test: the device to run on, the packed functions, the workspaces.

A test that asks for `device` runs twice, on CPU and on CUDA. The CUDA run carries the marker `cuda`
and is skipped, with the reason, where no CUDA device can be used. Nothing here needs torch.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

_HERE = Path(__file__).parent
for _folder in (_HERE, _HERE / "ops"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

FLOAT_WORKSPACE_BYTES = 64 << 20
INT_WORKSPACE_BYTES = 8 << 20


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker, so that strict markers accept it wherever pytest is started."""
    config.addinivalue_line("markers", "cuda: needs a CUDA device; skipped where there is none")


@functools.cache
def cuda_missing() -> str | None:
    """Why no CUDA device can be used, or None when one can."""
    import tvm

    try:
        if tvm.cuda(0).exist:
            return None
    except Exception as error:
        return f"asking TVM for a CUDA device failed: {error}"
    return "TVM sees no CUDA device (tvm.cuda(0).exist is false)"


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The device under test: `tvm.cpu(0)`, then `tvm.cuda(0)`.

    Tests may ask for "cuda-fa2", "cuda-fa3" and "cuda-fa3_copy" too: CUDA with that kernel of
    planned prefill.
    """
    import tvm

    name, _, kernel = request.param.partition("-")
    if name == "cpu":
        return tvm.cpu(0)
    reason = cuda_missing()
    if reason is not None:
        pytest.skip(reason)
    if kernel:
        if kernel.startswith("fa3") and tvm.cuda(0).compute_version != "9.0":
            pytest.skip("FA3 needs a Hopper GPU")
        monkeypatch.setenv("TVM_FLASHINFER_PREFILL_KERNEL", kernel)
    return tvm.cuda(0)


@pytest.fixture(scope="session")
def cuda() -> Any:
    """`tvm.cuda(0)`, for tests of that device alone; they are skipped where there is none."""
    import tvm

    reason = cuda_missing()
    if reason is not None:
        pytest.skip(reason)
    return tvm.cuda(0)


class Ops:
    """The packed functions by their short names: `ops.merge_state` is `flashinfer.merge_state`."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        import tvm_ffi

        function = tvm_ffi.get_global_func(f"flashinfer.{name}", allow_missing=True)
        if function is None:
            raise AttributeError(f"no function flashinfer.{name} is registered")
        return function


@pytest.fixture(scope="session")
def ops() -> Ops:
    """The registered functions, after the package has been imported."""
    importlib.import_module("tvm_flashinfer")
    return Ops()


class Workspaces(NamedTuple):
    """The three u8 tensors that plans and runs share."""

    float_workspace: Any
    int_workspace: Any
    pinned_int_workspace: Any


@functools.cache
def _poison(num_bytes: int) -> Any:
    import tvm

    return tvm.runtime.tensor(np.full(num_bytes, 0xFF, np.uint8), tvm.cpu(0))


@functools.cache
def _allocated(device_name: str) -> Workspaces:
    import tvm

    device = tvm.device(device_name, 0)
    return Workspaces(
        tvm.runtime.empty((FLOAT_WORKSPACE_BYTES,), "uint8", device),
        tvm.runtime.empty((INT_WORKSPACE_BYTES,), "uint8", device),
        tvm.runtime.empty((INT_WORKSPACE_BYTES,), "uint8", tvm.cpu(0)),
    )


def _poisoned_workspaces(device_name: str) -> Workspaces:
    found = _allocated(device_name)
    for workspace in found:
        _poison(int(workspace.shape[0])).copyto(workspace)
    return found


@pytest.fixture
def workspaces(device: Any) -> Workspaces:
    """Workspaces full of 0xFF: what an earlier call left there must not matter."""
    return _poisoned_workspaces("cpu" if device.dlpack_device_type() == 1 else "cuda")


@pytest.fixture
def cuda_workspaces(cuda: Any) -> Workspaces:
    """The same for tests of CUDA alone."""
    return _poisoned_workspaces("cuda")


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """A generator seeded by the test's name without its device, so all devices get one input."""
    name = re.sub("cuda(-fa[23])?", "cpu", request.node.name)
    return np.random.default_rng(list(name.encode()))

"""Work goes to the device of the tensors; the current device of the thread stays as it was."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import tvm
from batches import Spec, normal
from device_tensors import poisoned, to_device
from functions import Attend, batch_for, each, new_workspaces

pytestmark = pytest.mark.cuda


def current_device() -> int:
    """The device whose context the calling thread uses."""
    device = ctypes.c_int(-1)
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuCtxGetDevice(ctypes.byref(device)) == 0
    return device.value


@pytest.fixture(params=[0, 1])
def other(request: pytest.FixtureRequest, cuda: Any) -> Any:
    """The device of the tensors, while device 0 is the current one."""
    device = tvm.cuda(request.param)
    if not device.exist:
        pytest.skip("needs two GPUs")
    return device


@each()
def test_attention(ops, cuda, other, rng, function):
    """Planned and unplanned attention."""
    attend = Attend(ops, other, new_workspaces(other))
    call = attend.call(function, batch_for(function, rng, Spec((300, 5), (40, 5), (8, 2))))
    cuda.sync()  # makes device 0 the current one
    call.plan()
    call.run()
    assert current_device() == 0
    call.check()


def test_merge(ops, cuda, other, rng):
    """A function of the common unit."""
    v = [to_device(normal(rng, (9, 4, 64), "float16"), other) for _ in range(2)]
    s = [to_device(np.zeros((9, 4), np.float32), other) for _ in range(2)]
    out = poisoned((9, 4, 64), "float16", other), poisoned((9, 4), "float32", other)
    cuda.sync()
    ops.merge_state(*(x.tensor for x in (v[0], s[0], v[1], s[1], *out)))
    assert current_device() == 0
    mean = (v[0].numpy().astype(np.float32) + v[1].numpy().astype(np.float32)) / 2
    np.testing.assert_allclose(out[0].numpy().astype(np.float32), mean, atol=2e-3)
    np.testing.assert_array_equal(out[1].numpy(), 1)

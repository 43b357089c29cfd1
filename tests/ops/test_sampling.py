"""`flashinfer.sampling.parallel_sampling_from_prob` against running sums in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from batches import is_cuda
from device_tensors import DeviceTensor, poisoned, synchronize, to_device

OP = "sampling.parallel_sampling_from_prob"
#: How far a running sum of float32 probabilities may be from the one in float64.
_TOLERANCE = 2e-5


def _sample(ops: Any, device: Any, probs: np.ndarray, uniform: Any, indices: Any) -> np.ndarray:
    function = getattr(ops, OP)
    ids = poisoned((len(uniform),), "int32", device)
    result = function(
        to_device(probs.astype(np.float32), device).tensor,
        to_device(np.asarray(uniform, np.float32), device, byte_offset=4).tensor,
        to_device(np.asarray(indices, np.int32), device, byte_offset=8).tensor,
        ids.tensor,
    )
    synchronize(device)
    ids.assert_guards_intact("out_ids")
    returned = np.from_dlpack(result) if not is_cuda(device) else result.numpy()
    np.testing.assert_array_equal(returned, ids.numpy())
    return ids.numpy()


def _check(probs: np.ndarray, uniform: Any, indices: Any, ids: np.ndarray) -> None:
    """Every id is where the running sum of its row passes the uniform number."""
    for i, (u, row) in enumerate(zip(np.asarray(uniform, np.float32), indices, strict=True)):
        sums = np.cumsum(np.where(probs[row] > 0, probs[row], 0).astype(np.float64))
        token = ids[i]
        assert 0 <= token < probs.shape[1], f"sample {i} is {token}"
        assert probs[row, token] > 0, f"sample {i} is {token}, whose probability is 0"
        before = sums[token - 1] if token else 0.0
        assert before <= u + _TOLERANCE, f"sample {i} is {token}: an earlier one passes {u}"
        last = np.flatnonzero(probs[row] > 0)[-1]
        assert sums[token] > u - _TOLERANCE or token == last, f"sample {i} is {token}: not passed"


def _rows(rng: np.random.Generator, rows: int, vocab: int, power: float = 4.0) -> np.ndarray:
    probs = rng.random((rows, vocab)) ** power
    return (probs / probs.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("vocab", [1, 3, 31, 1000, 16384, 16385, 32000, 151936])
def test_running_sums(ops, device, rng, vocab):
    """Vocabularies below and above what a block adds up at once, aligned and not."""
    probs = _rows(rng, 5, vocab)
    indices = rng.integers(0, 5, 40)
    uniform = rng.random(40)
    _check(probs, uniform, indices, _sample(ops, device, probs, uniform, indices))


def test_the_same_row_many_times(ops, device, rng):
    """Rows in the order 0, 0, 2, 1; ids are written in place."""
    probs = _rows(rng, 3, 512)
    indices, uniform = [0, 0, 2, 1], [0.1, 0.9, 0.5, 0.0]
    _check(probs, uniform, indices, _sample(ops, device, probs, uniform, indices))


def test_exact_boundaries(ops, device):
    """With sums that floats hold: the first index whose sum is above the number, not at it."""
    probs = np.array([[0.25, 0.25, 0.0, 0.5]])
    uniform = [0.0, 0.2, 0.25, 0.49, 0.5, 0.99]
    assert _sample(ops, device, probs, uniform, [0] * 6).tolist() == [0, 0, 1, 1, 3, 3]


def test_uniform_of_one_and_rows_below_one(ops, device):
    """A number that no sum passes gives the last index with a probability."""
    probs = np.zeros((2, 40000), np.float32)
    probs[0, 7], probs[0, 30000] = 0.5, 0.25
    probs[1, :3] = 1 / 3
    assert _sample(ops, device, probs, [0.9, 1.0], [0, 1]).tolist() == [30000, 2]


def test_one_hot(ops, device, rng):
    """All of the probability on one index, wherever it lies."""
    where = [0, 1, 16383, 16384, 31999]
    probs = np.zeros((5, 32000), np.float32)
    probs[np.arange(5), where] = 1
    uniform = rng.random(5).astype(np.float32)
    assert _sample(ops, device, probs, uniform, range(5)).tolist() == where


def test_rows_of_nan(ops, device, rng):
    """A row that is all NaN gives -1, and one with a NaN in it draws from the others."""
    probs = _rows(rng, 5, 300)
    probs[2] = np.nan
    probs[4, 10] = np.nan
    ids = _sample(ops, device, probs, rng.random(5), range(5))
    assert ids[2] == -1
    assert ids[4] != 10
    good = [0, 1, 3, 4]
    uniform = rng.random(4)
    clean = np.nan_to_num(probs)
    _check(clean, uniform, good, _sample(ops, device, probs, uniform, good))


def test_any_row(ops, device, rng):
    """Rows with zeros, of any length, any number of samples."""
    for _ in range(40):
        vocab, samples = rng.integers(1, 700), rng.integers(0, 10)
        probs = rng.random((4, vocab)) * (rng.random((4, vocab)) < 0.3)
        probs[:, rng.integers(vocab)] += 1e-3
        probs = (probs / probs.sum(-1, keepdims=True)).astype(np.float32)
        indices, uniform = rng.integers(0, 4, samples), rng.random(samples)
        _check(probs, uniform, indices, _sample(ops, device, probs, uniform, indices))


def test_refusals(ops, device, rng):
    """What does not fit is refused, with the name of the argument."""
    function = getattr(ops, OP)
    good = {
        "probs": to_device(_rows(rng, 3, 16), device),
        "uniform": to_device(np.zeros(4, np.float32), device),
        "sample_indices": to_device(np.zeros(4, np.int32), device),
        "out_ids": poisoned((4,), "int32", device),
    }

    def refused(error: type, name: str, array: np.ndarray) -> None:
        changed = {**good, name: to_device(array, device)}
        with pytest.raises(error, match=f"`{name}"):
            function(*(x.tensor if isinstance(x, DeviceTensor) else x for x in changed.values()))

    refused(TypeError, "probs", np.zeros((3, 16), np.float16))
    refused(ValueError, "probs", np.zeros(16, np.float32))
    refused(TypeError, "uniform", np.zeros(4, np.float64))
    refused(ValueError, "sample_indices", np.zeros(5, np.int32))
    refused(ValueError, "out_ids", np.zeros(3, np.int32))
    if not is_cuda(device):
        refused(ValueError, "sample_indices", np.array([0, 1, 3, 0], np.int32))

"""Filters of tokens and draws of what they leave, against sorted rows in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from batches import is_cuda
from device_tensors import DeviceTensor, poisoned, synchronize, to_device
from refusals import refused, unchanged

from tvm_flashinfer import ops as typed

#: How far a sum of float32 probabilities may be from the one in float64.
TOLERANCE = 2e-6
VOCABS = [1, 2, 31, 1000, 8193, 32000, 128256]


def rows_of(rng: np.random.Generator, rows: int, vocab: int) -> np.ndarray:
    """Probabilities: spread, peaked, with equal ones and with zeros."""
    probs = rng.random((rows, vocab)) ** rng.choice([1, 4, 12], rows)[:, None]
    probs[rng.random((rows, vocab)) < 0.2] = 0
    probs[::3] = np.round(probs[::3] * 8) / 8
    probs[:, 0] += 1e-3
    return (probs / probs.sum(-1, keepdims=True)).astype(np.float32)


def kept_by_count(row: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """What top-k keeps, which rounding does not change: twice the same."""
    if k <= 0 or k >= len(row):
        return row > 0, row > 0
    kept = (row >= max(np.sort(row)[-k], np.finfo(np.float32).tiny)) & (row > 0)
    return kept, kept


def kept_by_sum(row: np.ndarray, p: float) -> tuple[np.ndarray, np.ndarray]:
    """What top-p keeps at least and at most, when sums may be off by `TOLERANCE`."""
    ordered = np.sort(row[row > 0])[::-1].astype(np.float64)
    values, counts = np.unique(-ordered, return_counts=True)
    values, sums = -values, ordered.cumsum()[counts.cumsum() - 1]
    found = []
    for wanted in (p - TOLERANCE, p + TOLERANCE):
        reached = np.flatnonzero(sums >= wanted)
        found.append(row >= values[reached[0] if len(reached) else -1])
    return found[0] & (row > 0), found[1] & (row > 0)


def kept_by_part(row: np.ndarray, p: float) -> tuple[np.ndarray, np.ndarray]:
    """What min-p keeps, give or take a rounding."""
    bound = np.float32(p) * row.max()
    return row >= bound * (1 + 1e-6), (row >= bound * (1 - 1e-6)) & (row > 0)


def check_draws(
    probs: np.ndarray, uniform: np.ndarray, indices: np.ndarray, ids: np.ndarray, kept: Callable
) -> None:
    """Each id is where the running sum of what may be kept passes the number."""
    for i, (u, index) in enumerate(zip(uniform, indices, strict=True)):
        row, token = probs[index].astype(np.float64), ids[i]
        at_least, at_most = kept(index)
        assert 0 <= token < len(row), f"sample {i} is {token}"
        assert at_most[token], f"sample {i} is {token}, which is filtered"
        sets = {x.tobytes(): x for x in (at_least, at_most)}.values()
        ways = []
        for chosen in sets:
            sums = np.where(chosen, row, 0).cumsum()
            before, after = sums[token] - row[token], sums[token]
            number, slack = u * sums[-1], 4e-6
            last = token == np.flatnonzero(chosen)[-1] if chosen[token] else False
            ways.append(before <= number + slack and (after > number - slack or last))
        # Between the two bounds a set may be in the middle, whose sums lie between theirs.
        assert any(ways) or not np.array_equal(at_least, at_most), f"sample {i} is {token}"


class Case:
    """Rows, numbers and samples on a device."""

    def __init__(
        self, rng: np.random.Generator, device: Any, vocab: int, samples: int = 24
    ) -> None:
        self.device = device
        self.probs = rows_of(rng, 6, vocab)
        self.uniform = rng.random(samples).astype(np.float32)
        self.uniform[:2] = 0, np.float32(1 - 2**-24)
        self.indices = rng.integers(0, 6, samples).astype(np.int32)
        self.held = {
            "probs": to_device(self.probs, device, byte_offset=16 if vocab % 2 else 4),
            "uniform": to_device(self.uniform, device, byte_offset=4),
            "sample_indices": to_device(self.indices, device, byte_offset=8),
        }

    def numbers(self, values: Any, dtype: str) -> DeviceTensor:
        """One number for each row."""
        return to_device(np.asarray(values, dtype), self.device, byte_offset=4)

    def draw(self, function: Callable[..., Any], *filters: Any) -> np.ndarray:
        """The ids, which are the same a second time."""
        results = []
        for _ in range(2):
            out = poisoned(self.uniform.shape, "int32", self.device)
            passed = [x.tensor if isinstance(x, DeviceTensor) else x for x in filters]
            with unchanged(self.held):
                function(*(x.tensor for x in self.held.values()), *passed, out.tensor)
                results.append(out.numpy())
            out.assert_guards_intact("out_ids")
        np.testing.assert_array_equal(*results)
        return results[0]

    def check(self, ids: np.ndarray, kept: Callable[[int], Any]) -> None:
        """Compare with what is kept of each row."""
        check_draws(self.probs, self.uniform, self.indices, ids, kept)


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k(ops, device, rng, vocab):
    """One token, some, all, and none asked for."""
    case = Case(rng, device, vocab)
    k = [1, 2, 5, 0, vocab, max(1, vocab // 2)]
    ids = case.draw(getattr(ops, "sampling.top_k_from_probs"), case.numbers(k, "int32"))
    case.check(ids, lambda row: kept_by_count(case.probs[row], k[row]))


@pytest.mark.parametrize("vocab", VOCABS)
def test_top_p(ops, device, rng, vocab):
    """No token but the best, some, and all."""
    case = Case(rng, device, vocab)
    p = [0.0, 0.1, 0.5, 0.9, 1.0, 0.999]
    ids = case.draw(getattr(ops, "sampling.top_p_from_probs"), case.numbers(p, "float32"))
    case.check(ids, lambda row: kept_by_sum(case.probs[row], p[row]))


@pytest.mark.parametrize("vocab", VOCABS)
def test_min_p(ops, device, rng, vocab):
    """Parts of the largest probability, all of it, and more, which keeps the best."""
    case = Case(rng, device, vocab)
    p = [0.0, 0.05, 0.3, 0.9, 1.0, 3.0]
    ids = case.draw(getattr(ops, "sampling.min_p_from_probs"), case.numbers(p, "float32"))
    case.check(ids, lambda row: kept_by_part(case.probs[row], min(p[row], 1.0)))


@pytest.mark.parametrize("joint", [0, 1])
@pytest.mark.parametrize("vocab", VOCABS)
def test_top_k_and_top_p(ops, device, rng, vocab, joint):
    """Of what top-k leaves, and of the whole row."""
    case = Case(rng, device, vocab)
    k, p = [1, 5, 20, 0, vocab, 300], [0.5, 0.9, 0.3, 0.8, 0.7, 0.2]
    filters = case.numbers(k, "int32"), case.numbers(p, "float32"), joint
    ids = case.draw(getattr(ops, "sampling.top_k_top_p_from_probs"), *filters)

    def kept(index: int) -> tuple[np.ndarray, np.ndarray]:
        row = case.probs[index]
        by_count, _ = kept_by_count(row, k[index])
        if joint:
            bounds = kept_by_sum(row, p[index])
            return bounds[0] & by_count, bounds[1] & by_count
        left = np.where(by_count, row, 0).astype(np.float64)
        return kept_by_sum((left / left.sum()).astype(np.float32), p[index])

    case.check(ids, kept)


@pytest.mark.parametrize("name", ["top_k", "top_p"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_renorm(ops, device, rng, vocab, name):
    """What is kept over its sum, and zeros."""
    probs = rows_of(rng, 6, vocab)
    kept = {
        "top_k": np.array([1, 2, 5, 0, vocab, max(1, vocab // 2)], np.int32),
        "top_p": np.array([0.0, 0.1, 0.5, 0.9, 1.0, 0.999], np.float32),
    }[name]
    out = poisoned(probs.shape, "float32", device)
    args = {"probs": to_device(probs, device), "kept": to_device(kept, device)}
    with unchanged(args):
        getattr(ops, f"sampling.{name}_renorm_probs")(
            *(x.tensor for x in args.values()), out.tensor
        )
        got = out.numpy()
    out.assert_guards_intact("out")
    rule = kept_by_count if name == "top_k" else kept_by_sum
    for row, result, number in zip(probs, got, kept, strict=True):
        at_least, at_most = rule(row, number)
        assert (result[at_least] > 0).all()
        assert not result[~at_most].any()
        chosen = result > 0
        exact = np.where(chosen, row, 0).astype(np.float64)
        np.testing.assert_allclose(result, exact / exact.sum(), rtol=2e-6)


@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("vocab", [31, 8193])
def test_renorm_by_both(device, rng, vocab, joint):
    """Top-k, then a part of what it leaves or of the row."""
    probs = rows_of(rng, 6, vocab)
    k = np.array([1, 5, 20, 0, vocab, 300], np.int32)
    p = np.array([0.5, 0.9, 0.3, 0.8, 0.7, 0.2], np.float32)
    held = [to_device(x, device).tensor for x in (probs, k, p)]
    got = typed.top_k_top_p_renorm_probs(*held, joint=joint)
    synchronize(device)
    for row, result, count, part in zip(probs, got.numpy(), k, p, strict=True):
        by_count, _ = kept_by_count(row, count)
        left = np.where(by_count, row, 0)
        given = row if joint else (left / left.sum(dtype=np.float64)).astype(np.float32)
        at_least, at_most = (x & by_count for x in kept_by_sum(given, part))
        assert (result[at_least] > 0).all()
        assert not result[~at_most].any()
        exact = np.where(result > 0, row, 0).astype(np.float64)
        np.testing.assert_allclose(result, exact / exact.sum(), rtol=2e-6)


def test_rows_without_probability(ops, device):
    """Zeros, NaN and negative numbers: no token, and no probability."""
    probs = np.zeros((3, 40), np.float32)
    probs[1] = np.nan
    probs[2] = -1
    held = to_device(probs, device)
    top_p = to_device(np.full(3, 0.5, np.float32), device)
    numbers = [np.array(x, d) for x, d in (([0.5, 0.1, 0.9], np.float32), ([0, 1, 2], np.int32))]
    ids = poisoned((3,), "int32", device)
    getattr(ops, "sampling.top_p_from_probs")(
        held.tensor, *(to_device(x, device).tensor for x in numbers), top_p.tensor, ids.tensor
    )
    np.testing.assert_array_equal(ids.numpy(), [-1, -1, -1])
    out = poisoned(probs.shape, "float32", device)
    getattr(ops, "sampling.top_p_renorm_probs")(held.tensor, top_p.tensor, out.tensor)
    assert not out.numpy().any()


def test_a_nan_is_no_token(ops, device):
    """NaN among probabilities counts as 0."""
    probs = np.array([[np.nan, 0.25, np.nan, 0.75]], np.float32)
    uniform = np.array([0.2, 0.5], np.float32)
    ids = poisoned((2,), "int32", device)
    index, top_p = np.zeros(2, np.int32), np.ones(1, np.float32)
    args = (to_device(x, device).tensor for x in (probs, uniform, index, top_p))
    getattr(ops, "sampling.top_p_from_probs")(*args, ids.tensor)
    np.testing.assert_array_equal(ids.numpy(), [1, 3])


def sorted_rows(rng: Any, vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows, the same in descending order, and where their elements were."""
    probs = rows_of(rng, 6, vocab)
    order = np.argsort(-probs, axis=1, kind="stable").astype(np.int32)
    return probs, np.take_along_axis(probs, order, 1), order


@pytest.mark.parametrize("vocab", VOCABS)
def test_sorted(ops, device, rng, vocab):
    """Draws in the order of sorted rows, and their renormalisation, against running sums."""
    probs, ordered, order = sorted_rows(rng, vocab)
    top_p = np.array([0.0, 0.3, 0.9, 1.0, 0.99, 0.5], np.float32)
    top_k = np.array([1, vocab, 7, vocab, 40, 0], np.int32)
    uniform = rng.random(24).astype(np.float32)
    indices = rng.integers(0, 6, 24).astype(np.int32)
    held = [to_device(x, device) for x in (ordered, order, top_p, top_k, uniform, indices)]
    ids = poisoned((24,), "int32", device)
    getattr(ops, "sampling.sample_from_sorted")(*(x.tensor for x in held), ids.tensor)
    got = ids.numpy()
    sums = ordered.astype(np.float64).cumsum(1)
    lengths = []
    for row in range(6):
        most = min(max(top_k[row], 1), vocab)
        ways = []
        for slack in (-TOLERANCE, TOLERANCE):
            reached = np.flatnonzero(sums[row, :most] >= np.float64(top_p[row]) + slack)
            ways.append(int(reached[0]) + 1 if len(reached) else most)
        lengths.append(ways)
    for i, row in enumerate(indices):
        at = int(np.flatnonzero(order[row] == got[i])[0])
        assert at < lengths[row][1], f"sample {i} is at {at}, behind what is kept"
        fits = []
        for length in range(lengths[row][0], lengths[row][1] + 1):
            number = uniform[i] * sums[row, length - 1]
            before = sums[row, at] - ordered[row, at]
            fits.append(before <= number + 4e-6 and sums[row, at] > number - 4e-6)
        assert any(fits), f"sample {i} is at {at}"
    out = poisoned(probs.shape, "float32", device)
    getattr(ops, "sampling.renorm_from_sorted")(
        to_device(probs, device).tensor, *(held[j].tensor for j in (0, 2, 3)), out.tensor
    )
    for row, result in enumerate(out.numpy()):
        least, most = (ordered[row, length - 1] for length in lengths[row][::-1])
        assert (result[(probs[row] >= most) & (probs[row] > 0)] > 0).all()
        assert not result[probs[row] < least].any()
        exact = np.where(result > 0, probs[row], 0).astype(np.float64)
        np.testing.assert_allclose(result, exact / exact.sum(), rtol=2e-6)


@pytest.mark.parametrize("active", [1.0, 0.6])
@pytest.mark.parametrize("vocab", VOCABS)
def test_softmax(ops, device, rng, vocab, active):
    """Temperatures, none of them that is greedy, and tokens that are not in use."""
    logits = (rng.standard_normal((5, vocab)) * 8).astype(np.float32)
    logits[1, :: max(1, vocab // 3)] = 40
    size = max(1, int(active * vocab))
    temperature = np.array([1.0, 0.0, 0.3, 2.5, 1e-6], np.float32)
    out = poisoned(logits.shape, "float32", device)
    getattr(ops, "sampling.softmax")(
        to_device(logits, device).tensor, to_device(temperature, device).tensor, size, out.tensor
    )
    got = out.numpy()
    assert not got[:, size:].any()
    for row, t, result in zip(logits[:, :size].astype(np.float64), temperature, got, strict=True):
        top = row.max()
        weights = np.exp((row - top) / t) if t > 1e-5 else (row == top).astype(float)
        exact = weights / weights.sum()
        np.testing.assert_allclose(result[:size], exact, rtol=3e-5, atol=1e-9)


def verified(
    draft: np.ndarray, ids: np.ndarray, target: np.ndarray, uniform: np.ndarray
) -> tuple[int, np.ndarray]:
    """How many drafts are accepted, and the running sums that the last token is drawn by."""
    for at, token in enumerate(ids):
        if not np.float32(uniform[at]) * draft[at, token] < target[at, token]:
            rest = np.maximum(target[at].astype(np.float64) - draft[at], 0)
            return at, (rest if rest.sum() > 0 else target[at]).cumsum()
    return len(ids), target[len(ids)].astype(np.float64).cumsum()


@pytest.mark.parametrize("drafts", [0, 1, 4])
@pytest.mark.parametrize("vocab", [2, 100, 32000])
def test_chain_speculative(ops, device, rng, vocab, drafts):
    """Drafts that are good, bad and impossible, one chain at a time."""
    batch = 9
    draft, target = (
        rng.dirichlet(np.full(vocab, 0.3), (batch, n)).astype(np.float32)
        for n in (drafts, drafts + 1)
    )
    target[:4, :drafts] = draft[:4]
    ids = rng.integers(0, vocab, (batch, drafts)).astype(np.int32)
    for b in range(4):
        ids[b] = draft[b].argmax(-1) if drafts else ids[b]
    uniform = rng.random((batch, drafts + 1)).astype(np.float32)
    held = {
        name: to_device(x, device)
        for name, x in (("draft", draft), ("ids", ids), ("target", target), ("uniform", uniform))
    }
    outs = poisoned((batch, drafts + 1), "int32", device), poisoned((batch,), "int32", device)
    with unchanged(held):
        getattr(ops, "sampling.chain_speculative")(
            *(x.tensor for x in held.values()), *(x.tensor for x in outs)
        )
        tokens, counts = (x.numpy() for x in outs)
    for out in outs:
        out.assert_guards_intact()
    for b in range(batch):
        count, sums = verified(draft[b], ids[b], target[b], uniform[b])
        assert counts[b] == count
        np.testing.assert_array_equal(tokens[b, :count], ids[b, :count])
        np.testing.assert_array_equal(tokens[b, count + 1 :], -1)
        token, number = tokens[b, count], uniform[b, drafts] * sums[-1]
        assert (sums[token - 1] if token else 0) <= number + 4e-6
        assert sums[token] > number - 4e-6


def test_speculation_keeps_the_distribution(device):
    """The first token that comes out is distributed as the target says."""
    rng = np.random.default_rng(3)
    batch, vocab = 20000, 5
    draft_row, target_row = np.array([0.6, 0.2, 0.1, 0.1, 0]), np.array([0.1, 0.3, 0.2, 0, 0.4])
    draft = np.tile(draft_row.astype(np.float32), (batch, 1, 1))
    target = np.tile(target_row.astype(np.float32), (batch, 2, 1))
    ids = rng.choice(vocab, (batch, 1), p=draft_row).astype(np.int32)
    uniform = rng.random((batch, 2)).astype(np.float32)
    held = [to_device(x, device).tensor for x in (draft, ids, target, uniform)]
    out, accepted = typed.chain_speculative(*held)
    synchronize(device)
    found = np.bincount(out.numpy()[:, 0], minlength=vocab) / batch
    np.testing.assert_allclose(found, target_row, atol=0.02)
    both = np.minimum(draft_row, target_row).sum()
    np.testing.assert_allclose(accepted.numpy().mean(), both, atol=0.02)


def test_typed(device, rng):
    """Names and results that are allocated are those of the functions."""
    case = Case(rng, device, 50)
    drawn = [x.tensor for x in case.held.values()]
    k, p = case.numbers([3] * 6, "int32").tensor, case.numbers([0.7] * 6, "float32").tensor
    rules = {
        "top_k": ((k,), lambda row: kept_by_count(case.probs[row], 3)),
        "top_p": ((p,), lambda row: kept_by_sum(case.probs[row], 0.7)),
        "min_p": ((p,), lambda row: kept_by_part(case.probs[row], 0.7)),
    }
    for name, (filters, kept) in rules.items():
        ids = getattr(typed, f"{name}_from_probs")(*drawn, *filters)
        synchronize(device)
        case.check(ids.numpy(), kept)
    typed.top_k_top_p_from_probs(*drawn, k, p, joint=True)
    for renorm, kept in ((typed.top_k_renorm_probs, k), (typed.top_p_renorm_probs, p)):
        got = renorm(drawn[0], kept)
        synchronize(device)
        np.testing.assert_allclose(got.numpy().sum(1), 1, rtol=1e-5)
    probs = typed.softmax(drawn[0], p, active_vocab_size=40)
    synchronize(device)
    assert not probs.numpy()[:, 40:].any()
    _, ordered, order = sorted_rows(rng, 50)
    ordered, order = (to_device(x, device).tensor for x in (ordered, order))
    ids = typed.sample_from_sorted(ordered, order, p, k, *drawn[1:])
    renormed = typed.renorm_from_sorted(ordered, ordered, p, k)
    synchronize(device)
    assert (np.isin(ids.numpy(), order.numpy()[:, :3])).all()
    assert ((renormed.numpy() > 0).sum(1) >= 1).all()


def test_rows_that_do_not_exist(ops, device, rng, monkeypatch):
    """Refused where the host can read the indices, or is asked to; else -1."""
    case = Case(rng, device, 20, samples=3)
    case.held["sample_indices"] = to_device(np.array([0, 6, -1], np.int32), device)
    args = getattr(ops, "sampling.top_p_from_probs"), case.numbers([1.0] * 6, "float32")
    if is_cuda(device):
        ids = case.draw(*args)
        np.testing.assert_array_equal(ids[1:], [-1, -1])
        monkeypatch.setenv("TVM_FLASHINFER_CHECK", "1")
    with refused(ValueError, r"sample_indices\[1\]` is 6"):
        case.draw(*args)

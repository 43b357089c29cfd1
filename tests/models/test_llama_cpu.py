"""The demo's model on CPU in float32: our cache against TVM's, and against itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from examples.llama.generate import Session, greedy


@pytest.fixture(scope="module")
def model(load_model: Callable[[str, str], Any]) -> Any:
    return load_model("cpu", "float32")


def run_greedy(model: Any, kind: str, prompt: np.ndarray, count: int) -> list[int]:
    return list(greedy(Session(model, kind), prompt, count))


def test_greedy_tokens_equal_those_of_tvms_cache(model: Any, tokens: np.ndarray) -> None:
    """64 tokens after a prompt of several pages."""
    ours = run_greedy(model, "flashinfer", tokens, 64)
    assert len(ours) == 64
    assert ours == run_greedy(model, "tir", tokens, 64)


def test_chunked_prefill_gives_the_same_logits(model: Any, tokens: np.ndarray) -> None:
    """A prompt in steps of 7 tokens, which cut pages anywhere, equals the prompt at once."""
    logits = []
    for chunk in (512, 7):
        session = Session(model, "flashinfer", prefill_chunk_size=chunk)
        session.add(0)
        logits.append(session.prefill({0: tokens}, all_positions=True)[0])
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=2e-3)


def test_fork_pop_and_remove_give_the_same_logits(model: Any, tokens: np.ndarray) -> None:
    """A sequence that was forked, cut back and refilled equals one that was written straight."""
    rest = tokens[20:30]
    straight = Session(model, "flashinfer")
    straight.add(0)
    straight.prefill({0: tokens[:20]})
    expected = straight.prefill({0: rest})[0]

    session = Session(model, "flashinfer")
    session.add(0)
    session.prefill({0: tokens[:20]})
    session.fork(0, 1)  # inside a page
    session.fork(0, 2, 16)  # at the end of a page
    session.prefill({2: tokens[16:20]})
    session.prefill({0: tokens[30:35]})  # the parent goes its own way
    session.pop(0, 5)
    got = session.prefill({0: rest, 1: rest, 2: rest})
    for seq_id in range(3):
        np.testing.assert_allclose(got[seq_id], expected, rtol=0, atol=2e-3)

    session.remove(0)
    after = {seq_id: session.decode({seq_id: int(tokens[30])})[seq_id] for seq_id in (1, 2)}
    expected = straight.decode({0: int(tokens[30])})[0]
    for logits in after.values():
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-3)


def test_batched_decode_equals_single(model: Any, tokens: np.ndarray) -> None:
    """Sequences of different lengths decoded together and one by one."""
    lengths = {0: 5, 1: 17, 2: 32}
    together = Session(model, "flashinfer")
    for seq_id in lengths:
        together.add(seq_id)
    together.prefill({seq_id: tokens[:length] for seq_id, length in lengths.items()})
    batch = together.decode({seq_id: int(tokens[length]) for seq_id, length in lengths.items()})
    for seq_id, length in lengths.items():
        alone = Session(model, "flashinfer")
        alone.add(0)
        alone.prefill({0: tokens[:length]})
        single = alone.decode({0: int(tokens[length])})[0]
        np.testing.assert_allclose(batch[seq_id], single, rtol=0, atol=2e-3)

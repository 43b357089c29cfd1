"""A model whose sequences slide as a whole, with attention sinks, as Mistral's are served."""

from __future__ import annotations

import numpy as np
import pytest
from reference import LlamaReference
from serving import Beside, Served

from tvm_flashinfer.relax import read_report

WINDOW, SINK = 32, 4


def slide_along(sides: Beside, vocab_size: int) -> None:
    """Prefill in chunks, then decode the greedy tokens of the reference.

    Sequences have different windows, one has none, and two share pages.
    """
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, vocab_size, n) for n in (120, 9, 47, 70)]
    sides.add(0)
    sides.add(1)
    sides.step({0: prompts[0][:20], 1: prompts[1]})
    sides.fork(0, 2)
    sides.add(3)
    sides.slide(0, WINDOW, SINK)
    sides.slide(1, WINDOW, SINK)
    sides.slide(2, 27, 0)
    # Sequence 3 keeps everything.
    sides.step({0: prompts[0][20:33], 2: prompts[2][:40]})  # over the window, and beyond it
    sides.step({0: prompts[0][33:90], 3: prompts[3]})
    last = sides.step({0: prompts[0][90:], 2: prompts[2][40:]})
    tokens = {seq: int(logits[-1].argmax()) for seq, logits in last.items()}
    tokens |= {1: 5, 3: 6}
    for _ in range(40):
        logits = sides.step({seq: [token] for seq, token in tokens.items()})
        tokens = {seq: int(rows[-1].argmax()) for seq, rows in logits.items()}
    sides.step({1: prompts[0][:3], 0: prompts[0][:11]})  # chunks on what slides


def test_windows_with_sinks(tiny) -> None:
    """Every logit of every token, and no further from float64 than with TVM's kernels."""
    errors = {}
    for kind in ("flashinfer", "tir"):
        reference = LlamaReference(tiny.config, tiny.weights)
        sides = Beside(Served(tiny.model, kind, slides=True), reference)
        slide_along(sides, tiny.config.vocab_size)
        assert [reference.length(seq) for seq in range(4)] == [WINDOW, WINDOW, 27, 110]
        errors[kind] = sides.error
    assert errors["flashinfer"] <= tiny.tolerance, errors
    assert errors["flashinfer"] <= 2 * errors["tir"] + tiny.tolerance / 10, errors


def greedy(side: Served | LlamaReference, prompt: np.ndarray, count: int) -> list[int]:
    """Continue a prompt that is given in chunks of 24 tokens."""
    side.add(0)
    side.slide(0, WINDOW, SINK)
    for start in range(0, len(prompt), 24):
        logits = side.step({0: prompt[start : start + 24]})[0]
    tokens = [int(logits[-1].argmax())]
    while len(tokens) < count:
        tokens.append(int(side.step({0: tokens[-1:]})[0][-1].argmax()))
    return tokens


def test_greedy_tokens(tiny) -> None:
    """80 tokens over a window of 32, each side going on from its own: an error would stay."""
    if tiny.dtype != "float32":
        pytest.skip("float16 parts two right runs sooner or later")
    prompt = np.random.default_rng(4).integers(0, tiny.config.vocab_size, 100)
    expected = greedy(LlamaReference(tiny.config, tiny.weights), prompt, 80)
    assert len(set(expected)) > 20
    assert greedy(Served(tiny.model, slides=True), prompt, 80) == expected


def test_a_fork_beyond_the_sinks_is_refused(tiny) -> None:
    """By TVM's cache, which goes on to work."""
    served, reference = Served(tiny.model, slides=True), LlamaReference(tiny.config, tiny.weights)
    sides = Beside(served, reference)
    sides.add(0)
    sides.slide(0, WINDOW, SINK)
    sides.step({0: range(20)})
    with pytest.raises(Exception, match=r"(?i)sink|sliding"):
        served.fork(0, 1, 10)
    sides.step({0: range(20)})
    assert sides.error <= tiny.tolerance


def test_report_names_the_kernels(tiny) -> None:
    """Of the slots that a cache calls whose sequences slide, on CPU and on CUDA."""
    rows = {row.slot: row for row in read_report(tiny.model).rows}
    for slot in ("prefill_ragged", "prefill_sliding_window", "decode_sliding_window"):
        row = rows[slot]
        assert "flashinfer.bind_attention_" in " ".join((row.kernel, *row.reasons)), row

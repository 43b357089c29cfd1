"""Gemma 3 270M with its own weights: windows in five layers of six, and two bases of RoPE."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tvm

from examples.llama.compile import compile_model, default_target, library_info
from examples.llama.generate import Model, Session
from examples.llama.progress import Progress

gemma3_weights = pytest.importorskip("examples.gemma3.weights")

from gemma3_reference import forward  # noqa: E402

from examples.gemma3.tokenizer import GGUFSentencePiece  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

#: Tokens of the long prompt; they go beyond the window, and chunks of 200 cross it.
LONG, CHUNK, NUM_TOKENS = 640, 200, 24


class Gemma(NamedTuple):
    """The file, its tokenizer, and its tensors, each dequantised once."""

    gguf: Any
    tokenizer: GGUFSentencePiece
    tensor: Callable[[str], np.ndarray]

    def reference(self, ids: Sequence[int], rows: Sequence[int], window: int = 512) -> np.ndarray:
        """Logits (rows, vocab_size) in NumPy."""
        config = self.gguf.config
        return forward(
            self.tensor,
            ids,
            rows,
            num_layers=config.num_hidden_layers,
            num_heads=config.num_attention_heads,
            head_dim=config.head_dim,
            window=window,
            eps=config.rms_norm_eps,
        )


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Gemma:
    """Gemma 3 270M."""
    try:
        path = gemma3_weights.assemble_default_model(tmp_path_factory.mktemp("gemma3"))
    except FileNotFoundError as error:
        pytest.skip(str(error))
    gguf = gemma3_weights.Gemma3GGUF(path)
    gguf.tensor = functools.cache(gguf.tensor)
    return Gemma(gguf, GGUFSentencePiece(gguf.metadata), gguf.tensor)


@pytest.fixture(scope="module")
def load(
    tvm_027: None, gemma: Gemma, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Model]:
    """Compile and load the model for a device, once."""

    @functools.cache
    def loaded(device: str) -> Model:
        dtype = "float32" if device == "cpu" else "bfloat16"
        folder = tmp_path_factory.mktemp("gemma3")
        library = compile_model(gemma.gguf.config, default_target(device), dtype, folder)
        names = library_info(library)["params"]
        weights = gemma.gguf.load(names, dtype, Progress(enabled=False))
        return Model(library, weights, tvm.device(device, 0))

    return loaded


@pytest.fixture
def model(device: Any, load: Callable[[str], Model]) -> Model:
    """The model on CPU in float32, and on CUDA in bfloat16."""
    is_cpu = device.dlpack_device_type() == tvm.cpu().dlpack_device_type()
    return load("cpu" if is_cpu else "cuda")


@pytest.fixture(scope="module")
def prompts(gemma: Gemma) -> dict[int, list[int]]:
    """One that is longer than the window, and one that stays inside it."""
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    text = text[text.index("Apache License") :]
    return {0: gemma.tokenizer.encode(text)[:LONG], 1: gemma.tokenizer.encode("One, two, three,")}


def decode(
    model: Model,
    kind: str,
    prompts: Mapping[int, Sequence[int]],
    follow: Mapping[int, Sequence[int]] | None = None,
    chunk: int = CHUNK,
) -> tuple[dict[int, list[int]], dict[int, np.ndarray]]:
    """Decode all prompts together: greedily, or the tokens of `follow`.

    Returns
    -------
    tokens, logits : dict
        The tokens of each sequence, and the logits that each of them came from.
    """
    session = Session(model, kind, prefill_chunk_size=chunk)
    for seq in prompts:
        session.add(seq)
    steps = [session.prefill(prompts)]
    tokens: dict[int, list[int]] = {seq: [] for seq in prompts}
    while True:
        for seq, logits in steps[-1].items():
            number = len(tokens[seq])
            tokens[seq].append(int(logits.argmax()) if follow is None else follow[seq][number])
        if len(steps) == NUM_TOKENS:
            return tokens, {seq: np.array([step[seq] for step in steps]) for seq in prompts}
        steps.append(session.decode({seq: own[-1] for seq, own in tokens.items()}))


def test_text_is_that_of_the_reference(
    model: Model, gemma: Gemma, prompts: dict[int, list[int]]
) -> None:
    """A prompt in chunks over the window, and text behind it, beside a sequence in its window."""
    tokens, ours = decode(model, "flashinfer", prompts)
    _, tvms = decode(model, "tir", prompts, follow=tokens)
    for seq, prompt in prompts.items():
        text = [*prompt, *tokens[seq][:-1]]
        rows = range(len(prompt) - 1, len(text))
        expected = gemma.reference(text, rows)
        error, tvms_error = (np.abs(got[seq] - expected).max() for got in (ours, tvms))
        print(f"sequence {seq}: error {error:.2g}, with TVM's kernels {tvms_error:.2g}")
        assert error <= (1e-3 if model.info["dtype"] == "float32" else 1.5 * tvms_error)
        # A token that is not the reference's own is as likely, up to the error.
        best = np.take_along_axis(expected, np.array(tokens[seq])[:, None], -1)[:, 0]
        assert (expected.max(-1) - best <= 2 * error).all()
        if seq == 0:
            # The window can be seen in the logits; without it they are others.
            wide = gemma.reference(text, rows[:1], window=len(text))
            assert np.abs(wide - expected[:1]).max() > 20 * error


def test_one_chunk_over_the_window(
    model: Model, gemma: Gemma, prompts: dict[int, list[int]]
) -> None:
    """The whole prompt at once, which TVM's own kernels would show too much of, and text behind it.

    It is as far from the reference as in chunks inside the window.
    """
    tokens, chunked = decode(model, "flashinfer", prompts)
    _, whole = decode(model, "flashinfer", prompts, follow=tokens, chunk=1024)
    text = [*prompts[0], *tokens[0][:-1]]
    expected = gemma.reference(text, range(LONG - 1, len(text)))
    error, chunked_error = (np.abs(got[0] - expected).max() for got in (whole, chunked))
    print(f"error {error:.2g}, in chunks of {CHUNK} {chunked_error:.2g}")
    assert error <= (1e-3 if model.info["dtype"] == "float32" else 1.5 * chunked_error)
    np.testing.assert_allclose(whole[1], chunked[1], atol=2 * error)


def test_the_text_is_known(model: Model, gemma: Gemma) -> None:
    """The model knows things by heart, so that its tokens are those of its tokenizer."""
    prompt = {0: gemma.tokenizer.encode("Monday, Tuesday, Wednesday,")}
    tokens, _ = decode(model, "flashinfer", prompt)
    assert gemma.tokenizer.decode(tokens[0]).startswith(" Thursday, Friday, Saturday, Sunday")


def test_tokens_of_the_tokenizer(gemma: Gemma) -> None:
    """Merges by score, runs of spaces and lines that stand alone, and bytes."""
    encode = gemma.tokenizer.encode
    assert encode("Hello, world!") == [2, 9259, 236764, 1902, 236888]
    assert encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    for text in ("  two  spaces\n\n\nline", "na\u00efve \u65e5\u672c", "\U00013000 is no token"):
        assert gemma.tokenizer.decode(encode(text)) == text
    pieces = gemma.gguf.metadata["tokenizer.ggml.tokens"]
    assert [pieces[i] for i in encode("a  b\n\n\U00013000")[2:]] == [
        "  ", "b", "\n\n", "<0xF0>", "<0x93>", "<0x80>", "<0x80>",
    ]  # fmt: skip

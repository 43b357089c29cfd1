"""The step runner: a whole model beside float64, beside TVM's cache, and replayed on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from reference import LlamaReference

from examples.llama.compile import default_target, library_info
from examples.llama.generate import Session, greedy
from examples.llama.steps import StepSession, compile_steps
from tvm_flashinfer import call_counts, reset_call_counts
from tvm_flashinfer.steps import OutOfPagesError, StepRunner

LAYERS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the libraries of this file are."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture
def make(tiny: Any, folder: Path) -> Callable[..., StepRunner]:
    """Make a runner of the smallest Llama; its pages hold NaN where no token is."""

    def runner(cuda_graph: bool = True, **settings: Any) -> StepRunner:
        device = tiny.model.device
        target = default_target("cpu" if device.dlpack_device_type() == 1 else "cuda")
        library = compile_steps(
            tiny.config, target, tiny.dtype, folder, (1, 4), cuda_graph=cuda_graph
        )
        weights = [tiny.model.params[name] for name in library_info(library)["params"]]
        settings = {"num_pages": 20, "max_seq_len": 128, "prefill_chunk": 13} | settings
        made = StepRunner(library, device, weights, **settings)
        for pages in made.pages:
            nan = np.full(pages.shape, np.nan, np.float32)
            pages.copyfrom(nan.astype(tiny.weights["embed.weight"].dtype))
        return made

    return runner


class Beside:
    """A runner and the model in float64, which get the same tokens."""

    def __init__(self, runner: StepRunner, tiny: Any) -> None:
        self.runner, self.tolerance = runner, tiny.tolerance
        self.reference = LlamaReference(tiny.config, tiny.weights)

    def add(self, seq: int) -> None:
        """Start a sequence."""
        for side in (self.runner, self.reference):
            side.add(seq)

    def remove(self, seq: int) -> None:
        """End one."""
        for side in (self.runner, self.reference):
            side.remove(seq)

    def pop(self, seq: int, count: int) -> None:
        """Drop tokens."""
        for side in (self.runner, self.reference):
            side.pop(seq, count)

    def prefill(self, tokens: dict[int, Any]) -> None:
        """Append prompts, and compare the last logits of each."""
        self._check(tokens, self.runner.prefill(tokens).numpy())

    def decode(self, tokens: dict[int, int]) -> None:
        """Append a token to each, and compare."""
        got = self.runner.decode(tokens).numpy()
        self._check({seq: [token] for seq, token in tokens.items()}, got)

    def _check(self, tokens: dict[int, Any], got: np.ndarray) -> None:
        expected = self.reference.step(tokens)
        assert got.shape == (len(tokens), 96)
        for seq, logits in zip(tokens, got, strict=True):
            np.testing.assert_allclose(logits, expected[seq][-1], rtol=0, atol=self.tolerance)


def serve(sides: Any, rng: np.random.Generator) -> None:
    """Prompts in chunks, decode over page boundaries, sequences that come, go and shrink."""
    sides.add(0)
    sides.add(5)
    sides.prefill({0: rng.integers(0, 96, 30), 5: rng.integers(0, 96, 3)})
    for token in range(20):  # 30 to 50 and 3 to 23 tokens: both begin pages
        sides.decode({5: token, 0: token + 1})
    sides.add(2)
    sides.prefill({2: rng.integers(0, 96, 16)})
    sides.decode({2: 1, 0: 2, 5: 3})
    sides.remove(0)
    for token in range(18):
        sides.decode({2: token})  # another batch size
        sides.decode({5: token, 2: 95 - token})
    sides.pop(5, 9)
    sides.prefill({5: rng.integers(0, 96, 17)})
    sides.add(0)
    sides.prefill({0: [4]})
    sides.decode({0: 1, 5: 2, 2: 3})


def test_logits(tiny: Any, make: Callable[..., StepRunner]) -> None:
    """Against float64, over pages that hold NaN where no token is."""
    sides = Beside(make(), tiny)
    serve(sides, np.random.default_rng(0))
    for seq in (0, 2, 5):
        sides.remove(seq)
    assert sides.runner.table.num_free == 20


@pytest.mark.parametrize("num_pages", [1, 64])
def test_rows_of_no_sequence(tiny: Any, make: Callable[..., Any], num_pages: int) -> None:
    """Three rows of four without a sequence write nothing, also where they could: into page 0."""
    runner = make(num_pages=num_pages)
    sides = Beside(runner, tiny)
    for seq in (0, 1) if num_pages > 1 else (0,):
        sides.add(seq)
        sides.prefill({seq: [1, 2, 3]})
    tokens = dict.fromkeys(range(2 if num_pages > 1 else 1), 7)
    sides.decode(tokens)
    stored = np.isfinite(runner.pages[0].numpy().astype(np.float32))
    assert stored[:, :, 0, :, 0].sum() == 2 * 4 * len(tokens)


def test_refusals(tiny: Any, make: Callable[..., StepRunner]) -> None:
    """Each says what there is and what to do; the sequences are as they were."""
    sides = Beside(make(num_pages=5, max_seq_len=48), tiny)
    runner = sides.runner
    for seq in range(5):
        sides.add(seq)
    sides.prefill({0: range(31), 1: range(16)})
    with pytest.raises(ValueError, match=r"5 sequences, and the batch is full with 4.*batch_sizes"):
        runner.decode(dict.fromkeys(range(5), 1))
    for call in (runner.decode, runner.prefill):
        with pytest.raises(ValueError, match="got no sequences"):
            call({})
    with pytest.raises(ValueError, match=r"no sequence 9; there are \[0, 1, 2, 3, 4\]"):
        runner.decode({0: 1, 9: 1})
    with pytest.raises(ValueError, match=r"no tokens for sequences \[2\]"):
        runner.prefill({1: [1], 2: []})
    with pytest.raises(ValueError, match=r"would have 49; .* room for 48"):
        runner.prefill({0: range(18)})
    with pytest.raises(OutOfPagesError, match="4 pages more, and 2 of 5 are free"):
        runner.prefill({1: [1], 2: [1], 3: range(17)})
    sides.decode({0: 1, 1: 2})  # sequence 1 begins a page
    sides.decode({0: 1})  # the last page
    with pytest.raises(OutOfPagesError, match="1 pages more, and 0 of 5 are free"):
        runner.decode({0: 1, 4: 1})
    sides.remove(1)
    sides.decode({0: 3, 4: 4})


def test_a_library_without_steps(tiny: Any) -> None:
    with pytest.raises(ValueError, match=r"no function 'flashinfer_steps'.*export_steps"):
        StepRunner(tiny.model.library, tiny.model.device, [], num_pages=1, max_seq_len=1)


def test_a_failed_call_appends_nothing(tiny: Any, make: Callable[..., StepRunner]) -> None:
    """Here one without its weights."""
    runner = make()
    runner.add(0)
    weights = runner._constants
    runner._constants = (weights[0], weights[1][:1])
    for call in (lambda: runner.decode({0: 1}), lambda: runner.prefill({0: range(20)})):
        with pytest.raises((ValueError, RuntimeError, IndexError, TypeError)):
            call()
        assert runner.table.length(0) == 0
        assert runner.table.num_free == 20


@pytest.mark.cuda
def test_replays_equal_eager_steps(cuda: Any, tiny: Any, make: Callable[..., StepRunner]) -> None:
    """The same bits, from two captures in all: one for each batch size."""
    replayed, eager = make(), make(cuda_graph=False)

    class Both:
        """Both runners, compared after each step."""

        def __getattr__(self, name: str) -> Any:
            def call(*args: Any) -> None:
                got, expected = (getattr(side, name)(*args) for side in (replayed, eager))
                if got is not None:
                    np.testing.assert_array_equal(got.numpy(), expected.numpy())

            return call

    for runner in (replayed, eager):
        reset_call_counts(runner.library)
    serve(Both(), np.random.default_rng(1))
    counts = [
        call_counts(runner.library)["cuda"]["attention_paged_decode"]
        for runner in (replayed, eager)
    ]
    # The first call of each of two functions runs its launches once, and once more to capture them.
    assert counts == [2 * 2 * LAYERS, (20 + 1 + 18 + 18 + 1) * LAYERS]


@pytest.mark.cuda
def test_two_runners_of_one_library(cuda: Any, tiny: Any, make: Callable[..., Any]) -> None:
    """Each replays a graph of its own, over its own pages."""
    first, second = Beside(make(), tiny), Beside(make(), tiny)
    for sides, token in ((first, 3), (second, 50)):
        sides.add(0)
        sides.prefill({0: range(token, token + 10)})
    for token in range(8):
        first.decode({0: token})
        second.decode({0: 95 - token})


@pytest.mark.cuda
def test_steps_that_nobody_waits_for(cuda: Any, tiny: Any, make: Callable[..., Any]) -> None:
    """The inputs of a step may be written while earlier ones run."""
    runs = []
    for wait in (True, False):
        runner = make(max_seq_len=320, num_pages=64)
        for seq in range(3):
            runner.add(seq)
        runner.prefill({seq: range(seq, seq + 9) for seq in range(3)})
        for token in range(200):
            logits = runner.decode({seq: (token * 7 + seq) % 96 for seq in range(3)})
            if wait:
                cuda.sync()
        runs.append(logits.numpy())
    np.testing.assert_array_equal(*runs)


def test_greedy_tokens_of_a_real_model(
    load_model: Callable[[str, str], Any], gguf_model: Any, tokens: np.ndarray, folder: Path
) -> None:
    """24 tokens after a prompt of several pages, on CPU in float32: those of TVM's cache."""
    model = load_model("cpu", "float32")
    library = compile_steps(gguf_model.config, default_target("cpu"), "float32", folder, (1,))
    steps = StepSession(library, model.params, tvm.cpu(), prefill_chunk_size=20)
    expected = list(greedy(Session(model, "flashinfer"), tokens, 24))
    assert list(greedy(steps, tokens, 24)) == expected

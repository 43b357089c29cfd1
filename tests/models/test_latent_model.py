"""A model with multi-head latent attention (MLA), as DeepSeek's are served, against float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from latent_model import LatentConfig, LatentReference
from serving import Beside, ServedLatent

from tvm_flashinfer.relax import read_report

CONFIGS = {
    # What a head of DeepSeek-V2 and V3 has, for which there are kernels with plans on CUDA.
    "deepseek": LatentConfig(latent_dim=512, rope_dim=64, nope_dim=128, value_dim=128),
    "small": LatentConfig(latent_dim=48, rope_dim=16, nope_dim=32, value_dim=32),
}


@pytest.fixture(params=CONFIGS)
def latent(
    request: pytest.FixtureRequest, place: tuple[str, str], load_random: Callable[..., Any]
) -> Any:
    """A model with MLA, on CPU and on CUDA."""
    return load_random(CONFIGS[request.param], place)


def serve(sides: Beside) -> None:
    """Prefill, chunks on top, decode, forks at any depth, pop and remove."""
    rng = np.random.default_rng(6)

    def some(n: int) -> np.ndarray:
        return rng.integers(0, 96, n)

    for seq in range(3):
        sides.add(seq)
    sides.step({0: some(37), 1: some(5)})  # prefill
    sides.step({0: some(1), 1: some(1)})  # decode
    sides.step({2: some(1), 0: some(1)})  # the first token of a sequence beside a later one
    sides.step({1: some(40), 2: some(3)})  # chunks on what is there
    sides.fork(1, 3, 21)  # inside a page
    sides.fork(1, 4, 16)  # at the end of a page
    sides.fork(3, 5)  # a fork of a fork, at its end
    sides.step({5: some(18), 3: some(1), 4: some(2)})
    sides.pop(0, 9)
    sides.pop(5, 20)  # into what it was forked from
    for _ in range(4):
        sides.step({seq: some(1) for seq in (4, 0, 5, 1, 3, 2)})
    sides.remove(1)
    sides.add(1)
    sides.step({1: some(19), 3: some(7)})  # a prompt, and a chunk on a fork whose parent has gone
    sides.step({seq: some(1) for seq in (1, 3, 5)})


@pytest.mark.parametrize("page_size", [16, 1])
def test_logits(latent: Any, page_size: int) -> None:
    """Every logit of every token."""
    reference = LatentReference(latent.config, latent.weights)
    sides = Beside(ServedLatent(latent.model, page_size=page_size), reference)
    serve(sides)
    print(f"error {sides.error:.2g}")
    assert sides.error <= latent.tolerance


def test_greedy_tokens(latent: Any) -> None:
    """A text of 60 tokens, each side going on from its own: an error would stay."""
    if latent.dtype != "float32":
        pytest.skip("half precision parts two right runs sooner or later")
    texts = []
    sides = LatentReference(latent.config, latent.weights), ServedLatent(latent.model)
    for side in sides:
        side.add(0)
        logits = side.step({0: range(20)})[0]
        text = [int(logits[-1].argmax())]
        while len(text) < 60:
            text.append(int(side.step({0: text[-1:]})[0][-1].argmax()))
        texts.append(text)
    assert len(set(texts[0])) > 8
    assert texts[0] == texts[1]


def test_report_names_the_kernels(latent: Any) -> None:
    """All slots that a model with MLA reaches are ours."""
    report = read_report(latent.model)
    assert report.fallbacks == []
    kernels = {row.slot: row.kernel for row in report.rows}
    assert kernels["append"] == "flashinfer.append_paged_mla_kv_cache"
    assert "mla" in kernels["mla"]

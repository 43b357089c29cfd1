"""The real model of the demo, compiled once per device and dtype."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

TEXT = (
    "The paged KV cache keeps the keys and values of many sequences in pages of one pool, so that "
    "a sequence grows without moving what it has, and two sequences share what they have in common."
)


@pytest.fixture(scope="session")
def gguf_model() -> Any:
    """The GGUF file of SmolLM2-135M-Instruct."""
    pytest.importorskip("gguf", reason="the examples' packages are not installed")
    from examples.llama.weights import GGUFModel, default_model_path

    try:
        return GGUFModel(default_model_path())
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def tokens(gguf_model: Any) -> np.ndarray:
    """Token ids of a text."""
    from examples.llama.tokenizer import GGUFTokenizer

    return np.array(GGUFTokenizer(gguf_model.metadata).encode(TEXT))


@pytest.fixture(scope="session")
def load_model(
    gguf_model: Any, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], Any]:
    """Compile and load the model for a device and a dtype; each pair once."""
    import tvm

    from examples.llama.compile import compile_model, default_target, library_info
    from examples.llama.generate import Model
    from examples.llama.progress import Progress

    folder = tmp_path_factory.mktemp("llama")
    models: dict[tuple[str, str], Any] = {}

    def load(device: str, dtype: str) -> Any:
        if (device, dtype) not in models:
            library = compile_model(gguf_model.config, default_target(device), dtype, folder)
            weights = gguf_model.load(
                library_info(library)["params"], dtype, Progress(enabled=False)
            )
            model = Model(library, weights, tvm.device(device, 0))
            model.library, model.weights = library, weights
            models[device, dtype] = model
        return models[device, dtype]

    return load

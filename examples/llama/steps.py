"""The same model as step functions, whose decode step is one CUDA graph on a GPU.

Nothing in the model changes: its layers call ``attention_with_fused_qkv`` of what they are given,
which is a `StepCache` here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import tvm
from tvm.target import Target

from tvm_flashinfer.steps import StepConfig, StepRunner

from .compile import build_library, content_key, library_info
from .model import LlamaConfig
from .progress import Progress


def step_config(config: LlamaConfig, dtype: str, batch_sizes: Sequence[int]) -> StepConfig:
    """Say what the step functions of a Llama model are to be compiled for."""
    return StepConfig(
        num_layers=config.num_hidden_layers,
        num_qo_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        dtype=dtype,
        batch_sizes=tuple(batch_sizes),
        rope_theta=config.rope_theta,
    )


def compile_steps(
    config: LlamaConfig,
    target: Target,
    dtype: str,
    build_dir: Path,
    batch_sizes: Sequence[int] = (1, 4),
    cuda_graph: bool = True,
    progress: Progress | None = None,
) -> Path:
    """Compile the step functions of a model, or find the library of an earlier compilation.

    Parameters
    ----------
    config : LlamaConfig
        Dimensions of the model.
    target : Target
        See `default_target`.
    dtype : str
        Of weights, activations and pages.
    build_dir : Path
        Folder for the library.
    batch_sizes : sequence of int
        The decode functions.
    cuda_graph : bool
        Capture a decode step in a CUDA graph; of no effect on CPU.

    Returns
    -------
    library : Path
        A shared object; ``library_info(library)["params"]`` names its weights.
    """
    from tvm_flashinfer.relax import export_steps

    progress = progress or Progress(enabled=False)
    kinds = ("steps", *map(str, batch_sizes), *(["graph"] if cuda_graph else []))
    key = content_key(config, target, dtype, kinds)
    library = build_dir / f"{config.family}-steps-{key}.so"
    if library.exists() and library.with_suffix(".json").exists():
        progress.say(f"using the compiled library {library}")
        return library
    model = config.model()
    model.to(dtype)
    with progress.step("exporting the step functions to Relax"):
        mod, params = export_steps(model, step_config(config, dtype, batch_sizes), target)
    info = {"dtype": dtype, "target": str(target), "params": params}
    build_library(mod, target, library, info, progress, cuda_graph)
    return library


class StepSession:
    """A `StepRunner` with the methods of `Session` that `greedy` uses.

    Parameters
    ----------
    library : Path
        What `compile_steps` returned.
    params : mapping of str to tvm.runtime.Tensor
        Weights on the device by their names: `Model.params`.
    device : tvm.runtime.Device
        Where to run.
    max_total_seq_len : int
        Tokens in the pages, and the most of one sequence.
    prefill_chunk_size : int
        Most tokens of one prefill step.
    """

    def __init__(
        self,
        library: Path,
        params: Mapping[str, tvm.runtime.Tensor],
        device: tvm.runtime.Device,
        max_total_seq_len: int = 2048,
        prefill_chunk_size: int = 512,
    ) -> None:
        weights = [params[name] for name in library_info(library)["params"]]
        self.runner = StepRunner(
            library, device, weights,
            num_pages=-(-max_total_seq_len // StepConfig.page_size), max_seq_len=max_total_seq_len,
            prefill_chunk=prefill_chunk_size,
        )  # fmt: skip

    def add(self, seq_id: int) -> None:
        """Start an empty sequence."""
        self.runner.add(seq_id)

    def remove(self, seq_id: int) -> None:
        """End a sequence and free its pages."""
        self.runner.remove(seq_id)

    def prefill(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, np.ndarray]:
        """Append tokens to sequences; the logits (vocab_size,) that follow each."""
        return dict(zip(tokens, self.runner.prefill(tokens).numpy(), strict=True))

    def decode(self, tokens: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Append one token to each sequence and return the logits (vocab_size,) that follow."""
        return dict(zip(tokens, self.runner.decode(tokens).numpy(), strict=True))

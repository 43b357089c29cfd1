"""Whole models whose attention is products and a softmax, as frontends leave it.

Weights are random. Ours is the pipeline "flashinfer", TVM's side its default pipeline: the matrix
products that TVM compiles for both are part of the time. What is right is the same model in float32
through the default pipeline, and ours may be off by twice what TVM's side in the row's dtype is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from tvm import relax as rx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

import tvm_flashinfer
import tvm_flashinfer.relax  # registers the pipeline

from .cases import Case
from .work import Row

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "models"))

from small_decoders import make_model, make_weights
from small_transformers import Config

LAYERS, VOCABULARY = 2, 1000
#: Of a relative error, beside twice that of TVM's side.
LEAST_ERROR = 1e-5


class Products(nn.Module):
    """Causal attention alone, over heads that come before lengths."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype

    def forward(self, q: nn.Tensor, k: nn.Tensor, v: nn.Tensor) -> nn.Tensor:
        """(batch, heads, length, head_dim) each."""
        length = q.shape[2]
        hidden = nn.Tensor.from_scalar(-65504.0, self.dtype)
        lowest = op.full((length, length), hidden, self.dtype)
        scores = op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))) / float(q.shape[3]) ** 0.5
        return op.matmul(op.softmax(scores + op.triu(lowest, 1), axis=-1), v)


class Sampling(nn.Module):
    """What a sampler of TVM's frontend does to rows of probabilities."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def forward(
        self, probs: nn.Tensor, top_p: nn.Tensor, top_k: nn.Tensor, uniform: nn.Tensor,
        rows: nn.Tensor,
    ) -> nn.Tensor:  # fmt: skip
        """Tokens (rows, 1), or with the kind "renorm" the probabilities of what is kept."""
        if self.kind == "draw":
            return op.multinomial_from_uniform(probs, uniform, rows, "int32")
        ordered = op.sort(probs, axis=-1, descending=True)
        if self.kind == "renorm":
            return op.renormalize_top_p_top_k_prob(probs, ordered, top_p, top_k)
        indices = op.argsort(probs, axis=-1, descending=True, dtype="int32")
        return op.sample_top_p_top_k_from_sorted_prob(ordered, indices, top_p, top_k, uniform, rows)


#: Kinds of `Sampling`.
SAMPLERS = ("draw", "sample", "renorm")


class Model(Case):
    """One model and what it is called with; `Row.feature` is its kind."""

    def __init__(self, row: Row, machine: Any) -> None:
        self._compiled: dict[tuple[str, bool], Callable[[], Any]] = {}
        super().__init__(row, machine)
        output = self.compiled(row.dtype, ours=False)().numpy()
        off = machine.float64(machine.put(output)) - self.expected[0]
        relative = ((off * off).mean() / (self.expected[0] ** 2).mean()) ** 0.5
        self.tolerance = (float("inf"), 2 * machine.numbers([relative])[0] + LEAST_ERROR)

    @property
    def cold(self) -> bool:
        """A model's weights and states are what it reads; nothing is rotated."""
        return True

    @property
    def config(self) -> Config:
        """Dimensions of the model."""
        row = self.row
        heads, width = row.heads[0], row.heads[0] * row.head_dim
        return Config(row.feature, LAYERS, heads, row.head_dim, 4 * width, VOCABULARY, row.kv_len)

    @property
    def lengths(self) -> list[int]:
        """Tokens of a request; an encoder with a decoder has frames and words."""
        row = self.row
        return [row.kv_len, row.qo_len] if row.feature == "whisper" else [row.kv_len]

    def make_shared(self) -> None:
        """The inputs and weights."""
        row, rng = self.row, self.rng
        if row.feature in SAMPLERS:
            logits = 4 * rng.standard_normal((row.batch, row.kv_len))
            weights = np.exp(logits - logits.max(-1, keepdims=True))
            probs = (weights / weights.sum(-1, keepdims=True)).astype("float32")
            column = lambda x, dtype: np.full((row.batch, 1), x, dtype)  # noqa: E731
            uniform = rng.random((row.batch, 1)).astype("float32")
            rows = np.arange(row.batch, dtype="int32")[:, None]
            self.arrays = [probs, column(0.9, "float32"), column(50, "int32"), uniform, rows]
            return
        if row.feature == "attention":
            shape = (row.batch, row.heads[0], row.kv_len, row.head_dim)
            self.arrays = [rng.standard_normal(shape).astype(row.dtype) for _ in "qkv"]
            return
        weights = make_weights(self.config, rng)
        tokens = [
            rng.integers(0, VOCABULARY, (row.batch, length)).astype("int32")
            for length in self.lengths
        ]
        # Rounded once, so that the model in float32 has the same weights.
        rounded = [weights[name].astype(row.dtype) for name in self.module(row.dtype)[1]]
        ones = [] if row.feature == "whisper" else [np.ones_like(tokens[0])]
        self.arrays = [*tokens, *ones, *rounded]

    def module(self, dtype: str) -> tuple[tvm.IRModule, list[str]]:
        """The model with static sizes, and the names of its weights."""
        row = self.row
        if row.feature in SAMPLERS:
            names = ("probs", "top_p", "top_k", "uniform", "rows")
            inputs = {
                name: nn.spec.Tensor(list(array.shape), array.dtype.name)
                for name, array in zip(names, self.arrays, strict=True)
            }
            return Sampling(row.feature).export_tvm(spec={"forward": inputs})[0], []
        if row.feature != "attention":
            return make_model(self.config).export(dtype, row.batch, *self.lengths)
        shape = (row.batch, row.heads[0], row.kv_len, row.head_dim)
        spec = {"forward": {x: nn.spec.Tensor(shape, dtype) for x in "qkv"}}
        return Products(dtype).export_tvm(spec=spec)[0], []

    def compiled(self, dtype: str, ours: bool) -> Callable[[], Any]:
        """What runs the model in a dtype through our pipeline, or TVM's."""
        if (dtype, ours) not in self._compiled:
            self._compiled[dtype, ours] = self._compile(dtype, ours)
        return self._compiled[dtype, ours]

    def _compile(self, dtype: str, ours: bool) -> Callable[[], Any]:
        pipeline = self.our_pipeline() if ours else self.default_pipeline()
        target, device = self.machine.target, self.machine.tvm_device
        with target:
            executable = tvm.compile(self.module(dtype)[0], target, relax_pipeline=pipeline)
        machine = rx.VirtualMachine(executable, device)
        arrays = [x if x.dtype.kind == "i" else x.astype(dtype) for x in self.arrays]
        tensors = [tvm.runtime.tensor(x, device) for x in arrays]
        return lambda: machine["forward"](*tensors)

    def default_pipeline(self) -> Any:
        """TVM's own pipeline for the target."""
        if self.machine.kind == "cpu":
            return rx.get_default_pipeline(self.machine.target)
        return rx.backend.cuda.get_default_pipeline(self.machine.target)

    def our_pipeline(self) -> Any:
        """The pipeline "flashinfer", which must leave no attention to TVM."""
        return rx.get_pipeline(
            "flashinfer", target=self.machine.target, ship="shared", strict=True,
            binary_masks=True,
        )  # fmt: skip

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Nothing: sides have weights of their own."""
        return {}

    def expect(self, i: int) -> Any:
        """The model in float32."""
        output = self.compiled("float32", ours=False)().numpy()
        return self.machine.put(output.astype(np.float64))

    def poison(self, i: int) -> None:
        """Nothing: what a model returned is filled with NaN by its side."""

    def found(self, i: int, returned: Any) -> Any:
        """All of what the model returned."""
        return self.whole(i, returned)

    def whole(self, i: int, returned: Any) -> Any:
        """The same."""
        return self.machine.put(returned.numpy())


def counted() -> int:
    """Calls of our functions that serve attention in graphs, and sampling."""
    return sum(
        count
        for device in tvm_flashinfer.call_counts().values()
        for name, count in device.items()
        if "attention" in name or "sampl" in name
    )

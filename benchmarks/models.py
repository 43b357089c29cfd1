"""Whole models whose attention is products and a softmax, as frontends leave it.

Weights are random. Ours is the pipeline "flashinfer", TVM's side its default pipeline: the matrix
products that TVM compiles for both are part of the time. What is right is the same model in float32
through the default pipeline.
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

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "models"))

from small_transformers import Config, Transformer, random_weights

LAYERS, VOCABULARY = 2, 1000


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


class Model(Case):
    """One model and what it is called with; `Row.feature` is its kind."""

    # Rounding grows with layers, and the two pipelines round in different places.
    tolerances = dict.fromkeys(Case.tolerances, (float("inf"), 2e-2))

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

    def make_shared(self) -> None:
        """The inputs and weights."""
        row, rng = self.row, self.rng
        if row.feature == "attention":
            shape = (row.batch, row.heads[0], row.kv_len, row.head_dim)
            self.arrays = [rng.standard_normal(shape).astype(row.dtype) for _ in "qkv"]
            return
        shape = (row.batch, row.kv_len)
        weights = random_weights(self.config, rng)
        ids = rng.integers(0, VOCABULARY, shape).astype("int32")
        # Rounded once, so that the model in float32 has the same weights.
        rounded = [weights[name].astype(row.dtype) for name in self.module(row.dtype)[1]]
        self.arrays = [ids, np.ones(shape, "int32"), *rounded]

    def module(self, dtype: str) -> tuple[tvm.IRModule, list[str]]:
        """The model with static sizes, and the names of its weights."""
        row = self.row
        if row.feature != "attention":
            return Transformer(self.config).export(dtype, row.batch, row.kv_len)
        shape = (row.batch, row.heads[0], row.kv_len, row.head_dim)
        spec = {"forward": {x: nn.spec.Tensor(shape, dtype) for x in "qkv"}}
        return Products(dtype).export_tvm(spec=spec)[0], []

    def compiled(self, dtype: str, pipeline: Any) -> Callable[[], Any]:
        """What runs the model in a dtype."""
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
        output = self.compiled("float32", self.default_pipeline())().numpy()
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
    """Calls of our functions that serve attention in graphs."""
    counts = tvm_flashinfer.call_counts()
    return sum(n for device in counts.values() for name, n in device.items() if "attention" in name)

"""Models through the pipeline "flashinfer" and through TVM's default one, on a GPU, in one run.

    python benchmarks/models.py [--row NAME] [--json FILE]

Encoders and decoders with random weights in float16, whose attention is products and a softmax, as
frontends leave it. Times are those of a whole forward pass, by `harness.seconds_of_call`, so the
matrix products that TVM compiles for both sides are part of them; rows named `attention` have
attention alone. The results of both sides are compared, after NaN in neither.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
from harness import cuda_device, cuda_target, seconds_of_call, write_results
from tvm import relax as rx
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import op

import tvm_flashinfer.relax  # noqa: F401  registers the pipeline

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "models"))

from small_transformers import Config, Transformer, random_weights

DTYPE = "float16"


class Products(nn.Module):
    """Causal attention alone, over heads that come before lengths."""

    def forward(self, q: nn.Tensor, k: nn.Tensor, v: nn.Tensor) -> nn.Tensor:
        """(batch, heads, length, head_dim) each."""
        length = q.shape[2]
        lowest = op.full((length, length), nn.Tensor.from_scalar(-65504.0, DTYPE), DTYPE)
        scores = op.matmul(q, op.permute_dims(k, (0, 1, 3, 2))) / float(q.shape[3]) ** 0.5
        return op.matmul(op.softmax(scores + op.triu(lowest, 1), axis=-1), v)


@dataclass
class Row:
    """A model, and how many sequences of how many tokens it gets."""

    name: str
    batch: int
    length: int
    config: Config


def _config(kind: str, heads: int, head_dim: int) -> Config:
    width = heads * head_dim
    return Config(kind, 2, heads, head_dim, 4 * width, vocab=1000, positions=4096)


ROWS = [
    Row("attention-d64", 4, 1024, _config("gpt", 16, 64)),
    Row("attention-d128", 1, 4096, _config("gpt", 32, 128)),
    Row("bert-d64", 16, 512, _config("bert", 12, 64)),
    Row("gpt-d64", 4, 1024, _config("gpt", 12, 64)),
    Row("gpt-d128", 1, 4096, _config("gpt", 16, 128)),
    Row("vit-d80", 8, 577, _config("vit", 16, 80)),
    Row("vit-d72", 8, 577, _config("vit", 16, 72)),
]


def _model(row: Row) -> tuple[tvm.IRModule, list[np.ndarray]]:
    """The module with static sizes, and everything that it is called with."""
    rng, config = np.random.default_rng(0), row.config
    if row.name.startswith("attention"):
        shape = (row.batch, config.heads, row.length, config.head_dim)
        spec = {"forward": {x: nn.spec.Tensor(shape, DTYPE) for x in "qkv"}}
        mod, _ = Products().export_tvm(spec=spec)
        return mod, [rng.standard_normal(shape).astype(DTYPE) for _ in range(3)]
    model = Transformer(config)
    model.to(DTYPE)
    shape = (row.batch, row.length)
    spec = {"forward": {x: nn.spec.Tensor(shape, "int32") for x in ("ids", "mask")}}
    mod, params = model.export_tvm(spec=spec)
    weights = random_weights(config, rng)
    ids = rng.integers(0, config.vocab, shape).astype("int32")
    return mod, [ids, np.ones(shape, "int32"), *(weights[name].astype(DTYPE) for name, _ in params)]


def _side(mod: tvm.IRModule, arrays: list[np.ndarray], target: Any, device: Any, ours: bool) -> Any:
    """A function that runs the model; ours has no attention left to TVM."""
    pipeline: Any = None
    if ours:
        pipeline = rx.get_pipeline(
            "flashinfer", target=target, ship="shared", strict=True, binary_masks=True
        )
    with target:
        pipeline = pipeline or rx.backend.cuda.get_default_pipeline(target)
        executable = tvm.compile(mod, target, relax_pipeline=pipeline)
    vm = rx.VirtualMachine(executable, device)
    tensors = [tvm.runtime.tensor(x, device) for x in arrays]
    return lambda: vm["forward"](*tensors)


def measure(row: Row, device: Any) -> dict[str, Any]:
    """Time both sides and compare them."""
    target = cuda_target(device)
    mod, arrays = _model(row)
    sides = [_side(mod, arrays, target, device, ours) for ours in (True, False)]
    ours, theirs = (side().numpy().astype(np.float64) for side in sides)
    difference = np.sqrt(np.mean((ours - theirs) ** 2) / np.mean(theirs**2))
    if not difference < 0.02:
        sys.exit(f"{row.name}: the sides differ by {difference:.3g} of the root mean square")
    seconds = [seconds_of_call(side, device) for side in sides]
    return {
        "row": row.name,
        "ours_us": seconds[0] * 1e6,
        "default_us": seconds[1] * 1e6,
        "difference": difference,
    }


def main() -> None:
    """Print a line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--row", help="run this row alone")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    options = parser.parse_args()
    device, results = cuda_device(), []
    for row in ROWS:
        if options.row not in (None, row.name):
            continue
        found = measure(row, device)
        results.append(found)
        ratio = found["default_us"] / found["ours_us"]
        times = f"ours {found['ours_us']:10.1f} us  default {found['default_us']:10.1f} us"
        print(f"{row.name:16} {times}  ratio {ratio:5.2f}  difference {found['difference']:.2g}")
        sys.stdout.flush()
    if options.json:
        write_results(options.json, device, "python benchmarks/models.py", results)


if __name__ == "__main__":
    main()

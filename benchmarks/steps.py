"""A decode step of a whole model: on TVM's cache, on its kernels and ours, and as one CUDA graph.

    python -m benchmarks.steps build DIR              # no GPU is needed: it compiles for sm_90a
    python -m benchmarks.steps run --lib DIR --json FILE
    python -m benchmarks.steps plot FILE              # FILE with the ending .svg

The model has the shape of Llama 3 8B, float16, and random weights. A step begins when the tokens
are on the host and ends when the device has the logits; the matrix products are TVM's on all sides.
The limit is the time to read the weights and the keys and values once. Sides are compared by their
logits after some steps over few tokens; then the cache is said to hold as many tokens as the row
names, whose keys and values are whatever lies there, since times do not depend on them. Kernels are
told apart where PyTorch is there, by its profiler.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import functools
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.relax.frontend import nn
from tvm.target import Target
from tvm_ffi import Shape

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from examples.llama.compile import (  # noqa: E402
    build_library,
    compile_module,
    default_target,
    library_info,
)
from examples.llama.model import LlamaConfig  # noqa: E402
from examples.llama.progress import Progress  # noqa: E402
from examples.llama.steps import step_config  # noqa: E402
from tvm_flashinfer.relax import export_steps  # noqa: E402
from tvm_flashinfer.steps import StepRunner  # noqa: E402

CONFIGS = {
    "llama3-8b": LlamaConfig(4096, 14336, 32, 32, 8, 128, 128256, 8192, 1e-5, 5e5, False),
    "tiny": LlamaConfig(64, 128, 2, 4, 2, 64, 96, 4096, 1e-5, 1e4, False),
}
SIDES = {
    "tir": "TVM's cache, TVM's kernels",
    "flashinfer": "TVM's cache, our kernels",
    "steps": "step function, not captured",
    "graph": "step function, one CUDA graph",
}
PAGE, CHUNK = 16, 2048
PARTS = {  # of a step, by what is in the names of kernels; the rest is "other"
    "attention": ("Attention", "batch_decode", "BatchDecode", "BatchPrefill", "Merge", "merge"),
    "append": ("append", "Append", "otary", "transpose"),
    "products": ("matmul", "gemv", "NT_"),
}


def builds(config: LlamaConfig, device: str, batch: int, folder: Path) -> dict[str, Path]:
    """Compile what is not there yet: a library for both caches, and one with and without graphs."""
    target, dtype = _target(device), _dtype(device)
    model = config.model()
    model.to(dtype)
    paths = {name: folder / f"{name}-{batch}.so" for name in ("caches", "steps", "graph")}
    if not paths["caches"].exists():
        spec = model.module_spec()
        spec["decode"]["input_ids"] = nn.spec.Tensor([batch, 1], "int32")
        del spec["prefill"]
        model.module_spec = lambda: spec
        compile_module(model, target, paths["caches"])
    for name in ("steps", "graph"):
        if not paths[name].exists():
            mod, params = export_steps(model, step_config(config, dtype, (batch,)), target)
            quiet = Progress(enabled=False)
            build_library(mod, target, paths[name], {"params": params}, quiet, name == "graph")
    kinds = dict.fromkeys(("tir", "flashinfer"), paths["caches"])
    return kinds | {name: paths[name] for name in ("steps", "graph")}


def _target(device: str) -> Target:
    """That of the processor here, or of an H200 beside any processor of the last ten years."""
    if device == "cpu":
        return default_target("cpu")
    host = {"kind": "llvm", "mtriple": "x86_64-unknown-linux-gnu", "mcpu": "x86-64-v3"}
    return Target(
        {
            "kind": "cuda",
            "arch": "sm_90a",
            "max_threads_per_block": 1024,
            "max_shared_memory_per_block": 49152,
            "thread_warp_size": 32,
        },
        host=host,
    )


def _dtype(device: str) -> str:
    return "float32" if device == "cpu" else "float16"


@functools.cache
def _loaded(library: Path) -> Any:
    """A library, loaded once: CUDA code that it has as source is compiled when it is first run."""
    return tvm.runtime.load_module(str(library))


class OnCache:
    """Decode steps on TVM's cache."""

    def __init__(self, library: Path, kind: str, batch: int, length: int, model: Model) -> None:
        vm = tvm.runtime.vm.VirtualMachine(_loaded(library), model.device)
        sizes = (batch, batch * (length + PAGE), CHUNK, PAGE, 0)
        self.cache = vm[f"create_{kind}_paged_kv_cache"](*(Shape([n]) for n in sizes))
        self.decode, self.model, self.batch = vm["decode"], model, batch
        self.weights = model.weights(library)
        for seq in range(batch):
            _state("add_sequence")(self.cache, seq)

    def extend(self, count: int) -> None:
        """Say that the sequences have so many tokens more."""
        for seq in range(self.batch):
            for at in range(0, count, CHUNK):
                part = min(CHUNK, count - at)
                _state("begin_forward")(self.cache, Shape([seq]), Shape([part]))
                _state("end_forward")(self.cache)
                self.model.device.sync()

    def step(self, tokens: np.ndarray) -> Any:
        """Append a token to each sequence: logits on the device."""
        ones = Shape([1] * self.batch)
        _state("begin_forward")(self.cache, Shape(range(self.batch)), ones)
        ids = tvm.runtime.tensor(tokens[:, None], self.model.device)
        logits = self.decode(ids, self.cache, self.weights)
        _state("end_forward")(self.cache)
        return logits


class OnSteps:
    """Decode steps of a `StepRunner`."""

    def __init__(self, library: Path, batch: int, length: int, model: Model) -> None:
        pages = batch * (-(-length // PAGE) + 1)
        self.runner = StepRunner(
            _loaded(library), model.device, model.weights(library), num_pages=pages,
            max_seq_len=length + PAGE,
        )  # fmt: skip
        self.batch = batch
        for seq in range(batch):
            self.runner.add(seq)

    def extend(self, count: int) -> None:
        """Say that the sequences have so many tokens more."""
        self.runner.table.append(dict.fromkeys(range(self.batch), count))

    def step(self, tokens: np.ndarray) -> Any:
        """Append a token to each sequence: logits on the device."""
        return self.runner.decode(dict(enumerate(tokens.tolist())))


def _state(name: str) -> Callable[..., Any]:
    return tvm.get_global_func("vm.builtin.kv_state_" + name)


class Model:
    """Random weights on a device, which all libraries share."""

    def __init__(self, config: LlamaConfig, device: Any, dtype: str) -> None:
        self.config, self.device = config, device
        rng = np.random.default_rng(0)
        pool = rng.standard_normal(1 << 24, np.float32).astype(dtype) * np.dtype(dtype).type(0.02)
        ones = np.ones(config.hidden_size, dtype)
        self.params: dict[str, Any] = {}
        for name, param in config.model().named_parameters():
            shape = [int(n) for n in param.shape]
            self.params[name] = tensor = tvm.runtime.empty(shape, dtype, device)
            count, source = int(np.prod(shape)), ones if len(shape) == 1 else pool
            for at in range(0, count, len(source)):
                part = source[: count - at]
                offset = at * source.itemsize
                tensor._create_view((len(part),), dtype, offset).copyfrom(part)
        self.itemsize = pool.itemsize
        self.elements = sum(int(np.prod(x.shape)) for x in self.params.values())

    def weights(self, library: Path) -> Any:
        """The weights in the order of a library."""
        names = library_info(library)["params"]
        return tvm_ffi.convert([self.params[name] for name in names])

    def bytes_of_step(self, batch: int, length: int) -> tuple[int, int]:
        """What a step reads at least: weights, but of the embedding its rows alone; and pages."""
        config = self.config
        table = config.vocab_size * config.hidden_size
        weights = self.elements - table + batch * config.hidden_size
        row = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        return weights * self.itemsize, batch * length * row * self.itemsize


def timings(side: Any, tokens: np.ndarray, device: Any, steps: int) -> dict[str, float]:
    """Microseconds of a step: waited for each time, and with the host ahead where that is safe."""
    for _ in range(3):
        side.step(tokens)
        device.sync()
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        side.step(tokens)
        device.sync()
        seconds.append(time.perf_counter() - start)
    found = {"us": statistics.median(seconds) * 1e6, "min_us": min(seconds) * 1e6}
    if isinstance(side, OnSteps):  # TVM's cache must be waited for
        start = time.perf_counter()
        for _ in range(steps):
            side.step(tokens)
        device.sync()
        found["ahead_us"] = (time.perf_counter() - start) / steps * 1e6
    return found


def parts(side: Any, tokens: np.ndarray, device: Any) -> dict[str, float] | None:
    """Microseconds of the kernels of a step by what they do; None without PyTorch's profiler."""
    try:
        from torch import profiler
    except ImportError:
        return None
    with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(4):
            side.step(tokens)
            device.sync()
    found = dict.fromkeys((*PARTS, "other"), 0.0)
    for event in profile.profiler.kineto_results.events():
        if "CUDA" in str(event.device_type()) and event.duration_ns() > 0:
            names = (part for part, words in PARTS.items() if any(w in event.name() for w in words))
            found[next(names, "other")] += event.duration_ns() / 4e3
    return found if sum(found.values()) else None


@contextlib.contextmanager
def opened(name: str, library: Path, batch: int, length: int, model: Model) -> Iterator[Any]:
    """A side; its memory is given back at the end."""
    on_steps = name in ("steps", "graph")
    side = (
        OnSteps(library, batch, length, model)
        if on_steps
        else OnCache(library, name, batch, length, model)
    )
    try:
        yield side
    finally:
        del side
        gc.collect()


def measure(
    model: Model, libraries: dict[str, Path], batch: int, length: int, options: Any
) -> dict[str, Any]:
    """Time a row on all sides."""
    weights, pages = model.bytes_of_step(batch, length)
    row: dict[str, Any] = {"row": f"B{batch}-L{length}", "batch": batch, "length": length}
    row |= {"weight_bytes": weights, "page_bytes": pages, "sides": {}}
    row["limit_us"] = (weights + pages) / options.bandwidth * 1e6
    room = length + 3 * options.steps + 16
    first: np.ndarray | None = None
    for name, library in libraries.items():
        with opened(name, library, batch, room, model) as side:
            tokens = np.arange(batch, dtype=np.int32) * 7 % model.config.vocab_size
            for step in range(4):
                logits = side.step(((tokens + step) % model.config.vocab_size).astype(np.int32))
                got = logits.numpy().reshape(batch, -1)
            first = got if first is None else first
            off = float(np.sqrt(np.mean((got - first) ** 2) / np.mean(first**2)))
            if not off < 0.03:
                sys.exit(f"{row['row']}: the logits of {name} differ by {off:.3g} of the first")
            side.extend(length - 4)
            found = timings(side, tokens, model.device, options.steps)
            if model.device.dlpack_device_type() != 1:
                found["parts"] = parts(side, tokens, model.device)
            row["sides"][name] = found | {"difference": off}
    return row


def run(options: argparse.Namespace) -> None:
    """Time all rows, and write them after each."""
    config = CONFIGS[options.model]
    device = tvm.device(options.device, 0)
    start = time.perf_counter()
    libraries = {
        batch: builds(config, options.device, batch, options.lib) for batch in options.batch
    }
    model = Model(config, device, _dtype(options.device))
    print(f"compiled, and weights made, in {time.perf_counter() - start:.0f} s")
    header = {
        "date": datetime.date.today().isoformat(),
        "machine": device.device_name if options.device == "cuda" else "cpu",
        "tvm": tvm.__version__,
        "model": options.model,
        "bytes_per_s": options.bandwidth,
        "command": f"python -m benchmarks.steps run --lib DIR --model {options.model}",
    }
    rows: list[dict[str, Any]] = []
    for batch in options.batch:
        for length in options.length:
            rows.append(measure(model, libraries[batch], batch, length, options))
            times = "  ".join(f"{k} {v['us']:9.1f}" for k, v in rows[-1]["sides"].items())
            limit = f"limit {rows[-1]['limit_us']:9.1f}"
            print(f"{rows[-1]['row']:10} us: {times}  {limit}", flush=True)
            if options.json:
                text = json.dumps({**header, "rows": rows}, indent=1)
                options.json.write_text(text + "\n", encoding="utf-8")


def plot(path: Path) -> Path:
    """Draw the parts of the steps of a file beside the limit, into an SVG file of its name."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update({"svg.hashsalt": "tvm-flashinfer", "font.size": 8})
    from matplotlib.figure import Figure

    found = json.loads(path.read_text(encoding="utf-8"))
    rows = found["rows"]
    figure = Figure((2.6 * len(rows) + 1, 4), layout="constrained")
    names = (*PARTS, "other", "host and gaps")
    colors = dict(zip(names, ("C0", "C2", "C1", "C7", "0.85"), strict=True))
    for place, row in enumerate(rows, 1):
        axes = figure.add_subplot(1, len(rows), place, title=row["row"])
        for at, side in enumerate(row["sides"].values()):
            known = side.get("parts") or {}
            rest = max(side["us"] - sum(known.values()), 0.0)
            bottom = 0.0
            for name, us in (known | {"host and gaps": rest}).items():
                label = name if at == 0 and place == 1 else None
                axes.bar(at, us / 1e3, bottom=bottom, color=colors[name], label=label)
                bottom += us / 1e3
        axes.axhline(row["limit_us"] / 1e3, color="k", linestyle=":", linewidth=1)
        axes.set_xticks(range(len(row["sides"])), list(row["sides"]), rotation=30)
        axes.set_ylim(0)
        if place == 1:
            axes.set_ylabel("ms of a decode step; dotted: the limit of memory")
    figure.legend(loc="outside lower center", ncols=5)
    figure.suptitle(f"{found['model']}, {found['machine']}")
    target = path.with_suffix(".svg")
    figure.savefig(target, metadata={"Date": None})
    return target


def main(argv: list[str] | None = None) -> None:
    """Build, run or plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.steps")
    parser.add_argument("action", choices=("build", "run", "plot"))
    parser.add_argument("path", type=Path, nargs="?", help="folder of `build`, file of `plot`")
    parser.add_argument("--lib", type=Path, help="folder of compiled libraries, for `run`")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--model", choices=CONFIGS, default="llama3-8b")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--length", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a side")
    parser.add_argument("--bandwidth", type=float, default=4.25e12, help="bytes a second")
    options = parser.parse_args(argv)
    if options.action == "run":
        options.lib = options.lib or ROOT / "build" / "steps"
        run(options)
    elif options.path is None:
        parser.error(f"{options.action} needs a path")
    elif options.action == "plot":
        print(plot(options.path))
    else:
        for batch in options.batch:
            for name, path in builds(
                CONFIGS[options.model], options.device, batch, options.path
            ).items():
                print(f"{name:10} {path} {path.stat().st_size >> 10} KB")


if __name__ == "__main__":
    # All libraries use the kernels of this process, which are loaded or compiled once.
    os.environ.setdefault("TVM_FLASHINFER_SHIP", "shared")
    main()

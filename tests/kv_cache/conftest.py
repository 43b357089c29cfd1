"""Caches on CPU, driven as a serving engine drives them, beside a float64 oracle.

A compiled library has our cache and TVM's for every model of one shape. A `Driver` gives the same
steps to a cache and to the oracle, and measures how far apart they are.
"""

from __future__ import annotations

import functools
import importlib
import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from parsed_once import kernels_parsed_once
from tvm import relax as rx
from tvm import tirx
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm_ffi import Shape

NUM_LAYERS = 2
SM_SCALE = 0.25


@dataclass(frozen=True)
class Model:
    """What a cache is compiled for."""

    num_qo_heads: int = 4
    num_kv_heads: int = 4
    head_dim: int = 32
    dtype: str = "float32"
    rope_mode: int = int(RopeMode.NORMAL)
    rope_theta: float = 10000.0
    rope_scale: float = 1.0
    rotary_dim: int = 32
    rope_scaling: str = "{}"
    attn_kind: tuple[str, ...] | str = "mha"

    @property
    def library(self) -> tuple[int, int, int, str]:
        """Models of one value are compiled together, since they share TVM's kernels."""
        return self.num_qo_heads, self.num_kv_heads, self.head_dim, self.dtype


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

#: Every model of the tests. The number in a name is the query heads per KV head.
MODELS = {
    "group1": Model(),
    "group1_half": Model(dtype="float16"),
    "group3": Model(6, 2, head_dim=24, rotary_dim=24),
    "group4": Model(8, 2, dtype="bfloat16"),
    "group8": Model(8, 1, dtype="float16"),
    # Models without RoPE leave values that mean nothing.
    "no_rope": Model(rope_mode=int(RopeMode.NONE), rope_theta=-1.0, rope_scale=-1.0),
    "partial_rope": Model(rotary_dim=16, rope_scale=0.5, rope_theta=500000.0),
    "gptj_rope": Model(rope_scaling='{"rope_type": "gptj"}'),
    "linear_rope": Model(rope_scaling='{"rope_type": "linear", "factor": 4.0}'),
    "llama3_rope": Model(rope_scaling=json.dumps(LLAMA3)),
    "sliding_layer": Model(attn_kind=("mha", "mha_sliding")),
}


def numpy_dtype(name: str) -> np.dtype:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def add_generic_creation(builder: rx.BlockBuilder, name: str, model: Model) -> None:
    """Add what MLC LLM exports for a model, without the model."""
    from tvm_flashinfer.relax._compat import StringImm

    sizes = [tirx.Var(size, "int64") for size in ("batch", "total", "chunk", "page", "slide")]
    kinds = model.attn_kind
    dtype = (
        rx.DataTypeImm(model.dtype)
        if hasattr(rx, "DataTypeImm")
        else tvm.ir.GenericConst(tvm.DataType(model.dtype), rx.AnyType())
    )
    numbers = [NUM_LAYERS, model.num_qo_heads, model.num_kv_heads, model.head_dim, model.head_dim]
    params = [rx.Var(f"{var.name}_", rx.ShapeType([var])) for var in sizes]
    with builder.function(f"create_{name}_cache", params):
        cache = rx.call_pure_packed(
            "mlc.create_paged_kv_cache_generic",
            StringImm(kinds) if isinstance(kinds, str) else [StringImm(kind) for kind in kinds],
            rx.ShapeExpr(sizes),
            rx.ShapeExpr([0, NUM_LAYERS]),
            *(rx.prim_value(number) for number in (*numbers, 0, 0, model.rope_mode)),
            rx.prim_value(model.rope_scale),
            rx.prim_value(model.rope_theta),
            StringImm(model.rope_scaling),
            rx.prim_value(0),
            rx.prim_value(model.rotary_dim),
            rx.prim_value(0),
            dtype,
            ty_args=rx.AnyType(),
        )
        builder.emit_func_output(cache)


@functools.cache
def compiled(library: tuple[int, int, int, str]) -> rx.VirtualMachine:
    """A library, loaded from disk, with our cache and TVM's for each of its models."""
    importlib.import_module("tvm_flashinfer")
    from tvm_flashinfer.relax import DispatchKVCacheCreation

    builder = rx.BlockBuilder()
    for name, model in MODELS.items():
        if model.library == library:
            add_generic_creation(builder, name, model)
    with kernels_parsed_once():
        mod = DispatchKVCacheCreation(tvm.target.Target("llvm"))(builder.get())
    path = Path(folder().name) / f"{compiled.cache_info().misses}.so"
    rx.build(mod, "llvm").export_library(str(path))
    return rx.VirtualMachine(tvm.runtime.load_module(str(path)), tvm.cpu())


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """A folder until the process ends: a loaded library must not lose its inode to another."""
    return tempfile.TemporaryDirectory(prefix="tvm-flashinfer-tests-")


def builtin(name: str) -> Callable[..., Any]:
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")


class Oracle:
    """Keys and values of each sequence in float64, and attention over them."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.keys: dict[tuple[int, int], np.ndarray] = {}
        self.values: dict[tuple[int, int], np.ndarray] = {}

    def rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """RoPE as in "RoFormer", in the half-split form, with the scaling of Llama 3.1."""
        model = self.model
        if model.rope_mode == RopeMode.NONE:
            return x
        scaling = json.loads(model.rope_scaling)
        kind, half = scaling.get("rope_type"), model.rotary_dim // 2
        freq = model.rope_theta ** (-np.arange(half) * 2.0 / model.rotary_dim)
        if kind == "linear":
            freq = freq / scaling["factor"]
        if kind == "llama3":
            low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
            turns = scaling["original_max_position_embeddings"] * freq / (2 * np.pi)
            smooth = np.clip((turns - low) / (high - low), 0, 1)
            freq = (1 - smooth) * freq / scaling["factor"] + smooth * freq
        angle = (positions[:, None] * model.rope_scale * freq)[:, None, :]
        out = x.copy()
        if kind == "gptj":
            a, b = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
            first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
        else:
            a, b = x[..., :half], x[..., half : 2 * half]
            first, second = slice(0, half), slice(half, 2 * half)
        out[..., first] = a * np.cos(angle) - b * np.sin(angle)
        out[..., second] = b * np.cos(angle) + a * np.sin(angle)
        return out

    def attend(
        self,
        layer: int,
        seqs: Sequence[int],
        lens: Sequence[int],
        qkv: np.ndarray,
        visible: Sequence[np.ndarray] | None = None,
        depths: Sequence[np.ndarray] | None = None,
    ) -> np.ndarray:
        """Append a step's keys and values, and attend to all of them.

        `visible` and `depths` describe token trees: which new tokens each new token sees, and how
        deep it is.
        """
        h, g = self.model.num_qo_heads, self.model.num_kv_heads
        out, start = [], 0
        for index, (seq, n) in enumerate(zip(seqs, lens, strict=True)):
            x = qkv[start : start + n].astype(np.float64)
            start += n
            old_k = self.keys.get((seq, layer), np.zeros((0, g, x.shape[2])))
            old_v = self.values.get((seq, layer), np.zeros((0, g, x.shape[2])))
            past = len(old_k)
            steps = np.arange(n) if depths is None else depths[index]
            q = self.rotate(x[:, :h], past + steps)
            k = np.concatenate([old_k, self.rotate(x[:, h : h + g], past + steps)])
            v = np.concatenate([old_v, x[:, h + g :]])
            self.keys[seq, layer], self.values[seq, layer] = k, v
            new = np.tril(np.ones((n, n), bool)) if visible is None else visible[index]
            seen = np.concatenate([np.ones((n, past), bool), new], 1)
            scores = np.einsum("nhd,mhd->hnm", q, k.repeat(h // g, 1)) * SM_SCALE
            scores = np.where(seen[None], scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out.append(np.einsum("hnm,mhd->nhd", weights, v.repeat(h // g, 1)))
        return np.concatenate(out)

    def edit(self, seq: int, keep: Callable[[np.ndarray], np.ndarray], to: int) -> None:
        """Make a sequence of what another one keeps of its tokens."""
        for held in (self.keys, self.values):
            for layer in range(NUM_LAYERS):
                if (seq, layer) in held:
                    held[to, layer] = keep(held[seq, layer])


class Driver:
    """Gives steps to a cache and to the oracle, and keeps the largest error."""

    def __init__(
        self,
        name: str,
        which: str = "flashinfer",
        *,
        page_size: int = 16,
        batch: int = 8,
        total: int = 1024,
        chunk: int = 256,
        support_sliding_window: int = 0,
    ) -> None:
        self.model = model = MODELS[name]
        create = compiled(model.library)[f"create_{which}_{name}_cache"]
        sizes = (batch, total, chunk, page_size, support_sliding_window)
        self.cache = create(*(Shape([size]) for size in sizes))
        self.oracle = Oracle(model)
        self.rng = np.random.default_rng(0)
        self.error = 0.0

    def add(self, *seqs: int) -> None:
        """Make empty sequences."""
        for seq in seqs:
            builtin("kv_state_add_sequence")(self.cache, seq)

    def fork(self, parent: int, child: int, at: int = -1) -> None:
        """Start a sequence from the first `at` tokens of another one, or from all of them."""
        builtin("kv_state_fork_sequence")(self.cache, parent, child, at)
        self.oracle.edit(parent, lambda x: x[: len(x) if at < 0 else at], child)

    def pop(self, seq: int, n: int) -> None:
        """Take the last tokens from a sequence."""
        builtin("kv_state_popn")(self.cache, seq, n)
        self.oracle.edit(seq, lambda x: x[: len(x) - n], seq)

    def remove(self, seq: int) -> None:
        """Drop a sequence."""
        builtin("kv_state_remove_sequence")(self.cache, seq)
        self.oracle.edit(seq, lambda x: x[:0], seq)

    def random(self, *shape: int) -> np.ndarray:
        """Return normal numbers in the dtype of the model."""
        return self.rng.standard_normal(shape).astype(numpy_dtype(self.model.dtype))

    def step(
        self,
        seqs: Sequence[int],
        lens: Sequence[int],
        parents: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Append tokens to sequences in every layer. `parents` makes them trees; -1 is a root."""
        tokens = sum(lens)
        model, trees = self.model, {}
        flat = None if parents is None else Shape([p for tree in parents for p in tree])
        if parents is not None:
            masks = [tree_masks(tree) for tree in parents]
            trees = {"visible": [m[0] for m in masks], "depths": [m[1] for m in masks]}
        builtin("kv_state_begin_forward")(self.cache, Shape(seqs), Shape(lens), flat)
        for layer in range(NUM_LAYERS):
            heads = model.num_qo_heads + 2 * model.num_kv_heads
            qkv = self.random(tokens, heads, model.head_dim)
            out = tvm.runtime.empty((tokens, model.num_qo_heads, model.head_dim), model.dtype)
            given = tvm.runtime.tensor(qkv, tvm.cpu())
            fused = builtin("attention_kv_cache_attention_with_fused_qkv")
            fused(self.cache, layer, SM_SCALE, given, out)
            self.check(out.numpy(), self.oracle.attend(layer, seqs, lens, qkv, **trees))
        builtin("kv_state_end_forward")(self.cache)

    def commit(self, seq: int, leaf: int, accepted: Sequence[int], tree_size: int) -> None:
        """Keep the tokens on the way to a leaf of the last tree, given by their numbers in it."""
        commit = builtin("attention_kv_cache_commit_accepted_token_tree_nodes")
        commit(self.cache, Shape([seq]), Shape([leaf]))

        def keep(x: np.ndarray) -> np.ndarray:
            past = len(x) - tree_size
            return np.concatenate([x[:past], x[past:][list(accepted)]])

        self.oracle.edit(seq, keep, seq)

    def check_contents(self, seq: int) -> None:
        """Read a sequence back and compare."""
        length = len(self.oracle.keys[seq, 0])
        shape = (NUM_LAYERS, length, self.model.num_kv_heads, self.model.head_dim)
        k, v = (tvm.runtime.empty(shape, self.model.dtype) for _ in range(2))
        builtin("attention_kv_cache_debug_get_kv")(self.cache, seq, 0, length, k, v)
        for layer in range(NUM_LAYERS):
            self.check(k.numpy()[layer], self.oracle.keys[seq, layer])
            self.check(v.numpy()[layer], self.oracle.values[seq, layer])

    def check(self, got: np.ndarray, expected: np.ndarray) -> None:
        """Remember the error if it is the largest so far; NaN is infinite."""
        error = np.abs(np.asarray(got, np.float64) - expected).max()
        self.error = max(self.error, float(np.inf if np.isnan(error) else error))

    @property
    def pages(self) -> int:
        """Pages that are free."""
        return builtin("attention_kv_cache_get_num_available_pages")(self.cache)


def tree_masks(parents: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens of a tree see which, and the depth of each."""
    n = len(parents)
    visible, depths = np.zeros((n, n), bool), np.zeros(n, int)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node], depths[node] = visible[parent], depths[parent] + 1
        visible[node, node] = True
    return visible, depths


#: Largest error that rounding of inputs, keys and outputs explains.
TOLERANCE = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 8e-2}


@pytest.fixture
def compile_model() -> Callable[[str], rx.VirtualMachine]:
    """Return the library with a model's caches."""
    return lambda name: compiled(MODELS[name].library)


@pytest.fixture
def drive() -> type[Driver]:
    """`Driver`; its first argument is one of `MODELS`, its second ``"flashinfer"`` or ``"tir"``."""
    return Driver


@pytest.fixture
def compare() -> Callable[..., None]:
    """Run steps on our cache and on TVM's.

    Ours must be right, and no more than twice as far from the oracle as TVM's, or one rounding.
    """

    def run(name: str, steps: Callable[[Driver], None], tvms: bool = True, **sizes: int) -> None:
        dtype = MODELS[name].dtype
        ours = Driver(name, **sizes)
        steps(ours)
        assert ours.error <= TOLERANCE[dtype], f"error {ours.error}, tolerance {TOLERANCE[dtype]}"
        if tvms:
            theirs = Driver(name, "tir", **sizes)
            steps(theirs)
            # Values are below 4, so this is one rounding of them.
            one_rounding = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) * 4
            assert ours.error <= 2 * theirs.error + one_rounding

    return run

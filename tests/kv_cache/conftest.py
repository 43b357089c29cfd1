"""Caches, driven as a serving engine drives them, beside a float64 oracle.

On CPU a compiled library has our cache and TVM's for every model of one shape. A `Driver` gives the
same steps to a cache and to the oracle, and measures how far apart they are. On CUDA models of
float32 are of float16, and there is our cache alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tvm
import tvm_ffi
from cache_models import MODELS, NUM_LAYERS, Model, compiled, compiled_alone, numpy_dtype
from cache_oracle import tree_masks
from sequences import SM_SCALE, Oracle, Slide
from tvm import relax as rx
from tvm_ffi import Shape


def builtin(name: str) -> Callable[..., Any]:
    return tvm_ffi.get_global_func(f"vm.builtin.{name}")


def on_cuda(model: Model) -> Model:
    """The model as CUDA serves it."""
    if model.head_dim % 16:
        pytest.skip(f"head_dim {model.head_dim} is refused on CUDA")
    return dataclasses.replace(model, dtype="float16") if model.dtype == "float32" else model


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
        device: Any = None,
    ) -> None:
        self.device = tvm.cpu() if device is None else device
        on_cpu = self.device.dlpack_device_type() == tvm.cpu().dlpack_device_type()
        self.model = model = MODELS[name] if on_cpu else on_cuda(MODELS[name])
        create = (
            compiled(model.library)[f"create_{which}_{name}_cache"]
            if on_cpu and model.is_generic
            else compiled_alone(model, on_cpu)["create"]
        )
        sizes = (batch, total, chunk, page_size, support_sliding_window)
        self.cache = create(*(Shape([size]) for size in sizes))
        self.oracle = Oracle(model, slides=support_sliding_window == 1)
        self.rng = np.random.default_rng(0)
        self.error = 0.0
        self.tells_windows = which == "flashinfer" and "mha_sliding" in model.attn_kind
        self.sinks: np.ndarray | None = None

    def empty(self, shape: Sequence[int], dtype: str | None = None) -> tvm.runtime.Tensor:
        """Make room on the device, for the dtype of the model unless another is named."""
        return tvm.runtime.empty(tuple(shape), dtype or self.model.dtype, self.device)

    def given(self, array: np.ndarray) -> tvm.runtime.Tensor:
        """Copy to the device."""
        return tvm.runtime.tensor(np.ascontiguousarray(array), self.device)

    def add(self, *seqs: int) -> None:
        """Make empty sequences."""
        for seq in seqs:
            builtin("kv_state_add_sequence")(self.cache, seq)

    def slide(self, seq: int, window: int, sink: int) -> None:
        """Let a sequence keep its first `sink` tokens and its last ones, `window` in all."""
        builtin("attention_kv_cache_enable_sliding_window_for_seq")(self.cache, seq, window, sink)
        self.oracle.slides[seq] = Slide(window, sink)

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
        self.oracle.slides.pop(seq, None)

    def clear(self) -> None:
        """Drop all sequences."""
        builtin("kv_state_clear")(self.cache)
        for held in (self.oracle.keys, self.oracle.values, self.oracle.slides):
            held.clear()

    def length(self, seq: int) -> int:
        """Tokens of a sequence."""
        return len(self.oracle.keys.get((seq, 0), ()))

    def random(self, *shape: int) -> np.ndarray:
        """Return normal numbers in the dtype of the model."""
        return self.rng.standard_normal(shape).astype(numpy_dtype(self.model.dtype))

    def step(
        self,
        seqs: Sequence[int],
        lens: Sequence[int],
        parents: Sequence[Sequence[int]] | None = None,
        *,
        with_lse: bool = False,
    ) -> None:
        """Append tokens to sequences in every layer. `parents` makes them trees; -1 is a root.

        `with_lse` also attends to the pages alone, which gives LSE besides outputs.
        """
        tokens = sum(lens)
        decoding = max(lens) == 1  # then TVM's cache appends first
        model, trees = self.model, {}
        flat = None if parents is None else Shape([p for tree in parents for p in tree])
        if parents is not None:
            masks = [tree_masks(tree) for tree in parents]
            trees = {"visible": [m[0] for m in masks], "depths": [m[1] for m in masks]}
        builtin("kv_state_begin_forward")(self.cache, Shape(seqs), Shape(lens), flat)
        for layer in range(NUM_LAYERS):
            heads = model.num_qo_heads + 2 * model.num_kv_heads
            qkv = self.random(tokens, heads, model.head_dim)
            out = self.empty((tokens, model.num_qo_heads, model.head_dim))
            if with_lse and not decoding:
                self._check_pages(layer, seqs, lens)
            self.attend(layer, self.given(qkv), out)
            sinks = None if self.sinks is None else self.sinks[layer]
            expected = self.oracle.attend(layer, seqs, lens, qkv, **trees, sinks=sinks)
            self.check(out.numpy(), expected)
            if with_lse and decoding:
                self._check_pages(layer, seqs, lens)
        builtin("kv_state_end_forward")(self.cache)

    def attend(self, layer: int, qkv: Any, out: Any) -> None:
        """Call the cache for one layer, with the sinks there are, and with its window."""
        window = [self.model.window_of(layer)] if self.tells_windows else []
        if self.sinks is None and not window:
            name, tensors = "vm.builtin.attention_kv_cache_attention_with_fused_qkv", [qkv]
        elif self.sinks is None:
            name, tensors = "flashinfer.cache_attention_in_window", [qkv]
        else:
            name = "flashinfer.cache_attention_with_sinks" + "_in_window" * len(window)
            tensors = [qkv, self.given(self.sinks[layer])]
        tvm_ffi.get_global_func(name)(self.cache, layer, SM_SCALE, *window, *tensors, out)

    def _check_pages(self, layer: int, seqs: Sequence[int], lens: Sequence[int]) -> None:
        if not any(len(self.oracle.keys.get((seq, layer), ())) for seq in seqs):
            return  # TVM's cache calls no function then
        shape = sum(lens), self.model.num_qo_heads
        q = self.random(*shape, self.model.head_dim)
        o, lse = self.empty(q.shape), self.empty(shape, "float32")
        attend = builtin("attention_kv_cache_cross_attention")
        attend(self.cache, layer, SM_SCALE, self.given(q), o, lse)
        expected_o, expected_lse = self.oracle.attend_to_pages(layer, seqs, lens, q)
        self.check(o.numpy(), expected_o)
        empty = np.isneginf(expected_lse)
        assert (np.isneginf(lse.numpy()) == empty).all()
        self.check(np.where(empty, 0, lse.numpy()), np.where(empty, 0, expected_lse))

    def commit(self, seq: int, leaf: int, accepted: Sequence[int], tree_size: int) -> None:
        """Keep the tokens on the way to a leaf of the last tree, given by their numbers in it."""
        commit = builtin("attention_kv_cache_commit_accepted_token_tree_nodes")
        commit(self.cache, Shape([seq]), Shape([leaf]))

        def keep(x: np.ndarray) -> np.ndarray:
            past = len(x) - tree_size
            return np.concatenate([x[:past], x[past:][list(accepted)]])

        self.oracle.edit(seq, keep, seq)

    def commit_all(
        self, seqs: Sequence[int], leaves: Sequence[int], trees: Sequence[Sequence[int]]
    ) -> None:
        """Commit the trees of the last step, whose sequences these are; -1 accepts nothing."""
        commit = builtin("attention_kv_cache_commit_accepted_token_tree_nodes")
        commit(self.cache, Shape(seqs), Shape(leaves))
        for seq, leaf, tree in zip(seqs, leaves, trees, strict=True):
            visible, _ = tree_masks(tree)
            past = self.length(seq) - len(tree)
            way = past + np.flatnonzero(visible[leaf]) if leaf >= 0 else np.zeros(0, int)
            kept = np.array([*range(past), *way], int)
            self.oracle.edit(seq, lambda x, kept=kept: x[kept], seq)

    def check_contents(self, seq: int) -> None:
        """Read a sequence back and compare."""
        length = len(self.oracle.keys[seq, 0])
        shape = (NUM_LAYERS, length, self.model.num_kv_heads, self.model.head_dim)
        k, v = self.empty(shape), self.empty(shape)
        builtin("attention_kv_cache_debug_get_kv")(self.cache, seq, 0, length, k, v)
        for layer in range(NUM_LAYERS):
            self.check(k.numpy()[layer], self.oracle.keys[seq, layer])
            self.check(v.numpy()[layer], self.oracle.values[seq, layer])

    def check(self, got: np.ndarray, expected: np.ndarray) -> None:
        """Remember the error if it is the largest so far; NaN is infinite."""
        error = np.abs(np.asarray(got, np.float64) - expected).max()
        self.error = max(self.error, float(np.inf if np.isnan(error) else error))

    @property
    def tolerance(self) -> float:
        """Largest error that rounding explains."""
        return TOLERANCE[self.model.dtype]

    @property
    def pages(self) -> int:
        """Pages that are free."""
        return builtin("attention_kv_cache_get_num_available_pages")(self.cache)

    @property
    def total_length(self) -> int:
        """Tokens of all sequences."""
        return builtin("attention_kv_cache_get_total_sequence_length")(self.cache)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held: no sequence, no block and no page."""
        return builtin("attention_kv_cache_empty")(self.cache)


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
def drive_on(device: Any) -> Callable[..., Driver]:
    """`Driver` on CPU and on CUDA."""
    return functools.partial(Driver, device=device)


@pytest.fixture
def compare(device: Any, drive_on: Callable[..., Driver]) -> Callable[..., None]:
    """Run steps on our cache and, on CPU, on TVM's.

    Ours must be right, and no more than twice as far from the oracle as TVM's, or one rounding.
    """

    def run(name: str, steps: Callable[[Driver], None], tvms: bool = True, **sizes: int) -> None:
        dtype = MODELS[name].dtype
        ours = drive_on(name, **sizes)
        steps(ours)
        assert ours.error <= ours.tolerance, f"error {ours.error}, tolerance {ours.tolerance}"
        if tvms and device.dlpack_device_type() == tvm.cpu().dlpack_device_type():
            theirs = Driver(name, "tir", **sizes)
            steps(theirs)
            # Values are below 4, so this is one rounding of them.
            one_rounding = float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) * 4
            assert ours.error <= 2 * theirs.error + one_rounding

    return run

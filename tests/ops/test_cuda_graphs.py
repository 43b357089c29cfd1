"""CUDA graphs of functions without a plan: captured once, replayed after the contents changed.

The index tensors lie at fixed addresses. Shapes are those of the capture; lengths are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from batches import Spec, normal
from cache_calls import CacheBatch, CacheSpec, make_cache_batch
from cache_oracle import random_tree
from calls import passed
from device_tensors import DeviceTensor, poisoned, to_device
from functions import PLANNED, Attend, batch_for, each, new_workspaces
from graphs import Graph, Stream
from refusals import refused, unchanged

pytestmark = pytest.mark.cuda


@pytest.fixture
def stream(cuda: Any) -> Iterator[Stream]:
    """A stream that can be captured; the default one cannot."""
    stream = Stream(cuda)
    yield stream
    stream.close()


class Slot:
    """One captured call, over tensors that hold the largest of some batches."""

    def __init__(self, ops: Any, batches: list[CacheBatch]) -> None:
        self.batches = batches
        first = batches[0]
        options = json.dumps(first.spec.options)
        self._bound = getattr(ops, f"bind_attention_{first.spec.slot}")(options)
        self.args = dict(first.args)
        for name, value in first.args.items():
            if isinstance(value, DeviceTensor):
                shapes = [batch.args[name].layout.shape for batch in batches]
                size = np.zeros(np.max(shapes, axis=0), value.layout.dtype)
                self.args[name] = to_device(size, first.device, byte_offset=32)

    def stage(self, step: int) -> None:
        """Write the inputs of a batch; what it does not fill is NaN or -1, as the outputs are."""
        for name, value in self.batches[step].args.items():
            if isinstance(value, DeviceTensor):
                written = value.numpy()
                self.args[name].write(written[:0] if name in ("o", "lse") else written)

    def spoil(self) -> None:
        """Make all numbers NaN, as memory that the call uses will be then."""
        for value in self.args.values():
            if isinstance(value, DeviceTensor) and value.layout.dtype.kind != "i":
                value.write(value.layout[:0])

    def call(self) -> None:
        """Call the bound function."""
        self._bound(*passed(self.args, {}))

    def check(self, step: int) -> None:
        """Compare the outputs with float64."""
        batch = self.batches[step]
        batch.args["o"], batch.args["lse"] = self.args["o"], self.args["lse"]
        batch.check()


def check_replays(ops: Any, stream: Stream, rng: Any, *calls: list[CacheSpec]) -> None:
    """Capture one call for each list of specs, in one graph, with the contents of the first ones.

    Then replay with the contents of each, up and down again, after a replay over NaN. The scratch
    memory that calls take and give back holds NaN before the first of them.
    """
    device = stream.device
    slots = [Slot(ops, [make_cache_batch(rng, device, spec) for spec in specs]) for specs in calls]

    def body() -> None:
        stream.dirty()
        for slot in slots:
            slot.call()

    for slot in slots:
        slot.stage(0)
    with stream.current():
        body()  # loads the kernels
    graph = Graph(stream, body)
    for slot in slots:
        slot.spoil()
    graph.replay()
    steps = list(range(len(calls[0])))
    for step in (*steps, *steps[-2::-1]):
        for slot in slots:
            slot.stage(step)
        graph.replay()
        for slot in slots:
            slot.check(step)
    graph.close()


GROWTH = [[1, 1], [63, 65], [700, 17], [5000, 4099], [9001, 1]]


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((4, 4), 64), ((16, 2), 64), ((28, 4), 128), ((4, 1), 80)], ids=str
)
def test_decode(ops, stream, rng, heads, head_dim, dtype):
    """Captured when two requests have one key each, replayed when they have thousands."""
    specs = [CacheSpec("decode_paged", kv, None, heads, head_dim, dtype=dtype) for kv in GROWTH]
    check_replays(ops, stream, rng, specs)


def test_decode_without_split(ops, stream, rng):
    """Two requests, 16/2 heads, few keys, memory that held NaN."""
    specs = [CacheSpec("decode_paged", kv, None, (16, 2)) for kv in ([5, 17], [17, 5], [60, 64])]
    check_replays(ops, stream, rng, specs)


def test_decode_that_rotates_with_a_cap(ops, stream, rng):
    """Positions change from step to step."""
    specs = [
        CacheSpec(
            "decode_paged", kv, None, (8, 2), 64, rotary_mode=1, options={"logits_soft_cap": 30.0}
        )
        for kv in GROWTH
    ]
    check_replays(ops, stream, rng, specs)


def test_two_windows(ops, stream, rng):
    """Two layers with windows of 64 and 512 tokens, decode and chunks, before and past them."""
    calls: list[list[CacheSpec]] = []
    for window in (64, 512):
        for slot, causal in (("decode_paged", 0), ("prefill_paged", 1)):
            specs = []
            for past in ([1, 0], [63, 40], [64, 65], [700, 513]):
                held = [min(n, window) for n in past]
                offsets = [(n % 16 if n > window else 0, 0) for n in past]
                rows = None if slot == "decode_paged" else [5, 4]
                options = {"layer_window": window}
                specs.append(
                    CacheSpec(
                        slot, held, rows, (8, 2), sliding=offsets, causal=causal, options=options
                    )
                )
            calls.append(specs)
    check_replays(ops, stream, rng, *calls)


@pytest.mark.parametrize("causal", [0, 1])
@pytest.mark.parametrize("slot", ["prefill_paged", "prefill_ragged"])
def test_prefill(ops, stream, rng, slot, causal):
    """The same number of rows, dealt out to the requests in other ways, over more keys."""
    shapes = [([8, 8, 0], [8, 8, 0]), ([40, 0, 77], [5, 1, 10]), ([3000, 1, 300], [0, 1, 15])]
    specs = [CacheSpec(slot, kv, qo, (8, 2), 128, causal=causal) for kv, qo in shapes]
    check_replays(ops, stream, rng, specs)


@pytest.mark.parametrize("slot", ["tree_paged", "tree_ragged"])
def test_trees(ops, stream, rng, slot):
    """Other trees over other pasts, with as many rows in all."""
    specs = []
    for nodes, past in (([3, 13], [0, 0]), ([15, 1], [40, 7]), ([8, 8], [2000, 999])):
        ragged = slot == "tree_ragged"
        kv_lens = nodes if ragged else [n + p for n, p in zip(nodes, past, strict=True)]
        trees = [random_tree(rng, n) for n in nodes]
        specs.append(CacheSpec(slot, kv_lens, nodes, (8, 2), trees=trees))
    check_replays(ops, stream, rng, specs)


def test_step_of_a_layer(ops, stream, rng):
    """Split with RoPE, append, attend, merge and page moves in one graph: the bits of plain calls.

    One token for each of two requests at each step, so that a page is filled and the next begun.
    """
    device, n, qo_heads, kv_heads, d, size = stream.device, 2, 8, 2, 64, 16
    heads = qo_heads + 2 * kv_heads
    dtype = "float16"

    def ints(*shape: int) -> DeviceTensor:
        return to_device(np.zeros(shape, np.int32), device, byte_offset=4)

    def make() -> dict[str, DeviceTensor]:
        same = np.random.default_rng(5)
        floats = {
            "pages": to_device(normal(same, (6, 2, kv_heads, size, d), dtype), device),
            "qkv": poisoned((n, heads, d), dtype, device),
            "other": to_device(normal(same, (n, qo_heads, d), dtype), device),
            "other_lse": to_device(normal(same, (n, qo_heads), "float32"), device),
            "lse": poisoned((n, qo_heads), "float32", device),
        }
        for name, count in {"q": qo_heads, "o": qo_heads, "k": kv_heads, "v": kv_heads}.items():
            floats[name] = poisoned((n, count, d), dtype, device)
        sizes = {"positions": (n,), "slots": (n,), "indptr": (n + 1,), "indices": (4,)}
        sizes |= {"last": (n,), "moved": (2,), "moves": (2, 1)}
        return floats | {name: ints(*shape) for name, shape in sizes.items()}

    attention = ops.bind_attention_decode_paged("{}")

    def body(t: dict[str, DeviceTensor]) -> None:
        x = {name: holder.tensor for name, holder in t.items()}
        ops.split_qkv_rotary(x["qkv"], x["positions"], x["q"], x["k"], x["v"], 1, 1e4, 1.0, d, "{}")
        ops.append_paged_kv_cache(x["pages"], x["k"], x["v"], x["slots"])
        ops.copy_single_page(x["pages"], 0, 5, 7)
        ops.compact_kv_copy(x["pages"], x["moved"], x["moves"], 1)
        attention(
            x["q"], x["pages"], x["indptr"], x["indices"], x["last"], x["positions"],
            x["positions"], x["o"], x["lse"], 0, 1.0, 1e4, 0.125,
        )  # fmt: skip
        ops.merge_state_in_place(x["o"], x["lse"], x["other"], x["other_lse"])

    def stage(t: dict[str, DeviceTensor], position: int, qkv: np.ndarray) -> None:
        pages = position // size + 1
        indices = [0, 2, 1, 3] if pages == 2 else [0, 1]
        row = [indices[pages * b + position // size] * size + position % size for b in range(n)]
        for name, values in {
            "positions": [position] * n,
            "slots": row,
            "indptr": [0, pages, 2 * pages],
            "indices": indices,
            "last": [position % size + 1] * n,
            "moved": [0, 1],
            "moves": [[row[0]], [4 * size + position]],
        }.items():
            t[name].write(np.array(values, np.int32))
        t["qkv"].write(qkv)

    captured, plain = make(), make()
    steps = [(at, normal(rng, (n, heads, d), dtype)) for at in (13, 14, 15, 16, 17)]
    warm = make()
    stage(warm, *steps[0])
    with stream.current():
        body(warm)
    graph = Graph(stream, lambda: body(captured))
    for step in steps:
        for tensors in (captured, plain):
            stage(tensors, *step)
        graph.replay()
        with stream.current():
            body(plain)
        for name in ("pages", "o", "lse"):
            got, expected = captured[name].numpy(), plain[name].numpy()
            np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8), name)
            assert np.isfinite(got.astype(np.float32)).all()
    graph.close()


@each(*PLANNED)
def test_plans_are_refused(ops, stream, rng, function):
    """A plan in a capture, and a run of a plan made before; the capture goes on."""
    device = stream.device
    attend = Attend(ops, device, new_workspaces(device))
    spec = Spec((40, 3), (4, 3), (8, 2))
    call = attend.call(function, batch_for(function, rng, spec))
    call.plan_run_check()
    other = make_cache_batch(rng, device, CacheSpec("decode_paged", [40, 3]))
    other.run_check(ops)

    def body() -> None:
        says = ("captured into a CUDA graph", "bind_attention")
        with refused(RuntimeError, *says):
            call.run()
        with refused(RuntimeError, *says):
            call.plan()
        other.call(ops)

    with unchanged(call.run_args):
        graph = Graph(stream, body)
    check_replay(graph, other)
    with refused(ValueError, "enable_cuda_graph"):
        call.plan(enable_cuda_graph=True)
    call.fresh_outputs()
    call.plan_run_check()


def test_checked_contents_are_refused(ops, stream, rng, monkeypatch):
    """Contents cannot be read back in a capture; the setting is named, and the capture goes on."""
    batch = make_cache_batch(rng, stream.device, CacheSpec("decode_paged", [40, 3]))
    batch.run_check(ops)

    def body() -> None:
        with monkeypatch.context() as patch:
            patch.setenv("TVM_FLASHINFER_CHECK", "1")
            with refused(RuntimeError, "captured into a CUDA graph", "TVM_FLASHINFER_CHECK"):
                batch.call(ops)
        batch.call(ops)

    with unchanged(batch.args):
        graph = Graph(stream, body)
    check_replay(graph, batch)
    batch.run_check(ops)


def test_norms_and_rotary_append(ops, stream, rng):
    """Norm, gate and rotated append in one graph: positions and slots are read in each replay."""
    device, rows = stream.device, 3
    made = {
        "x": normal(rng, (rows, 8 * 64), "float16"),
        "weight": normal(rng, (8 * 64,), "float16"),
        "positions": np.zeros(rows, np.int32),
        "slots": np.zeros(rows, np.int32),
        "pages": np.zeros((4, 2, 2, 16, 64), np.float16),
    }
    held = {name: to_device(x, device) for name, x in made.items()}
    normed = poisoned((rows, 8 * 64), "float16", device)
    q = poisoned((rows, 4, 64), "float16", device)
    gate = poisoned((rows, 4 * 64), "float16", device)
    t = {name: x.tensor for name, x in held.items()}

    def body() -> None:
        ops.rmsnorm(t["x"], t["weight"], 1e-6, normed.tensor)
        ops.split_qkv_rotary_append(
            normed.tensor, t["positions"], t["slots"], 1e4, 1.0, 64, "{}", t["pages"], q.tensor
        )
        ops.silu_and_mul(normed.tensor, gate.tensor)

    with stream.current():
        body()
    graph = Graph(stream, body)
    for step in range(3):
        held["positions"].write(np.arange(rows, dtype=np.int32) + 7 * step)
        held["slots"].write(np.arange(rows, dtype=np.int32) * 16 + step)
        held["x"].write(normal(rng, (rows, 8 * 64), "float16"))
        graph.replay()
        outputs = [x.numpy() for x in (q, gate, held["pages"])]
        with stream.current():
            body()
        for got, holder in zip(outputs, (q, gate, held["pages"]), strict=True):
            np.testing.assert_array_equal(got, holder.numpy())
            assert np.isfinite(got).all()
            assert got.any()
    graph.close()


def check_replay(graph: Graph, batch: CacheBatch) -> None:
    """Replay over outputs that hold NaN, and compare with float64."""
    for name in ("o", "lse"):
        output = batch.args[name]
        output.write(output.layout[:0])
    graph.replay()
    batch.check()
    graph.close()

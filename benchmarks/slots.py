"""Cases of the slots of TVM's cache that have no plan: sliding pages, RoPE inside, trees."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cases import Attention
from .moves import THETA, turn
from .work import WINDOW

#: The slot in which the window of a sliding request starts, and the tokens of its sink.
OFFSET, SINK = 37, 4
FIRST_POSITIONS = 2000


def depth_first_tree(rng: np.random.Generator, nodes: int) -> np.ndarray:
    """(nodes, 2): the interval of orders of each node's subtree, nodes in depth-first order."""
    parents = [-1]
    for node in range(1, nodes):
        parent = node - 1
        while parent >= 0 and rng.random() < 0.4:
            parent = parents[parent]
        parents.append(parent)
    ends = list(range(1, nodes + 1))
    for node in range(nodes - 1, 0, -1):
        if parents[node] >= 0:
            ends[parents[node]] = max(ends[parents[node]], ends[node])
    return np.stack([np.arange(nodes), np.array(ends)], 1).astype(np.int32)


class Slot(Attention):
    """Attention without a plan, with what `Row.feature` names."""

    @property
    def sliding(self) -> bool:
        """Whether pages hold a sink and a window that starts inside of a page."""
        return "window" in self.row.feature

    @property
    def rope(self) -> bool:
        """Whether queries and keys are rotated inside of attention."""
        return "rope" in self.row.feature

    @property
    def windowed(self) -> bool:
        """Whether rows see a window of the keys, which lie all before them."""
        return self.row.feature == "window" and self.row.kind == "slot_prefill"

    def make_shared(self) -> None:
        """Besides the offsets: positions, where windows start, and trees."""
        row = self.row
        super().make_shared()
        self.index("positions", self.rng.integers(0, 3000, row.rows).astype(np.int32))
        self.index("first", self.rng.integers(0, FIRST_POSITIONS, row.batch).astype(np.int32))
        if self.sliding:
            info = [self.host["last"], *(np.full(row.batch, x) for x in (OFFSET, SINK))]
            self.index("last", np.stack(info).astype(np.int32))
        if row.kind.startswith("slot_tree"):
            self.trees = [depth_first_tree(self.rng, row.qo_len) for _ in range(row.batch)]
            self.index("tree_indptr", np.arange(row.batch + 1, dtype=np.int32) * row.qo_len)
            self.index("tree_mask", np.concatenate(self.trees))
        if self.rope:
            # TVM's kernels round angles of thousands of radians to float.
            self.tolerance = tuple(max(x, 3e-2) for x in self.tolerance)

    @property
    def ragged(self) -> bool:
        """Whether keys lie one after another instead of in pages."""
        return self.row.kind == "slot_tree_ragged"

    @property
    def slots(self) -> int:
        """Places that a request takes up in its pages."""
        return self.row.kv_len + (OFFSET - SINK if self.sliding else 0)

    def keys_of(self, i: int, request: int) -> tuple[Any, Any]:
        """Keys and values out of their slots."""
        if not self.sliding:
            return super().keys_of(i, request)
        k, v = self.pages_of(i, request)
        key = np.arange(self.row.kv_len)
        where = self.machine.put(np.where(key < SINK, key, key - SINK + OFFSET).astype(np.int64))
        return k[where], v[where]

    def seen(self, request: int, rows: np.ndarray) -> np.ndarray | None:
        """Which keys the rows see; None for all."""
        row, key = self.row, np.arange(self.row.kv_len)[None]
        if self.windowed:
            return key >= row.kv_len - np.maximum(WINDOW - rows[:, None] - 1, 0)
        if not row.kind.startswith("slot_tree"):
            return None
        tree, before = self.trees[request], row.kv_len - row.qo_len
        own = tree[rows, 0][:, None]
        inside = (own >= tree[None, :, 0]) & (own < tree[None, :, 1])
        return np.concatenate([np.ones((len(rows), before), bool), inside], 1)

    def operands(self, i: int, request: int, rows: np.ndarray) -> tuple[Any, Any, Any]:
        """Queries, keys and values; rotated where attention rotates them."""
        q, k, v = super().operands(i, request, rows)
        if not self.rope:
            return q, k, v
        machine = self.machine
        at_q = self.host["positions"][request * self.row.qo_len + rows]
        at_k = self.host["first"][request] + np.arange(self.row.kv_len)
        return turn(machine, q, at_q, THETA), turn(machine, k, at_k, THETA), v

    def arguments(self, i: int) -> tuple[Any, ...]:
        """What TVM's kernel of the slot takes, and so does ours."""
        machine, kind, buffer = self.machine, self.row.kind, self.buffers[i]
        shared = {name: machine.tvm(x) for name, x in self.shared.items()}
        q, o, lse = (machine.tvm(buffer[name]) for name in ("q", "o", "lse"))
        rope = (int(self.rope), 1.0, THETA, self.row.sm_scale)
        rows, at_q = shared["qo_indptr"], shared["positions"]
        trees = [shared[name] for name in ("tree_indptr", "tree_mask") if name in shared]
        if self.ragged:
            k, v = (machine.tvm(buffer[name]) for name in "kv")
            return (q, rows, k, v, shared["kv_indptr"], at_q, *trees, o, lse, *rope)
        table = (
            machine.tvm(buffer["pages"]),
            *(shared[x] for x in ("kv_indptr", "page_indices", "last", "first")), at_q, o, lse,
        )  # fmt: skip
        if kind == "slot_decode":
            return (q, *table, *rope)
        if kind == "slot_prefill":
            return (q, rows, *table, int(self.windowed), *rope)
        return (q, rows, *table, *rope, *trees)

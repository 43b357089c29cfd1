"""Cases that move, rotate or merge rows."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from .cases import Case

THETA = 1e4


def turn(machine: Any, x: Any, positions: np.ndarray, theta: float) -> Any:
    """Rotary embedding of x (n, H, d) in float64."""
    x, dim = machine.float64(x), x.shape[-1]
    half = dim // 2
    angles = np.outer(positions, theta ** (-2.0 * np.arange(half) / dim))
    cos, sin = (machine.put(f(angles)[:, None]) for f in (np.cos, np.sin))
    a, b = x[..., :half], x[..., half:]
    return machine.xp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


class Rotary(Case):
    """The rows of q, k and v out of one tensor, with their positions applied."""

    # TVM's kernel rounds angles of thousands of radians to float32.
    tolerances: ClassVar = {
        "float16": (2e-2, 5e-3),
        "bfloat16": (1e-1, 2e-2),
        "float32": (2e-3, 1e-3),
    }

    def make_shared(self) -> None:
        """Positions of the rows."""
        self.index("positions", np.arange(self.row.batch, dtype=np.int32))

    def make_buffer(self, i: int) -> dict[str, Any]:
        """The joined rows and the three outputs."""
        row, machine = self.row, self.machine
        qo, kv = row.heads
        found = {"qkv": machine.normal(row.batch, qo + 2 * kv, row.head_dim, dtype=row.dtype)}
        for name, heads in (("q", qo), ("k", kv), ("v", kv)):
            found[name] = machine.empty(row.batch, heads, row.head_dim, dtype=row.dtype)
        return found

    def expect(self, i: int) -> Any:
        """All rows, with the angles in float64."""
        machine, (qo, kv) = self.machine, self.row.heads
        x = machine.float64(self.buffers[i]["qkv"])
        turned = turn(machine, x[:, : qo + kv], self.host["positions"], THETA)
        return machine.xp.concatenate([turned, x[:, qo + kv :]], 1)

    def poison(self, i: int) -> None:
        """Fill the three outputs with NaN."""
        for name in "qkv":
            self.machine.poison(self.buffers[i][name])

    def whole(self, i: int, returned: Any) -> Any:
        """The three outputs side by side."""
        return self.machine.xp.concatenate([self.buffers[i][name] for name in "qkv"], 1)

    def found(self, i: int, returned: Any) -> Any:
        """All of them."""
        return self.whole(i, returned)


class Append(Case):
    """New keys and values into random slots of pages."""

    tolerances = dict.fromkeys(Case.tolerances, (0.0, 0.0))

    def make_shared(self) -> None:
        """The slot of each row: a page, and a place in it."""
        row = self.row
        self.pages = math.ceil(2 * row.batch / row.page_size)
        slots = self.rng.permutation(self.pages * row.page_size)[: row.batch].astype(np.int32)
        self.index("slots", slots)
        self.where = [self.machine.put(x.astype(np.int64)) for x in np.divmod(slots, row.page_size)]

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Rows and the pool of pages."""
        row, machine, kv = self.row, self.machine, self.row.heads[1]
        found = {
            name: machine.normal(row.batch, kv, row.head_dim, dtype=row.dtype) for name in "kv"
        }
        shape = (self.pages, 2, kv, row.page_size, row.head_dim)
        return {**found, "o": machine.empty(*shape, dtype=row.dtype)}

    def expect(self, i: int) -> Any:
        """Rows of keys and values, to the bit."""
        machine, buffer = self.machine, self.buffers[i]
        return machine.float64(machine.xp.stack([buffer["k"], buffer["v"]], 1))

    def whole(self, i: int, returned: Any) -> Any:
        """What lies in the slots."""
        pages, places = self.where
        return self.buffers[i]["o"][pages, :, :, places]

    def found(self, i: int, returned: Any) -> Any:
        """All of it."""
        return self.whole(i, returned)


class Merge(Case):
    """Two states of attention into the first of them."""

    once = True

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Both states, and a copy of the one that is written."""
        row, machine = self.row, self.machine
        shape = (row.batch, row.heads[0], row.head_dim)
        found = {name: machine.normal(*shape, dtype=row.dtype) for name in ("v", "v_other")}
        found |= {name: machine.normal(*shape[:2]) for name in ("s", "s_other")}
        return {**found, "v_first": machine.clone(found["v"]), "s_first": machine.clone(found["s"])}

    def expect(self, i: int) -> Any:
        """The merged values and, behind them, the merged logarithms."""
        buffer, xp, f = self.buffers[i], self.machine.xp, self.machine.float64
        a, b = (2.0 ** f(buffer[name])[..., None] for name in ("s_first", "s_other"))
        merged = (a * f(buffer["v_first"]) + b * f(buffer["v_other"])) / (a + b)
        return xp.concatenate([merged, xp.log2(a + b)], -1)

    def poison(self, i: int) -> None:
        """Put back what the last call merged: a side that does not run leaves it."""
        for name in "vs":
            self.machine.copy(self.buffers[i][f"{name}_first"], self.buffers[i][name])

    def whole(self, i: int, returned: Any) -> Any:
        """Values and logarithms side by side."""
        buffer, f = self.buffers[i], self.machine.float64
        return self.machine.xp.concatenate([f(buffer["v"]), f(buffer["s"])[..., None]], -1)

    def found(self, i: int, returned: Any) -> Any:
        """All of them."""
        return self.whole(i, returned)


class CopyPage(Case):
    """One page onto another of one pool; each buffer is a pair of pages."""

    tolerances = dict.fromkeys(Case.tolerances, (0.0, 0.0))

    def make_shared(self) -> None:
        """The pool, and pairs of pages that lie apart."""
        row, machine = self.row, self.machine
        count = max(1, math.ceil(machine.rotate_bytes / row.bytes))
        shape = (2 * count, 2, row.heads[1], row.page_size, row.head_dim)
        self.pool = machine.normal(*shape, dtype=row.dtype)
        self.pairs = self.rng.permutation(2 * count).reshape(count, 2).tolist()

    def make_buffer(self, i: int) -> dict[str, Any]:
        """The pool, and the numbers of two pages."""
        source, target = self.pairs[i]
        return {"pool": self.pool, "source": source, "target": target, "o": self.pool[target]}

    def expect(self, i: int) -> Any:
        """The page that is copied."""
        return self.machine.float64(self.pool[self.buffers[i]["source"]])

    def found(self, i: int, returned: Any) -> Any:
        """The page that is written."""
        return self.buffers[i]["o"]


class Compact(Append):
    """Rows of pages onto other slots of them, for 16 sequences."""

    sequences = 16

    def make_shared(self) -> None:
        """Slots to copy from and to, none of them twice."""
        row, machine = self.row, self.machine
        self.pages = math.ceil(4 * row.batch / row.page_size)
        slots = self.rng.permutation(self.pages * row.page_size)[: 2 * row.batch]
        self.index("pairs", slots.reshape(2, row.batch).astype(np.int32))
        each = row.batch // self.sequences
        self.index("indptr", np.arange(self.sequences + 1, dtype=np.int32) * each)
        self.from_where, self.where = (
            [machine.put(x.astype(np.int64)) for x in np.divmod(part, row.page_size)]
            for part in self.host["pairs"]
        )

    def make_buffer(self, i: int) -> dict[str, Any]:
        """The pool."""
        row = self.row
        shape = (self.pages, 2, row.heads[1], row.page_size, row.head_dim)
        return {"o": self.machine.normal(*shape, dtype=row.dtype)}

    def expect(self, i: int) -> Any:
        """The rows that are copied, to the bit."""
        pages, places = self.from_where
        return self.machine.float64(self.buffers[i]["o"][pages, :, :, places])

    def poison(self, i: int) -> None:
        """Fill the slots that are written with NaN."""
        pages, places = self.where
        self.buffers[i]["o"][pages, :, :, places] = float("nan")

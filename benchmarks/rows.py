"""Cases of the functions around attention: norms, gates, and rotary embedding into pages."""

from __future__ import annotations

from typing import Any

import numpy as np

from .cases import Case
from .moves import THETA, Append, Rotary, turn

EPS = 1e-5


class Norm(Case):
    """Root mean square norm of rows."""

    adds = False

    def make_shared(self) -> None:
        """The weight."""
        row, machine = self.row, self.machine
        self.shared["weight"] = machine.normal(row.head_dim, dtype=row.dtype)

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Inputs and outputs, all of one shape."""
        row, machine = self.row, self.machine
        shape = (row.batch, row.head_dim)
        names = ("x", "residual") if self.adds else ("x",)
        found = {name: machine.normal(*shape, dtype=row.dtype) for name in names}
        outputs = ("o", "sum") if self.adds else ("o",)
        return found | {name: machine.empty(*shape, dtype=row.dtype) for name in outputs}

    def expect(self, i: int) -> Any:
        """The norm of all rows, and behind it the sum where there is one."""
        machine, buffer = self.machine, self.buffers[i]
        y = machine.float64(buffer["x"])
        if self.adds:
            y = y + machine.float64(buffer["residual"])
        scale = ((y * y).mean(-1) + EPS) ** -0.5
        normed = y * scale[:, None] * machine.float64(self.shared["weight"])
        return machine.xp.concatenate([normed, y], -1) if self.adds else normed

    def poison(self, i: int) -> None:
        """Fill the outputs with NaN."""
        for name in ("o", "sum"):
            if name in self.buffers[i]:
                self.machine.poison(self.buffers[i][name])

    def whole(self, i: int, returned: Any) -> Any:
        """The outputs side by side."""
        buffer = self.buffers[i]
        if not self.adds:
            return buffer["o"]
        return self.machine.xp.concatenate([buffer["o"], buffer["sum"]], -1)

    def found(self, i: int, returned: Any) -> Any:
        """All of them."""
        return self.whole(i, returned)


class AddNorm(Norm):
    """The same of a sum with a residual, which is an output too."""

    adds = True


class Gate(Case):
    """SiLU of the first half of rows times the second."""

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Rows of two halves, and the output."""
        row, machine = self.row, self.machine
        return {
            "x": machine.normal(row.batch, 2 * row.head_dim, dtype=row.dtype),
            "o": machine.empty(row.batch, row.head_dim, dtype=row.dtype),
        }

    def expect(self, i: int) -> Any:
        """All rows."""
        machine, dim = self.machine, self.row.head_dim
        x = machine.float64(self.buffers[i]["x"])
        gate = x[:, :dim]
        return gate / (1 + machine.xp.exp(-gate)) * x[:, dim:]

    def found(self, i: int, returned: Any) -> Any:
        """All of the output."""
        return self.whole(i, returned)


class RotaryAppend(Rotary):
    """Joined rows whose queries come out, and whose keys and values go into pages."""

    def make_shared(self) -> None:
        """Positions and slots of the rows."""
        Append.make_shared(self)
        self.index("positions", np.arange(self.row.batch, dtype=np.int32))

    def make_buffer(self, i: int) -> dict[str, Any]:
        """The joined rows, the queries, the pool, and what two kernels pass between them."""
        row, machine, (qo, kv) = self.row, self.machine, self.row.heads
        found = {"qkv": machine.normal(row.batch, qo + 2 * kv, row.head_dim, dtype=row.dtype)}
        for name, heads in (("q", qo), ("k", kv), ("v", kv)):
            found[name] = machine.empty(row.batch, heads, row.head_dim, dtype=row.dtype)
        shape = (self.pages, 2, kv, row.page_size, row.head_dim)
        return {**found, "o": machine.empty(*shape, dtype=row.dtype)}

    def expect(self, i: int) -> Any:
        """Queries, then keys and values, with the angles in float64."""
        machine, (qo, kv) = self.machine, self.row.heads
        x = machine.float64(self.buffers[i]["qkv"])
        turned = turn(machine, x[:, : qo + kv], self.host["positions"], THETA)
        return machine.xp.concatenate([turned, x[:, qo + kv :]], 1)

    def poison(self, i: int) -> None:
        """Fill queries and pages with NaN."""
        for name in ("q", "o"):
            self.machine.poison(self.buffers[i][name])

    def whole(self, i: int, returned: Any) -> Any:
        """Queries, and what lies in the slots, side by side."""
        pages, places = self.where
        held = self.buffers[i]["o"][pages, :, :, places]
        return self.machine.xp.concatenate([self.buffers[i]["q"], held[:, 0], held[:, 1]], 1)

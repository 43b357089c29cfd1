"""Cases of the functions around attention: norms, gates, rotary embedding, and a softmax."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from .cases import Case
from .moves import THETA, Append, Rotary, turn

EPS = 1e-5


class Norm(Case):
    """Root mean square norm of rows, or of their sum with a residual, which is an output too."""

    @property
    def adds(self) -> bool:
        """Whether there is a residual."""
        return "add" in self.row.kind

    def make_shared(self) -> None:
        """The weight, and what rows are multiplied by: models that add 1 do so when loaded."""
        row, machine = self.row, self.machine
        weight = self.rng.standard_normal(row.head_dim).astype(row.dtype)
        self.shared["weight"] = machine.put(weight)
        whole = weight + np.array("gemma" in row.kind, row.dtype)
        self.shared["whole_weight"] = machine.put(whole)

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
        weight = machine.float64(self.shared["weight"]) + float("gemma" in self.row.kind)
        normed = y * scale[:, None] * weight
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


class Gate(Case):
    """SiLU or GELU of the first half of rows times the second."""

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Rows of two halves, and the output."""
        row, machine = self.row, self.machine
        return {
            "x": machine.normal(row.batch, 2 * row.head_dim, dtype=row.dtype),
            "o": machine.empty(row.batch, row.head_dim, dtype=row.dtype),
        }

    def expect(self, i: int) -> Any:
        """All rows."""
        machine, dim, kind = self.machine, self.row.head_dim, self.row.kind
        x = machine.float64(self.buffers[i]["x"])
        gate, up = x[:, :dim], x[:, dim:]
        if kind == "silu":
            return gate / (1 + machine.xp.exp(-gate)) * up
        if kind == "gelu":
            # NumPy has none.
            erf = getattr(machine.xp, "erf", None) or np.vectorize(math.erf)
            return gate * (1 + erf(gate / 2**0.5)) / 2 * up
        inner = (2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)
        return gate * (1 + machine.xp.tanh(inner)) / 2 * up

    def found(self, i: int, returned: Any) -> Any:
        """All of the output."""
        return self.whole(i, returned)


class Rope(Rotary):
    """Rotary embedding of queries and keys outside of a cache."""

    # TVM's side reads sines and cosines in the dtype of the row, as models have them.
    tolerances: ClassVar = {
        "float16": (4e-2, 5e-3),
        "bfloat16": (2e-1, 2e-2),
        "float32": (2e-3, 1e-3),
    }

    def make_shared(self) -> None:
        """Positions of the rows, and sines and cosines (n, 1, d) of them."""
        super().make_shared()
        row, half = self.row, self.row.head_dim // 2
        angles = np.outer(self.host["positions"], THETA ** (-np.arange(half) / half))
        for name, f in (("cos", np.cos), ("sin", np.sin)):
            both = np.concatenate([f(angles)] * 2, -1)[:, None]
            self.shared[name] = self.machine.put(both.astype(row.dtype))

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Queries and keys, and the rotated ones."""
        row, machine, (qo, kv) = self.row, self.machine, self.row.heads
        found = {}
        for name, heads in (("q", qo), ("k", kv)):
            shape = (row.batch, heads, row.head_dim)
            found[name] = machine.normal(*shape, dtype=row.dtype)
            found[f"{name}_out"] = machine.empty(*shape, dtype=row.dtype)
        return found

    def expect(self, i: int) -> Any:
        """All rows, with the angles in float64."""
        machine, buffer = self.machine, self.buffers[i]
        x = machine.xp.concatenate([buffer["q"], buffer["k"]], 1)
        return turn(machine, x, self.host["positions"], THETA)

    def poison(self, i: int) -> None:
        """Fill both outputs with NaN."""
        for name in "qk":
            self.machine.poison(self.buffers[i][f"{name}_out"])

    def whole(self, i: int, returned: Any) -> Any:
        """Both outputs side by side."""
        outputs = [self.buffers[i][f"{name}_out"] for name in "qk"]
        return self.machine.xp.concatenate(outputs, 1)


class Softmax(Case):
    """Softmax of rows over a vocabulary, each with a temperature."""

    def make_shared(self) -> None:
        """Temperatures."""
        self.index("temperature", np.linspace(0.5, 1.5, self.row.batch).astype(np.float32))

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Logits and probabilities."""
        shape, machine = (self.row.batch, self.row.kv_len), self.machine
        found = {"x": machine.normal(*shape, dtype="float32")}
        # TVM's side has a tensor between two kernels.
        return found | {name: machine.empty(*shape) for name in ("scaled", "o")}

    def expect(self, i: int) -> Any:
        """All rows."""
        machine = self.machine
        scaled = machine.float64(self.buffers[i]["x"])
        scaled = scaled / machine.float64(self.shared["temperature"])[:, None]
        weights = machine.xp.exp(scaled - machine.xp.amax(scaled, -1, keepdims=True))
        return weights / weights.sum(-1)[:, None]

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

"""The tensors of a row, in as many copies as it takes to leave the cache, and what is right.

A case has buffers, which all sides share. `poison` makes a buffer's outputs what no side may leave
them, and `errors` compares them with float64.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from .work import CKV, GATES, KPE, NORMS, Row

#: Buffers of a row at most: enough for pages of 64 KB to be read from memory.
MOST_BUFFERS = 2560
SAMPLED_ROWS = 8


class Case:
    """Tensors of one row.

    Attributes
    ----------
    buffers : list of dict
        Inputs and outputs of a call, by name.
    shared : dict
        What the calls of all buffers are given: index tensors, on the device and on the host.
    once : bool
        Whether a call changes its input, so that each buffer is good for one call.
    tolerance : (float, float)
        Largest error of an element, and root of the mean square of errors beside that of what is
        right.
    """

    once = False
    tolerances: ClassVar = {
        "float16": (4e-3, 1e-2),
        "bfloat16": (2e-2, 2e-2),
        "float32": (1e-4, 1e-4),
    }

    def __init__(self, row: Row, machine: Any) -> None:
        self.row, self.machine = row, machine
        self.tolerance = self.tolerances[row.dtype]
        self.rng = np.random.default_rng(0)
        self.shared: dict[str, Any] = {}
        self.host: dict[str, np.ndarray] = {}
        count = self.buffer_count()
        self.make_shared()
        self.buffers = [self.make_buffer(i) for i in range(count)]
        self.expected = [self.expect(i) for i in range(count)]
        machine.sync()

    def buffer_count(self) -> int:
        """How many buffers it takes to leave the cache; more where each is good for one call."""
        if not self.row.bytes or self.row.kind.startswith("host"):
            return 1
        count = math.ceil(self.machine.rotate_bytes / self.row.bytes)
        return min(MOST_BUFFERS, max(count, 8 if self.once else 1))

    @property
    def cold(self) -> bool:
        """Whether a buffer has left the cache when its turn comes again."""
        return len(self.buffers) * self.row.bytes >= 2 * self.machine.cache_bytes

    def index(self, name: str, array: np.ndarray) -> None:
        """Keep an index array for the host and the device."""
        self.host[name] = array
        self.shared[name] = self.machine.put(array)

    def make_shared(self) -> None:
        """Make the index tensors."""

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Make the inputs and outputs of one call."""
        raise NotImplementedError

    def expect(self, i: int) -> Any:
        """What part of the outputs of a buffer must be, in float64."""
        raise NotImplementedError

    def poison(self, i: int) -> None:
        """Fill the outputs of a buffer with NaN."""
        for name in ("o", "lse"):
            if name in self.buffers[i]:
                self.machine.poison(self.buffers[i][name])

    def found(self, i: int, returned: Any) -> Any:
        """The part of the outputs that `expect` is about; `returned` stands in place of `o`."""
        raise NotImplementedError

    def whole(self, i: int, returned: Any) -> Any:
        """Outputs that must have no NaN."""
        return self.buffers[i]["o"] if returned is None else returned

    def errors(self, i: int, returned: Any = None) -> list[Any]:
        """Whether an output is NaN, the largest error, mean squares of errors and of the truth."""
        machine, expected = self.machine, self.expected[i]
        off = machine.float64(self.found(i, returned)) - expected
        return [
            machine.xp.isnan(self.whole(i, returned)).any(),
            abs(off).max(),
            (off * off).mean(),
            (expected * expected).mean(),
        ]


def attention64(machine: Any, q: Any, k: Any, v: Any, scale: float, seen: np.ndarray | None) -> Any:
    """Attention in float64; q (n, Hq, d), k and v (m, Hkv, d), and which keys rows see (n, m).

    Without `seen` all rows see all keys.
    """
    xp = machine.xp
    (n, heads, d), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads
    q = machine.float64(q).reshape(n, kv_heads, group, d).swapaxes(0, 1)
    k, v = (machine.float64(x).swapaxes(0, 1) for x in (k, v))
    scores = q.reshape(kv_heads, n * group, d) @ k.swapaxes(1, 2) * scale
    if seen is not None:
        hidden = np.where(np.repeat(seen, group, 0), 0.0, -np.inf)
        scores = scores + machine.put(hidden)
    weights = xp.exp(scores - xp.amax(scores, -1, keepdims=True))
    out = weights @ v / weights.sum(-1)[..., None]
    out = out.reshape(kv_heads, n, group, v.shape[-1]).swapaxes(0, 1)
    return out.reshape(n, heads, v.shape[-1])


class Attention(Case):
    """Decode and prompts, over pages or over ragged keys."""

    @property
    def ragged(self) -> bool:
        """Whether keys lie one after another instead of in pages."""
        return self.row.kind == "ragged"

    @property
    def slots(self) -> int:
        """Places that a request takes up in its pages."""
        return self.row.kv_len

    def make_shared(self) -> None:
        """Offsets of rows and keys, the page table, and what TVM's kernels want besides."""
        row, steps = self.row, np.arange(self.row.batch + 1, dtype=np.int32)
        self.index("qo_indptr", steps * row.qo_len)
        self.index("kv_len", np.full(row.batch, row.kv_len, np.int32))
        self.index("zeros", np.zeros(row.batch, np.int32))
        self.index("positions", np.arange(row.rows, dtype=np.int32))
        if self.ragged:
            self.index("kv_indptr", steps * row.kv_len)
        else:
            self.make_page_table()
        requests = sorted({0, row.batch // 2, row.batch - 1})
        each = np.unique(np.linspace(0, row.qo_len - 1, SAMPLED_ROWS).astype(np.int32))
        self.sampled = [(b, each) for b in requests]
        rows = np.concatenate([b * row.qo_len + each for b in requests]).astype(np.int64)
        self.sampled_rows = self.machine.put(rows)

    def make_page_table(self) -> None:
        """Pages in a random order, the same of all buffers."""
        row = self.row
        pages = math.ceil(self.slots / row.page_size)
        steps = np.arange(row.batch + 1, dtype=np.int32)
        self.index("kv_indptr", steps * pages)
        self.index("page_indices", self.rng.permutation(row.batch * pages).astype(np.int32))
        self.index("last", np.full(row.batch, (self.slots - 1) % row.page_size + 1, np.int32))

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Queries, keys and values, output and LSE."""
        row, machine = self.row, self.machine
        qo, kv = row.heads
        normal = lambda *shape: machine.normal(*shape, dtype=row.dtype)  # noqa: E731
        found = {
            "q": normal(row.rows, qo, row.head_dim),
            "o": machine.empty(row.rows, qo, row.head_dim, dtype=row.dtype),
            "lse": machine.empty(row.rows, qo),
        }
        if self.ragged:
            keys = row.batch * row.kv_len
            found |= {name: normal(keys, kv, row.head_dim) for name in "kv"}
        else:
            count = len(self.host["page_indices"])
            found["pages"] = normal(count, 2, kv, row.page_size, row.head_dim)
        return found

    def keys_of(self, i: int, request: int) -> tuple[Any, Any]:
        """Keys and values (m, Hkv, d) of one request."""
        row, buffer = self.row, self.buffers[i]
        if self.ragged:
            part = slice(request * row.kv_len, (request + 1) * row.kv_len)
            return buffer["k"][part], buffer["v"][part]
        k, v = self.pages_of(i, request)
        return k[: row.kv_len], v[: row.kv_len]

    def pages_of(self, i: int, request: int) -> tuple[Any, Any]:
        """Keys and values (slots, Hkv, d) of the pages of one request, in order."""
        row, buffer = self.row, self.buffers[i]
        first, last = self.host["kv_indptr"][request : request + 2]
        where = self.machine.put(self.host["page_indices"][first:last].astype(np.int64))
        pages = buffer["pages"][where]
        shape = (-1, row.heads[1], row.head_dim)
        k, v = (pages[:, part].swapaxes(1, 2).reshape(shape) for part in range(2))
        return k, v

    def seen(self, request: int, rows: np.ndarray) -> np.ndarray | None:
        """Which keys some rows of a request see; None for all."""
        if not self.row.causal:
            return None
        last = rows + self.row.kv_len - self.row.qo_len
        return last[:, None] >= np.arange(self.row.kv_len)[None]

    def operands(self, i: int, request: int, rows: np.ndarray) -> tuple[Any, Any, Any]:
        """Queries, keys and values of some rows of a request."""
        where = self.machine.put((request * self.row.qo_len + rows).astype(np.int64))
        return self.buffers[i]["q"][where], *self.keys_of(i, request)

    def expect(self, i: int) -> Any:
        """Some rows of the first, the middle and the last request."""
        parts = []
        for request, rows in self.sampled:
            operands, seen = self.operands(i, request, rows), self.seen(request, rows)
            parts.append(attention64(self.machine, *operands, self.row.sm_scale, seen))
        return self.machine.xp.concatenate(parts)

    def found(self, i: int, returned: Any) -> Any:
        """The sampled rows."""
        return self.whole(i, returned)[self.sampled_rows]


class Latent(Attention):
    """Decode over compressed pages."""

    def make_buffer(self, i: int) -> dict[str, Any]:
        """Queries, pages, output and LSE."""
        row, machine, count = self.row, self.machine, len(self.host["page_indices"])
        heads = row.heads[0]
        return {
            "q": machine.normal(row.rows, heads, CKV + KPE, dtype=row.dtype),
            "pages": machine.normal(count, row.page_size, CKV + KPE, dtype=row.dtype),
            "o": machine.empty(row.rows, heads, CKV, dtype=row.dtype),
            "lse": machine.empty(row.rows, heads),
        }

    def keys_of(self, i: int, request: int) -> tuple[Any, Any]:
        """The rows of one request as the key of all heads, and their first part as the value."""
        first, last = self.host["kv_indptr"][request : request + 2]
        where = self.machine.put(self.host["page_indices"][first:last].astype(np.int64))
        keys = self.buffers[i]["pages"][where].reshape(-1, 1, CKV + KPE)[: self.row.kv_len]
        return keys, keys[..., :CKV]


class Plan(Attention):
    """A plan for a step of decode: nothing on the device is read or written.

    Sides put what they made into `made`.
    """

    def __init__(self, row: Row, machine: Any) -> None:
        self.made: Any = None
        super().__init__(row, machine)

    def make_buffer(self, i: int) -> dict[str, Any]:
        """One query row, whose dtype is read."""
        row = self.row
        return {"q": self.machine.normal(1, row.heads[0], row.head_dim, dtype=row.dtype)}

    def expect(self, i: int) -> Any:
        """Nothing: a plan is checked by the run that it is for."""
        return None

    def poison(self, i: int) -> None:
        """Forget the plan."""
        self.made = None

    def errors(self, i: int, returned: Any = None) -> list[Any]:
        """As for outputs; no plan counts as NaN."""
        missing = self.made is None or len(self.made) == 0
        return list(self.machine.put(np.array([float(missing), 0.0, 0.0, 1.0])))


def make_case(row: Row, machine: Any) -> Case:
    """The case of a row."""
    from . import moves, rows, slots

    if row.kind == "model":
        from .models import Model

        return Model(row, machine)
    if row.kind.startswith("slot"):
        return slots.Slot(row, machine)
    kinds = {
        "decode": Attention, "ragged": Attention, "paged": Attention, "host_run": Attention,
        "host_plan": Plan, "mla": Latent, "rotary": moves.Rotary, "append": moves.Append,
        "merge": moves.Merge, "copy_page": moves.CopyPage, "compact": moves.Compact,
        "rotary_append": rows.RotaryAppend, "rope": rows.Rope, "softmax": rows.Softmax,
        **dict.fromkeys(NORMS, rows.Norm), **dict.fromkeys(GATES, rows.Gate),
    }  # fmt: skip
    return kinds[row.kind](row, machine)

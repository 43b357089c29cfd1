"""The rows that can be timed: what each one does, what it must move and compute, and row sets."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import dataclass, replace

ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}

#: Width of a row of latent attention: the compressed part, and the part with positions.
CKV, KPE = 512, 64
#: Tokens that a row sees in a layer with a window.
WINDOW = 1024
#: Kinds of rows that are normed, and that are gated.
NORMS = ("rmsnorm", "add_rmsnorm", "gemma_rmsnorm", "gemma_add_rmsnorm")
GATES = ("silu", "gelu", "gelu_tanh")


@dataclass(frozen=True)
class Row:
    """One piece of work.

    Attributes
    ----------
    name : str
        What ``--row`` takes.
    kind : str
        decode, ragged, paged, mla, rotary, append, merge, copy_page or compact; rotary_append;
        rope, which is outside of a cache; norms and gates, whose rows have the width of head_dim,
        and softmax, whose rows have the length kv_len; slot_... for what
        TVM's cache calls without a plan; host_plan and host_run, whose time is that of the host;
        model for whole models.
    batch : int
        Requests; for the kinds that move rows, rows.
    kv_len, qo_len : int
        Keys and query rows of each request.
    heads : (int, int)
        Query and KV heads.
    planned : bool
        Whether ours has a plan, where it may.
    feature : str
        What a slot has besides: window, rope. Of a model, its kind.
    """

    name: str
    kind: str
    batch: int
    kv_len: int = 1
    qo_len: int = 1
    heads: tuple[int, int] = (32, 8)
    head_dim: int = 128
    dtype: str = "float16"
    page_size: int = 16
    planned: bool = True
    feature: str = ""

    @property
    def causal(self) -> bool:
        """Prompts are causal; a decoded row sees all keys."""
        return self.kind in ("ragged", "paged")

    @property
    def sm_scale(self) -> float:
        """Factor of the scores."""
        return (192 if self.kind == "mla" else self.head_dim) ** -0.5

    @property
    def rows(self) -> int:
        """Query rows of all requests."""
        return self.batch * self.qo_len

    @property
    def bytes(self) -> int:
        """Bytes that a call moves at least: each input read once, each output written once."""
        item, (qo, kv), d = ITEM_BYTES[self.dtype], self.heads, self.head_dim
        if self.kind == "model":
            return 0
        if self.kind == "mla":
            return item * self.batch * (self.kv_len * (CKV + KPE) + qo * (2 * CKV + KPE))
        if self.kind in NORMS or self.kind in GATES:
            tensors = 3 if self.kind in GATES else 4 if "add" in self.kind else 2
            return tensors * self.batch * d * item
        if self.kind == "softmax":
            return 2 * self.batch * self.kv_len * item
        if self.kind == "rope":
            return 2 * self.batch * (qo + kv) * d * item
        if self.kind in ("rotary", "rotary_append"):
            return 2 * self.batch * (qo + 2 * kv) * d * item
        if self.kind in ("append", "compact"):
            return 2 * self.batch * 2 * kv * d * item
        if self.kind == "copy_page":
            return 2 * self.page_size * 2 * kv * d * item
        if self.kind == "merge":
            return 3 * self.batch * qo * (d * item + 4)
        return item * d * (2 * self.batch * self.kv_len * kv + 2 * self.rows * qo)

    @property
    def flops(self) -> int:
        """Operations of the matrix products, of what the causal mask leaves."""
        qo, d = self.heads[0], self.head_dim
        if self.kind == "mla":
            return 2 * self.batch * self.kv_len * qo * (2 * CKV + KPE)
        if self.kind not in ("decode", "ragged", "paged", "host_run"):
            return 0
        pairs = 2 * self.qo_len * self.kv_len
        if self.causal:
            pairs = (2 * self.kv_len - self.qo_len) * self.qo_len
        return 2 * self.batch * pairs * qo * d

    @property
    def shape(self) -> dict[str, object]:
        """What a file of results says of the row."""
        names = ("batch", "kv_len", "qo_len", "heads", "head_dim", "dtype", "page_size")
        found = {name: getattr(self, name) for name in names}
        return {**found, "heads": list(self.heads)}


def decode(batch: int, length: int, heads: tuple[int, int] = (32, 8), dim: int = 128) -> Row:
    """A step of one token for each request, over pages."""
    other = "" if heads == (32, 8) else f"-H{heads[0]}/{heads[1]}"
    other += "" if dim == 128 else f"-d{dim}"
    return Row(f"decode-B{batch}-L{length}{other}", "decode", batch, length, 1, heads, dim)


def prompts(
    kind: str, batch: int, length: int, heads: tuple[int, int] = (32, 8), dim: int = 128
) -> Row:
    """Causal prompts, ragged or over pages."""
    other = "" if heads == (32, 8) else f"-H{heads[0]}/{heads[1]}"
    other += "" if dim == 128 else f"-d{dim}"
    return Row(f"{kind}-B{batch}-S{length}{other}", kind, batch, length, length, heads, dim)


def chunk(batch: int, rows: int, length: int) -> Row:
    """The last rows of requests whose other keys are in the pages already."""
    return Row(f"paged-B{batch}-Q{rows}-L{length}", "paged", batch, length, rows)


def mla(heads: int, batch: int, length: int) -> Row:
    """A step of one token over compressed pages."""
    name = f"mla-decode-h{heads}-B{batch}-L{length}"
    return Row(name, "mla", batch, length, 1, (heads, 1), CKV, "bfloat16")


def moved(kind: str, count: int, heads: tuple[int, int] = (32, 8)) -> Row:
    """A row of a kind that moves or merges `count` rows."""
    return Row(f"{kind}-{count}", kind, count, heads=heads)


def wide(kind: str, count: int, dim: int) -> Row:
    """A norm or a gate of `count` rows of this width."""
    return Row(f"{kind}-{count}-d{dim}", kind, count, heads=(1, 1), head_dim=dim)


def sampling(kind: str, batch: int, vocabulary: int = 128256) -> Row:
    """A chain of TVM's frontend that samples, or a softmax, over rows of a vocabulary."""
    name, heads = f"{kind}-B{batch}-V{vocabulary}", (1, 1)
    if kind == "softmax":
        return Row(name, kind, batch, vocabulary, heads=heads, dtype="float32")
    return Row(name, "model", batch, vocabulary, 1, heads, 1, "float32", feature=kind)


def unplanned(row: Row) -> Row:
    """The same work by the kernel that makes its schedule on the device."""
    return replace(row, name=f"unplanned-{row.name}", planned=False)


def slot(kind: str, batch: int, length: int, rows: int = 1, feature: str = "") -> Row:
    """A slot of TVM's cache that is called without a plan."""
    name = f"slot-{kind}" + (f"-{feature}" if feature else "")
    return Row(name, f"slot_{kind}", batch, length, rows, feature=feature, planned=False)


def model(kind: str, batch: int, length: int, heads: int, dim: int, words: int = 0) -> Row:
    """A model of two layers; an encoder with a decoder has `words` in the second."""
    name = f"model-{kind}-d{dim}-S{length}"
    heads_ = (heads, heads)
    return Row(name, "model", batch, length, words or length, heads_, dim, feature=kind)


def host(kind: str, batch: int) -> Row:
    """Time of the host for a plan of decode or for one call of it."""
    length = 64 if kind == "run" else 4096
    return Row(f"host-{kind}-B{batch}", f"host_{kind}", batch, length)


HEADLINE = [
    decode(1, 4096), decode(1, 32768), decode(16, 4096), decode(64, 4096), decode(128, 2048),
    decode(64, 16384),
    prompts("ragged", 16, 1024), prompts("ragged", 4, 4096), prompts("ragged", 1, 16384),
    prompts("paged", 16, 1024), prompts("paged", 4, 4096), prompts("paged", 1, 16384),
    chunk(8, 512, 8192),
    mla(128, 128, 4096),
    moved("rotary", 5000), moved("append", 5000), moved("merge", 8192), moved("copy_page", 1),
    moved("compact", 1024),
    host("plan", 64), host("run", 64),
]  # fmt: skip

OTHER = [
    decode(64, 1024, (32, 32)), decode(16, 4096, (32, 32)),
    decode(64, 1024, (32, 4)), decode(64, 4096, (32, 4)), decode(64, 8192, (32, 4)),
    decode(16, 1024, (64, 8)), decode(16, 8192, (64, 8)), decode(1, 2048, (9, 3), 64),
    prompts("ragged", 16, 1024, (32, 32), 64), prompts("ragged", 1, 16384, (32, 32), 64),
    prompts("ragged", 16, 1024, (8, 8), 256), prompts("ragged", 1, 16384, (8, 8), 256),
    *(
        prompts(kind, batch, length, (32, 32))
        for kind in ("ragged", "paged")
        for batch, length in ((128, 1024), (64, 2048), (32, 4096), (16, 8192), (1, 32768))
    ),
    mla(64, 128, 4096), mla(16, 128, 4096), mla(128, 1, 4096), mla(16, 64, 1024),
    moved("rotary", 64), moved("append", 64), moved("merge", 64),
    unplanned(decode(1, 4096)), unplanned(decode(64, 4096)), unplanned(prompts("ragged", 4, 4096)),
    slot("decode", 32, 2048, feature="window"), slot("decode", 32, 2048, feature="window-rope"),
    slot("prefill", 8, 2048, 256), slot("prefill", 8, 2048, 256, "window"),
    slot("prefill", 8, 2048, 256, "window-rope"), slot("tree_paged", 16, 2048, 64),
    slot("tree_ragged", 64, 64, 64),
    host("plan", 1), host("plan", 256), host("run", 1), host("run", 256),
]  # fmt: skip

#: Each of them through our pipeline and through TVM's.
MODELS = [
    model("attention", 4, 1024, 16, 64), model("attention", 1, 4096, 32, 128),
    model("bert", 32, 128, 12, 32), model("bert", 16, 512, 12, 64),
    model("gpt", 4, 1024, 12, 64), model("gpt", 1, 4096, 16, 128),
    model("llama", 4, 1024, 32, 64), model("llama", 1, 4096, 32, 128),
    model("whisper", 4, 1500, 16, 64, 448),
    model("vit", 8, 577, 16, 80), model("vit", 8, 577, 16, 72),
]  # fmt: skip

#: What decides whether a pass for it pays: ours beside what TVM's passes make of the operators.
PARTS = [
    *(
        wide(kind, count, dim)
        for kinds, dim in ((NORMS, 4096), (GATES, 14336))
        for kind in kinds
        for count in (1, 64, 5000)
    ),
    *(moved(kind, count) for kind in ("rope", "rotary_append") for count in (1, 64, 5000)),
    *(
        sampling(kind, batch)
        for kind in ("softmax", "draw", "sample", "renorm")
        for batch in (1, 64)
    ),
]  # fmt: skip

#: Rows that a processor does in moments, for tests and for a look at the harness without a GPU.
TINY = [
    Row("tiny-decode", "decode", 3, 64, 1, (4, 2), 32, "float32"),
    Row("tiny-unplanned-decode", "decode", 3, 64, 1, (4, 2), 32, "float32", planned=False),
    Row("tiny-ragged", "ragged", 2, 48, 48, (4, 2), 32, "float32"),
    Row("tiny-paged", "paged", 2, 64, 16, (4, 2), 32, "float32"),
    Row("tiny-mla", "mla", 2, 32, 1, (4, 1), CKV, "float32"),
    Row("tiny-rotary", "rotary", 40, heads=(4, 2), head_dim=32, dtype="float32"),
    Row("tiny-append", "append", 40, heads=(4, 2), head_dim=32, dtype="float32"),
    Row("tiny-rotary_append", "rotary_append", 40, heads=(4, 2), head_dim=32, dtype="float32"),
    *(
        Row(f"tiny-{kind}", kind, 9, heads=(1, 1), head_dim=96, dtype="float32")
        for kind in (*NORMS, *GATES)
    ),
    Row("tiny-rope", "rope", 40, heads=(4, 2), head_dim=32, dtype="float32"),
    Row("tiny-softmax", "softmax", 5, 300, heads=(1, 1), dtype="float32"),
    *(
        Row(f"tiny-model-{kind}", "model", 5, 300, 1, (1, 1), 1, "float32", feature=kind)
        for kind in ("draw", "sample")  # TVM compiles no renormalisation for processors
    ),
    Row("tiny-merge", "merge", 40, heads=(4, 2), head_dim=32, dtype="float32"),
    Row("tiny-copy_page", "copy_page", 1, heads=(4, 2), head_dim=32, dtype="float32"),
    Row("tiny-compact", "compact", 32, heads=(4, 2), head_dim=32, dtype="float32"),
    *(
        Row(
            f"tiny-slot-{kind}-{feature}",
            f"slot_{kind}",
            3,
            70,
            rows,
            (4, 2),
            32,
            "float32",
            planned=False,
            feature=feature,
        )
        for kind, rows, feature in (
            ("decode", 1, "window"),
            ("decode", 1, "window-rope"),
            ("prefill", 9, "window"),
            ("prefill", 9, "window-rope"),
        )
    ),
    Row("tiny-slot-tree_paged", "slot_tree_paged", 3, 70, 9, (4, 2), 32, "float32"),
    Row("tiny-slot-tree_ragged", "slot_tree_ragged", 3, 20, 20, (4, 2), 32, "float32"),
    Row("tiny-model", "model", 2, 12, 12, (4, 4), 16, "float32", feature="gpt"),
    Row("tiny-model-llama", "model", 2, 12, 12, (4, 4), 16, "float32", feature="llama"),
    Row("tiny-model-whisper", "model", 2, 12, 5, (2, 2), 16, "float32", feature="whisper"),
    Row("tiny-model-attention", "model", 1, 16, 16, (2, 2), 32, "float32", feature="attention"),
    Row("tiny-host-plan", "host_plan", 3, 64, 1, (4, 2), 32, "float32"),
    Row("tiny-host-run", "host_run", 3, 64, 1, (4, 2), 32, "float32"),
]

SETS = {
    "headline": HEADLINE, "other": OTHER, "models": MODELS, "parts": PARTS,
    "all": HEADLINE + OTHER + MODELS + PARTS, "tiny": TINY,
}  # fmt: skip
ROWS = {row.name: row for rows in SETS.values() for row in rows}


def select(names: Iterable[str] = (), row_set: str = "headline") -> list[Row]:
    """The rows of a set, or those whose names match patterns, each once and in order.

    Raises
    ------
    ValueError
        When a pattern matches no row, or the set does not exist.
    """
    patterns = list(names)
    if not patterns:
        if row_set not in SETS:
            raise ValueError(f"no set of rows {row_set!r}; there are {', '.join(SETS)}")
        return list(SETS[row_set])
    found: dict[str, Row] = {}
    for pattern in patterns:
        matches = [name for name in ROWS if fnmatch.fnmatchcase(name, pattern)]
        if not matches:
            raise ValueError(
                f"no row {pattern!r}; `python -m benchmarks list` prints the names, and * and ? "
                "match parts of them"
            )
        found.update((name, ROWS[name]) for name in matches)
    return list(found.values())

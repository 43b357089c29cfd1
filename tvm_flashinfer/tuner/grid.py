"""What is measured for a model: classes of shapes, and the kernels that may serve each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

#: Query heads per KV head that the kernel on CUDA cores is compiled for.
_CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)

#: Keys of the chunks that FA2 splits requests of one row into.
_CHUNKS = (256, 512, 1024, 2048)

#: Rows of prompts, and of parts of prompts over a past.
_PROMPTS = tuple(2**i for i in range(7, 14))
_PARTS = (256, 1024)


@dataclass(frozen=True)
class ModelShape:
    """Attention of a model on one GPU.

    Parameters
    ----------
    num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo : int
        Of one GPU of those that share the model.
    dtype : str
        ``"float16"`` or ``"bfloat16"``; entries hold for both.
    page_size : int
    is_mla : bool
        Latent attention: `num_qo_heads` heads over one row of 512 + 64 for each token.
    only_new_tokens : bool
        New tokens of MLA before compression, which see themselves alone.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim_qk: int
    head_dim_vo: int
    dtype: str = "float16"
    page_size: int = 16
    is_mla: bool = False
    only_new_tokens: bool = False

    @property
    def group(self) -> int:
        """Query heads for each KV head."""
        return self.num_qo_heads // self.num_kv_heads

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of a token."""
        if self.is_mla:
            return 2 * (512 + 64)
        return 2 * self.num_kv_heads * (self.head_dim_qk + self.head_dim_vo)


@dataclass(frozen=True)
class Point:
    """A class of shapes, as its largest one: sizes are powers of two.

    Parameters
    ----------
    slot : str
        As in `tvm_flashinfer.kernel_choice`.
    batch, rows, keys : int
        Requests, and the rows and keys of each.
    causal : bool
    """

    slot: str
    batch: int
    rows: int
    keys: int
    causal: bool = False

    def __str__(self) -> str:
        mask = ", causal" if self.causal else ""
        return f"{self.slot}, batch {self.batch}, rows {self.rows}, keys {self.keys}{mask}"


@dataclass(frozen=True)
class Tactic:
    """A kernel, and the keys of the chunks that it splits requests into, or 0."""

    kernel: str
    split_keys: int = 0

    def __str__(self) -> str:
        return self.kernel + (f"/{self.split_keys}" if self.split_keys else "")


@dataclass(frozen=True)
class Limits:
    """How far the measuring goes.

    Parameters
    ----------
    max_batch, max_keys, max_rows : int
        Requests of a step, keys of a request, and rows of a step.
    max_bytes : int
        Keys and values of a step.
    """

    max_batch: int = 128
    max_keys: int = 32768
    max_rows: int = 16384
    max_bytes: int = 2 << 30


def grid(shape: ModelShape, limits: Limits) -> list[Point]:
    """Return what to measure for a model: the steps that TVM's cache plans for it.

    Decode is planned for its own slot, and from 4 query heads per KV head on for that of paged
    prefill; new tokens see themselves with a causal mask, and those of a part of a prompt the past
    without one.
    """
    points: list[Point] = []
    if not shape.only_new_tokens:
        decode = "mla" if shape.is_mla else "decode_paged"
        points += [Point(decode, batch, 1, keys) for batch, keys in _steps(limits)]
    if not (shape.is_mla or shape.only_new_tokens) and shape.group >= 4:
        points += [Point("prefill_paged", batch, 1, keys) for batch, keys in _steps(limits)]
    for slot, all_rows in (("prefill_ragged", _PROMPTS), ("prefill_paged", _PARTS)):
        if shape.is_mla or (shape.only_new_tokens and slot != "prefill_ragged"):
            continue
        for rows in all_rows:
            for batch in _powers(1, min(16, limits.max_rows // rows)):
                if slot == "prefill_ragged":
                    points.append(Point(slot, batch, rows, rows, causal=True))
                else:
                    points += [
                        Point(slot, batch, rows, keys)
                        for keys in (1024, 4096, 16384)
                        if batch <= 4 and keys <= limits.max_keys
                    ]
    return [p for p in points if p.batch * p.keys * shape.token_bytes <= limits.max_bytes]


def _steps(limits: Limits) -> Iterator[tuple[int, int]]:
    for batch in _powers(1, limits.max_batch):
        for keys in _powers(512, limits.max_keys):
            yield batch, keys


def _powers(first: int, last: int) -> list[int]:
    powers = []
    while first <= last:
        powers.append(first)
        first *= 2
    return powers


def tactics(shape: ModelShape, point: Point, arch: int, num_sm: int) -> list[Tactic]:
    """Return what may serve a point on a GPU.

    Parameters
    ----------
    shape : ModelShape
    point : Point
    arch : int
        Such as 90.
    num_sm : int
        Chunks that fill less than half of the multiprocessors, or that are far more than needed,
        are left out.
    """
    if point.slot == "mla":
        return [Tactic("fa2"), *([Tactic("sm90")] if arch == 90 else [])]
    found = [Tactic("fa2"), Tactic("batch_attention")]
    if point.slot == "decode_paged":
        if shape.group in _CUDA_CORE_GROUPS:
            found.append(Tactic("cuda_core"))
    elif arch == 90 and point.rows > 1:
        found.append(Tactic("fa3"))
        if point.slot == "prefill_paged":
            found.append(Tactic("fa3_copy"))
    if point.rows == 1:
        for chunk in _CHUNKS:
            blocks = point.batch * shape.num_kv_heads * -(-point.keys // chunk)
            if chunk < point.keys and num_sm // 2 <= blocks <= 16 * num_sm:
                found.append(Tactic("fa2", chunk))
    return found

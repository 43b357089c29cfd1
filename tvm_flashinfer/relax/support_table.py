"""The tables of what is served, as Markdown, made from what the code decides by.

``python -m tvm_flashinfer.relax.support_table README.md`` writes them between the markers of a
file. A test compares the file with them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from tvm import relax as rx
from tvm.relax.frontend.nn.llm.kv_cache import RopeMode
from tvm.target import Target

from tvm_flashinfer.hooks import SUPPORTED_TVM
from tvm_flashinfer.kernels.spec import ARCHS, DTYPES, HEAD_DIMS
from tvm_flashinfer.relax.config import ATTN_KINDS, PagedKVCacheConfig
from tvm_flashinfer.relax.report import NATIVE, ReportRow
from tvm_flashinfer.relax.slots import DECODE_BY_PREFILL_RATIO, DECODE_PAGED, SLOTS, native_rows
from tvm_flashinfer.relax.support import CPU_DTYPES, ROPE_TYPES, TARGETS, unsupported_reasons

#: The lines between which a file has the tables.
BEGIN = "<!-- support table -->"
END = "<!-- end of support table -->"

#: Names of the kinds of target, in the order of the columns.
_COLUMNS = {"llvm": "CPU", "cuda": "CUDA"}

#: Tokens of a page that TVM's own kernels are compiled for; their tree kernels take no other.
_TVM_PAGE_SIZE = 16

#: A cache that both targets serve; rows are asked for with one of its fields changed.
_SERVED = PagedKVCacheConfig(
    attn_kind="mha",
    max_batch_size=1,
    max_total_seq_len=1,
    prefill_chunk_size=1,
    page_size=16,
    support_sliding_window=0,
    layer_partition=rx.ShapeExpr([0, 1]),
    num_hidden_layers=1,
    num_attention_heads=1,
    num_key_value_heads=1,
    qk_head_dim=HEAD_DIMS[0],
    v_head_dim=HEAD_DIMS[0],
    mla_original_qk_head_dim=0,
    mla_original_v_head_dim=0,
    rope_mode=RopeMode.NORMAL,
    rope_scale=1.0,
    rope_theta=10000.0,
    rope_scaling={},
    rope_ext_factors=None,
    rotary_dim=HEAD_DIMS[0],
    enable_disaggregation=False,
    dtype=next(iter(DTYPES)),
)


def support_table() -> str:
    """Return two Markdown tables: what a cache may be, and what holds each slot of it.

    Returns
    -------
    text : str
        Without the markers, and without an empty line at either end.

    Raises
    ------
    RuntimeError
        A kind of target is served that the tables have no column for.
    """
    if set(_COLUMNS) != set(TARGETS):
        raise RuntimeError(
            f"the targets are {', '.join(TARGETS)}, the table has columns for "
            f"{', '.join(_COLUMNS)}; add the missing ones to _COLUMNS"
        )
    return "\n\n".join((_properties(), _slots(), _notes()))


def write_table(path: Path) -> bool:
    """Write the tables between the markers of a file.

    Returns
    -------
    changed : bool
        Whether the file had others.

    Raises
    ------
    ValueError
        The file does not have each marker once, in order.
    """
    text = path.read_text(encoding="utf-8")
    before, after = split_at_markers(text)
    new = f"{before}{BEGIN}\n{support_table()}\n{END}{after}"
    if new == text:
        return False
    path.write_text(new, encoding="utf-8")
    return True


def split_at_markers(text: str) -> tuple[str, str]:
    """Return what stands before the first marker of a text and after the second one.

    Raises
    ------
    ValueError
        The text does not have each marker once, in order.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"expected one line {BEGIN!r} and after it one line {END!r}")
    return text[: text.index(BEGIN)], text[text.index(END) + len(END) :]


def _properties() -> str:
    pages = f"any; {_TVM_PAGE_SIZE} where a slot on TVM's kernels is used"
    heads = "any multiple of the KV heads"
    rope = ", ".join(_code(ROPE_TYPES))
    versions = ", ".join(f"{major}.{minor}" for major, minor in SUPPORTED_TVM)
    rows = [
        ("dtypes of the cache", ", ".join(CPU_DTYPES), ", ".join(DTYPES)),
        ("head dimensions", "any", ", ".join(map(str, HEAD_DIMS))),
        ("query heads", heads, heads),
        ("tokens of a page", pages, pages),
        ("kinds of layers", *(", ".join(_code(_kinds(kind))) for kind in _COLUMNS)),
        ("RoPE modes", *(", ".join(_rope_modes(kind)) for kind in _COLUMNS)),
        ("RoPE scaling", rope, rope),
        ("architectures", "any; AVX2 and AVX-512 are used on x86-64", ", ".join(ARCHS)),
        ("apache-tvm", versions, versions),
    ]
    return _table(("", *_COLUMNS.values()), rows)


def _slots() -> str:
    config = replace(_SERVED, attn_kind="mha_sliding")
    columns = [
        {row.slot: row for row in native_rows(config, _target(kind), "")} for kind in _COLUMNS
    ]
    rows = []
    for slot in SLOTS:
        function = f"`flashinfer.{slot.run}`" if slot.run else f"`{slot.tir}`"
        rows.append(
            (f"`{slot.name}`", function, *(_holder(column[slot.name]) for column in columns))
        )
    return _table(("slot of the KV cache", "function", *_COLUMNS.values()), rows)


def _notes() -> str:
    return (
        f"From {DECODE_BY_PREFILL_RATIO} query heads per KV head on, TVM calls the paged prefill "
        f'slot in place of\n`{DECODE_PAGED.name}`. "TIR" is a kernel of TVM\'s own, compiled with '
        "the model; its name ends in `_cpu` on CPU."
    )


def _holder(row: ReportRow) -> str:
    return "native" if row.status == NATIVE else "TIR"


def _kinds(target_kind: str) -> list[str]:
    target = _target(target_kind)
    configs = {kind: replace(_SERVED, attn_kind=kind) for kind in ATTN_KINDS}
    return [kind for kind, config in configs.items() if not unsupported_reasons(config, target)]


def _rope_modes(target_kind: str) -> list[str]:
    target = _target(target_kind)
    configs = {mode: replace(_SERVED, rope_mode=mode) for mode in RopeMode}
    return [
        mode.name.lower()
        for mode, config in configs.items()
        if not unsupported_reasons(config, target)
    ]


def _target(kind: str) -> Target:
    return Target({"kind": "cuda", "arch": "sm_90a"} if kind == "cuda" else kind)


def _code(names: Iterable[str]) -> list[str]:
    return [f"`{name}`" for name in names]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(paths: Sequence[str]) -> None:
    """Write the tables into files, or print them when none is named."""
    if not paths:
        print(support_table())
    for name in paths:
        changed = write_table(Path(name))
        print(f"{name}: {'written' if changed else 'up to date'}")


if __name__ == "__main__":
    main(sys.argv[1:])

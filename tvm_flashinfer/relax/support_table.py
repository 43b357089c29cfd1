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

from tvm_flashinfer.contract import TESTED_TVM
from tvm_flashinfer.kernels.spec import (
    ARCHS,
    DEVICE_SCHEDULED_HEAD_DIMS,
    DTYPES,
    HEAD_DIMS,
    MLA_HEAD_DIMS,
    MLA_RAGGED_HEAD_DIMS,
)
from tvm_flashinfer.relax.config import ATTN_KINDS, PagedKVCacheConfig
from tvm_flashinfer.relax.report import NATIVE
from tvm_flashinfer.relax.slots import DECODE_PAGED, MLA, MLA_SLOTS, SLOTS, native_rows
from tvm_flashinfer.relax.support import (
    CPU_DTYPES,
    DECODE_BY_PREFILL_RATIO,
    ROPE_TYPES,
    TARGETS,
    unsupported_reasons,
)

#: The lines between which a file has the tables.
BEGIN = "<!-- support table -->"
END = "<!-- end of support table -->"

#: Names of the kinds of target, in the order of the columns.
_COLUMNS = {"llvm": "CPU", "cuda": "CUDA"}

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

#: What a cache of MLA has besides.
_SERVED_MLA = {
    "attn_kind": "mla",
    "qk_head_dim": MLA_HEAD_DIMS[0],
    "v_head_dim": MLA_HEAD_DIMS[1],
    "mla_original_qk_head_dim": MLA_RAGGED_HEAD_DIMS[0],
    "mla_original_v_head_dim": MLA_RAGGED_HEAD_DIMS[1],
    "rope_mode": RopeMode.NONE,
}


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
    heads = "any multiple of the KV heads"
    head_dims = (
        f"{', '.join(map(str, HEAD_DIMS))}; without plans also "
        f"{', '.join(str(dim) for dim in DEVICE_SCHEDULED_HEAD_DIMS if dim not in HEAD_DIMS)}"
    )
    versions = ", ".join(TESTED_TVM)
    latent = "{} with values of {}, new tokens {} with {}; others without plans, as above"
    rows = [
        ("dtypes of the cache", ", ".join(CPU_DTYPES), ", ".join(DTYPES)),
        ("head dimensions", "any", head_dims),
        ("head dimensions of MLA", "any", latent.format(*MLA_HEAD_DIMS, *MLA_RAGGED_HEAD_DIMS)),
        ("query heads", heads, heads),
        ("tokens of a page", "any", "any"),
        ("kinds of layers", *(", ".join(_code(_kinds(kind))) for kind in _COLUMNS)),
        ("RoPE modes", *(", ".join(_rope_modes(kind)) for kind in _COLUMNS)),
        ("RoPE scaling", *(", ".join(_code(_rope_types(kind))) for kind in _COLUMNS)),
        ("changes of scores", *(", ".join(_code(_scores(kind))) for kind in _COLUMNS)),
        ("sliding window", *["of layers, and of the whole cache with attention sinks"] * 2),
        ("architectures", "any; AVX2 and AVX-512 are used on x86-64", ", ".join(ARCHS)),
        ("apache-tvm", versions, versions),
    ]
    return _table(("", *_COLUMNS.values()), rows)


def _slots() -> str:
    """Return which function holds each slot, of a cache that gets plans where there are any."""
    columns = [_kernels(kind, "mha") for kind in _COLUMNS]
    rows = [(f"`{slot.name}`", *(column[slot.name] for column in columns)) for slot in SLOTS]
    by_kind = {kind: _kernels(kind, "mla") if "mla" in _kinds(kind) else {} for kind in _COLUMNS}
    for slot in MLA_SLOTS:
        if slot not in SLOTS:
            name = f"`{slot.name}`" if slot is MLA else f"`{slot.name}` of MLA"
            rows.append((name, *(column.get(slot.name, "") for column in by_kind.values())))
    return _table(("slot of the KV cache", *_COLUMNS.values()), rows)


def _kernels(target_kind: str, attn_kind: str) -> dict[str, str]:
    """Return what holds each slot, by the name of the slot."""
    rows = native_rows(_served(attn_kind), _target(target_kind), "")
    return {row.slot: f"`{row.kernel}`" if row.status == NATIVE else "TIR" for row in rows}


def _served(attn_kind: str) -> PagedKVCacheConfig:
    changes = _SERVED_MLA if attn_kind == "mla" else {"attn_kind": attn_kind}
    return replace(_SERVED, **changes)


def _notes() -> str:
    return (
        "Functions `bind_...` return what the slot holds. On CUDA the slots with a plan hold those "
        "of the CPU's\ncolumn when the cache slides as a whole, for RoPE inside attention, changes "
        "of scores, and head dimensions\nwithout plans. "
        f"With plans, from {DECODE_BY_PREFILL_RATIO} query heads per KV head on, TVM calls the "
        f"paged prefill\nslot in place of `{DECODE_PAGED.name}`."
    )


def _kinds(target_kind: str) -> list[str]:
    target = _target(target_kind)
    return [kind for kind in ATTN_KINDS if not unsupported_reasons(_served(kind), target)]


def _rope_modes(target_kind: str) -> list[str]:
    target = _target(target_kind)
    configs = {mode: replace(_SERVED, rope_mode=mode) for mode in RopeMode}
    return [
        mode.name.lower()
        for mode, config in configs.items()
        if not unsupported_reasons(config, target)
    ]


def _rope_types(target_kind: str) -> list[str]:
    target = _target(target_kind)
    served = []
    for rope_type, keys in ROPE_TYPES.items():
        scaling = {"rope_type": rope_type, **dict.fromkeys(keys, 2.0)}
        factors = rx.const([1.0] * HEAD_DIMS[0], "float32") if rope_type == "longrope" else None
        config = replace(_SERVED, rope_scaling=scaling, rope_ext_factors=factors)
        if not unsupported_reasons(config, target):
            served.append(rope_type)
    return served


def _scores(target_kind: str) -> list[str]:
    target = _target(target_kind)
    configs = {
        "logits_soft_cap": replace(_SERVED, logits_soft_cap=30.0),
        "alibi_slopes": replace(_SERVED, alibi_slopes=(0.5,)),
        "attention_sinks": replace(_SERVED, attention_sinks=(0.0,)),
    }
    return [name for name, config in configs.items() if not unsupported_reasons(config, target)]


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

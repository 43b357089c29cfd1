"""What a kernel unit is compiled for: its kind, dtype, head dimensions and architectures."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tvm_flashinfer.kernels.errors import UnsupportedKernelError

#: Kinds of units. Each is one source file, ``csrc/kernels/cuda/units/<kind>.cu``.
KINDS = (
    "common", "batch_prefill_paged", "batch_prefill_ragged", "batch_decode", "batch_attention",
    "batch_mla", "batch_mla_sm90", "batch_prefill_paged_sm90", "batch_prefill_ragged_sm90",
    "norm", "cascade", "rope", "sampling",
)  # fmt: skip

#: Kinds that serve every dtype and shape: what all attention needs, and families of their own.
PLAIN_KINDS = ("common", *KINDS[9:])

#: Kinds that are compiled once per dtype and head dimension.
ATTENTION_KINDS = KINDS[1:5]

#: Kinds of latent attention (MLA), which have one pair of head dimensions.
MLA_KINDS = KINDS[5:7]

#: Kinds that use instructions of Hopper, by the kinds that they serve beside: they are compiled for
#: 90a alone, from CUTLASS' headers too, and have no template in common with other kinds.
HOPPER_KINDS: Mapping[str, str] = {
    "batch_mla": "batch_mla_sm90",
    "batch_prefill_paged": "batch_prefill_paged_sm90",
    "batch_prefill_ragged": "batch_prefill_ragged_sm90",
}

#: The same, without those that they serve beside.
SM90A_KINDS = tuple(HOPPER_KINDS.values())

#: Dtypes with kernels: the C++ type that a unit is compiled with, and the short form in names.
DTYPES: Mapping[str, tuple[str, str]] = {
    "float16": ("half", "f16"),
    "bfloat16": ("nv_bfloat16", "bf16"),
}

#: The same of keys and values of 8 bits, which ``batch_attention`` takes with any of `DTYPES`.
FLOAT8_DTYPES: Mapping[str, tuple[str, str]] = {
    "float8_e4m3fn": ("__nv_fp8_e4m3", "e4m3"),
    "float8_e5m2": ("__nv_fp8_e5m2", "e5m2"),
}

#: Head dimensions of FlashInfer's kernels. Queries, keys and values have the same one.
HEAD_DIMS = (64, 128, 256)

#: Head dimensions of latent attention in DeepSeek's models, of keys and of values: those of the
#: pages, and those of new tokens before compression, which are ragged.
MLA_HEAD_DIMS = (576, 512)
MLA_RAGGED_HEAD_DIMS = (192, 128)

#: Head dimensions of ``batch_attention``, whose values may have another one than queries and keys.
DEVICE_SCHEDULED_HEAD_DIMS = tuple(range(16, 257, 16))

#: Architectures with kernels. The FA2 kernels need nothing that is newer than 8.0, so Blackwell
#: compiles them as they are. A name with "a" gives machine code for that one chip. 8.7, 8.8 and
#: 11.0, which are embedded boards, are left out.
ARCHS = (
    "80", "86", "89", "90", "90a", "100", "100a", "103", "103a", "120", "120a", "121", "121a",
)  # fmt: skip

#: Architectures of a build that names none, on a machine without a GPU: A100 to RTX 40, and Hopper.
DEFAULT_ARCHS = ("80", "90a")

_DTYPE_ALIASES = {
    "half": "float16", "fp16": "float16", "f16": "float16", "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn", "float8_e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2",
}  # fmt: skip


def normalize_dtype(dtype: str) -> str:
    """Return TVM's name of a dtype: ``"fp16"``, ``"f16"`` and ``"half"`` are ``"float16"``.

    A name that is not known is returned as it is; `unsupported_reasons` reports it.
    """
    name = dtype.strip().lower()
    return _DTYPE_ALIASES.get(name, name)


def normalize_arch(arch: str) -> str:
    """Return an architecture as ``"90a"``, from ``"sm_90a"``, ``"compute_90a"`` or ``"9.0a"``.

    A name that is not known is returned as it is; `unsupported_reasons` reports it.
    """
    name = re.sub(r"^(sm|compute)_?", "", arch.strip().lower())
    return re.sub(r"^(\d+)\.(\d)([af]?)$", r"\1\2\3", name)


def parse_archs(archs: str | Iterable[str]) -> tuple[str, ...]:
    """Return architectures, without repeats and in order, from names or comma-separated lists."""
    parts = [archs] if isinstance(archs, str) else list(archs)
    names = {normalize_arch(name) for part in parts for name in re.split(r"[,;\s]+", part) if name}
    return tuple(sorted(names, key=_arch_order))


def arch_for_capability(major: int, minor: int) -> str | None:
    """Return the architecture to compile for a GPU, or None when no kernel runs on it.

    Parameters
    ----------
    major, minor : int
        Compute capability, such as 9 and 0.
    """
    name = f"{major}{minor}"
    if name == "90":
        return "90a"
    if name in ARCHS:
        return name
    return "80" if major == 8 else None


def _arch_order(arch: str) -> tuple[int, str]:
    match = re.match(r"\d+", arch)
    return (int(match.group()) if match else 0, arch)


@dataclass(frozen=True, order=True)
class KernelSpec:
    """One kernel unit: a source file compiled for a dtype, a head dimension and architectures.

    Spellings are normalised (``"fp16"``, ``"sm_90a"``); support is not checked here, see
    `unsupported_reasons`.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    dtype : str, optional
        ``"float16"`` or ``"bfloat16"``, of queries and outputs. None for `PLAIN_KINDS`.
    head_dim_qk, head_dim_vo : int, optional
        Head dimension of queries and keys, and of values and outputs. None for `PLAIN_KINDS`.
        `head_dim_vo` is `head_dim_qk` when it is left out.
    archs : tuple of str
        GPU architectures, such as ``("80", "90a")``.
    kv_dtype : str, optional
        Dtype of keys and values; `dtype` when it is left out.
    """

    kind: str
    dtype: str | None = None
    head_dim_qk: int | None = None
    head_dim_vo: int | None = None
    archs: tuple[str, ...] = DEFAULT_ARCHS
    kv_dtype: str | None = None

    def __post_init__(self) -> None:
        if self.dtype is not None:
            object.__setattr__(self, "dtype", normalize_dtype(self.dtype))
            kv_dtype = normalize_dtype(self.kv_dtype or self.dtype)
            object.__setattr__(self, "kv_dtype", kv_dtype)
        if self.head_dim_vo is None:
            object.__setattr__(self, "head_dim_vo", self.head_dim_qk)
        object.__setattr__(self, "archs", parse_archs(self.archs))

    @property
    def name(self) -> str:
        """The stable name, such as ``"batch_prefill_paged_f16_d128_sm90a"``."""
        parts = [self.kind]
        if self.dtype is not None:
            dtypes = {**DTYPES, **FLOAT8_DTYPES}
            for name in dict.fromkeys((self.dtype, self.kv_dtype)):
                parts.append(dtypes[name][1] if name in dtypes else name)
        if self.head_dim_qk is not None:
            same = self.head_dim_vo == self.head_dim_qk
            parts.append(f"d{self.head_dim_qk}" + ("" if same else f"x{self.head_dim_vo}"))
        return "_".join(parts + [f"sm{arch}" for arch in self.archs])

    @property
    def source(self) -> str:
        """The source file, relative to the ``csrc`` folder."""
        return f"kernels/cuda/units/{self.kind}.cu"

    @property
    def is_large(self) -> bool:
        """Whether its compiler needs several gigabytes of memory."""
        return self.kind in SM90A_KINDS and self.kind not in MLA_KINDS

    @property
    def definitions(self) -> dict[str, str]:
        """The preprocessor definitions that the source file is compiled with."""
        definitions = {"TVM_FLASHINFER_ARCHS": '"' + ",".join(self.archs) + '"'}
        if self.dtype is not None:
            definitions["TVM_FLASHINFER_DTYPE"] = DTYPES[self.dtype][0]
            dtypes = {**DTYPES, **FLOAT8_DTYPES}
            definitions["TVM_FLASHINFER_KV_DTYPE"] = dtypes[self.kv_dtype][0]
            definitions["TVM_FLASHINFER_HEAD_DIM_QK"] = str(self.head_dim_qk)
            definitions["TVM_FLASHINFER_HEAD_DIM_VO"] = str(self.head_dim_vo)
        return definitions


def unsupported_reasons(spec: KernelSpec) -> list[str]:
    """Return why no kernel exists for a spec: one sentence each, none when it is supported.

    Whether the installed nvcc knows the architectures is a question to the toolchain.
    """
    return [
        *_kind_reasons(spec),
        *_dtype_reasons(spec),
        *_head_dim_reasons(spec),
        *_arch_reasons(spec),
    ]


def planned_head_dims(kind: str) -> tuple[tuple[int, int], ...]:
    """Return the head dimensions of a kind that takes a plan: of keys, and of values."""
    if kind in MLA_KINDS:
        return (MLA_HEAD_DIMS,)
    equal = tuple((dim, dim) for dim in HEAD_DIMS)
    return (*equal, MLA_RAGGED_HEAD_DIMS) if kind.startswith("batch_prefill_ragged") else equal


def on_hopper(spec: KernelSpec) -> list[KernelSpec]:
    """Return a spec and, where one of its architectures is Hopper, that of the kernel for Hopper.

    Plain 90 is Hopper too: the unit beside it is compiled as 90a.
    """
    if spec.kind not in HOPPER_KINDS or not {"90", "90a"} & set(spec.archs):
        return [spec]
    return [spec, replace(spec, kind=HOPPER_KINDS[spec.kind], archs=("90a",))]


def check_supported(specs: Iterable[KernelSpec]) -> None:
    """Raise `UnsupportedKernelError` with every reason why one of the specs has no kernel."""
    reasons = dict.fromkeys(reason for spec in specs for reason in unsupported_reasons(spec))
    if reasons:
        raise UnsupportedKernelError(list(reasons))


def check_same_archs(specs: Iterable[KernelSpec]) -> None:
    """Raise `UnsupportedKernelError` when specs cannot be linked into one library.

    Units have templates in common, of which the linker keeps one: that of the first unit, with
    machine code for the architectures of that unit alone. `SM90A_KINDS` have none in common.
    """
    shared = (spec for spec in specs if spec.kind not in SM90A_KINDS)
    archs = list(dict.fromkeys(",".join(spec.archs) for spec in shared))
    if len(archs) > 1:
        raise UnsupportedKernelError(
            [
                "the kernels of one library need one list of architectures; got "
                + " and ".join(archs)
            ]
        )


def _kind_reasons(spec: KernelSpec) -> list[str]:
    if spec.kind in KINDS:
        return []
    return [f"the kind is {spec.kind!r}; there are {', '.join(KINDS)}"]


def _dtype_reasons(spec: KernelSpec) -> list[str]:
    if spec.kind in PLAIN_KINDS:
        has_none = spec.dtype is None and spec.kv_dtype is None
        return [] if has_none else [f"the unit {spec.kind!r} has no dtype; leave it out"]
    if spec.dtype not in DTYPES:
        return [f"the dtype is {spec.dtype}; CUDA attention has {' and '.join(DTYPES)}"]
    if spec.kv_dtype == spec.dtype:
        return []
    if spec.kind != "batch_attention":
        return [
            f"the dtype of keys is {spec.kv_dtype} and that of queries {spec.dtype}; {spec.kind} "
            "has equal ones alone, batch_attention has keys of 8 bits too"
        ]
    if spec.kv_dtype in FLOAT8_DTYPES:
        return []
    return [
        f"the dtype of keys is {spec.kv_dtype} and that of queries {spec.dtype}; there are kernels "
        f"for equal ones, and for keys of {' and '.join(FLOAT8_DTYPES)}"
    ]


def _head_dim_reasons(spec: KernelSpec) -> list[str]:
    dims = (spec.head_dim_qk, spec.head_dim_vo)
    if spec.kind in PLAIN_KINDS:
        if dims == (None, None):
            return []
        return [f"the unit {spec.kind!r} has no head_dim; leave it out"]
    if spec.kind == "batch_attention":
        supported = ", ".join(map(str, DEVICE_SCHEDULED_HEAD_DIMS))
        return [
            f"head_dim is {dim}; there are kernels for {supported}"
            for dim in dict.fromkeys(dims)
            if dim not in DEVICE_SCHEDULED_HEAD_DIMS
        ]
    if dims in planned_head_dims(spec.kind):
        return []
    if spec.kind in MLA_KINDS:
        qk, vo = MLA_HEAD_DIMS
        return [
            f"head_dim is {dims[0]} for keys and {dims[1]} for values; latent attention has "
            f"kernels for {qk} and {vo}"
        ]
    reasons = []
    if spec.head_dim_qk not in HEAD_DIMS:
        supported = ", ".join(map(str, HEAD_DIMS))
        reasons.append(f"head_dim is {spec.head_dim_qk}; there are kernels for {supported}")
    if spec.head_dim_qk != spec.head_dim_vo:
        reasons.append(
            f"head_dim is {spec.head_dim_qk} for queries and keys but {spec.head_dim_vo} for "
            "values; there are kernels for equal ones only"
        )
    return reasons


def _arch_reasons(spec: KernelSpec) -> list[str]:
    if not spec.archs:
        return [f"no GPU architecture is named; name some of {', '.join(ARCHS)}"]
    if spec.kind in SM90A_KINDS and spec.archs != ("90a",):
        return [f"the GPU architecture is {', '.join(spec.archs)}; {spec.kind} is for 90a alone"]
    reasons = []
    for arch in spec.archs:
        if arch in ARCHS:
            continue
        match = re.fullmatch(r"(\d+)[af]?", arch)
        why = "there are kernels for"
        if match and int(match.group(1)) < 80:
            why = "the kernels need 8.0 (Ampere) or newer, and there are some for"
        reasons.append(f"the GPU architecture is {arch!r}; {why} {', '.join(ARCHS)}")
    return reasons


def attention_specs(
    dtypes: Sequence[str] = tuple(DTYPES),
    head_dims: Sequence[int] = HEAD_DIMS,
    archs: Iterable[str] = DEFAULT_ARCHS,
    kv_dtypes: Sequence[str] = (),
) -> list[KernelSpec]:
    """Return ``common`` and the attention units of every dtype and head dimension.

    This is what a model needs whose attention has those dtypes and head dimensions. `kv_dtypes` are
    dtypes of keys and values besides those of queries: the 8-bit ones.
    """
    archs = parse_archs(archs)
    specs = [KernelSpec("common", archs=archs)]
    for dtype in dtypes:
        for head_dim in head_dims:
            kinds = ATTENTION_KINDS if head_dim in HEAD_DIMS else ("batch_attention",)
            for kind in kinds:
                specs += on_hopper(KernelSpec(kind, dtype, head_dim, archs=archs))
            specs += [
                KernelSpec("batch_attention", dtype, head_dim, archs=archs, kv_dtype=kv_dtype)
                for kv_dtype in kv_dtypes
            ]
    return list(dict.fromkeys(specs))


def mla_specs(
    dtypes: Sequence[str] = tuple(DTYPES), archs: Iterable[str] = DEFAULT_ARCHS
) -> list[KernelSpec]:
    """Return ``common`` and what latent attention of DeepSeek's models needs in every dtype."""
    archs = parse_archs(archs)
    specs = [KernelSpec("common", archs=archs)]
    for dtype in dtypes:
        specs += on_hopper(KernelSpec("batch_mla", dtype, *MLA_HEAD_DIMS, archs=archs))
        for kind in ("batch_prefill_ragged", "batch_attention"):
            specs += on_hopper(KernelSpec(kind, dtype, *MLA_RAGGED_HEAD_DIMS, archs=archs))
    return specs


def plain_specs(archs: Iterable[str] = DEFAULT_ARCHS) -> list[KernelSpec]:
    """Return the units that serve every dtype and shape: ``common``, norms, rotary embedding..."""
    archs = parse_archs(archs)
    return [KernelSpec(kind, archs=archs) for kind in PLAIN_KINDS]


#: Sets of specs to build ahead of time: dtypes, head dimensions, whether latent attention is in it,
#: and whether all of `PLAIN_KINDS` are. Each holds ``common``.
PRESETS: Mapping[str, tuple[tuple[str, ...], tuple[int, ...], bool, bool]] = {
    "common": ((), (), False, False),
    "ops": ((), (), False, True),
    "fp16-d128": (("float16",), (128,), False, False),
    "bf16-d128": (("bfloat16",), (128,), False, False),
    "fp16-mla": (("float16",), (), True, False),
    "bf16-mla": (("bfloat16",), (), True, False),
    "all": (tuple(DTYPES), HEAD_DIMS, True, True),
}


def preset_specs(preset: str, archs: Iterable[str] = DEFAULT_ARCHS) -> list[KernelSpec]:
    """Return the specs of a preset.

    Parameters
    ----------
    preset : str
        ``"common"``: no attention. ``"ops"``: norms, rotary embedding and what else is for every
        dtype and shape. ``"fp16-d128"`` and ``"bf16-d128"``: what models with the head
        dimension of Llama, Qwen and Mistral need in that dtype. ``"fp16-mla"`` and ``"bf16-mla"``:
        what DeepSeek's models need. ``"all"``: all of these, for every head dimension.
    archs : iterable of str
        GPU architectures.
    """
    if preset not in PRESETS:
        raise UnsupportedKernelError([f"the preset is {preset!r}; there are {', '.join(PRESETS)}"])
    dtypes, head_dims, has_mla, has_plain = PRESETS[preset]
    archs = parse_archs(archs)
    specs = attention_specs(dtypes, head_dims, archs)
    if has_mla:
        specs += mla_specs(dtypes, archs)
    if has_plain:
        specs += plain_specs(archs)
    return list(dict.fromkeys(specs))

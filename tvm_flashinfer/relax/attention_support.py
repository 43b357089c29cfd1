"""Whether a kernel of ours serves an attention, and the reasons why not."""

from __future__ import annotations

import math
from collections.abc import Callable

from tvm.target import Target

from tvm_flashinfer.kernels import spec as kernel_spec
from tvm_flashinfer.relax.attention_site import (
    TOP_LEFT,
    AttentionSite,
    provably_at_most,
    provably_equal,
    static,
)
from tvm_flashinfer.relax.support import CPU_DTYPES, TARGETS, target_archs

#: Head dimensions are padded where that makes them at most this many times as large.
MAX_PADDING = 1.5


def unserved_reasons(site: AttentionSite, target: Target) -> list[str]:
    """Return why a site cannot be rewritten: one sentence each, none when it can be.

    Parameters
    ----------
    site : AttentionSite
    target : tvm.target.Target
        What the model is compiled for.
    """
    if target.kind.name not in TARGETS:
        return [
            f"the target is {target.kind.name!r}; there are kernels for {' and '.join(TARGETS)}"
        ]
    if site.problems:
        return list(dict.fromkeys(site.problems))
    reasons = [reason for predicate in _PREDICATES for reason in predicate(site)]
    if reasons:
        return reasons
    return _cuda_reasons(site, target) if target.kind.name == "cuda" else _cpu_reasons(site)


def _dtypes(site: AttentionSite) -> list[str]:
    dtypes = [operand.dtype for operand in (site.q, site.k, site.v)]
    if len(set(dtypes)) > 1:
        return [f"the dtypes of q, k and v are {', '.join(dtypes)}; kernels take equal ones"]
    return []


def _heads(site: AttentionSite) -> list[str]:
    heads, keys, values = (static(x.size("N")) for x in (site.q, site.k, site.v))
    if None in (heads, keys, values):
        return ["a number of heads is not known at compile time"]
    if keys != values:
        return [f"there are {keys} heads of keys and {values} of values; they must be equal"]
    if keys == 0 or heads % keys:
        return [f"there are {heads} query heads, which is no multiple of the {keys} KV heads"]
    return []


def _sizes(site: AttentionSite) -> list[str]:
    reasons = [
        f"{name} has shape {operand.expr.ty.shape}, which has no elements"
        for name, operand in zip("qkv", (site.q, site.k, site.v), strict=True)
        if 0 in map(static, operand.shape)
    ]
    if static(site.q.size("H")) is None or static(site.v.size("H")) is None:
        reasons.append("a head_dim is not known at compile time")
    for dim, meaning in (("B", "requests"), ("S", "keys")):
        if not provably_equal(site.k.size(dim), site.v.size(dim)):
            reasons.append(
                f"keys have {site.k.size(dim)} {meaning} and values {site.v.size(dim)}, which are "
                "not provably equal"
            )
    if site.qo_indptr is None and not provably_equal(site.q.size("B"), site.k.size("B")):
        reasons.append(
            f"queries have {site.q.size('B')} requests and keys {site.k.size('B')}, which are not "
            "provably equal"
        )
    return reasons


def _causal(site: AttentionSite) -> list[str]:
    if site.causal != TOP_LEFT or site.qo_indptr is not None:
        return []
    rows, keys = site.rows, site.keys
    if provably_at_most(rows, keys):
        return []
    return [
        f"the causal mask is {TOP_LEFT} with {rows} rows and {keys} keys; it is served where there "
        "are provably no more rows than keys"
    ]


def _masks(site: AttentionSite) -> list[str]:
    whole = (site.q.size("B"), site.q.size("N"), site.rows, site.keys)
    for kind, found in (("mask", site.masks), ("bias", site.biases)):
        for mask in found:
            shape = site.mask_shape(mask)
            if not all(
                static(size) == 1 or provably_equal(size, full)
                for size, full in zip(shape, whole, strict=True)
            ):
                return [f"a {kind} has shape {mask.shape}, which is not that of scores {whole}"]
    return []


def _numbers(site: AttentionSite) -> list[str]:
    reasons = []
    if not math.isfinite(site.scale):
        reasons.append(f"the scale is {site.scale}; it must be finite")
    if not (math.isfinite(site.soft_cap) and site.soft_cap >= 0):
        reasons.append(f"the soft cap is {site.soft_cap}; it must be positive and finite")
    if site.window is not None and site.window < 1:
        reasons.append(f"the window is {site.window}; it must be positive")
    return reasons


def _cpu_reasons(site: AttentionSite) -> list[str]:
    if site.q.dtype in CPU_DTYPES:
        return []
    return [f"the dtype is {site.q.dtype}; on CPU there are {', '.join(CPU_DTYPES)}"]


def kernel_head_dims(site: AttentionSite, target: Target) -> tuple[int, int]:
    """Return the head dimensions of the kernel: of keys, and of values.

    On CUDA they may be larger than those of the model: operands are padded with zeros, which change
    no score, and the columns of the result that belong to padded values are cut off.
    """
    dims = static(site.q.size("H")), static(site.v.size("H"))
    return tuple(map(_native, dims)) if target.kind.name == "cuda" else dims


def _native(head_dim: int) -> int:
    """Return the next head dimension with a kernel where padding pays, else the same one."""
    larger = [dim for dim in kernel_spec.DEVICE_SCHEDULED_HEAD_DIMS if dim >= head_dim]
    return larger[0] if larger and larger[0] <= MAX_PADDING * head_dim else head_dim


def needed_specs(site: AttentionSite, target: Target) -> list[kernel_spec.KernelSpec]:
    """Return the kernels that a site needs on CUDA, none on other targets."""
    if target.kind.name != "cuda":
        return []
    archs, dims = target_archs(target), kernel_head_dims(site, target)
    attention = kernel_spec.KernelSpec("batch_attention", site.q.dtype, *dims, archs=archs)
    return [kernel_spec.KernelSpec("common", archs=archs), attention]


def padding_notes(site: AttentionSite, target: Target) -> list[str]:
    """Return what a report says of head dimensions that are padded."""
    wanted = {"keys": static(site.q.size("H")), "values": static(site.v.size("H"))}
    dims = zip(wanted.items(), kernel_head_dims(site, target), strict=True)
    return [
        f"head_dim {dim} of {name} is padded to {native}"
        for (name, dim), native in dims
        if dim != native
    ]


def _cuda_reasons(site: AttentionSite, target: Target) -> list[str]:
    reasons = [
        reason
        for spec in needed_specs(site, target)
        for reason in kernel_spec.unsupported_reasons(spec)
    ]
    reasons += [
        f"padding head_dim {dim} would make it more than {MAX_PADDING} times as large"
        for dim in {static(site.q.size("H")), static(site.v.size("H"))}
        if dim < kernel_spec.DEVICE_SCHEDULED_HEAD_DIMS[0] and _native(dim) == dim
    ]
    if not site.scale > 0:
        reasons.append(f"the scale is {site.scale}; CUDA kernels need a positive one")
    return reasons


_PREDICATES: tuple[Callable[[AttentionSite], list[str]], ...] = (
    _dtypes,
    _heads,
    _sizes,
    _causal,
    _masks,
    _numbers,
)

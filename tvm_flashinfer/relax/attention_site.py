"""One attention of a model: what is computed there, and why a kernel of ours cannot."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tvm import relax as rx
from tvm.ir import Range
from tvm.target import Target
from tvm.tirx import IntImm

from tvm_flashinfer.kernels import spec as kernel_spec
from tvm_flashinfer.relax._compat import Analyzer, undefined_vars
from tvm_flashinfer.relax.support import CPU_DTYPES, TARGETS, target_archs

#: Causal masks as TVM names them: row i sees keys up to i, or up to i + (keys - rows).
TOP_LEFT = "TopLeft"
BOTTOM_RIGHT = "BottomRight"

#: Orders of dimensions: batch, sequence, number of heads, head.
BSNH = "BSNH"
BNSH = "BNSH"


@dataclass(frozen=True, eq=False)
class Operand:
    """Queries, keys or values.

    Parameters
    ----------
    expr : relax.Expr
        A tensor of four dimensions.
    layout : str
        `BSNH` or `BNSH`.
    """

    expr: rx.Expr
    layout: str = BSNH

    def size(self, dim: str) -> Any:
        """Return the size of the dimension with this letter."""
        return self.expr.ty.shape[self.layout.index(dim)]

    @property
    def dtype(self) -> str:
        """The dtype of the elements."""
        return str(self.expr.ty.dtype)


@dataclass(eq=False)
class AttentionSite:
    """What one attention of a model computes.

    Parameters
    ----------
    name : str
        Of the variable that the result is bound to.
    root : relax.Call
        The call whose value is the result.
    form : str
        How the model spells it, such as ``"relax.nn.attention"``.
    q, k, v : Operand
    layout : str
        That of the result.
    scale : float
        Scores are multiplied by it.
    causal : str or None
        `TOP_LEFT`, `BOTTOM_RIGHT`, or None.
    window : int or None
        How many keys up to the diagonal a row sees.
    soft_cap : float
        c > 0: scores become ``c * tanh(score / c)``.
    qo_indptr, kv_indptr : relax.Expr or None
        Where requests start, when the rows of all of them follow each other.
    notes : list of str
        What there is to know about the rewritten site.
    problems : list of str
        Why it cannot be rewritten, found while it was read.
    """

    name: str
    root: rx.Call
    form: str
    q: Operand
    k: Operand
    v: Operand
    layout: str
    scale: float
    causal: str | None = None
    window: int | None = None
    soft_cap: float = 0.0
    qo_indptr: rx.Expr | None = None
    kv_indptr: rx.Expr | None = None
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def kernel(self) -> str:
        """The packed function that serves it."""
        return (
            "flashinfer.attention_dense"
            if self.qo_indptr is None
            else ("flashinfer.attention_ragged")
        )

    @property
    def rows(self) -> Any:
        """Query rows of a request."""
        return self.q.size("S")

    @property
    def keys(self) -> Any:
        """Keys of a request."""
        return self.k.size("S")

    @property
    def equal_heads(self) -> bool:
        """Whether there are as many KV heads as query heads."""
        return provably_equal(self.q.size("N"), self.k.size("N"))

    @property
    def sliced(self) -> bool:
        """Whether rows see the first keys alone, as many as there are rows."""
        return self.causal == TOP_LEFT and not provably_equal(self.rows, self.keys)

    def specs(self, target: Target) -> list[kernel_spec.KernelSpec]:
        """Return the kernels that it needs on CUDA, none on other targets."""
        if target.kind.name != "cuda":
            return []
        archs = target_archs(target)
        dims = static(self.q.size("H")), static(self.v.size("H"))
        attention = kernel_spec.KernelSpec("batch_attention", self.q.dtype, *dims, archs=archs)
        return [kernel_spec.KernelSpec("common", archs=archs), attention]


def static(size: Any) -> int | None:
    """Return a size as an integer, or None for a symbolic one."""
    if isinstance(size, int):
        return size
    return int(size.value) if isinstance(size, IntImm) else None


def provably_equal(a: Any, b: Any) -> bool:
    """Return whether two sizes are equal whatever the symbols in them stand for."""
    return bool(Analyzer().can_prove_equal(a, b))


def provably_at_most(a: Any, b: Any) -> bool:
    """Return whether a size is at most another one; symbols of shapes are not negative."""
    analyzer = Analyzer()
    for var in {*undefined_vars(a), *undefined_vars(b)}:
        analyzer.bind(var, Range.from_min_extent(0, 1 << 40))
    return bool(analyzer.can_prove(a <= b))


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
    reasons = []
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
    if site.causal is None or site.qo_indptr is not None:
        return []
    rows, keys = site.rows, site.keys
    if provably_at_most(rows, keys) or static(rows) == 1:
        return []
    if site.causal == BOTTOM_RIGHT:
        return [
            f"the causal mask is {BOTTOM_RIGHT} with {rows} rows and {keys} keys; TVM lets every "
            "row see more keys when there are more rows than keys, which kernels do not"
        ]
    return [
        f"the causal mask is {TOP_LEFT} with {rows} rows and {keys} keys; it is served where there "
        "are provably no more rows than keys"
    ]


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


def _cuda_reasons(site: AttentionSite, target: Target) -> list[str]:
    reasons = [
        reason for spec in site.specs(target) for reason in kernel_spec.unsupported_reasons(spec)
    ]
    if not site.scale > 0:
        reasons.append(f"the scale is {site.scale}; CUDA kernels need a positive one")
    return reasons


_PREDICATES: tuple[Callable[[AttentionSite], list[str]], ...] = (
    _dtypes,
    _heads,
    _sizes,
    _causal,
    _numbers,
)

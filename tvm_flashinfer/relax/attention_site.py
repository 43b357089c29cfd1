"""One attention of a model: what is computed there, and why a kernel of ours cannot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tvm import relax as rx
from tvm.ir import Range
from tvm.tirx import IntImm

from tvm_flashinfer.relax._compat import Analyzer, undefined_vars

if TYPE_CHECKING:
    from tvm_flashinfer.relax.affine import Affine
    from tvm_flashinfer.relax.attention_masks import Seen

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
        A tensor whose elements lie in the order of the layout.
    layout : str
        `BSNH` or `BNSH`.
    shape : tuple
        The four sizes, in the order of the layout.
    """

    expr: rx.Expr
    layout: str
    shape: tuple[Any, ...]

    def size(self, dim: str) -> Any:
        """Return the size of the dimension with this letter."""
        return self.shape[self.layout.index(dim)]

    @property
    def dtype(self) -> str:
        """The dtype of the elements."""
        return str(self.expr.ty.dtype)


@dataclass(frozen=True, eq=False)
class Bias:
    """A tensor that is added to scores, after it is multiplied by a number."""

    expr: rx.Expr
    factor: float = 1.0

    @property
    def shape(self) -> tuple[Any, ...]:
        """Its sizes; it can be broadcast to scores."""
        return tuple(self.expr.ty.shape.values)


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
        How many keys up to the diagonal a row sees. Without a causal mask the diagonal is that of
        `BOTTOM_RIGHT`.
    soft_cap : float
        c > 0: scores become ``c * tanh(score / c)``.
    qo_indptr, kv_indptr : relax.Expr or None
        Where requests start, when the rows of all of them follow each other.
    masks : list of Seen
        Other conditions, all of which hold for a key that a row sees.
    biases : list of Bias
        Tensors that are added to scores, after their cap.
    notes : list of str
        What there is to know about the rewritten site.
    problems : list of str
        Why it cannot be rewritten, found while it was read.
    """

    name: str
    root: rx.Call
    form: str
    q: Operand | None = None
    k: Operand | None = None
    v: Operand | None = None
    layout: str = BSNH
    scale: float = 1.0
    causal: str | None = None
    window: int | None = None
    soft_cap: float = 0.0
    qo_indptr: rx.Expr | None = None
    kv_indptr: rx.Expr | None = None
    masks: list[Seen] = field(default_factory=list)
    biases: list[Bias] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def kernel(self) -> str:
        """The packed function that serves it."""
        if self.qo_indptr is not None:
            return "flashinfer.attention_ragged"
        suffix = "_biased" if self.biased else "_masked" if self.masks else ""
        return f"flashinfer.attention_dense{suffix}"

    @property
    def biased(self) -> bool:
        """Whether the kernel adds numbers to scores, which then hide keys too."""
        return bool(self.biases) or (self.masked_per_head and not self.equal_heads)

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

    @property
    def masked_per_head(self) -> bool:
        """Whether some mask differs between heads."""
        return any(len(x.shape) > 2 and static(self.mask_shape(x)[1]) != 1 for x in self.masks)

    def mask_shape(self, mask: Seen | Bias) -> tuple[Any, ...]:
        """Return the shape of a mask or bias as (requests, heads, rows, keys)."""
        rank = len(mask.shape)
        requests, heads = self.q.size("B"), self.q.size("N")
        if rank == 3 and not provably_equal(mask.shape[0], heads):
            if provably_equal(mask.shape[0], requests * heads):
                return (requests, heads, *mask.shape[1:])
        if rank == 5:
            requests, kv_heads, group, *others = mask.shape
            return (requests, kv_heads * group, *others)
        return (1,) * (4 - rank) + tuple(mask.shape)

    def add_conditions(self, conditions: Sequence[Seen]) -> None:
        """Read conditions on positions into `causal` and `window`, and keep the others as masks.

        Parameters
        ----------
        conditions : sequence of Seen
        """
        diagonals = {BOTTOM_RIGHT: self.keys - self.rows, TOP_LEFT: 0}
        lower = []
        for seen in conditions:
            above, below = (_diagonal(seen.line, sign, self.rows) for sign in (1, -1))
            if _always(seen):
                continue
            names = [n for n, at in diagonals.items() if above is not None and _same(at, above)]
            if names and self.causal in (None, names[0]) and self._can_be(names[0]):
                self.causal = names[0]
            elif below is not None:
                lower.append((seen, below))
            else:
                self.masks.append(seen)
        base = diagonals[self.causal or BOTTOM_RIGHT]
        for seen, start in lower:
            left = static(simplified(base - start))
            if left is not None and left >= 0 and self.window in (None, left + 1):
                self.window = left + 1
            else:
                self.masks.append(seen)

    def _can_be(self, causal: str) -> bool:
        return causal == BOTTOM_RIGHT or provably_at_most(self.rows, self.keys)


def _diagonal(line: Affine | None, sign: int, rows: Any) -> Any:
    """Return d of the condition ``sign * (key - row) <= sign * d``, or None for another one."""
    if line is None or len(line.slopes) < 2 or any(line.slopes[:-2]):
        return None
    row, key = line.slopes[-2:]
    fits = key == sign and (row == -sign or (row == 0 and static(rows) == 1))
    return -sign * line.start if fits else None


def _always(seen: Seen) -> bool:
    """Return whether a condition holds for all rows and keys."""
    if seen.line is None:
        return False
    most = seen.line.start
    for slope, size in zip(seen.line.slopes, seen.shape, strict=True):
        most = most + slope * (size - 1) if slope > 0 else most
    return provably_at_most(most, 0)


def _same(a: Any, b: Any) -> bool:
    return provably_equal(a, b)


def simplified(size: Any) -> Any:
    """Return a size in a simple form: an integer where the symbols cancel out."""
    return size if isinstance(size, int) else Analyzer().simplify(size)


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

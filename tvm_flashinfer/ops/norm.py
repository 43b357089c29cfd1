"""Norms and gated activations."""

from __future__ import annotations

from tvm_flashinfer.ops._tensors import Tensor, empty, function


def rmsnorm(x: Tensor, weight: Tensor, *, eps: float = 1e-6, out: Tensor | None = None) -> Tensor:
    """Norm rows by their root mean square; ``flashinfer.rmsnorm``.

    ``x / sqrt(mean(x ** 2) + eps) * weight`` in float32, rounded once: Zhang and Sennrich, "Root
    Mean Square Layer Normalization", 2019.

    Parameters
    ----------
    x : tensor
        (n, dim), or (n, num_heads, dim) for a norm of each head; float16, bfloat16 or float32.
        Rows and heads may have gaps between them, as slices of fused projections do.
    weight : tensor
        (dim,), of the dtype of x.
    eps : float
        0 or more.
    out : tensor, optional
        Of the shape of x, with gaps too; x itself for a norm in place. Allocated when left out.

    Returns
    -------
    out : tensor

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected.
    """
    return _norm("rmsnorm", x, weight, eps, out)


def gemma_rmsnorm(
    x: Tensor, weight: Tensor, *, eps: float = 1e-6, out: Tensor | None = None
) -> Tensor:
    """Norm rows as Gemma's models do, by ``weight + 1``; ``flashinfer.gemma_rmsnorm``.

    See `rmsnorm`.
    """
    return _norm("gemma_rmsnorm", x, weight, eps, out)


def fused_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Add a residual and norm the sum; ``flashinfer.fused_add_rmsnorm``.

    Parameters
    ----------
    x, residual : tensor
        (n, dim) or (n, num_heads, dim), see `rmsnorm`.
    weight, eps
        See `rmsnorm`.
    out, total : tensor, optional
        Of the shape of x: the norm, which may be x, and the sum, which may be the residual. The sum
        is rounded to its dtype before it is normed. Allocated when left out.

    Returns
    -------
    out, total : tensor
    """
    return _add_norm("fused_add_rmsnorm", x, residual, weight, eps, out, total)


def gemma_fused_add_rmsnorm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    *,
    eps: float = 1e-6,
    out: Tensor | None = None,
    total: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `fused_add_rmsnorm`; by ``weight + 1``: ``flashinfer.gemma_fused_add_rmsnorm``."""
    return _add_norm("gemma_fused_add_rmsnorm", x, residual, weight, eps, out, total)


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Gate the second half of each row by SiLU of the first; ``flashinfer.silu_and_mul``.

    ``x[:, :dim] * sigmoid(x[:, :dim]) * x[:, dim:]`` in float32, rounded once: Shazeer, "GLU
    Variants Improve Transformer", 2020.

    Parameters
    ----------
    x : tensor
        (n, 2 * dim), float16, bfloat16 or float32; rows may have gaps between them.
    out : tensor, optional
        (n, dim); allocated when left out.

    Returns
    -------
    out : tensor

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected.
    """
    return _gate("silu_and_mul", x, out)


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The same by GELU, ``x * (1 + erf(x / sqrt(2))) / 2``; ``flashinfer.gelu_and_mul``."""
    return _gate("gelu_and_mul", x, out)


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """The same by GELU's approximation with tanh; ``flashinfer.gelu_tanh_and_mul``."""
    return _gate("gelu_tanh_and_mul", x, out)


def _norm(name: str, x: Tensor, weight: Tensor, eps: float, out: Tensor | None) -> Tensor:
    out = empty(x, x.shape) if out is None else out
    function(name)(x, weight, float(eps), out)
    return out


def _add_norm(
    name: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor | None,
    total: Tensor | None,
) -> tuple[Tensor, Tensor]:
    out = empty(x, x.shape) if out is None else out
    total = empty(x, x.shape) if total is None else total
    function(name)(x, residual, weight, float(eps), out, total)
    return out, total


def _gate(name: str, x: Tensor, out: Tensor | None) -> Tensor:
    out = empty(x, (x.shape[0], x.shape[1] // 2)) if out is None else out
    function(name)(x, out)
    return out

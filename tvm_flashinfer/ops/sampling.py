"""Sampling of tokens."""

from __future__ import annotations

from tvm_flashinfer.ops._tensors import Tensor, empty, function


def sample_from_probs(
    probs: Tensor,
    uniform: Tensor,
    sample_indices: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw tokens by inversion; ``flashinfer.sampling.parallel_sampling_from_prob``.

    Parameters
    ----------
    probs : tensor
        (n, vocab_size), float32.
    uniform : tensor
        (m,), float32 in [0, 1), one random number for each sample.
    sample_indices : tensor
        (m,), int32: the row of `probs` that a sample is drawn from.
    out : tensor, optional
        (m,), int32; allocated when it is left out.

    Returns
    -------
    out : tensor
        The first token at which the running sum of probabilities is above the random number; -1
        for a row without a positive probability.

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected.
    """
    out = empty(probs, uniform.shape, "int32") if out is None else out
    function("sampling.parallel_sampling_from_prob")(probs, uniform, sample_indices, out)
    return out

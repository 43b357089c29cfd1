"""Sampling of tokens: by random numbers that the caller gives, so that a call can be repeated."""

from __future__ import annotations

from typing import Any

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


def top_k_from_probs(
    probs: Tensor,
    uniform: Tensor,
    sample_indices: Tensor,
    top_k: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw from the most probable tokens; ``flashinfer.sampling.top_k_from_probs``.

    Parameters
    ----------
    probs, uniform, sample_indices, out
        See `sample_from_probs`.
    top_k : tensor
        (n,), int32: how many tokens of a row are kept; all where it is 0 or less. Tokens as
        probable as the last of them are kept too.

    Returns
    -------
    out : tensor
        The first kept token at which the running sum of kept ones, in the order of the vocabulary,
        is above the random number times their sum.
    """
    return _draw("top_k", probs, uniform, sample_indices, (top_k,), out)


def top_p_from_probs(
    probs: Tensor,
    uniform: Tensor,
    sample_indices: Tensor,
    top_p: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw from a nucleus; ``flashinfer.sampling.top_p_from_probs``.

    Holtzman et al., "The Curious Case of Neural Text Degeneration", 2019.

    Parameters
    ----------
    probs, uniform, sample_indices, out
        See `sample_from_probs`.
    top_p : tensor
        (n,), float32: the most probable tokens are kept whose sum is `top_p` at least, all where no
        sum is. Tokens as probable as the last of them are kept too.

    Returns
    -------
    out : tensor
        See `top_k_from_probs`.
    """
    return _draw("top_p", probs, uniform, sample_indices, (top_p,), out)


def top_k_top_p_from_probs(
    probs: Tensor,
    uniform: Tensor,
    sample_indices: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    *,
    joint: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Draw from what both filters leave; ``flashinfer.sampling.top_k_top_p_from_probs``.

    Parameters
    ----------
    probs, uniform, sample_indices, top_k, top_p, out
        See `top_k_from_probs` and `top_p_from_probs`.
    joint : bool
        Whether `top_p` is of the probabilities as they are. Else it is of those that `top_k`
        leaves, over their sum.

    Returns
    -------
    out : tensor
        See `top_k_from_probs`.
    """
    filters = (top_k, top_p, int(joint))
    return _draw("top_k_top_p", probs, uniform, sample_indices, filters, out)


def min_p_from_probs(
    probs: Tensor,
    uniform: Tensor,
    sample_indices: Tensor,
    min_p: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw from tokens that are probable enough; ``flashinfer.sampling.min_p_from_probs``.

    Nguyen et al., "Turning Up the Heat", 2024.

    Parameters
    ----------
    probs, uniform, sample_indices, out
        See `sample_from_probs`.
    min_p : tensor
        (n,), float32: tokens are kept whose probability is `min_p` times the largest one at least.

    Returns
    -------
    out : tensor
        See `top_k_from_probs`.
    """
    return _draw("min_p", probs, uniform, sample_indices, (min_p,), out)


def top_k_renorm_probs(probs: Tensor, top_k: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Give the probability to the top tokens; ``flashinfer.sampling.top_k_renorm_probs``.

    Parameters
    ----------
    probs : tensor
        (n, vocab_size), float32.
    top_k : tensor
        (n,), int32, see `top_k_from_probs`.
    out : tensor, optional
        (n, vocab_size), float32; allocated when it is left out.

    Returns
    -------
    out : tensor
        What is kept over its sum, and 0.
    """
    return _renorm("top_k", probs, top_k, out)


def top_p_renorm_probs(probs: Tensor, top_p: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Give the probability to a nucleus; ``flashinfer.sampling.top_p_renorm_probs``.

    Parameters
    ----------
    probs, out
        See `top_k_renorm_probs`.
    top_p : tensor
        (n,), float32, see `top_p_from_probs`.
    """
    return _renorm("top_p", probs, top_p, out)


def top_k_top_p_renorm_probs(
    probs: Tensor, top_k: Tensor, top_p: Tensor, *, joint: bool = False, out: Tensor | None = None
) -> Tensor:
    """Renormalise what both filters leave; ``flashinfer.sampling.top_k_top_p_renorm_probs``.

    Parameters
    ----------
    probs, out
        See `top_k_renorm_probs`.
    top_k, top_p, joint
        See `top_k_top_p_from_probs`.
    """
    out = empty(probs, probs.shape) if out is None else out
    function("sampling.top_k_top_p_renorm_probs")(probs, top_k, top_p, int(joint), out)
    return out


def sample_from_sorted(
    sorted_probs: Tensor,
    sorted_indices: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    uniform: Tensor,
    sample_indices: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Draw from rows in descending order; ``flashinfer.sampling.sample_from_sorted``.

    What ``relax.frontend.nn.op.sample_top_p_top_k_from_sorted_prob`` of TVM computes.

    Parameters
    ----------
    sorted_probs, sorted_indices : tensor
        (n, vocab_size), float32 and int32: probabilities in descending order, and their tokens.
    top_p, top_k : tensor
        (n,), float32 and int32: the first tokens are kept, up to the one with which their sum is
        `top_p` at least, and `top_k` at most; one at least.
    uniform, sample_indices, out
        See `sample_from_probs`.

    Returns
    -------
    out : tensor
        The first token at which the running sum, in descending order, is above the random number
        times the sum of what is kept.
    """
    out = empty(sorted_probs, uniform.shape, "int32") if out is None else out
    function("sampling.sample_from_sorted")(
        sorted_probs, sorted_indices, top_p, top_k, uniform, sample_indices, out
    )
    return out


def renorm_from_sorted(
    probs: Tensor,
    sorted_probs: Tensor,
    top_p: Tensor,
    top_k: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Renormalise by sorted tokens; ``flashinfer.sampling.renorm_from_sorted``.

    What ``relax.frontend.nn.op.renormalize_top_p_top_k_prob`` of TVM computes.

    Parameters
    ----------
    probs : tensor
        (n, vocab_size), float32.
    sorted_probs, top_p, top_k
        See `sample_from_sorted`.
    out : tensor, optional
        (n, vocab_size), float32; allocated when it is left out.

    Returns
    -------
    out : tensor
        What is as probable as the last kept one over its sum, and 0.
    """
    out = empty(probs, probs.shape) if out is None else out
    function("sampling.renorm_from_sorted")(probs, sorted_probs, top_p, top_k, out)
    return out


def softmax(
    logits: Tensor,
    temperature: Tensor,
    *,
    active_vocab_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Make probabilities of logits; ``flashinfer.sampling.softmax``.

    Parameters
    ----------
    logits : tensor
        (n, vocab_size), float32.
    temperature : tensor
        (n,), float32; where it is 1e-5 or less the tokens with the largest logit share 1.
    active_vocab_size : int, optional
        Tokens from there on get 0; none when it is left out.
    out : tensor, optional
        (n, vocab_size), float32; allocated when it is left out.

    Returns
    -------
    out : tensor
    """
    out = empty(logits, logits.shape) if out is None else out
    active = logits.shape[1] if active_vocab_size is None else active_vocab_size
    function("sampling.softmax")(logits, temperature, active, out)
    return out


def chain_speculative(
    draft_probs: Tensor,
    draft_ids: Tensor,
    target_probs: Tensor,
    uniform: Tensor,
    *,
    out: Tensor | None = None,
    num_accepted: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Verify a chain of draft tokens; ``flashinfer.sampling.chain_speculative``.

    The tokens that come out are distributed as if they were drawn from `target_probs`: Leviathan et
    al., "Fast Inference from Transformers via Speculative Decoding", 2022.

    Parameters
    ----------
    draft_probs : tensor
        (batch_size, num_drafts, vocab_size), float32: what the drafts were drawn from.
    draft_ids : tensor
        (batch_size, num_drafts), int32.
    target_probs : tensor
        (batch_size, num_drafts + 1, vocab_size), float32.
    uniform : tensor
        (batch_size, num_drafts + 1), float32 in [0, 1): draft i is accepted while number i times
        its draft probability is below its target probability; the last number draws a token.
    out, num_accepted : tensor, optional
        (batch_size, num_drafts + 1) and (batch_size,), int32; allocated when they are left out.

    Returns
    -------
    out, num_accepted : tensor
        The accepted drafts, a token drawn from what the target has more than the draft at the first
        that was refused, or from the last target, and then -1; and how many were accepted.

    Raises
    ------
    ValueError, TypeError
        For shapes, devices and dtypes that do not fit, with what is expected.
    """
    batch, drafts = draft_ids.shape
    out = empty(draft_ids, (batch, drafts + 1)) if out is None else out
    num_accepted = empty(draft_ids, (batch,)) if num_accepted is None else num_accepted
    function("sampling.chain_speculative")(
        draft_probs, draft_ids, target_probs, uniform, out, num_accepted
    )
    return out, num_accepted


def _draw(
    name: str,
    probs: Tensor,
    uniform: Tensor,
    sample_indices: Tensor,
    filters: tuple[Any, ...],
    out: Tensor | None,
) -> Tensor:
    out = empty(probs, uniform.shape, "int32") if out is None else out
    function(f"sampling.{name}_from_probs")(probs, uniform, sample_indices, *filters, out)
    return out


def _renorm(name: str, probs: Tensor, kept: Tensor, out: Tensor | None) -> Tensor:
    out = empty(probs, probs.shape) if out is None else out
    function(f"sampling.{name}_renorm_probs")(probs, kept, out)
    return out

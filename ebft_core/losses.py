"""Losses of one micro-batch, and the feature-matching distance that is reported.

Every loss is a sum divided by a count over the *whole optimiser batch*, so that splitting the batch
into micro-batches changes nothing. Legend: see `geometry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ebft_core.whitening import gram_of


class CfmOutput(NamedTuple):
    """Conditional feature matching of groups, `(*,)` each."""

    biased: Tensor
    unbiased: Tensor


def cfm(phi: Tensor, target: Tensor) -> CfmOutput:
    """‖mean_j φ_j - y‖² of groups, and its unbiased form (minus the samples' variance / N).

    Args:
        phi: raw unit features `(*, N, D)`. target: `(*, D)`.

    Returns:
        Both float64. With N = 1 the variance is unknown and `unbiased` is NaN.
    """
    return cfm_from_gram(gram_of(phi, target))


def cfm_from_gram(gram: Tensor) -> CfmOutput:
    """`cfm` from Gram matrices of the features, the target last: `(*, N+1, N+1)`.

    With S = Σ_jk φ_j·φ_k: biased = S/N² - 2/N Σ_j φ_j·y + ‖y‖²; variance = (Σ_j ‖φ_j‖² - S/N) / (N-1).
    """
    gram = gram.double()
    N = gram.shape[-1] - 1
    samples = gram[..., :N, :N]
    total = samples.sum(dim=(-2, -1))
    biased = total / N**2 - 2.0 * gram[..., :N, N].mean(dim=-1) + gram[..., N, N]
    if N < 2:
        return CfmOutput(biased, torch.full_like(biased, float("nan")))
    variance = (samples.diagonal(dim1=-2, dim2=-1).sum(dim=-1) - total / N) / (N - 1)
    return CfmOutput(biased, biased - variance / N)


def policy_gradient_loss(advantage_RAN: Tensor, logprob_RANG: Tensor, action_count: int) -> Tensor:
    """-Σ advantage · log π / action tokens of the optimiser batch (REINFORCE; one update per rollout).

    Args:
        logprob_RANG: 0 where there is no action, so such tokens contribute nothing.
        action_count: action tokens of the whole optimiser batch.
    """
    return -(advantage_RAN[..., None] * logprob_RANG).sum() / max(action_count, 1)


def cross_entropy_loss(label_logprob_RL: Tensor, label_count: int) -> Tensor:
    """Mean negative log-likelihood of the supervised document tokens of the optimiser batch, in nats."""
    return -label_logprob_RL.sum() / max(label_count, 1)


def kl_penalty(logprob_RANG: Tensor, reference_RANG: Tensor, estimator: str, action_count: int) -> Tensor:
    """Penalty towards the frozen reference on action tokens; its gradient is the gradient of the loss.

    With ratio r = π_ref / π: k1 = -log r, k2 = (log r)² / 2, k3 = r - 1 - log r. As a *loss* on samples of
    the policy, the gradient of k1 is zero in expectation, the gradient of k2 is that of the reverse
    KL, and k3's is that of the forward KL; k1 is meant for reporting.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown kl_estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
    return KL_ESTIMATORS[estimator](reference_RANG - logprob_RANG).sum() / max(action_count, 1)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: log_ratio.expm1() - log_ratio,
}

"""Losses of one micro-batch, and the feature-matching distance that is reported.

Every loss is a sum divided by a count over the *whole optimiser batch*, so that splitting the batch
into micro-batches changes nothing. Legend: see `geometry.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ebft_core.blocks import BlockChoice
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


@dataclass(frozen=True)
class TokenTerms:
    """What the loss of each generated token is made of; tensors of one shape, without gradient.

    Attributes:
        weight: advantage times importance weight, 0 where there is no action.
        samples: samples behind the token: 1 at an action, 0 elsewhere, more where equal ones were merged.
        reference: log-probabilities of the frozen reference, for the KL penalty.
        old_logprob: log-probabilities when the rollout was scored; set where it is used more than once.
        clip: range of the policy ratio below and above 1, with `old_logprob`.
        sampler_logprob: what the sampler reported, where it is not the policy itself.
        is_cap: upper bound of the importance ratio between the policy and the sampler.
    """

    weight: Tensor
    samples: Tensor
    reference: Tensor | None = None
    old_logprob: Tensor | None = None
    clip: tuple[float, float] = (0.2, 0.2)
    sampler_logprob: Tensor | None = None
    is_cap: float = 1.0

    @property
    def mergeable(self) -> bool:
        """Whether samples with equal tokens have equal terms, but for their weight."""
        return self.old_logprob is None and self.sampler_logprob is None

    @property
    def active(self) -> Tensor:
        """Tokens that have a gradient."""
        return (self.samples > 0) if self.reference is not None else (self.weight != 0)

    def map(self, change: Callable[[Tensor], Tensor]) -> TokenTerms:
        """The same change made to every tensor."""
        changed = {name: change(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return replace(self, **changed)  # type: ignore[arg-type]

    def merged(self, choice: BlockChoice) -> TokenTerms:
        """Terms `(R, X, …)` of the chosen blocks, each with what it stands for."""
        picked = {name: choice.pick(x) for name, x in vars(self).items() if isinstance(x, Tensor)}
        picked |= {"weight": choice.sum(self.weight), "samples": choice.sum(self.samples)}
        return replace(self, **picked)  # type: ignore[arg-type]


class TokenLosses(NamedTuple):
    """Policy-gradient loss and KL penalty of some tokens, as shares of the optimiser batch's means."""

    rl: Tensor
    kl: Tensor


def token_losses(logprob: Tensor, terms: TokenTerms, kl_estimator: str, action_count: int) -> TokenLosses:
    """Losses of generated tokens whose log-probabilities (any shape) carry the gradient."""
    weight = terms.weight
    ratio = importance_ratio(logprob, terms)
    if ratio is not None:
        weight = weight * ratio.clamp(max=terms.is_cap)
    if terms.old_logprob is None:
        rl = policy_gradient_loss(weight, logprob, action_count)
    else:
        rl = clipped_policy_loss(weight, logprob, terms.old_logprob, terms.clip, action_count)
    if terms.reference is None:
        return TokenLosses(rl, rl.new_zeros(()))
    return TokenLosses(
        rl, kl_penalty(logprob, terms.reference, kl_estimator, action_count, samples=terms.samples)
    )


def importance_ratio(logprob: Tensor, terms: TokenTerms) -> Tensor | None:
    """Each token's probability under the policy when it was scored over that under its sampler; no gradient.

    A completion may come from weights that are some steps old, and a server computes in other kernels: the
    ratio, bounded by `is_cap`, weighs its tokens. None where the sampler is the policy itself.
    """
    if terms.sampler_logprob is None:
        return None
    scored = logprob.detach() if terms.old_logprob is None else terms.old_logprob
    return (scored - terms.sampler_logprob).exp()


def policy_gradient_loss(weight: Tensor, logprob: Tensor, action_count: int) -> Tensor:
    """-Σ weight · log π / action tokens of the optimiser batch (REINFORCE; one update per rollout).

    Args:
        weight: advantages, per token or (one axis less) per block; 0 where there is no action.
        action_count: action tokens of the whole optimiser batch.
    """
    if weight.dim() < logprob.dim():
        weight = weight[..., None]
    return -(weight * logprob).sum() / max(action_count, 1)


def clipped_policy_loss(
    weight: Tensor, logprob: Tensor, old_logprob: Tensor, clip: tuple[float, float], action_count: int
) -> Tensor:
    """PPO's clipped surrogate: -Σ min(r · weight, clamp(r, 1-ε, 1+ε') · weight) / action tokens.

    With r = π / π_old; at r = 1 its gradient is that of `policy_gradient_loss`.
    """
    ratio = (logprob - old_logprob).exp()
    clamped = ratio.clamp(1.0 - clip[0], 1.0 + clip[1])
    return -torch.minimum(ratio * weight, clamped * weight).sum() / max(action_count, 1)


def cross_entropy_loss(label_logprob_RL: Tensor, label_count: int) -> Tensor:
    """Mean negative log-likelihood of the supervised document tokens of the optimiser batch, in nats."""
    return -label_logprob_RL.sum() / max(label_count, 1)


def kl_penalty(
    logprob: Tensor,
    reference: Tensor,
    estimator: str,
    action_count: int,
    *,
    samples: Tensor | None = None,
) -> Tensor:
    """Penalty towards the frozen reference on action tokens; its gradient is the gradient of the loss.

    With ratio r = π_ref / π: k1 = -log r, k2 = (log r)² / 2, k3 = r - 1 - log r. As a *loss* on samples of
    the policy, the gradient of k1 is zero in expectation, the gradient of k2 is that of the reverse
    KL, and k3's is that of the forward KL; k1 is meant for reporting.

    Args:
        samples: samples behind each token, 0 where there is no action; None: 1.

    Raises:
        ValueError: unknown estimator.
    """
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f"unknown kl_estimator {estimator!r}; known: {', '.join(KL_ESTIMATORS)}")
    penalty = KL_ESTIMATORS[estimator](reference - logprob)
    return (penalty if samples is None else penalty * samples).sum() / max(action_count, 1)


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratio: -log_ratio,
    "k2": lambda log_ratio: 0.5 * log_ratio**2,
    "k3": lambda log_ratio: log_ratio.expm1() - log_ratio,
}

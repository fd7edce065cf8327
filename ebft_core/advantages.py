"""Advantages: rewards minus a baseline that the sample itself does not enter.

The alignment of sample k says nothing about sample j, so its baseline is a plain leave-one-out mean.
The similarity d_k of another sample contains the pair (j, k); subtracting twice d_j from the sum
removes every pair with j, and what is left is an unbiased baseline over N - 2 samples. Legend: see
`geometry.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ebft_core.rewards import RewardOutput


def group_advantages(
    rewards: RewardOutput, *, estimator: str, alignment_coef: float = 1.0, diversity_coef: float = 1.0
) -> Tensor:
    """Advantages `(*, N)` of groups of N samples.

    Args:
        rewards: from `group_rewards`, with the same coefficients.
        estimator: `rloo` (unbiased; sums to 0 in a group of N ≥ 3), `group_norm` or `reinforce`.

    Raises:
        ValueError: unknown estimator, or N = 1 with an estimator that needs other samples.

    Example:
        >>> from ebft_core import group_rewards
        >>> rewards = group_rewards(torch.eye(4)[None], torch.eye(4)[None, 0], whitening="none")
        >>> group_advantages(rewards, estimator="rloo")
        tensor([[ 2.0000, -0.6667, -0.6667, -0.6667]])
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown advantage_estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")
    N = rewards.reward.shape[-1]
    if N < 2 and estimator != "reinforce":
        raise ValueError(
            f"{estimator} compares samples of a group and needs N >= 2; use reinforce with N = 1"
        )
    return ESTIMATORS[estimator](rewards, alignment_coef, diversity_coef)


def _rloo(rewards: RewardOutput, alignment_coef: float, diversity_coef: float) -> Tensor:
    N = rewards.reward.shape[-1]
    a, d = rewards.alignment, rewards.diversity
    baseline = alignment_coef * (a.sum(dim=-1, keepdim=True) - a) / (N - 1)
    if N > 2:  # with two samples every pair contains j: nothing independent is left
        baseline = baseline - diversity_coef * (d.sum(dim=-1, keepdim=True) - 2 * d) / (N - 2)
    return rewards.reward - baseline


def _group_norm(rewards: RewardOutput, alignment_coef: float, diversity_coef: float) -> Tensor:
    del alignment_coef, diversity_coef
    # A float32 mean of equal rewards can be off by one ulp, which 1e-8 would blow up.
    reward = rewards.reward.double()
    spread = torch.std(reward, dim=-1, keepdim=True)
    return ((reward - reward.mean(dim=-1, keepdim=True)) / (spread + 1e-8)).float()


def _reinforce(rewards: RewardOutput, alignment_coef: float, diversity_coef: float) -> Tensor:
    """RLOO with a zero baseline."""
    del alignment_coef, diversity_coef
    return rewards.reward


ESTIMATORS: dict[str, Callable[[RewardOutput, float, float], Tensor]] = {
    "rloo": _rloo,
    "group_norm": _group_norm,
    "reinforce": _reinforce,
}

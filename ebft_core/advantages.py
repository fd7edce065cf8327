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
    _check_estimator(estimator)
    N = rewards.reward.shape[-1]
    if N < 2 and estimator != "reinforce":
        raise ValueError(
            f"{estimator} compares samples of a group and needs N >= 2; use reinforce with N = 1"
        )
    return ESTIMATORS[estimator](rewards, alignment_coef, diversity_coef)


def own_advantages(reward: Tensor, *, estimator: str) -> Tensor:
    """Advantages `(*, N)` of rewards that know nothing of the other samples, such as the user's own.

    Args:
        reward: `(*, N)`; NaN where a sample has no such reward. It is then nobody's baseline, and its
            own advantage is 0. A sample without a rewarded sibling has nothing to be compared with: 0.
        estimator: `rloo` (plain leave-one-out mean), `group_norm` or `reinforce`.

    Raises:
        ValueError: unknown estimator.

    Example:
        >>> own_advantages(torch.tensor([1.0, 0.0, 0.5, torch.nan]), estimator="rloo")
        tensor([ 0.7500, -0.7500,  0.0000,  0.0000])
    """
    _check_estimator(estimator)
    if estimator == "group_norm":
        advantage = _normalise(reward)
    elif estimator == "rloo":
        advantage = reward - _mean_of_others(reward)
    else:
        advantage = reward
    return advantage.nan_to_num(nan=0.0)


def total_advantages(
    rewards: RewardOutput,
    own: Tensor | None,
    *,
    estimator: str,
    alignment_coef: float = 1.0,
    diversity_coef: float = 1.0,
) -> Tensor:
    """Advantages `(*, N)` of the feature reward plus the weighted sum of the user's own rewards.

    With `rloo` each part has the baseline that leaves it unbiased. `group_norm` divides the sum of both by
    its spread, so that the weights keep their meaning; there, no own reward counts as 0.

    Args:
        own: `(*, N)`, NaN where no own reward applies (`own_rewards.combine_own`); None: there are none.

    Raises:
        ValueError: as `group_advantages`.
    """
    coefficients = {"alignment_coef": alignment_coef, "diversity_coef": diversity_coef}
    if own is None:
        return group_advantages(rewards, estimator=estimator, **coefficients)
    if estimator == "rloo":
        feature_part = group_advantages(rewards, estimator=estimator, **coefficients)
        return feature_part + own_advantages(own, estimator=estimator)
    total = rewards._replace(reward=rewards.reward + own.nan_to_num(nan=0.0))
    return group_advantages(total, estimator=estimator, **coefficients)


def scale_advantages(advantage: Tensor, reward: Tensor, valid: Tensor, scale: str) -> Tensor:
    """Advantages `(*, N)` over the standard deviation of the rewards.

    Args:
        reward: `(*, N)`. valid: `(*,)`, groups that count.
        scale: `none`; `group`: each group's own deviation; `batch`: that of all rewards of valid groups.
    """
    if scale == "none" or not bool(valid.any()):
        return advantage
    if scale == "group":
        return advantage / (reward.double().std(dim=-1, keepdim=True) + 1e-8).float()
    return advantage / (reward[valid].double().std() + 1e-8).float()


def _check_estimator(estimator: str) -> None:
    if estimator not in ESTIMATORS:
        raise ValueError(f"unknown advantage_estimator {estimator!r}; known: {', '.join(ESTIMATORS)}")


def _mean_of_others(value: Tensor) -> Tensor:
    """Leave-one-out mean over the last axis, NaN entries left out; NaN where there is no other."""
    present = ~value.isnan()
    others = present.sum(dim=-1, keepdim=True) - present.int()
    return (value.nansum(dim=-1, keepdim=True) - value.nan_to_num(nan=0.0)) / torch.where(
        others > 0, others, torch.nan
    )


def _normalise(reward: Tensor) -> Tensor:
    """(r - mean) / (std + 1e-8) over the last axis, NaN entries left out; float32."""
    # A float32 mean of equal rewards can be off by one ulp, which 1e-8 would blow up.
    reward = reward.double()
    count = (~reward.isnan()).sum(dim=-1, keepdim=True)
    centred = reward - reward.nanmean(dim=-1, keepdim=True)
    spread = (centred.square().nansum(dim=-1, keepdim=True) / (count - 1)).sqrt()
    return (centred / (spread + 1e-8)).float()


def _rloo(rewards: RewardOutput, alignment_coef: float, diversity_coef: float) -> Tensor:
    N = rewards.reward.shape[-1]
    d = rewards.diversity
    baseline = alignment_coef * _mean_of_others(rewards.alignment)
    if N > 2:  # with two samples every pair contains j: nothing independent is left
        baseline = baseline - diversity_coef * (d.sum(dim=-1, keepdim=True) - 2 * d) / (N - 2)
    return rewards.reward - baseline


def _group_norm(rewards: RewardOutput, alignment_coef: float, diversity_coef: float) -> Tensor:
    del alignment_coef, diversity_coef
    return _normalise(rewards.reward)


def _reinforce(rewards: RewardOutput, alignment_coef: float, diversity_coef: float) -> Tensor:
    """RLOO with a zero baseline."""
    del alignment_coef, diversity_coef
    return rewards.reward


ESTIMATORS: dict[str, Callable[[RewardOutput, float, float], Tensor]] = {
    "rloo": _rloo,
    "group_norm": _group_norm,
    "reinforce": _reinforce,
}

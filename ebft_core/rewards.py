"""The EBFT reward: be close to the reference, do not repeat the other samples.

reward_j = 2·alignment_coef·alignment_j - 2·diversity_coef·mean_{k≠j} similarity_jk
(paper 2603.12248, the REINFORCE form of the feature-matching objective). Legend: see `geometry.py`;
`*` stands for any leading axes, usually (R, A).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ebft_core.config import EBFTConfig
from ebft_core.whitening import gram_of, whiten

DEFAULT_WHITEN_TOL = EBFTConfig().whiten_tol


class RewardOutput(NamedTuple):
    """Per sample, float32, all `(*, N)`.

    Attributes:
        reward: alignment_coef · alignment - diversity_coef · diversity.
        alignment: 2 · alignment_j.
        diversity: 2 · mean similarity with the other samples (0 when N = 1).
    """

    reward: Tensor
    alignment: Tensor
    diversity: Tensor


def valid_groups(phi: Tensor, target: Tensor) -> Tensor:
    """`(*,)` bool: whether all features of a group are finite and none is all zero."""
    return valid_grams(gram_of(phi, target))


def valid_grams(gram: Tensor) -> Tensor:
    """`valid_groups` from Gram matrices `(*, N+1, N+1)`: finite, with nothing of length zero."""
    lengths = gram.diagonal(dim1=-2, dim2=-1)
    return gram.isfinite().all(dim=(-2, -1)) & (lengths > 0).all(dim=-1)


def group_rewards(
    phi: Tensor,
    target: Tensor,
    *,
    whitening: str,
    alignment_coef: float = 1.0,
    diversity_coef: float = 1.0,
    whiten_tol: float = DEFAULT_WHITEN_TOL,
) -> RewardOutput:
    """Rewards of groups of N samples.

    Args:
        phi: features of the samples, `(*, N, D)`.
        target: features of the ground truth, `(*, D)`.
        whitening: `feature` (the paper's), `sample` (the authors' code) or `none`.
        whiten_tol: relative cut-off of singular values; never below the precision of `phi`'s dtype.

    Returns:
        Zeros for a group that `valid_groups` rejects: such a group has no signal and must be counted.

    Raises:
        ValueError: unknown whitening, or shapes that do not fit.

    Example:
        >>> phi = torch.eye(4)[None]  # one group: four different samples ...
        >>> group_rewards(phi, phi[:, 0], whitening="feature").alignment
        tensor([[2., 0., 0., 0.]])
        >>> phi[:, 1] = phi[:, 0]  # ... and now two of them are equal: a penalty of 1/3 for each
        >>> group_rewards(phi, phi[:, 0], whitening="feature").diversity[0, :2]
        tensor([0.3333, 0.3333])
    """
    if phi.shape[:-2] + phi.shape[-1:] != target.shape:
        raise ValueError(f"phi {tuple(phi.shape)} needs a target (*, D), got {tuple(target.shape)}")
    return rewards_from_gram(
        gram_of(phi, target),
        whitening=whitening,
        alignment_coef=alignment_coef,
        diversity_coef=diversity_coef,
        whiten_tol=max(whiten_tol, torch.finfo(phi.dtype).eps),
    )


def rewards_from_gram(
    gram: Tensor,
    *,
    whitening: str,
    alignment_coef: float = 1.0,
    diversity_coef: float = 1.0,
    whiten_tol: float = DEFAULT_WHITEN_TOL,
) -> RewardOutput:
    """`group_rewards` from Gram matrices of the features, the target last: `(*, N+1, N+1)`.

    Args:
        whiten_tol: relative cut-off of singular values; give at least the precision of the features. It is
            raised to what a float32 Gram matrix can resolve, the square root of its precision.
    """
    valid = valid_grams(gram)
    safe = torch.where(valid[..., None, None], gram, torch.eye(gram.shape[-1], device=gram.device))
    if gram.dtype != torch.float64:
        whiten_tol = max(whiten_tol, torch.finfo(gram.dtype).eps ** 0.5)
    alignment, similarity = whiten(safe, whitening, whiten_tol)
    N = gram.shape[-1] - 1
    others = similarity.sum(dim=-1) - similarity.diagonal(dim1=-2, dim2=-1)
    keep = valid[..., None]
    doubled_alignment = torch.where(keep, 2.0 * alignment, 0.0)
    doubled_diversity = torch.where(keep, 2.0 * others / max(N - 1, 1), 0.0)
    reward = alignment_coef * doubled_alignment - diversity_coef * doubled_diversity
    return RewardOutput(reward.float(), doubled_alignment.float(), doubled_diversity.float())

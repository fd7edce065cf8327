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
from ebft_core.whitening import group_gram, whiten

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
    samples_ok = phi.isfinite().all(dim=-1) & (phi != 0).any(dim=-1)
    target_ok = target.isfinite().all(dim=-1) & (target != 0).any(dim=-1)
    return samples_ok.all(dim=-1) & target_ok


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
    valid = valid_groups(phi, target)
    safe_phi = torch.where(valid[..., None, None], phi, 1.0)
    safe_target = torch.where(valid[..., None], target, 1.0)
    tolerance = max(whiten_tol, torch.finfo(phi.dtype).eps)
    alignment, similarity = whiten(group_gram(safe_phi, safe_target), whitening, tolerance)
    N = phi.shape[-2]
    others = similarity.sum(dim=-1) - similarity.diagonal(dim1=-2, dim2=-1)
    keep = valid[..., None]
    doubled_alignment = torch.where(keep, 2.0 * alignment, 0.0)
    doubled_diversity = torch.where(keep, 2.0 * others / max(N - 1, 1), 0.0)
    reward = alignment_coef * doubled_alignment - diversity_coef * doubled_diversity
    return RewardOutput(reward.float(), doubled_alignment.float(), doubled_diversity.float())

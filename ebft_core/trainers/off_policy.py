"""Terms of the loss for completions that another policy wrote: older weights, or a server's own kernels."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from ebft_core.attention import Backend
from ebft_core.blocks import Blocks
from ebft_core.config import EBFTConfig, RolloutConfig
from ebft_core.losses import TokenTerms
from ebft_core.rows import RowBatch
from ebft_core.trainers.step import scored_logprobs


def off_policy_terms(
    terms: TokenTerms,
    policy: nn.Module,
    batch: RowBatch,
    blocks: Blocks,
    ebft: EBFTConfig,
    rollout: RolloutConfig,
    *,
    attention: Backend,
) -> tuple[TokenTerms, float]:
    """Terms with importance weights, clipping and masks; and the share of action tokens that were masked.

    The policy's own log-probabilities are computed here, without gradient, where something needs them before
    the update: several optimiser steps on one batch, or a mask that looks at whole completions.
    """
    old_RANG = None
    if rollout.num_iterations > 1 or rollout.off_policy_mask_threshold is not None:
        old_RANG = scored_logprobs(policy, batch, blocks, ebft, attention)
    kept_RAN = torch.ones_like(blocks.length_RAN, dtype=torch.bool)
    if ebft.mask_truncated_completions and blocks.truncated_RAN is not None:
        kept_RAN &= ~blocks.truncated_RAN
    if rollout.off_policy_mask_threshold is not None and old_RANG is not None:
        kept_RAN &= mean_log_ratio(blocks, old_RANG) <= rollout.off_policy_mask_threshold
    actions = terms.samples.sum().clamp(min=1.0)
    masked = float((terms.samples * ~kept_RAN[..., None]).sum() / actions)
    changed = replace(
        terms,
        weight=terms.weight * kept_RAN[..., None],
        sampler_logprob=blocks.sampler_logprob_RANG,
        is_cap=rollout.is_cap,
        old_logprob=old_RANG if rollout.num_iterations > 1 else None,
        clip=(rollout.epsilon, rollout.epsilon_high or rollout.epsilon),
    )
    return changed, masked


def mean_log_ratio(blocks: Blocks, logprob_RANG: Tensor) -> Tensor:
    """Mean over a completion's actions of log π_sampler - log π, `(R, A, N)`: its estimate of the KL."""
    if blocks.sampler_logprob_RANG is None:
        return torch.zeros(blocks.length_RAN.shape, device=logprob_RANG.device)
    actions = blocks.action_RANG.float()
    difference = (blocks.sampler_logprob_RANG - logprob_RANG) * actions
    return difference.sum(dim=-1) / actions.sum(dim=-1).clamp(min=1.0)

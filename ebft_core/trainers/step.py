"""One micro-batch of EBFT as pure functions: rollout → features → reward → advantage.

Records go in, records come out; nothing is kept between calls. `update.py` turns the result into
gradients; the trainer adds the optimiser, the schedule and the checkpoints around both. Legend: see
`geometry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebft_core.advantages import scale_advantages, total_advantages
from ebft_core.attention import Backend
from ebft_core.blocks import Blocks
from ebft_core.config import EBFTConfig
from ebft_core.features import feature_states
from ebft_core.geometry import NO_ANCHOR
from ebft_core.kernels.group_gram import group_gram
from ebft_core.logprobs import count_scored_labels, packed_logprobs
from ebft_core.losses import TokenTerms, cfm_from_gram
from ebft_core.model_parts import adapters_disabled, evaluation_mode
from ebft_core.rewards import rewards_from_gram, valid_grams
from ebft_core.rows import RowBatch
from ebft_core.samplers.strided import rollout
from ebft_core.whitening import precision_of


@dataclass(frozen=True)
class ScoredRollout:
    """Rollouts of a micro-batch with everything that was found out about them; all without gradient.

    Attributes:
        blocks: the rollouts.
        advantage_RAN, alignment_RAN, diversity_RAN, reward_RAN: per sample.
        cfm_RA, cfm_biased_RA: feature-matching distance of each group, on raw features.
        duplicate_RAN: whether an earlier sample of the group has the same tokens.
        valid_RA: real anchors whose features are usable.
        anchor_RA: real anchors.
    """

    blocks: Blocks
    advantage_RAN: Tensor
    alignment_RAN: Tensor
    diversity_RAN: Tensor
    reward_RAN: Tensor
    cfm_RA: Tensor
    cfm_biased_RA: Tensor
    duplicate_RAN: Tensor
    valid_RA: Tensor
    anchor_RA: Tensor


def count_labels(batch: RowBatch, config: EBFTConfig) -> int:
    """Supervised document tokens of a micro-batch that the loss scores."""
    return count_scored_labels(batch.labels_RL, batch.document_ids_RL) if config.ce_coef > 0 else 0


def count_actions(batch: RowBatch, config: EBFTConfig) -> int:
    """Tokens that strided rollouts of a micro-batch will have."""
    return batch.num_groups * config.n_samples_per_prompt * config.generate_max_len


def generate(
    policy: nn.Module,
    batch: RowBatch,
    config: EBFTConfig,
    uniforms_RANG: Tensor,
    *,
    share_prefixes: bool = True,
) -> Blocks:
    """Rollouts of the policy at every anchor of the batch."""
    tokens_RANG = rollout(
        policy,
        batch.input_ids_RL,
        batch.anchors_RA,
        n_samples=config.n_samples_per_prompt,
        generate_max_len=config.generate_max_len,
        temperature=config.temperature,
        top_p=config.top_p,
        document_ids_RL=batch.document_ids_RL,
        uniforms_RANG=uniforms_RANG,
        share_prefixes=share_prefixes,
    )
    return Blocks.full(tokens_RANG, batch.anchors_RA)


def score(
    feature_model: nn.Module,
    batch: RowBatch,
    blocks: Blocks,
    config: EBFTConfig,
    attention: Backend,
    max_tokens: int | None = None,
    share_prefixes: bool = True,
    own_RAN: Tensor | None = None,
) -> ScoredRollout:
    """Features, rewards and advantages of the rollouts.

    Args:
        own_RAN: rewards of the user's own, NaN where there is none; they are added to the feature reward.
        feature_model: the frozen network, or the PEFT policy whose adapters are disabled here. It may live
            on another device than the batch; results come back to the batch's device.
    """
    device = batch.input_ids_RL.device
    parameter = next(feature_model.parameters())
    there = batch.to(parameter.device)
    states = feature_states(
        feature_model,
        there.input_ids_RL,
        there.anchors_RA,
        blocks.to(parameter.device),
        feature_layers=config.feature_layers,
        embed_method=config.embed_method,
        document_ids_RL=there.document_ids_RL,
        attention=attention,
        target_length_RA=there.target_length_RA,
        target_action_RL=there.is_target_RL,
        max_tokens=max_tokens,
        share_prefixes=share_prefixes,
    )
    gram_RAMM = group_gram(states.samples, states.targets, states.first_RAN).to(device)
    rewards = rewards_from_gram(
        gram_RAMM,
        whitening=config.whitening,
        alignment_coef=config.alignment_coef,
        diversity_coef=config.diversity_coef,
        # The products are exact, but no more precise than the network that made the features.
        whiten_tol=max(config.whiten_tol, precision_of(states.samples[0], parameter)),
    )
    anchor_RA = batch.anchors_RA != NO_ANCHOR
    valid_RA = valid_grams(gram_RAMM) & anchor_RA
    advantage_RAN = total_advantages(
        rewards,
        own_RAN,
        estimator=config.advantage_estimator,
        alignment_coef=config.alignment_coef,
        diversity_coef=config.diversity_coef,
    )
    reward_RAN = rewards.reward if own_RAN is None else rewards.reward + own_RAN.nan_to_num(nan=0.0)
    advantage_RAN = scale_advantages(advantage_RAN, reward_RAN, valid_RA, config.scale_rewards)
    distance = cfm_from_gram(gram_RAMM)
    first_RAN = states.first_RAN.to(device)
    return ScoredRollout(
        blocks=blocks,
        advantage_RAN=torch.where(valid_RA[..., None], advantage_RAN, 0.0),
        alignment_RAN=rewards.alignment,
        diversity_RAN=rewards.diversity,
        reward_RAN=reward_RAN,
        cfm_RA=distance.unbiased,
        cfm_biased_RA=distance.biased,
        duplicate_RAN=first_RAN != torch.arange(first_RAN.shape[2], device=device),
        valid_RA=valid_RA,
        anchor_RA=anchor_RA,
    )


def token_terms(
    scored: ScoredRollout,
    batch: RowBatch,
    config: EBFTConfig,
    *,
    attention: Backend,
    reference: nn.Module,
) -> TokenTerms:
    """The terms of the loss of every generated token.

    Args:
        reference: frozen model of the KL penalty, or the policy, whose adapters are disabled for it.
    """
    action_RANG = scored.blocks.action_RANG.float()
    return TokenTerms(
        weight=scored.advantage_RAN[..., None] * action_RANG if config.rl_coef > 0 else 0.0 * action_RANG,
        samples=action_RANG,
        reference=_reference_logprobs(reference, batch, scored.blocks, config, attention)
        if config.kl_coef > 0
        else None,
    )


def _reference_logprobs(
    reference: nn.Module, batch: RowBatch, blocks: Blocks, config: EBFTConfig, attention: Backend
) -> Tensor:
    device = next(reference.parameters()).device
    there, moved = batch.to(device), blocks.to(device)
    with adapters_disabled(reference):
        return scored_logprobs(reference, there, moved, config, attention).to(batch.input_ids_RL.device)


def scored_logprobs(
    model: nn.Module, batch: RowBatch, blocks: Blocks, config: EBFTConfig, attention: Backend
) -> Tensor:
    """A model's log-probabilities `logprob_RANG` of the blocks, without dropout and without gradient."""
    with torch.no_grad(), evaluation_mode(model):
        return packed_logprobs(
            model,
            batch.input_ids_RL,
            batch.anchors_RA,
            blocks.tokens_RANG,
            temperature=config.temperature,
            document_ids_RL=batch.document_ids_RL,
            attention=attention,
            blocks=blocks,
        )

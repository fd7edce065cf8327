"""One micro-batch of EBFT as pure functions: rollout → features → reward → advantage → loss.

Records go in, records come out; nothing is kept between calls. The trainer adds the optimiser,
the schedule and the checkpoints around it. Legend: see `geometry.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ebft_core.advantages import group_advantages
from ebft_core.attention.packed import Backend
from ebft_core.config import EBFTConfig
from ebft_core.features import extract_features, first_duplicates
from ebft_core.geometry import NO_ANCHOR
from ebft_core.logprobs import count_scored_labels, packed_forward, packed_logprobs
from ebft_core.losses import cfm, cross_entropy_loss, kl_penalty, policy_gradient_loss
from ebft_core.model_parts import adapters_disabled, evaluation_mode
from ebft_core.rewards import group_rewards, valid_groups
from ebft_core.rows import RowBatch
from ebft_core.samplers.strided import rollout


@dataclass(frozen=True)
class BatchCounts:
    """Denominators of the losses: counts over the whole optimiser batch.

    Attributes:
        actions: generated tokens at real anchors.
        labels: supervised document tokens.
    """

    actions: int
    labels: int

    def __add__(self, other: BatchCounts) -> BatchCounts:
        return BatchCounts(self.actions + other.actions, self.labels + other.labels)


@dataclass(frozen=True)
class ScoredRollout:
    """Rollouts of a micro-batch with everything that was found out about them; all without gradient.

    Attributes:
        tokens_RANG, advantage_RAN, alignment_RAN, diversity_RAN, reward_RAN: per sample.
        cfm_RA, cfm_biased_RA: feature-matching distance of each group, on raw features.
        duplicate_RAN: whether an earlier sample of the group has the same tokens.
        valid_RA: real anchors whose features are usable.
        anchor_RA: real anchors.
    """

    tokens_RANG: Tensor
    advantage_RAN: Tensor
    alignment_RAN: Tensor
    diversity_RAN: Tensor
    reward_RAN: Tensor
    cfm_RA: Tensor
    cfm_biased_RA: Tensor
    duplicate_RAN: Tensor
    valid_RA: Tensor
    anchor_RA: Tensor


@dataclass(frozen=True)
class LossOutput:
    """Total loss (with gradient) and its parts, as shares of the optimiser batch's means."""

    loss: Tensor
    rl: Tensor
    ce: Tensor
    kl: Tensor
    entropy_sum: Tensor


def count_batch(batch: RowBatch, config: EBFTConfig) -> BatchCounts:
    """Denominator shares of one micro-batch; add those of all micro-batches of a step."""
    return BatchCounts(
        actions=batch.num_groups * config.n_samples_per_prompt * config.generate_max_len,
        labels=count_scored_labels(batch.labels_RL, batch.document_ids_RL) if config.ce_coef > 0 else 0,
    )


def generate(policy: nn.Module, batch: RowBatch, config: EBFTConfig, uniforms_RANG: Tensor) -> Tensor:
    """Rollouts `tokens_RANG` of the policy at every anchor of the batch."""
    return rollout(
        policy,
        batch.input_ids_RL,
        batch.anchors_RA,
        n_samples=config.n_samples_per_prompt,
        generate_max_len=config.generate_max_len,
        temperature=config.temperature,
        top_p=config.top_p,
        document_ids_RL=batch.document_ids_RL,
        uniforms_RANG=uniforms_RANG,
    )


def score(
    feature_model: nn.Module, batch: RowBatch, tokens_RANG: Tensor, config: EBFTConfig, attention: Backend
) -> ScoredRollout:
    """Features, rewards and advantages of the rollouts.

    Args:
        feature_model: the frozen network, or the PEFT policy whose adapters are disabled here. It may live
            on another device than the batch; results come back to the batch's device.
    """
    device = batch.input_ids_RL.device
    parameter = next(feature_model.parameters())
    there = batch.to(parameter.device)
    phi_RAND, target_RAD = extract_features(
        feature_model,
        there.input_ids_RL,
        there.anchors_RA,
        tokens_RANG.to(parameter.device),
        feature_layers=config.feature_layers,
        embed_method=config.embed_method,
        document_ids_RL=there.document_ids_RL,
        attention=attention,
    )
    phi_RAND, target_RAD = phi_RAND.to(device), target_RAD.to(device)
    rewards = group_rewards(
        phi_RAND,
        target_RAD,
        whitening=config.whitening,
        alignment_coef=config.alignment_coef,
        diversity_coef=config.diversity_coef,
        # Features are float32 here, but no more precise than the network that made them.
        whiten_tol=max(config.whiten_tol, torch.finfo(parameter.dtype).eps),
    )
    advantage_RAN = group_advantages(
        rewards,
        estimator=config.advantage_estimator,
        alignment_coef=config.alignment_coef,
        diversity_coef=config.diversity_coef,
    )
    distance = cfm(phi_RAND, target_RAD)
    anchor_RA = batch.anchors_RA != NO_ANCHOR
    samples_N = torch.arange(tokens_RANG.shape[2], device=device)
    return ScoredRollout(
        tokens_RANG=tokens_RANG,
        advantage_RAN=advantage_RAN,
        alignment_RAN=rewards.alignment,
        diversity_RAN=rewards.diversity,
        reward_RAN=rewards.reward,
        cfm_RA=distance.unbiased,
        cfm_biased_RA=distance.biased,
        duplicate_RAN=first_duplicates(tokens_RANG) != samples_N,
        valid_RA=valid_groups(phi_RAND, target_RAD) & anchor_RA,
        anchor_RA=anchor_RA,
    )


def losses(
    policy: nn.Module,
    batch: RowBatch,
    tokens_RANG: Tensor,
    advantage_RAN: Tensor,
    config: EBFTConfig,
    counts: BatchCounts,
    *,
    attention: Backend,
    reference: nn.Module | None = None,
) -> LossOutput:
    """Total loss of a micro-batch: rl_coef·RL + ce_coef·CE + kl_coef·KL, from one packed forward.

    Args:
        counts: of the whole optimiser batch, so that the losses of its micro-batches add up.
        reference: frozen model of the KL penalty; None: the policy with its adapters disabled.
    """
    output = packed_forward(
        policy,
        batch.input_ids_RL,
        batch.anchors_RA,
        tokens_RANG,
        temperature=config.temperature,
        labels_RL=batch.labels_RL if config.ce_coef > 0 else None,
        document_ids_RL=batch.document_ids_RL,
        attention=attention,
    )
    zero = output.logprob_RANG.new_zeros(())
    rl = policy_gradient_loss(advantage_RAN, output.logprob_RANG, counts.actions)
    ce = (
        zero
        if output.label_logprob_RL is None
        else cross_entropy_loss(output.label_logprob_RL, counts.labels)
    )
    kl = zero
    if config.kl_coef > 0:
        reference_RANG = _reference_logprobs(reference or policy, batch, tokens_RANG, config, attention)
        kl = kl_penalty(output.logprob_RANG, reference_RANG, config.kl_estimator, counts.actions)
    return LossOutput(
        loss=config.rl_coef * rl + config.ce_coef * ce + config.kl_coef * kl,
        rl=rl.detach(),
        ce=ce.detach(),
        kl=kl.detach(),
        entropy_sum=output.entropy_RANG.sum(),
    )


def _reference_logprobs(
    reference: nn.Module, batch: RowBatch, tokens_RANG: Tensor, config: EBFTConfig, attention: Backend
) -> Tensor:
    device = next(reference.parameters()).device
    there = batch.to(device)
    with torch.no_grad(), evaluation_mode(reference), adapters_disabled(reference):
        logprob_RANG = packed_logprobs(
            reference,
            there.input_ids_RL,
            there.anchors_RA,
            tokens_RANG.to(device),
            temperature=config.temperature,
            document_ids_RL=there.document_ids_RL,
            attention=attention,
        )
    return logprob_RANG.to(tokens_RANG.device)

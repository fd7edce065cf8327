"""Sums over the micro-batches of one optimiser step, and the metrics they become."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass, fields

import torch

from ebft_core.trainers.step import ScoredRollout
from ebft_core.trainers.update import LossSums


@dataclass
class StepSums:
    """Sums of one or several micro-batches; `+=` them, then call `metrics`."""

    groups: int = 0
    dropped_groups: int = 0
    samples: int = 0
    tokens: int = 0
    reward: float = 0.0
    alignment: float = 0.0
    diversity: float = 0.0
    cfm: float = 0.0
    cfm_biased: float = 0.0
    advantage: float = 0.0
    advantage_squared: float = 0.0
    duplicates: int = 0
    zero_advantages: int = 0
    entropy: float = 0.0
    scored: int = 0
    tokens_fed: int = 0
    rl_loss: float = 0.0
    ce_loss: float = 0.0
    kl: float = 0.0
    rollout_seconds: float = 0.0
    features_seconds: float = 0.0
    update_seconds: float = 0.0

    def __iadd__(self, other: StepSums) -> StepSums:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    def add_rollout(self, scored: ScoredRollout) -> None:
        """Count a micro-batch's rollouts. Dropped groups enter no mean."""
        used = scored.valid_RA
        advantage = scored.advantage_RAN[used].double()
        self.groups += int(scored.anchor_RA.sum())
        self.dropped_groups += int((scored.anchor_RA & ~used).sum())
        self.samples += advantage.numel()
        self.tokens += scored.blocks.action_count
        self.reward += float(scored.reward_RAN[used].double().sum())
        self.alignment += float(scored.alignment_RAN[used].double().sum())
        self.diversity += float(scored.diversity_RAN[used].double().sum())
        self.cfm += float(scored.cfm_RA[used].sum())
        self.cfm_biased += float(scored.cfm_biased_RA[used].sum())
        self.advantage += float(advantage.sum())
        self.advantage_squared += float((advantage**2).sum())
        self.duplicates += int(scored.duplicate_RAN[used].sum())
        self.zero_advantages += int((advantage == 0).sum())

    def add_losses(self, sums: LossSums) -> None:
        """Count a micro-batch's losses (each is already a share of the optimiser batch's mean)."""
        self.rl_loss += sums.rl
        self.ce_loss += sums.ce
        self.kl += sums.kl
        self.entropy += sums.entropy
        self.scored += sums.scored
        self.tokens_fed += sums.tokens_fed

    def metrics(self) -> dict[str, float]:
        """The metrics of the step, under the names users see."""
        groups = max(self.groups - self.dropped_groups, 1)
        samples = max(self.samples, 1)
        mean = self.advantage / samples
        metrics = {
            "ebft/reward": self.reward / samples,
            "ebft/alignment": self.alignment / samples,
            "ebft/diversity": self.diversity / samples,
            "ebft/cfm": self.cfm / groups,
            "ebft/cfm_biased": self.cfm_biased / groups,
            "ebft/rl_loss": self.rl_loss,
            "ebft/ce_loss": self.ce_loss,
            "ebft/kl": self.kl,
            "ebft/advantage_std": max(self.advantage_squared / samples - mean**2, 0.0) ** 0.5,
            "ebft/duplicate_rate": self.duplicates / samples,
            "ebft/zero_advantage_rate": self.zero_advantages / samples,
            "ebft/dropped_groups": float(self.dropped_groups),
            "ebft/entropy": self.entropy / max(self.scored, 1),
            # A block's last token predicts nothing and is never fed: it counts among those that were spared.
            "perf/tokens_spared": 1.0 - self.tokens_fed / max(self.tokens, 1),
            "perf/rollout_seconds": self.rollout_seconds,
            "perf/features_seconds": self.features_seconds,
            "perf/update_seconds": self.update_seconds,
        }
        if self.rollout_seconds > 0:  # a later step on the same completions has no rollout
            metrics["rollout/tokens_per_second"] = self.tokens / self.rollout_seconds
        return metrics


def peak_memory_mb(device: torch.device) -> float:
    """Peak memory so far: allocated on the GPU, resident of this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)

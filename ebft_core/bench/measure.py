"""Timing of the three phases of a step, interleaved with whatever it is compared to.

Machines are noisy: every figure is a median over rounds, competitors take turns inside a round, and a
ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ebft_core.attention.packed import Backend
from ebft_core.bench.cost_model import StepShape
from ebft_core.config import EBFTConfig
from ebft_core.geometry import place_anchors
from ebft_core.rows import RowBatch
from ebft_core.trainers.step import count_actions, count_labels, generate, score, token_terms
from ebft_core.trainers.update import Autocast, BatchCounts, accumulate_gradients

PHASES = ("rollout", "features", "update")


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of one step, by phase."""

    rollout: float
    features: float
    update: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.rollout + self.features + self.update


def random_batch(length: int, rows: int, vocab_size: int, config: EBFTConfig, seed: int = 0) -> RowBatch:
    """Rows of random tokens with the run's anchors: the cost of a step does not depend on the text."""
    generator = torch.Generator().manual_seed(seed)
    ids_RL = torch.randint(0, vocab_size, (rows, length), generator=generator)
    anchors_A = place_anchors(
        length,
        stride=config.stride,
        context_length=config.context_length,
        generate_max_len=config.generate_max_len,
    )
    return RowBatch(ids_RL, ids_RL.clone(), None, anchors_A.expand(rows, -1).contiguous(), torch.arange(rows))


def shape_of(batch: RowBatch, config: EBFTConfig) -> StepShape:
    """Sizes of a batch, for the cost model."""
    rows, length = batch.input_ids_RL.shape
    anchors = batch.anchors_RA.shape[1]
    return StepShape(rows, length, anchors, config.n_samples_per_prompt, config.generate_max_len)


def uniforms_for(batch: RowBatch, config: EBFTConfig, seed: int = 1) -> Tensor:
    """Random numbers `uniforms_RANG` for a batch."""
    R, A = batch.anchors_RA.shape
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(R, A, config.n_samples_per_prompt, config.generate_max_len, generator=generator)


def timed_step(
    policy: nn.Module,
    feature_model: nn.Module,
    batch: RowBatch,
    config: EBFTConfig,
    attention: Backend,
    *,
    max_tokens: int | None = None,
    share_prefixes: bool = True,
    autocast: Autocast = nullcontext,
) -> PhaseTimes:
    """One step of the product: rollout, features with rewards, forward and backward.

    Args:
        max_tokens, share_prefixes, autocast: as in `trainers.update.accumulate_gradients`.
    """
    clock = clock_of(batch.input_ids_RL.device)
    uniforms = uniforms_for(batch, config)
    parts: Any = {"max_tokens": max_tokens, "share_prefixes": share_prefixes}
    policy.zero_grad(set_to_none=True)
    start = clock()
    with autocast():
        blocks = generate(policy, batch, config, uniforms, share_prefixes=share_prefixes)
        rolled_out = clock()
        scored = score(feature_model, batch, blocks, config, attention, **parts)
        featured = clock()
        terms = token_terms(scored, batch, config, attention=attention, reference=feature_model)
    policy.train()
    counts = BatchCounts(count_actions(batch, config), count_labels(batch, config))
    accumulate_gradients(
        policy, batch, blocks, terms, config, counts, attention=attention, autocast=autocast, **parts
    )
    return PhaseTimes(rolled_out - start, featured - rolled_out, clock() - featured)


def clock_of(device: torch.device) -> Callable[[], float]:
    """A clock that waits for the device before it reads the time."""

    def clock() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


def interleave(
    contenders: Mapping[str, Callable[[], PhaseTimes]], rounds: int
) -> dict[str, list[PhaseTimes]]:
    """Times of every contender; each runs once uncounted, then once per round, in turn."""
    for contender in contenders.values():
        contender()
    times: dict[str, list[PhaseTimes]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            times[name].append(contender())
    return times


def median(times: Sequence[PhaseTimes], phase: str) -> float:
    """Median seconds of a phase (or of `step`)."""
    return statistics.median(_phase(t, phase) for t in times)


def median_ratio(slow: Sequence[PhaseTimes], fast: Sequence[PhaseTimes], phase: str) -> dict[str, float]:
    """How many times faster `fast` is, round by round: median, smallest and largest ratio."""
    ratios = [_phase(a, phase) / _phase(b, phase) for a, b in zip(slow, fast, strict=True)]
    return {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)}


def _phase(times: PhaseTimes, phase: str) -> float:
    return {"rollout": times.rollout, "features": times.features, "update": times.update, "step": times.step}[
        phase
    ]


def matrix_peak(
    device: torch.device, dtype: torch.dtype, *, size: int | None = None, rounds: int = 5
) -> float:
    """Floating-point operations per second of a large square matrix product: the machine's practical peak."""
    n = size or (8192 if device.type == "cuda" else 2048)
    left = torch.randn(n, n, device=device).to(dtype)
    right = torch.randn(n, n, device=device).to(dtype)
    clock = clock_of(device)
    left @ right
    seconds = []
    for _ in range(rounds):
        start = clock()
        left @ right
        seconds.append(clock() - start)
    return 2.0 * n**3 / min(seconds)

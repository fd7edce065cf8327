"""`ebft bench`: the run's own model on this machine, phase by phase, with a suggestion.

Rows are random tokens of the configured length; the cost of a step does not depend on the text. Each
micro-batch size and attention backend that fits is measured; the suggestion is the fastest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ebft_core.attention.packed import Backend
from ebft_core.bench.cost_model import ModelCost, StepFlops, step_flops
from ebft_core.bench.measure import (
    PHASES,
    PhaseTimes,
    matrix_peak,
    median,
    random_batch,
    shape_of,
    timed_step,
)
from ebft_core.config import RunConfig
from ebft_core.models import freeze_copy, load_policy, select_device, select_precision
from ebft_core.rows import RowBatch
from ebft_core.trainers.metrics import peak_memory_mb

MICRO_BATCHES = (1, 2, 4, 8, 16)
MIN_GAIN = 1.05
"""A larger micro-batch must be this much faster to be worth its memory."""


@dataclass(frozen=True)
class BenchRow:
    """One measured setting.

    Attributes:
        micro_batch_size, attention: the setting.
        seconds: median seconds per phase and of the whole step.
        tokens_per_second: generated tokens per second of the rollout, and of the whole step.
        fraction_of_peak: required operations over seconds over the machine's peak, per phase.
        peak_memory_mb: peak so far (a high-water mark on the CPU).
    """

    micro_batch_size: int
    attention: Backend
    seconds: dict[str, float]
    tokens_per_second: dict[str, float]
    fraction_of_peak: dict[str, float]
    peak_memory_mb: float


@dataclass(frozen=True)
class BenchReport:
    """All settings measured, and the fastest."""

    device: str
    precision: str
    peak_flops: float
    rows: list[BenchRow]
    best: BenchRow

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def run_bench(
    model_path: Path, config: RunConfig, *, rounds: int = 3, report: Callable[[str], None] = lambda _: None
) -> BenchReport:
    """Measure the run's model on this machine.

    Args:
        model_path: folder of the base model.
        rounds: counted steps per setting, after one that is not counted.
        report: told what is measured next.

    Raises:
        UserError: the configuration does not fit the machine or the model.
    """
    device = select_device(config.trainer)
    precision = select_precision(config.trainer, device)
    policy = load_policy(model_path, config, dtype=precision).to(device)
    feature_model = policy if config.lora is not None else freeze_copy(policy, precision, device)
    cost, peak = ModelCost.of(policy), matrix_peak(device, precision)
    rows: list[BenchRow] = []
    full: set[Backend] = set()
    for micro_batch, attention in _settings(config, device):
        if attention in full:
            continue
        report(f"micro_batch_size {micro_batch}, attention {attention}")
        # Full fine-tuning keeps float32 weights: what it computes in is the chosen precision, not theirs.
        step = partial(
            timed_step,
            policy,
            feature_model,
            config=config.ebft,
            attention=attention,
            max_tokens=config.trainer.tokens_per_forward,
            share_prefixes=config.trainer.share_prefixes,
            autocast=partial(torch.autocast, device.type, precision, enabled=precision != torch.float32),
        )
        row = _measure(step, policy, config, cost, peak, micro_batch, attention, rounds)
        if row is None:
            report(f"micro_batch_size {micro_batch} does not fit into the device's memory")
            full.add(attention)
        else:
            rows.append(row)
    if not rows:
        raise MemoryError("not even one row fits into the device's memory")
    return BenchReport(str(device), str(precision).removeprefix("torch."), peak, rows, _best(rows))


def _settings(config: RunConfig, device: torch.device) -> Iterator[tuple[int, Backend]]:
    backends: tuple[Backend, ...] = ("flex", "sdpa") if device.type == "cuda" else ("sdpa",)
    if config.trainer.attention != "auto":
        backends = (config.trainer.attention,)
    limit = config.trainer.batch_size or max(MICRO_BATCHES)
    for attention in backends:
        for micro_batch in MICRO_BATCHES:
            if micro_batch <= limit:
                yield micro_batch, attention


def _measure(
    step: Callable[[RowBatch], PhaseTimes],
    policy: nn.Module,
    config: RunConfig,
    cost: ModelCost,
    peak: float,
    micro_batch: int,
    attention: Backend,
    rounds: int,
) -> BenchRow | None:
    """One setting; None when it does not fit into GPU memory."""
    device = next(policy.parameters()).device
    vocabulary = int(policy.config.vocab_size)  # type: ignore[union-attr, arg-type]
    batch = random_batch(config.data.sequence_length, micro_batch, vocabulary, config.ebft).to(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    times: list[PhaseTimes] = []
    try:
        for _ in range(rounds + 1):
            times.append(step(batch))
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return None
    shape = shape_of(batch, config.ebft)
    flops = step_flops(cost, shape, config.ebft.feature_layers)
    seconds = {phase: median(times[1:], phase) for phase in (*PHASES, "step")}
    return BenchRow(
        micro_batch_size=micro_batch,
        attention=attention,
        seconds=seconds,
        tokens_per_second={p: shape.generated / seconds[p] for p in ("rollout", "step")},
        fraction_of_peak=fractions(flops, seconds, peak),
        peak_memory_mb=peak_memory_mb(device),
    )


def fractions(flops: StepFlops, seconds: dict[str, float], peak: float) -> dict[str, float]:
    """Required operations per second over the machine's peak, by phase."""
    return {phase: flops_of / seconds[phase] / peak for phase, flops_of in asdict(flops).items()}


def _best(rows: list[BenchRow]) -> BenchRow:
    """The fastest setting per generated token; a larger micro-batch must earn its memory."""
    best = rows[0]
    for row in rows[1:]:
        if row.tokens_per_second["step"] > MIN_GAIN * best.tokens_per_second["step"]:
            best = row
    return best

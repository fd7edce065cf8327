"""The strided step on a GPU: against the plain baseline, against the machine's peak, and over row lengths.

Used by `benchmarks/gpu.py`. The model is a random Llama of 1.2B parameters; `full` trains float32 weights
and computes in bfloat16, `lora` keeps the base in bfloat16 and trains adapters in float32, as the trainer
does. On a CPU all of it runs with a tiny model, to test the path; such figures mean nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from benchmarks import full_recompute as plain
from benchmarks.models import llama_1b, llama_28m, llama_tiny
from benchmarks.setting import paper_setting
from ebft_core.attention.packed import Backend
from ebft_core.bench.cost_model import ModelCost, step_flops
from ebft_core.bench.measure import (
    PHASES,
    PhaseTimes,
    clock_of,
    interleave,
    matrix_peak,
    median,
    median_ratio,
    random_batch,
    shape_of,
    timed_step,
    uniforms_for,
)
from ebft_core.bench.suite import fractions
from ebft_core.config import EBFTConfig
from ebft_core.features import layer_indices
from ebft_core.logprobs import packed_logprobs
from ebft_core.models import freeze_copy
from ebft_core.rows import RowBatch
from ebft_core.trainers.metrics import peak_memory_mb

MODES = ("full", "lora")
REWARD_BLOCKS = 2
"""Groups whose whitening by large matrices the baseline really does; their time is scaled to all groups."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Place:
    """Where and how large to measure."""

    device: torch.device
    tiny: bool

    @property
    def lengths(self) -> tuple[int, ...]:
        """Row lengths compared with the baseline."""
        return (24,) if self.tiny else (256, 1024)

    @property
    def growth_lengths(self) -> tuple[int, ...]:
        """Row lengths of the growth part."""
        return (24, 48) if self.tiny else (256, 512, 1024, 2048, 4096, 8192)

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows per forward that the share of the peak is measured for."""
        return (1,) if self.tiny else (1, 4, 8)

    @property
    def rounds(self) -> int:
        """Counted rounds."""
        return 1 if self.tiny else 3

    @property
    def attention(self) -> Backend:
        """The trainer's choice for the device."""
        return "flex" if self.device.type == "cuda" else "sdpa"

    def setting(self) -> EBFTConfig:
        """The paper's, with smaller blocks when tiny."""
        config = paper_setting()
        return config.model_copy(update={"generate_max_len": 4}) if self.tiny else config

    @property
    def precision(self) -> torch.dtype:
        """The trainer's choice for the device."""
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        """Forward passes in `precision`."""
        return torch.autocast(self.device.type, self.precision, enabled=self.precision != torch.float32)

    def models(self, mode: str) -> tuple[nn.Module, nn.Module]:
        """Policy and feature network."""
        model = (llama_tiny() if self.tiny else llama_1b()).to(self.device)
        if mode == "full":
            return model, freeze_copy(model, self.precision, self.device)
        policy = _with_adapters(model.to(self.precision))
        return policy, policy


def _with_adapters(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    policy = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return policy


def peak(place: Place, say: Say) -> dict[str, Any]:
    """Rate of a large matrix product: the practical peak."""
    say("peak of a matrix product")
    return {"flops": matrix_peak(place.device, place.precision, size=64 if place.tiny else None)}


def attention(place: Place, say: Say) -> dict[str, Any]:
    """FlexAttention against the chunked scaled-dot-product path in float32: values, and gradients on CUDA."""
    say("FlexAttention against SDPA")
    model = (llama_tiny() if place.tiny else llama_28m()).to(place.device)
    config = place.setting()
    batch = random_batch(place.lengths[-1], 1, model.config.vocab_size, config).to(place.device)
    R, A = batch.anchors_RA.shape
    shape = (R, A, config.n_samples_per_prompt, config.generate_max_len)
    tokens = torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(2))
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    backends: tuple[Backend, ...] = ("sdpa", "flex")
    differentiable = place.device.type == "cuda"
    for backend in backends:
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(differentiable):
            logprob = packed_logprobs(
                model,
                batch.input_ids_RL,
                batch.anchors_RA,
                tokens.to(place.device),
                temperature=config.temperature,
                attention=backend,
            )
        if differentiable:
            logprob.mean().backward()
        gradient = [p.grad.flatten() for p in model.parameters() if p.grad is not None] or [torch.zeros(1)]
        found[backend] = logprob.detach(), torch.cat(gradient)
    (want, want_gradient), (got, got_gradient) = found["sdpa"], found["flex"]
    difference = float((got - want).abs().max())
    relative = float((got_gradient - want_gradient).norm() / want_gradient.norm().clamp(min=1e-30))
    if difference > 1e-3 or relative > 1e-2:
        raise AssertionError(f"FlexAttention is off: log-probabilities {difference}, gradient {relative}")
    return {"logprob_difference": difference, "gradient_difference": relative if differentiable else None}


def steps(place: Place, say: Say) -> dict[str, Any]:
    """Ratios of the baseline to the product, in turn on the same rows, with the peak memory of both."""
    config = place.setting()
    result: dict[str, Any] = {}
    for mode in MODES:
        policy, frozen = place.models(mode)
        for length in place.lengths:
            say(f"{mode}, L = {length}: product and baseline in turn")
            batch = random_batch(length, 1, policy.config.vocab_size, config).to(place.device)
            contenders = {
                "product": partial(timed_step, policy, frozen, batch, config, place.attention),
                "baseline": partial(_plain_step, policy, frozen, batch, config),
            }
            with place.autocast():
                memory = {name: _peak_of(run, place).total for name, run in contenders.items()}
                times = interleave(contenders, place.rounds)
            result.setdefault(mode, {})[f"L{length}"] = {
                "seconds": {name: _summary(values) for name, values in times.items()},
                "ratio": {p: median_ratio(times["baseline"], times["product"], p) for p in (*PHASES, "step")},
                "peak_mb": memory,
                "memory_ratio": memory["baseline"] / memory["product"],
                "baseline_whitening": f"measured on {REWARD_BLOCKS} groups, scaled to all",
            }
        del policy, frozen
    return result


def phases(place: Place, say: Say) -> dict[str, Any]:
    """Seconds, tokens per second, share of the peak, memory: by mode, attention and rows per forward."""
    config, length = place.setting(), place.lengths[-1]
    backends: tuple[Backend, ...] = ("flex", "sdpa") if place.device.type == "cuda" else ("sdpa",)
    measured: list[dict[str, Any]] = []
    for mode in MODES:
        policy, frozen = place.models(mode)
        cost = ModelCost.of(policy)
        for backend in backends:
            for rows in place.rows:
                say(f"{mode}, {backend}, {rows} rows of {length} tokens")
                batch = random_batch(length, rows, policy.config.vocab_size, config).to(place.device)
                row = {"mode": mode, "attention": backend, "rows": rows, "length": length}
                try:
                    row |= _phase_row(policy, frozen, batch, config, cost, backend, place)
                except torch.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    row["error"] = "does not fit into the device's memory"
                measured.append(row)
        del policy, frozen
    return {"rows": measured}


def _phase_row(
    policy: nn.Module,
    frozen: nn.Module,
    batch: RowBatch,
    config: EBFTConfig,
    cost: ModelCost,
    backend: Backend,
    place: Place,
) -> dict[str, Any]:
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place.device)
    size = 64 if place.tiny else None
    times: list[PhaseTimes] = []
    tops: list[float] = []
    with place.autocast():
        for _ in range(place.rounds + 2):
            tops.append(matrix_peak(place.device, place.precision, size=size, rounds=3))
            times.append(timed_step(policy, frozen, batch, config, backend))
    counted = times[2:]  # the first step compiles, the second one finds its buffers
    seconds = {phase: median(counted, phase) for phase in (*PHASES, "step")}
    shape = shape_of(batch, config)
    flops = step_flops(cost, shape, config.feature_layers)
    return {
        "seconds": seconds,
        "tokens_per_second": {p: shape.generated / seconds[p] for p in ("rollout", "step")},
        "fraction_of_peak": fractions(flops, seconds, statistics.median(tops[2:])),
        "peak_mb": peak_memory_mb(place.device),
    }


def growth(place: Place, say: Say) -> dict[str, Any]:
    """Time and memory of one product step over row lengths, and the fitted exponents (LoRA)."""
    config = place.setting()
    policy, frozen = place.models("lora")
    rows = []
    for length in place.growth_lengths:
        say(f"growth: L = {length}")
        batch = random_batch(length, 1, policy.config.vocab_size, config).to(place.device)
        shape = shape_of(batch, config)

        run = partial(timed_step, policy, frozen, batch, config, place.attention)
        with place.autocast():
            memory = _peak_of(run, place).growth  # compiles as well
            times = [run() for _ in range(place.rounds)]
        rows.append(
            {
                "length": length,
                "generated_tokens": shape.generated,
                "packed_tokens": shape.length + shape.generated,
                "seconds": median(times, "step"),
                "step_mb": memory,
            }
        )
    return {
        "rows": rows,
        "time_exponent": _slope([r["generated_tokens"] for r in rows], [r["seconds"] for r in rows]),
        "memory_exponent": _slope([r["packed_tokens"] for r in rows], [r["step_mb"] for r in rows]),
    }


def _slope(x: list[float], y: list[float]) -> float:
    """Exponent of a power law through the points."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


class Peak(NamedTuple):
    """Peak memory in MB: all of it, and beyond what lay there before (the models)."""

    total: float
    growth: float


def _peak_of(run: Callable[[], PhaseTimes], place: Place) -> Peak:
    """Peak memory while `run` works; on a CPU it is a high-water mark of the process."""
    if place.device.type != "cuda":
        run()
        return Peak(peak_memory_mb(place.device), peak_memory_mb(place.device))
    torch.cuda.synchronize(place.device)
    torch.cuda.reset_peak_memory_stats(place.device)
    before = torch.cuda.memory_allocated(place.device)
    run()
    peak = torch.cuda.max_memory_allocated(place.device)
    return Peak(peak / 2**20, (peak - before) / 2**20)


def _summary(times: list[PhaseTimes]) -> dict[str, float]:
    return {phase: median(times, phase) for phase in (*PHASES, "step")}


def _plain_step(
    policy: nn.Module, feature_model: nn.Module, batch: RowBatch, config: EBFTConfig
) -> PhaseTimes:
    """`full_recompute.timed_plain_step`, but whitening only `REWARD_BLOCKS` groups.

    An eigen-decomposition of a 6144 × 6144 matrix takes about a second, and there are 127 of them.
    """
    ids, anchors = batch.input_ids_RL, batch.anchors_RA
    clock = clock_of(ids.device)
    uniforms = uniforms_for(batch, config).to(ids.device)
    layers = layer_indices(config.feature_layers, policy.config.num_hidden_layers)
    policy.zero_grad(set_to_none=True)
    start = clock()
    tokens = plain.plain_rollout(policy, ids, anchors, uniforms, config.temperature)
    rolled_out = clock()
    phi, target = plain.plain_features(feature_model, ids, anchors, tokens, layers)
    featured = clock()
    few = slice(0, min(REWARD_BLOCKS, anchors.shape[1]))
    _, some = plain.plain_rewards(phi[:, few], target[:, few])
    whitening = (clock() - featured) * anchors.shape[1] / some.shape[1]
    advantage = some.mean(dim=1, keepdim=True).expand(-1, anchors.shape[1], -1)
    rewarded = clock()
    logprob = plain.plain_logprobs(policy, ids, anchors, tokens, config.temperature)
    plain.plain_loss(advantage, logprob).backward()
    return PhaseTimes(rolled_out - start, featured - rolled_out + whitening, clock() - rewarded)

"""What a run will take, before it runs: memory, disk, time. Estimates, each with what it assumes.

Time is the cost model's operations over the machine's speed. Memory counts what grows with the model:
weights, gradients, optimiser, and the activations of one forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ebft_core.bench.cost_model import ModelCost, StepShape, step_flops
from ebft_core.bench.measure import matrix_peak
from ebft_core.config import RunConfig, SFTConfig, TrainerConfig
from ebft_core.data.sources import resolve_sources
from ebft_core.doctor.model import local_model
from ebft_core.manifests import read_meta
from ebft_core.model_parts import decoder_layers
from ebft_core.models import empty_model, select_device, select_precision
from ebft_core.preflight import estimate_bytes
from ebft_core.runs import RunPlan

SHARE_OF_PEAK = 0.4
"""Share of the matrix product's speed that a run is assumed to reach, all stages and overheads together."""
CHARACTERS_PER_TOKEN = 4
_TRAINED_BYTES = 12  # float32 gradient and two Adam moments
_SPECIAL_TOKENS = 2
_TOKENS_PER_FORWARD = {"cpu": 1024, "cuda": 16384}
_TRAINED_PASSES = 6.0  # operations per weight and token, forward and backward


@dataclass(frozen=True)
class Estimates:
    """Of the stages that are still to do.

    Args:
        memory_bytes: peak of training; None where the model is not on this machine.
        disk_bytes: that will be written; None as above.
        steps: optimiser steps; None where the rows are not known yet.
        seconds: per stage; a stage that is missing here takes little, or is not known.
        assumptions: what the numbers rest on, for people.
    """

    memory_bytes: int | None
    disk_bytes: int | None
    steps: int | None
    seconds: dict[str, float]
    assumptions: list[str]


def estimate(config: RunConfig, plan: RunPlan) -> Estimates:
    """Look at the model's shape and the data's size; computes one matrix product and writes nothing.

    Raises:
        UserError: the device is absent, or the model's folder is not one.
    """
    device = select_device(config.trainer)
    precision = select_precision(config.trainer, device)
    rows, steps = _rows_and_steps(config, plan)
    model = _empty_policy(config)
    if model is None:
        missing = "the model is not on this machine yet: no estimate of memory, disk and time"
        return Estimates(None, None, steps, {}, [missing])
    cost = replace(ModelCost.of(model), trains_all=config.lora is None)
    peak = matrix_peak(device, precision)
    flops = dict(_stage_flops(config, cost, rows, steps))
    seconds = {name: count / (SHARE_OF_PEAK * peak) for name, count in flops.items()} | _budgets(config)
    assumptions = [
        f"time: {SHARE_OF_PEAK:.0%} of the {peak / 1e12:.2g} TFLOP/s that a matrix product reaches on "
        f"{device.type} in {str(precision).removeprefix('torch.')} now; `ebft bench` measures instead",
        *_data_assumptions(config, plan, rows),
    ]
    if config.ebft.mode == "structured":
        assumptions.append("completions: each as long as ebft.max_completion_length, so rather too much")
    return Estimates(
        memory_bytes=_memory(config, model, device, precision),
        disk_bytes=estimate_bytes(config, plan),
        steps=steps,
        seconds={name: value for name, value in seconds.items() if plan.stage(name).state != "done"},
        assumptions=assumptions,
    )


def step_shape(config: RunConfig, rows: int, n_samples: int) -> StepShape:
    """A step on full rows; whole completions of the greatest length in structured mode."""
    ebft, length = config.ebft, config.data.sequence_length
    if ebft.mode == "structured":
        return StepShape(rows, length, 1, n_samples, ebft.max_completion_length)
    anchors = (length - ebft.context_length - ebft.generate_max_len) // ebft.stride + 1
    return StepShape(rows, length, max(anchors, 1), n_samples, ebft.generate_max_len)


def _rows_and_steps(config: RunConfig, plan: RunPlan) -> tuple[int | None, int | None]:
    """Training rows, from the tokenized data or else from the sources' size; and optimiser steps."""
    rows = _known_rows(plan)
    if rows is None and config.ebft.mode == "strided":
        per_token = _characters_per_token(config)
        paths = [file.path for file in resolve_sources(config.data.sources)]
        if all(path.is_file() for path in paths):  # a data set of the hub has no size yet
            tokens = sum(path.stat().st_size for path in paths) / per_token
            share = 1 - config.data.heldout_fraction
            rows = max(1, round(share * tokens / config.data.sequence_length))
    trainer = config.trainer
    return rows, _steps(trainer, trainer.micro_batch_size * trainer.accumulation, rows)


def _steps(part: TrainerConfig | SFTConfig, batch: int, rows: int | None) -> int | None:
    """Optimiser steps; None where seconds end the training, or where they depend on rows not known yet."""
    if part.max_steps is not None:
        return part.max_steps
    if part.max_seconds is not None or rows is None:
        return None
    return math.ceil((part.num_train_epochs or 1.0) * rows / batch)


def _budgets(config: RunConfig) -> dict[str, float]:
    """Stage → seconds, where the run says them itself."""
    parts = {"sft": config.sft, "train": config.trainer}
    return {
        name: part.max_seconds
        for name, part in parts.items()
        if part is not None and part.max_seconds is not None
    }


def _known_rows(plan: RunPlan) -> int | None:
    stage = plan.stage("tokenize")
    return int(read_meta(stage.output)["train"]["rows"]) if stage.state == "done" else None


def _characters_per_token(config: RunConfig) -> int:
    made = config.model.from_scratch
    return 1 if made is not None and made.tokenizer == "byte" else CHARACTERS_PER_TOKEN


def _data_assumptions(config: RunConfig, plan: RunPlan, rows: int | None) -> Iterator[str]:
    trainer = config.trainer
    if _known_rows(plan) is not None or trainer.max_steps is not None or trainer.max_seconds is not None:
        return
    if rows is None:
        yield "steps: not known before the data are tokenized, so no time of training"
    else:
        yield (
            f"steps: about {rows:,} rows, from the size of the files at {_characters_per_token(config)} "
            "byte(s) per token"
        )


def _empty_policy(config: RunConfig) -> Any:
    """The model's shape without weights; None if it is not here."""
    from transformers import AutoConfig, LlamaConfig

    folder, made = local_model(config), config.model.from_scratch
    if folder is not None:
        trust = config.model.trust_remote_code
        architecture = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
        return empty_model(architecture, trust_remote_code=trust)
    if made is None:
        return None
    return empty_model(
        LlamaConfig(
            vocab_size=256 + _SPECIAL_TOKENS if made.tokenizer == "byte" else made.vocab_size,
            hidden_size=made.hidden_size,
            intermediate_size=made.intermediate_size,
            num_hidden_layers=made.num_hidden_layers,
            num_attention_heads=made.num_attention_heads,
            num_key_value_heads=made.num_key_value_heads,
            tie_word_embeddings=True,
        )
    )


def _stage_flops(
    config: RunConfig, cost: ModelCost, rows: int | None, steps: int | None
) -> Iterator[tuple[str, float]]:
    ebft, layers, made = config.ebft, config.ebft.feature_layers, config.model.from_scratch
    if made is not None:
        tokens = made.max_steps * made.batch_size * made.sequence_length
        yield "prepare_base", _TRAINED_PASSES * (cost.decoder + cost.head) * tokens
    warm_steps = None if config.sft is None else _steps(config.sft, config.sft.batch_size, rows)
    if config.sft is not None and warm_steps is not None:
        tokens = warm_steps * config.sft.batch_size * config.data.sequence_length
        yield "sft", _TRAINED_PASSES * (cost.decoder + cost.head) * tokens
    if steps is not None:
        batch = config.trainer.micro_batch_size * config.trainer.accumulation
        step = step_flops(cost, step_shape(config, batch, ebft.n_samples_per_prompt), layers)
        yield "train", steps * (step.rollout + step.features + step.update)
    compared = step_flops(
        cost, step_shape(config, config.evaluate.max_rows, config.evaluate.n_samples), layers
    )
    yield "evaluate", 2 * (compared.rollout + compared.features)


def _memory(config: RunConfig, model: nn.Module, device: torch.device, precision: torch.dtype) -> int:
    parameters = sum(p.numel() for p in model.parameters())
    width = precision.itemsize
    if config.lora is None:  # float32 masters, and a frozen copy as feature network
        held, trained = (4 + width) * parameters, parameters
    else:
        linear = [m for m in decoder_layers(model).modules() if isinstance(m, nn.Linear)]
        trained = sum(config.lora.r * (m.in_features + m.out_features) for m in linear)
        held = width * parameters + 4 * trained
    return held + _TRAINED_BYTES * trained + _activations(config, model, device, width)


def _activations(config: RunConfig, model: Any, device: torch.device, width: int) -> int:
    """Of one micro-batch's rows and of the generated tokens of one forward pass."""
    shape = step_shape(config, config.trainer.micro_batch_size, config.ebft.n_samples_per_prompt)
    bound = config.trainer.tokens_per_forward or _TOKENS_PER_FORWARD[device.type]
    tokens = shape.rows * shape.length + min(shape.generated, bound)
    text = model.config.get_text_config()
    per_layer = 2 * text.hidden_size
    if not config.trainer.gradient_checkpointing:
        per_layer = 10 * text.hidden_size + 4 * getattr(text, "intermediate_size", 4 * text.hidden_size)
    return int(tokens * text.num_hidden_layers * per_layer * width)

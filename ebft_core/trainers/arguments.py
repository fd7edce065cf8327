"""Translates our trainer section into the library's `TrainingArguments`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

from ebft_core.config import TrainerConfig

_SCHEDULES = {"constant": "constant_with_warmup", "linear": "linear", "cosine": "cosine"}
_CHECKPOINTING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}


UNBOUNDED_STEPS = 10**9
"""Stands for the number of steps where `max_seconds` ends the training."""


def count_steps(config: TrainerConfig, num_rows: int) -> int:
    """Optimiser steps of a training over `num_rows` rows."""
    if config.max_seconds is not None:
        return UNBOUNDED_STEPS
    if config.max_steps is not None:
        return config.max_steps
    per_epoch = math.ceil(num_rows / (config.micro_batch_size * config.accumulation))
    return math.ceil((config.num_train_epochs or 1.0) * per_epoch)


def training_arguments(
    config: TrainerConfig, output_dir: Path, *, max_steps: int, device: torch.device, precision: torch.dtype
) -> TrainingArguments:
    """The library's arguments: its own logging, reporting and evaluation loop are off."""
    values = argument_values(config, output_dir, max_steps=max_steps, device=device, precision=precision)
    return TrainingArguments(**values)


def argument_values(
    config: TrainerConfig, output_dir: Path, *, max_steps: int, device: torch.device, precision: torch.dtype
) -> dict[str, Any]:
    """The same by name, for trainers with arguments of a type of their own."""
    return {
        "output_dir": str(output_dir),
        "max_steps": max_steps,
        "per_device_train_batch_size": config.micro_batch_size,
        "gradient_accumulation_steps": config.accumulation,
        "learning_rate": config.learning_rate,
        "lr_scheduler_type": _SCHEDULES[config.lr_scheduler],
        "warmup_steps": math.ceil(config.warmup_ratio * max_steps),
        "weight_decay": config.weight_decay,
        "adam_beta1": config.adam_beta1,
        "adam_beta2": config.adam_beta2,
        "max_grad_norm": config.max_grad_norm,
        "optim": "adamw_torch",
        "bf16": precision == torch.bfloat16,
        "use_cpu": device.type == "cpu",
        **(_CHECKPOINTING if config.gradient_checkpointing else {}),
        "eval_strategy": "no" if config.eval_every is None else "steps",
        "eval_steps": config.eval_every,
        "save_strategy": "steps",
        "save_steps": config.save_every,
        "save_total_limit": config.keep_checkpoints,
        "logging_strategy": "steps",
        "logging_steps": 1,
        "logging_nan_inf_filter": False,
        "report_to": [],
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_num_workers": 0,
        "seed": config.seed,
        "data_seed": config.seed,
    }

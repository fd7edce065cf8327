"""Stage `train`: EBFT on the tokenized rows, from the base model to an adapter (or a full model).

Starts from the warm start's model where there is one. Resumes from the newest valid checkpoint in its work
folder; is done only when `global_step` equals `max_steps`, or when the budget of time is used.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset as ArrowDataset
from datasets import load_from_disk
from torch import nn
from torch.utils.data import Dataset

from ebft_core.base_model import BaseModelInfo, read_start
from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.evaluation import training_evaluator
from ebft_core.models import (
    freeze_copy,
    load_policy,
    load_tokenizer,
    select_attention,
    select_device,
    select_precision,
)
from ebft_core.rows import row_anchors
from ebft_core.stage_runner import StageContext
from ebft_core.stages.evaluate_model import heldout_rows
from ebft_core.stages.structured_training import generation, own_scorer
from ebft_core.stages.training import train_to_end, training_summary
from ebft_core.trainers.arguments import count_steps, training_arguments
from ebft_core.trainers.ebft import EBFTTrainer
from ebft_core.trainers.ema import load_trainable
from ebft_core.trainers.samples import RolloutSamples
from ebft_core.trainers.schedule import RowSchedule
from ebft_core.trainers.structured import StructuredTrainer


def run(context: StageContext) -> dict[str, Any]:
    """Train, resume or finish; see the contract in `stage_runner.StageContext`."""
    config = context.config
    base = read_start(context.inputs)
    device = select_device(config.trainer)
    precision = select_precision(config.trainer, device)
    attention = select_attention(config.trainer, device)
    tokenizer = load_tokenizer(base.path, config)
    rows = TrainingRows(load_from_disk(str(context.inputs["tokenize"] / "train")), config)
    if rows.skipped:
        context.events.message(f"{rows.skipped} training rows have room for no anchor and are left out")

    context.events.phase("load model")
    policy = load_policy(base.path, config, dtype=precision).to(device)
    feature_model = None
    if config.lora is None:
        feature_model = freeze_copy(policy, precision, torch.device(config.ebft.feature_device or device))
    shared: dict[str, Any] = {
        "pad_token_id": tokenizer.pad_token_id,
        "attention": attention,
        "feature_model": feature_model,
        "evaluator": _evaluator(context, feature_model, tokenizer.pad_token_id),
        "events": context.events,
        "samples": _samples(context, tokenizer),
        "stop": context.stop,
    }
    max_steps = count_steps(config.trainer, len(rows))
    checkpoints = context.work / "checkpoints"
    arguments = training_arguments(
        config.trainer, checkpoints, max_steps=max_steps, device=device, precision=precision
    )
    with contextlib.ExitStack() as stack:
        trainer: EBFTTrainer
        if config.ebft.mode == "strided":
            trainer = EBFTTrainer(policy, config, arguments, rows, **shared)
        else:
            canary = rows[0]["input_ids"]
            writers = stack.enter_context(generation(context, policy, tokenizer, canary, attention))
            trainer = StructuredTrainer(
                policy,
                config,
                arguments,
                RowSchedule(
                    rows,
                    batch_size=config.trainer.micro_batch_size * config.trainer.accumulation,
                    max_steps=max_steps,
                    num_iterations=config.rollout.num_iterations,
                    seed=config.trainer.seed,
                ),
                sampler=writers.sampler,
                publisher=writers.publisher,
                own=own_scorer(config, tokenizer),
                **shared,
            )
        train_to_end(context, trainer, checkpoints)
    if trainer.average is not None:
        load_trainable(policy, trainer.average.average)
    _save(policy, base, tokenizer, context.output, lora=config.lora is not None)
    return training_summary(trainer, context.output, len(rows))


class TrainingRows(Dataset[Mapping[str, Any]]):
    """Rows of the tokenized dataset that hold at least one anchor, with their number as `row_id`."""

    def __init__(self, table: ArrowDataset, config: RunConfig) -> None:
        self.table = table
        self.indices = [i for i in range(len(table)) if row_anchors(table[i], config).numel()]
        self.skipped = len(table) - len(self.indices)
        if not self.indices:
            raise UserError(
                "no training row has room for an anchor",
                where="data.sources",
                value=f"{len(table)} rows",
                expected="documents longer than ebft.context_length + ebft.generate_max_len",
                hint="lower ebft.context_length, ebft.min_completion_prefix or ebft.generate_max_len",
            )

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        number = self.indices[index]
        return {**self.table[number], "row_id": number}


def _evaluator(context: StageContext, feature_model: nn.Module | None, pad_token_id: int) -> Any:
    """The evaluation on held-out rows during training; None where it is switched off."""
    trainer = context.config.trainer
    if trainer.eval_every is None:
        return None
    heldout, stop_token_ids = heldout_rows(context)
    rows = [{**heldout[i], "row_id": i} for i in range(min(trainer.eval_rows, len(heldout)))]
    return training_evaluator(
        rows,
        context.config,
        feature_model=feature_model,
        pad_token_id=pad_token_id,
        stop_token_ids=stop_token_ids,
    )


def _samples(context: StageContext, tokenizer: Any) -> RolloutSamples | None:
    every = context.config.trainer.sample_every
    return None if every is None else RolloutSamples(context.events, tokenizer, every)


def _save(policy: Any, base: BaseModelInfo, tokenizer: Any, output: Path, *, lora: bool) -> None:
    folder = output / ("adapter" if lora else "model")
    policy.save_pretrained(str(folder), safe_serialization=True)
    if lora:
        note = {"base_digest": base.digest, "base_path": str(base.path)}
        (folder / "ebft.json").write_text(json.dumps(note, indent=1), encoding="utf-8")
    else:
        tokenizer.save_pretrained(str(folder))

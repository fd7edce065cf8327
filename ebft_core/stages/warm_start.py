"""Stage `sft`: supervised training on the tokenized rows; EBFT then starts from the model it leaves.

The output is a base model like that of `prepare_base`: `base.json` and `model/`.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset, load_from_disk
from peft.tuners.tuners_utils import BaseTunerLayer

from ebft_core.base_model import BaseModelInfo, digest_model_folder, read_base, write_base
from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.logprobs import IGNORE
from ebft_core.lora_merge import merge_adapter
from ebft_core.models import load_policy, load_tokenizer, select_device, select_precision
from ebft_core.stage_runner import StageContext
from ebft_core.stages.training import train_to_end, training_summary
from ebft_core.trainers.arguments import count_steps
from ebft_core.trainers.warm_start import WarmStartTrainer, warm_start_settings


def run(context: StageContext) -> dict[str, Any]:
    """Train, resume or finish, and write the trained model.

    Raises:
        UserError: no supervised token, or adapters on the output layer. Preempted: asked to stop.
        FloatingPointError: the loss is not finite any more.
    """
    config = _as_trained(context.config)
    base = read_base(context.inputs["prepare_base"])
    device = select_device(config.trainer)
    precision = select_precision(config.trainer, device)
    tokenizer = load_tokenizer(base.path, config)
    rows = _supervised(load_from_disk(str(context.inputs["tokenize"] / "train")))
    context.events.phase("load model")
    policy: Any = load_policy(base.path, config, dtype=precision).to(device)
    _check_head(policy, config)
    checkpoints = context.work / "checkpoints"
    trainer = WarmStartTrainer(
        policy,
        tokenizer,
        config,
        config.trainer,
        checkpoints,
        rows,
        max_steps=count_steps(config.trainer, len(rows)),
        device=device,
        precision=precision,
        events=context.events,
        stop=context.stop,
    )
    train_to_end(context, trainer, checkpoints)
    folder = context.output / "model"
    if config.lora is None:
        policy.save_pretrained(str(folder), safe_serialization=True)
        tokenizer.save_pretrained(str(folder))
    else:
        adapter = context.work / "adapter"
        policy.save_pretrained(str(adapter), safe_serialization=True)
        merge_adapter(base.path, adapter, folder)
    summary = training_summary(trainer, context.output, len(rows))
    write_base(context.output, BaseModelInfo(folder, digest_model_folder(folder), source="sft"))
    return summary


def _as_trained(config: RunConfig) -> RunConfig:
    """The run with the warm start in the place of its training."""
    assert config.sft is not None  # the stage is in the plan
    lora = config.lora if config.sft.use_lora else None
    settings = warm_start_settings(config.trainer, config.sft)
    return config.model_copy(update={"trainer": settings, "lora": lora})


def _supervised(table: Dataset) -> Dataset:
    """The rows that hold a supervised token behind their first one."""
    found = [i for i, labels in enumerate(table["labels"]) if any(label != IGNORE for label in labels[1:])]
    if not found:
        raise UserError(
            "no training row has a supervised token",
            where="data.sources",
            value=f"{len(table)} rows",
            expected="documents with text behind their prompts",
        )
    return table.select(found)


def _check_head(policy: Any, config: RunConfig) -> None:
    if isinstance(policy.get_output_embeddings(), BaseTunerLayer):
        raise UserError(
            "the warm start cannot train adapters of the output layer",
            where="lora.target_modules",
            value=None if config.lora is None else config.lora.target_modules,
            expected="targets without `lm_head`, or `sft.use_lora: false`",
        )

"""`WarmStartTrainer`: TRL's SFTTrainer on tokenized rows, with our checkpoints and events.

The loss is TRL's: the mean cross-entropy over the supervised tokens of the whole optimiser batch. Documents
packed into one row do not see each other: positions begin anew with each of them, which is how transformers'
attention masks tell them apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from trl import SFTConfig as LibraryArguments
from trl import SFTTrainer

from ebft_core.config import RunConfig, SFTConfig, TrainerConfig
from ebft_core.events import EventWriter
from ebft_core.geometry import pack_layout
from ebft_core.logprobs import IGNORE
from ebft_core.rows import collate_rows
from ebft_core.stop import StopSignal
from ebft_core.trainers.arguments import argument_values
from ebft_core.trainers.metrics import peak_memory_mb
from ebft_core.trainers.resumable import ResumableTrainer


def warm_start_settings(trainer: TrainerConfig, sft: SFTConfig) -> TrainerConfig:
    """The section `trainer` with what the section `sft` says; evaluations during training are off."""
    own = sft.model_dump(exclude={"use_lora"})
    return trainer.model_copy(update={**own, "gradient_accumulation_steps": None, "eval_every": None})


class WarmStartTrainer(ResumableTrainer, SFTTrainer):
    """Supervised training.

    Args:
        policy: causal language model, or a PEFT model around one.
        tokenizer: of the model, with a padding token.
        config: the run; its section `ebft` says whether packed documents see each other.
        settings: from `warm_start_settings`.
        output_dir: folder of the checkpoints.
        max_steps, device, precision: as for `argument_values`.
        rows: tokenized rows.
        events: where metrics go.
        stop: when it is requested, the trainer writes a checkpoint at the next step boundary and stops.
    """

    def __init__(
        self,
        policy: nn.Module,
        tokenizer: Any,
        config: RunConfig,
        settings: TrainerConfig,
        output_dir: Path,
        rows: Dataset,
        *,
        max_steps: int,
        device: torch.device,
        precision: torch.dtype,
        events: EventWriter,
        stop: StopSignal,
    ) -> None:
        values = argument_values(
            settings, output_dir, max_steps=max_steps, device=device, precision=precision
        )
        super().__init__(
            settings=settings,
            events=events,
            stop=stop,
            model=policy,
            args=LibraryArguments(
                **{"gradient_checkpointing": False, **values},
                max_length=None,
                dataset_kwargs={"skip_prepare_dataset": True},
            ),
            train_dataset=rows,
            processing_class=tokenizer,
            data_collator=partial(
                collate_supervised, config=config, pad_token_id=int(tokenizer.pad_token_id)
            ),
        )

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Send the metrics of a finished step to the event stream."""
        is_step = "grad_norm" in logs
        seconds = self.end_step() if is_step else 0.0
        super().log(logs, start_time)  # adds the library's own
        if is_step:
            if not math.isfinite(logs["loss"]):
                raise FloatingPointError(f"the loss is {logs['loss']} at step {self.state.global_step}")
            metrics = {
                "sft/loss": logs["loss"],
                "sft/token_accuracy": logs["mean_token_accuracy"],
                "sft/entropy": logs["entropy"],
                "sft/grad_norm": float(logs["grad_norm"]),
                "sft/learning_rate": logs["learning_rate"],
                "sft/step_seconds": seconds,
                "sft/peak_memory_mb": peak_memory_mb(self.args.device),
            }
            self.events.metrics(self.state.global_step, metrics, total=self.expected_steps)


def collate_supervised(
    rows: Sequence[Mapping[str, Any]], *, config: RunConfig, pad_token_id: int
) -> dict[str, Tensor]:
    """Tokens, labels and positions of rows, `(R, L)` int64.

    The first token of a document has no predictor and carries no label.
    """
    batch = collate_rows(rows, config, pad_token_id, row_ids=range(len(rows)))
    L = batch.input_ids_RL.shape[1]
    position_RL = pack_layout(batch.anchors_RA[:, :0], 1, 1, L, batch.document_ids_RL).position_RT
    return {
        "input_ids": batch.input_ids_RL,
        "labels": batch.labels_RL.masked_fill(position_RL == 0, IGNORE),
        "position_ids": position_RL,
    }

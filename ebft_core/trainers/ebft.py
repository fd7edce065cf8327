"""`EBFTTrainer`: the transformers trainer around the pure step of `step.py`.

What the library gives: optimiser, schedules, accumulation, clipping, precision, data order, resume.
What is replaced: the micro-batch (rollout → features → reward → loss, normalised by counts over the
whole optimiser batch), the checkpoints (`resumable.py`), and the logging (events).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from ebft_core.attention.packed import Backend
from ebft_core.config import RunConfig
from ebft_core.errors import UserError
from ebft_core.events import EventWriter
from ebft_core.rows import RowBatch, collate_rows, row_uniforms
from ebft_core.stop import StopSignal
from ebft_core.trainers.ema import WeightAverage
from ebft_core.trainers.health import HealthCallback
from ebft_core.trainers.metrics import StepSums, peak_memory_mb
from ebft_core.trainers.resumable import ResumableTrainer
from ebft_core.trainers.samples import RolloutSamples
from ebft_core.trainers.step import ScoredRollout, count_actions, count_labels, generate, score, token_terms
from ebft_core.trainers.update import BatchCounts, accumulate_gradients

Row = Mapping[str, Any]
Evaluator = Callable[[nn.Module], dict[str, float]]


class EBFTTrainer(ResumableTrainer):
    """Trains a policy by Energy-Based Fine-Tuning.

    Args:
        policy: causal language model, or a PEFT model around one.
        config: the run; its sections `ebft` and `trainer` are used.
        arguments: from `training_arguments`.
        rows: training rows (`rows.collate_rows` lists their columns), each with a `row_id`.
        pad_token_id: fills short rows.
        attention: backend of the packed forwards.
        feature_model: the frozen feature network; None: the policy with its adapters disabled.
        evaluator: called every `trainer.eval_every` steps; its metrics are logged with the prefix `eval/`.
        events: where metrics go.
        samples: is shown the rollouts; None: nobody looks at them.
        stop: when it is requested, the trainer writes a checkpoint at the next step boundary and stops.
    """

    def __init__(
        self,
        policy: nn.Module,
        config: RunConfig,
        arguments: TrainingArguments,
        rows: Dataset[Any],
        *,
        pad_token_id: int,
        attention: Backend,
        feature_model: nn.Module | None = None,
        evaluator: Evaluator | None = None,
        events: EventWriter | None = None,
        samples: RolloutSamples | None = None,
        stop: StopSignal | None = None,
    ) -> None:
        super().__init__(
            settings=config.trainer,
            events=events or EventWriter(None, "train"),
            stop=stop or StopSignal(),
            average=WeightAverage(policy, config.ebft.ema_decay) if config.ebft.ema_decay > 0 else None,
            model=policy,
            args=arguments,
            train_dataset=rows,
            eval_dataset=rows,  # never read: `evaluate` asks the evaluator; the library insists on one
            data_collator=keep_rows,
        )
        self.config = config
        self.attention = attention
        self._pad_token_id = pad_token_id
        self.feature_model = policy if feature_model is None else feature_model
        self.evaluator = evaluator
        self.samples = samples
        self._sums = StepSums()
        self.add_callback(HealthCallback(config, self.events))

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], int]:
        """The micro-batches of one optimiser step, each with the counts of the whole step."""
        read, _ = super().get_batch_samples(epoch_iterator, num_batches, device)
        ebft = self.config.ebft
        batches = [
            collate_rows(rows, self.config, self._pad_token_id)
            for rows in alike_in_length([part["rows"].rows for part in read])
        ]
        counts = BatchCounts(
            actions=sum(count_actions(batch, ebft) for batch in batches),
            labels=sum(count_labels(batch, ebft) for batch in batches),
        )
        return [{"batch": batch, "counts": counts} for batch in batches], counts.actions

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> None:
        return None

    @property
    def execution(self) -> dict[str, Any]:
        """How forward passes are cut and what they share: no effect on results."""
        trainer = self.config.trainer
        return {"max_tokens": trainer.tokens_per_forward, "share_prefixes": trainer.share_prefixes}

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Rollout, score and backward of one micro-batch; returns its share of the loss."""
        ebft, batch = self.config.ebft, inputs["batch"].to(self.args.device)
        started = self._clock()
        sums = StepSums()
        with self.accelerator.autocast():
            blocks = generate(
                model, batch, ebft, self._uniforms(batch), share_prefixes=self.config.trainer.share_prefixes
            )
            rolled_out = self._clock()
            scored = score(self.feature_model, batch, blocks, ebft, self.attention, **self.execution)
            sums.add_rollout(scored)
            self.show(batch, scored)
            featured = self._clock()
            terms = token_terms(scored, batch, ebft, attention=self.attention, reference=self.feature_model)
        model.train()
        losses = accumulate_gradients(
            model,
            batch,
            blocks,
            terms,
            ebft,
            inputs["counts"],
            attention=self.attention,
            **self.execution,
            autocast=self.accelerator.autocast,
        )
        if not math.isfinite(losses.loss):
            raise FloatingPointError(f"the loss is {losses.loss} at step {self.state.global_step + 1}")
        sums.add_losses(losses)
        sums.rollout_seconds = rolled_out - started
        sums.features_seconds = featured - rolled_out
        sums.update_seconds = self._clock() - featured
        self._sums += sums
        return torch.tensor(losses.loss, device=self.args.device)

    def show(self, batch: RowBatch, scored: ScoredRollout) -> None:
        """Let people see rollouts of the step that is going on."""
        if self.samples is not None:
            self.samples.look(self.state.global_step + 1, batch, scored)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Send the metrics of a finished step to the event stream."""
        if "grad_norm" in logs:
            seconds = self.end_step()
            self._check_dropped()
            metrics = {
                **self._sums.metrics(),
                **self._step_metrics(),
                "train/loss": logs["loss"],
                "train/grad_norm": float(logs["grad_norm"]),
                "train/learning_rate": logs["learning_rate"],
                "perf/step_seconds": seconds,
                "perf/peak_memory_mb": peak_memory_mb(self.args.device),
            }
            self.events.metrics(self.state.global_step, metrics, total=self.expected_steps)
            self._sums = StepSums()
            logs = {**logs, **metrics}
        super().log(logs, start_time)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Run the evaluator; the time it takes is not counted as step time."""
        if self.evaluator is None:
            return {}
        with self.clock.paused():
            metrics = {f"eval/{name}": value for name, value in self.evaluator(self.model).items()}
            self.events.metrics(self.state.global_step, metrics)
        return metrics

    def _uniforms(self, batch: RowBatch) -> Tensor:
        ebft = self.config.ebft
        shape = (batch.anchors_RA.shape[1], ebft.n_samples_per_prompt, ebft.generate_max_len)
        seed = self.config.trainer.seed
        return row_uniforms(batch.row_ids_R, seed=seed, step=self.state.global_step, shape=shape)

    def _step_metrics(self) -> dict[str, float]:
        """Further metrics of the finished step."""
        return {}

    def _check_dropped(self) -> None:
        dropped, groups = self._sums.dropped_groups, self._sums.groups
        if dropped > self.config.ebft.max_dropped_fraction * groups:
            raise UserError(
                f"{dropped} of {groups} groups of step {self.state.global_step} have unusable features",
                where="ebft.max_dropped_fraction",
                value=self.config.ebft.max_dropped_fraction,
                expected="features that are finite and not all zero",
                hint="try trainer.precision: float32, and check the base model's weights",
            )


@dataclass(frozen=True)
class Rows:
    """Dataset rows of a micro-batch, before they become tensors."""

    rows: list[Row]


def keep_rows(rows: Sequence[Row]) -> dict[str, Rows]:
    """The data collator: rows become tensors when their optimiser step is known as a whole."""
    return {"rows": Rows(list(rows))}


def alike_in_length(parts: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The rows of an optimiser step in micro-batches of the same sizes, rows of similar length together.

    How a step is split changes neither loss nor gradient, and padding is computed for nothing.
    """
    rows = sorted((row for part in parts for row in part), key=lambda row: -len(row["input_ids"]))
    ends = list(itertools.accumulate(len(part) for part in parts))
    return [rows[start:end] for start, end in zip([0, *ends], ends, strict=False)]

"""`StructuredTrainer`: whole completions, written by a sampler for a whole optimiser step at once.

Features, rewards, advantages and gradients are those of strided mode; a structured example is a row with one
anchor. What differs is the schedule: the step's completions come first (and may have been written while the
previous step trained), every group is scored as it arrives, groups without a signal may be replaced, and
then the micro-batches are trained on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import SequentialSampler
from transformers import Trainer, TrainingArguments

from ebft_core.attention import Backend
from ebft_core.config import RunConfig
from ebft_core.losses import TokenTerms
from ebft_core.rows import collate_rows
from ebft_core.samplers.prompts import PromptRequest, request_of, to_blocks
from ebft_core.samplers.protocol import Sampler
from ebft_core.stop import Interrupted, StopSignal
from ebft_core.trainers.arrivals import Arrivals, Scored
from ebft_core.trainers.checkpoints import has_checkpoint
from ebft_core.trainers.ebft import EBFTTrainer
from ebft_core.trainers.groups import Candidate, StandIns
from ebft_core.trainers.metrics import StepSums
from ebft_core.trainers.off_policy import off_policy_terms
from ebft_core.trainers.own import OwnScorer
from ebft_core.trainers.schedule import Generated, RolloutQueue, Row, RowSchedule
from ebft_core.trainers.step import count_labels, score, token_terms
from ebft_core.trainers.update import BatchCounts, RatioSums, accumulate_gradients
from ebft_core.vllm.sync import Publication, Publisher


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch ready for its backward pass."""

    scored: Scored
    terms: TokenTerms


class StructuredTrainer(EBFTTrainer):
    """Trains a policy on whole completions.

    Args:
        schedule: the training rows in the order of the steps.
        sampler: writes the completions.
        publisher: brings the weights to the sampler; None where it runs the policy itself.
        own: rewards of the user's own; None: none.
        stop: as `EBFTTrainer`; while completions are waited for, a signal ends the waiting at once.
        Others: as `EBFTTrainer`.
    """

    def __init__(
        self,
        policy: nn.Module,
        config: RunConfig,
        arguments: TrainingArguments,
        schedule: RowSchedule,
        *,
        sampler: Sampler,
        pad_token_id: int,
        attention: Backend,
        publisher: Publisher | None = None,
        own: OwnScorer | None = None,
        stop: StopSignal | None = None,
        **others: Any,
    ) -> None:
        self.stop = stop or StopSignal()
        super().__init__(
            policy,
            config,
            arguments,
            schedule,
            pad_token_id=pad_token_id,
            attention=attention,
            stop=self.stop,
            **others,
        )
        self.schedule = schedule
        self.publisher = publisher
        self.own = own
        rollout = config.rollout
        self._stand_ins = StandIns(rollout.replay_buffer_size, rollout.max_rerolls)
        self._queue = RolloutQueue(
            sampler,
            self._requests_of,
            last=schedule.generations,
            depth=rollout.prefetch_depth,
            seed=config.trainer.seed,
        )
        self._published: int | None = None
        self._prepared: tuple[int, list[MicroBatch]] | None = None
        self._more: dict[str, float] = {}
        self._ratios = RatioSums()
        self._asked_again: dict[int, list[Row]] = {}
        self._own_values: defaultdict[str, list[float]] = defaultdict(list)

    def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
        return SequentialSampler(self.schedule)  # the schedule is the order

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], int]:
        """The micro-batches of one optimiser step, scored, with the counts of the whole step."""
        read, _ = Trainer.get_batch_samples(self, epoch_iterator, num_batches, device)
        generation = self.schedule.generation_of(self.state.global_step)
        if self._prepared is None or self._prepared[0] != generation:
            try:
                with self.stop.interruptible():  # completions may take minutes; no step has begun
                    self._prepared = generation, self._prepare([p["rows"].rows for p in read], generation)
            except Interrupted:
                self._end_between_steps()
                return [], 0
        micro_batches = self._prepared[1]
        ebft = self.config.ebft
        counts = BatchCounts(
            actions=sum(m.scored.rollout.blocks.action_count for m in micro_batches),
            labels=sum(count_labels(m.scored.batch, ebft) for m in micro_batches),
        )
        return [{"micro_batch": m, "counts": counts} for m in micro_batches], counts.actions

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Backward pass of one micro-batch; returns its share of the loss."""
        micro_batch: MicroBatch = inputs["micro_batch"]
        scored, terms = micro_batch.scored, micro_batch.terms
        started, sums = self._clock(), StepSums()
        if self.samples is not None:
            self.samples.look(self.state.global_step + 1, scored.batch, scored.rollout, scored.columns)
        sums.add_rollout(scored.rollout)
        loss = 0.0
        if self._worth_a_pass(terms):
            model.train()
            losses = accumulate_gradients(
                model,
                scored.batch,
                scored.rollout.blocks,
                terms,
                self.config.ebft,
                inputs["counts"],
                attention=self.attention,
                autocast=self.accelerator.autocast,
                **self.execution,
            )
            loss = losses.loss
            if not math.isfinite(loss):
                raise FloatingPointError(f"the loss is {loss} at step {self.state.global_step + 1}")
            sums.add_losses(losses)
            self._ratios += losses.ratios
        sums.update_seconds = self._clock() - started
        self._sums += sums
        return torch.tensor(loss, device=self.args.device)

    def _worth_a_pass(self, terms: TokenTerms) -> bool:
        """Whether anything of a micro-batch has a gradient."""
        if not self.config.rollout.skip_zero_advantage_batches or self.config.ebft.ce_coef > 0:
            return True
        return bool(terms.active.any())

    def _end_between_steps(self) -> None:
        """Let the training loop end before a step that has not begun, with a checkpoint of the last one."""
        step = self.state.global_step
        self.control.should_training_stop = True
        self.control.should_save = step > 0 and not has_checkpoint(Path(self.args.output_dir), step)

    def _requests_of(self, generation: int) -> list[PromptRequest]:
        again = self._asked_again[generation] = self._stand_ins.rows_to_try_again()
        return [request_of(row, self.config) for row in (*self.schedule.rows_of(generation), *again)]

    def _prepare(self, rows: Sequence[Sequence[Row]], generation: int) -> list[MicroBatch]:
        """Completions, scores and terms of the step's micro-batches."""
        step = self.state.global_step
        self._publish(step)
        version = step if self._published is None else self._published
        started = self._clock()
        arrivals = Arrivals(rows, self.score_candidates)
        generated = self._queue.take(
            generation,
            version=version,
            oldest=step - self.config.rollout.staleness_bound,
            on_group=lambda group: arrivals.add(group, version),
        )
        waited = max(self._clock() - started - arrivals.seconds, 0.0)
        self._note_generation(generated, waited, step)
        fresh, again = arrivals.candidates(generated), self._asked_again.pop(generation)
        self._note_failures(fresh)
        extra = zip(again, generated.groups[len(fresh) :], strict=True)
        self._stand_ins.add_written_again([Candidate(*pair, generated.version) for pair in extra])
        scored = self._fill_places(arrivals.finish(generated))
        prepared = [self._with_terms(micro_batch) for micro_batch in scored]
        self._sums.rollout_seconds += waited
        self._sums.features_seconds += self._clock() - started - waited
        return prepared

    def _publish(self, step: int) -> None:
        if self.publisher is None:
            return
        interval = self.config.rollout.sync_interval
        if self._published is None or step - self._published >= interval:
            publication = self.publisher.publish(step)
            self._published = step
            self._note_publication(publication)

    def score_candidates(self, candidates: list[Candidate]) -> Scored:
        """Features, rewards and advantages of a micro-batch."""
        ebft = self.config.ebft
        rows = [c.row for c in candidates]
        batch = collate_rows(rows, self.config, self._pad_token_id).to(self.args.device)
        version = min(c.version for c in candidates)
        groups = [c.group for c in candidates]
        blocks = to_blocks(groups, batch.anchors_RA, self._pad_token_id, version=version)
        own = None if self.own is None else self.own.score(rows, blocks, self.state)
        if own is not None:
            for name, value in own.metrics.items():
                self._own_values[name].append(value)
        own_RAN = None if own is None else own.total_RAN.to(self.args.device)
        with self.accelerator.autocast():
            rollout = score(
                self.feature_model, batch, blocks, ebft, self.attention, own_RAN=own_RAN, **self.execution
            )
        return Scored(candidates, batch, rollout, {} if own is None else own.columns)

    def _fill_places(self, scored: list[Scored]) -> list[Scored]:
        """Exchange groups without a signal for stand-ins, and score what has changed again."""
        replaced, filled, useful = 0, [], []
        for micro_batch in scored:
            candidates = list(micro_batch.candidates)
            for place, candidate in enumerate(candidates):
                if micro_batch.has_signal(place):
                    useful.append(candidate)
                elif (stand_in := self._stand_ins.next()) is not None:
                    candidates[place] = stand_in
                    replaced += 1
            changed = candidates != micro_batch.candidates
            filled.append(self.score_candidates(candidates) if changed else micro_batch)
        for candidate in useful:  # only now: a group must not stand beside itself
            self._stand_ins.remember(candidate)
        self._more["rollout/replaced_groups"] = float(replaced)
        return filled

    def _with_terms(self, scored: Scored) -> MicroBatch:
        ebft, rollout = self.config.ebft, self.config.rollout
        with self.accelerator.autocast():
            terms = token_terms(
                scored.rollout,
                scored.batch,
                ebft,
                attention=self.attention,
                reference=self.feature_model,
            )
            terms, masked = off_policy_terms(
                terms,
                self.model,
                scored.batch,
                scored.rollout.blocks,
                ebft,
                rollout,
                attention=self.attention,
            )
        self._more["rollout/masked_fraction"] = (
            self._more.get("rollout/masked_fraction", 0.0) + masked / self.args.gradient_accumulation_steps
        )
        return MicroBatch(scored, terms)

    def _note_generation(self, generated: Generated, waited: float, step: int) -> None:
        samples = [s for group in generated.groups for s in group.samples if s is not None]
        written = sum(sum(s.action) for s in samples)
        self._more |= {
            "rollout/seconds": generated.seconds,
            "rollout/waited_seconds": max(waited, 0.0),
            "rollout/completion_tokens": written / max(len(samples), 1),
            "rollout/truncated_rate": sum(s.truncated for s in samples) / max(len(samples), 1),
            "rollout/tokens_per_second": written / max(generated.seconds, 1e-9),
            "policy_lag": float(step - generated.version),
        }

    def _note_publication(self, publication: Publication) -> None:
        self._more |= {
            "sync/version": float(publication.version),
            "sync/seconds": publication.seconds,
            "sync/canary": publication.canary,
        }

    def _note_failures(self, candidates: Sequence[Candidate]) -> None:
        """Count prompts without completions; stop where a whole step has none."""
        failed = [c for c in candidates if c.failed]
        self._more["rollout/failed_prompts"] = float(len(failed))
        for candidate in self._stand_ins.note_failures(candidates):
            self.events.message(
                f"row {candidate.group.row_id} is left out: its completions failed "
                f"{self.config.rollout.max_rerolls + 1} times ({candidate.group.problem})"
            )
        if failed and len(failed) == len(candidates):
            raise RuntimeError(
                f"no prompt of step {self.state.global_step + 1} got its completions: "
                f"{failed[0].group.problem}"
            )

    def _step_metrics(self) -> dict[str, float]:
        own = {f"rewards/{name}": fmean(values) for name, values in self._own_values.items()}
        more = {**self._more, **self._ratios.metrics(), **own}
        self._more, self._ratios = {}, RatioSums()
        self._own_values.clear()
        return more

"""Connects the health rules to the trainer: warnings into the journal, and the end of a run told to stop."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from ebft_core.config import RunConfig
from ebft_core.events import EventWriter, read_events
from ebft_core.health import HealthMonitor

_STEP_METRIC = "train/grad_norm"
"""In the metrics of every optimiser step, and of nothing else."""


class HealthCallback(TrainerCallback):
    """Feeds every step's metrics to the rules.

    A stop is a checkpoint like any other, then a `UserError`: the stage ends with 78 and is not retried.

    Args:
        config: the run.
        events: the journal that takes the warnings. A resumed training reads its earlier steps from it, so
            an episode that was reported before the interruption is not reported again.
    """

    def __init__(self, config: RunConfig, events: EventWriter) -> None:
        self.monitor = HealthMonitor(config)
        self.enabled = config.health.enabled
        self.events = events

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Catch up with the steps before a resume."""
        if self.enabled and state.global_step > 0 and self.events.path is not None:
            journal = [e for e in read_events(self.events.path) if e["kind"] == "metrics"]
            steps = {e["step"]: e["values"] for e in journal if _STEP_METRIC in e["values"]}
            for step in sorted(step for step in steps if step <= state.global_step):
                self.monitor.observe(step, {name: float(value) for name, value in steps[step].items()})
        self._raise_if_ill()

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Look at the metrics of a finished step."""
        logs: dict[str, float] = kwargs["logs"]
        if not self.enabled or _STEP_METRIC not in logs:
            return
        for finding in self.monitor.observe(state.global_step, logs):
            self.events.warning(
                finding.text,
                name=finding.ailment,
                step=finding.step,
                numbers=finding.numbers,
                fix=finding.fix,
            )
        if self.monitor.to_stop is not None:
            control.should_save = control.should_training_stop = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The checkpoint is there: end the training if it is to be ended."""
        self._raise_if_ill()

    def _raise_if_ill(self) -> None:
        finding = self.monitor.to_stop
        if finding is not None:
            raise finding.to_error()

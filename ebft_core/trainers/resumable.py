"""What every training here adds to the transformers trainer: checkpoints without pickle, a clock, an end.

The library would pickle the optimiser, the scheduler and the random states. A training ends after its steps
or after its seconds (`clock.py`), and at the next step boundary when it is asked to.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import (
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from ebft_core.config import TrainerConfig
from ebft_core.errors import UserError
from ebft_core.events import EventWriter
from ebft_core.stop import StopSignal
from ebft_core.trainers import checkpoints
from ebft_core.trainers.clock import StepClock, time_schedule
from ebft_core.trainers.ema import WeightAverage, load_trainable, trainable_state

CLOCK = "clock"


class ResumableTrainer(Trainer):
    """A trainer that goes on exactly where a checkpoint was written.

    Args:
        settings: length, schedule and checkpoints of this training.
        events: where metrics go.
        stop: when it is requested, the trainer writes a checkpoint at the next step boundary and stops.
        average: moving average of the trained weights; None: none.
        library: arguments of the library's trainer.
    """

    def __init__(
        self,
        *,
        settings: TrainerConfig,
        events: EventWriter,
        stop: StopSignal,
        average: WeightAverage | None = None,
        **library: Any,
    ) -> None:
        super().__init__(**library)
        if self.args.world_size > 1:
            raise UserError(
                "training runs in one process",
                where="WORLD_SIZE",
                value=self.args.world_size,
                expected="1",
                hint="start the run without torchrun or accelerate launch",
            )
        self.settings = settings
        self.events = events
        self.average = average
        self.clock = StepClock(self._clock)
        self.remove_callback(PrinterCallback)  # the event stream is the only log
        self.add_callback(_StepCallback(stop, average, self.clock.start))

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the budget of time is used."""
        if self.settings.max_seconds is not None:
            return self.clock.spent >= self.settings.max_seconds
        return self.state.global_step >= self.args.max_steps

    @property
    def expected_steps(self) -> int:
        """Steps of the whole training; with a budget of time, by the pace so far."""
        step, budget = self.state.global_step, self.settings.max_seconds
        if budget is None:
            return self.args.max_steps
        return max(step, round(step * budget / max(self.clock.spent, 1e-9)))

    def end_step(self) -> float:
        """Count the step that is over, and end the training with the budget. Returns the step's seconds."""
        seconds = self.clock.lap()
        if self.settings.max_seconds is not None and self.finished:
            self.control.should_save = self.control.should_training_stop = True
        return seconds

    def adopt_finished(self, checkpoint: Path) -> bool:
        """Take over weights and state of a checkpoint if its budget of time is used; say whether it is."""
        budget = self.settings.max_seconds
        if budget is None or checkpoints.read_json(checkpoint, CLOCK)["seconds"] < budget:
            return False
        self._load_from_checkpoint(str(checkpoint))
        self.state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
        return True

    def create_scheduler(self, num_training_steps: int, optimizer: Optimizer | None = None) -> LRScheduler:
        """The library's schedule, or that of the budget of time."""
        if self.settings.max_seconds is None:
            return super().create_scheduler(num_training_steps, optimizer)
        self.clock.start()
        schedule = time_schedule(optimizer or self.optimizer, self.clock, self.settings)
        self.lr_scheduler, self._created_lr_scheduler = schedule, True
        return schedule

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """Not estimated here: the library's formula does not know packed rows."""
        return 0

    def _clock(self) -> float:
        if self.args.device.type == "cuda":
            torch.cuda.synchronize(self.args.device)
        return time.perf_counter()

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        with self.clock.paused():
            root, step = Path(self.args.output_dir), self.state.global_step
            staging = checkpoints.open_staging(root, step)
            checkpoints.save_tensors(staging, checkpoints.WEIGHTS, trainable_state(self.model))
            if self.average is not None:
                checkpoints.save_tensors(staging, checkpoints.AVERAGE, self.average.average)
            checkpoints.save_optimizer(staging, self.optimizer.state_dict())
            checkpoints.write_json(staging, "scheduler", self.lr_scheduler.state_dict())
            checkpoints.write_json(staging, CLOCK, {"seconds": self.clock.spent})
            checkpoints.save_rng(staging)
            self.state.save_to_json(str(staging / "trainer_state.json"))
            checkpoints.commit_checkpoint(staging, root, step, self.settings.keep_checkpoints)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        folder = Path(resume_from_checkpoint)
        load_trainable(self.model, checkpoints.load_tensors(folder, checkpoints.WEIGHTS))
        self.clock.spent = float(checkpoints.read_json(folder, CLOCK)["seconds"])
        if self.average is not None:
            device = self.args.device
            saved = checkpoints.load_tensors(folder, checkpoints.AVERAGE)
            self.average.average = {name: value.to(device) for name, value in saved.items()}

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.optimizer.load_state_dict(checkpoints.load_optimizer(Path(checkpoint)))
            self.lr_scheduler.load_state_dict(checkpoints.read_json(Path(checkpoint), "scheduler"))

    def _load_scaler(self, checkpoint: str | None) -> None:
        """bfloat16 and float32 need no loss scaler."""

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            checkpoints.load_rng(Path(checkpoint))


class _StepCallback(TrainerCallback):
    """Starts the clock; after each step moves the weight average; on a stop request, saves and ends."""

    def __init__(
        self, stop: StopSignal, average: WeightAverage | None, start_clock: Callable[[], None]
    ) -> None:
        self.stop = stop
        self.average = average
        self.start_clock = start_clock

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.start_clock()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self.average is not None:
            self.average.update(kwargs["model"])
        if self.stop.requested:
            control.should_save = True
            control.should_training_stop = True

"""`max_seconds`: what is counted, when the training ends, how the learning rate follows, and resume."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import get_scheduler

from ebft_core.config import RunConfig, TrainerConfig
from ebft_core.errors import UserErrors
from ebft_core.events import EventWriter, read_events
from ebft_core.samplers.prompts import Group
from ebft_core.trainers import resumable
from ebft_core.trainers.arguments import UNBOUNDED_STEPS, count_steps
from ebft_core.trainers.checkpoints import newest_checkpoint
from ebft_core.trainers.clock import StepClock, rate_factor
from ebft_core.trainers.ebft import EBFTTrainer
from tests.structured_fixtures import FakeSampler, config_of, metrics_of, trainer_of
from tests.trainer_fixtures import make_config, make_rows, make_trainer, weights


class Time:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_the_clock_counts_steps_and_nothing_else() -> None:
    time = Time()
    clock = StepClock(time)
    time.now += 50  # set-up
    clock.start()
    time.now += 2
    assert clock.elapsed == 2
    assert clock.lap() == 2
    with clock.paused():
        time.now += 30  # an evaluation
    time.now += 3
    assert (clock.lap(), clock.spent) == (3, 5)


@pytest.mark.parametrize("shape", ["constant", "linear", "cosine"])
def test_the_schedule_is_that_of_the_library(shape: str) -> None:
    config = TrainerConfig(lr_scheduler=shape, warmup_ratio=0.25, max_seconds=1.0)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    name = {"constant": "constant_with_warmup"}.get(shape, shape)
    library = get_scheduler(name, optimizer, num_warmup_steps=10, num_training_steps=40)
    for step in range(41):
        assert rate_factor(step / 40, config) == pytest.approx(library.get_last_lr()[0], abs=1e-12)
        optimizer.step()
        library.step()


def budget_config(seconds: float, **trainer: Any) -> RunConfig:
    settings = {"max_steps": None, "max_seconds": seconds, "save_every": 2, "lr_scheduler": "linear"}
    return make_config(trainer={**settings, "warmup_ratio": 0.0, **trainer})


@pytest.fixture
def steps_of_three_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes 3 seconds of a clock of our own."""
    time = Time()
    train = EBFTTrainer.training_step

    def step(self: EBFTTrainer, *args: Any, **kwargs: Any) -> torch.Tensor:
        time.now += 3
        return train(self, *args, **kwargs)

    monkeypatch.setattr(resumable.time, "perf_counter", time)
    monkeypatch.setattr(EBFTTrainer, "training_step", step)


def run(folder: Path, config: RunConfig) -> tuple[EBFTTrainer, list[dict[str, Any]]]:
    journal = folder.with_suffix(".jsonl")
    trainer = make_trainer(folder, config, events=EventWriter(journal, "train"))
    resume = newest_checkpoint(folder)
    if resume is None or not trainer.adopt_finished(resume):
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    return trainer, [e for e in read_events(journal) if e["kind"] == "metrics"]


@pytest.mark.usefixtures("steps_of_three_seconds")
def test_training_ends_with_the_step_in_which_the_budget_is_used(tmp_path: Path) -> None:
    trainer, steps = run(tmp_path / "run", budget_config(10.0))
    assert trainer.state.global_step == 4  # 3, 6, 9, 12 seconds
    assert trainer.finished
    assert [e["values"]["perf/step_seconds"] for e in steps] == [3, 3, 3, 3]
    rates = [e["values"]["train/learning_rate"] for e in steps]
    assert rates == pytest.approx([1e-2 * share for share in (1.0, 0.7, 0.4, 0.1)])
    assert [e["total"] for e in steps] == [3, 3, 3, 4]
    assert newest_checkpoint(tmp_path / "run").name == "checkpoint-4"


@pytest.mark.usefixtures("steps_of_three_seconds")
def test_a_resumed_training_has_only_what_is_left(tmp_path: Path) -> None:
    whole, _ = run(tmp_path / "whole", budget_config(17.0))
    assert whole.state.global_step == 6
    first, _ = run(tmp_path / "broken", budget_config(17.0))
    shutil.rmtree(tmp_path / "broken" / "checkpoint-6")  # as if it had been killed after step 4
    second, _ = run(tmp_path / "broken", budget_config(17.0))
    assert second.state.global_step == first.state.global_step == 6
    assert second.clock.spent == 18
    for name, value in weights(second).items():
        assert torch.equal(value, weights(whole)[name]), name


@pytest.mark.usefixtures("steps_of_three_seconds")
def test_a_used_budget_trains_no_further_step(tmp_path: Path) -> None:
    done, _ = run(tmp_path / "run", budget_config(10.0))
    again, _ = run(tmp_path / "run", budget_config(10.0))
    assert again.finished
    assert again.state.global_step == 4
    for name, value in weights(again).items():
        assert torch.equal(value, weights(done)[name]), name


def test_waiting_for_completions_is_training_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time = Time()

    class SlowSampler(FakeSampler):
        def sample(self, *args: Any, **kwargs: Any) -> list[Group]:
            time.now += 5
            return super().sample(*args, **kwargs)

    monkeypatch.setattr(resumable.time, "perf_counter", time)
    config = config_of(trainer={"max_steps": None, "max_seconds": 12.0})
    trainer = trainer_of(tmp_path, config, sampler=SlowSampler())
    trainer.train()
    assert trainer.finished
    assert [m["perf/step_seconds"] for m in metrics_of(tmp_path)] == [5, 5, 5]


def test_one_length_only() -> None:
    assert count_steps(budget_config(5.0).trainer, len(make_rows())) == UNBOUNDED_STEPS
    with pytest.raises(UserErrors) as caught:
        budget_config(5.0, max_steps=3)
    (error,) = caught.value.errors
    assert error.what == "the length of the training is given twice"
    assert error.where == "trainer.max_steps (test)"
    with pytest.raises(UserErrors) as caught:
        make_config(sft={"max_seconds": 5.0, "num_train_epochs": 1.0, "batch_size": 6})
    assert [e.where for e in caught.value.errors] == ["sft.num_train_epochs (test)", "sft.batch_size (test)"]

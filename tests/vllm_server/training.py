"""Training runs against a kept server: everything but the training itself is done beforehand."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ebft_core.errors import UserError
from ebft_core.events import EventWriter, read_events
from ebft_core.manifests import StageRef
from ebft_core.runs import RunPlan
from ebft_core.stage_runner import run_stage
from ebft_core.stop import StopSignal
from ebft_core.vllm.state import server_folder
from tests.vllm_server.builders import Kept, kept
from tests.vllm_server.runs import prepared_run, run_document

PROMPTS_PER_STEP, SAMPLES = 2, 2
OnStep = Callable[[int], None]


def structured_sections(folder: Path, *, rows: int = 16, **sections: Any) -> dict[str, Any]:
    """Sections of a small structured run; `section={...}` changes one."""
    source = folder / "pairs.jsonl"
    if not source.exists():
        letters = random.Random(1)
        pairs = [
            {"prompt": "".join(letters.choices("abcdefgh", k=4)), "completion": "xyzxyz"[: 2 + n % 4]}
            for n in range(rows)
        ]
        source.write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    chosen: dict[str, Any] = {
        "data": {
            "sources": [{"path": str(source)}], "transform": "prompt_completion",
            "sequence_length": 32, "heldout_fraction": 0.2,
        },
        "ebft": {
            "mode": "structured", "n_samples_per_prompt": SAMPLES, "max_completion_length": 6,
            "adaptive_max_tokens": False, "temperature": 1.0, "whitening": "none", "ce_coef": 0.2,
        },
        "rollout": {"request_timeout": 3.0, "request_attempts": 2},
        "trainer": {
            "learning_rate": 1e-2, "max_steps": 4, "micro_batch_size": 2, "batch_size": PROMPTS_PER_STEP,
            "save_every": 2, "device": "cpu", "precision": "float32",
        },
        "vllm": {"dtype": "float32", "max_restarts": 9},
        "storage": {"reserve_gb": 0.05},
    }  # fmt: skip
    for name, values in sections.items():
        chosen[name] = {**chosen.get(name, {}), **values}
    return chosen


@dataclass
class Watched(EventWriter):
    """A journal whose steps call `on_step`, in the trainer's thread."""

    path: Path | None
    stage: str
    on_step: OnStep = field(default=lambda step: None)

    def __post_init__(self) -> None:
        super().__init__(self.path, self.stage)

    def metrics(self, step: int, values: Mapping[str, float], total: int | None = None) -> None:
        super().metrics(step, values, total)
        self.on_step(step)


@dataclass(frozen=True)
class Training:
    """A planned run whose data are tokenized."""

    plan: RunPlan

    def train(self, on_step: OnStep = lambda step: None, stop: StopSignal | None = None) -> StageRef:
        """Run the stage program's work in this process."""
        here = os.getcwd()
        try:
            return run_stage(
                "train",
                self.plan.run_dir,
                events=Watched(self.plan.run_dir / "events" / "train.jsonl", "train", on_step),
                stop=stop or StopSignal(),
            )
        finally:
            os.chdir(here)

    def refused(self, on_step: OnStep = lambda step: None) -> str:
        """What the user reads where training has to end with an error of theirs."""
        try:
            self.train(on_step)
        except UserError as error:
            return error.render()
        raise AssertionError("it was not refused")

    def events(self) -> list[dict[str, Any]]:
        return read_events(self.plan.run_dir / "events" / "train.jsonl")

    def steps(self) -> list[int]:
        """Numbers of the steps with metrics, in the order of the journal."""
        return [int(event["step"]) for event in self.events() if event["kind"] == "metrics"]

    def series(self, name: str) -> list[float]:
        """A metric over the steps that have it."""
        found = [event["values"] for event in self.events() if event["kind"] == "metrics"]
        return [float(values[name]) for values in found if name in values]


def planned_training(folder: Path, model: Path, python: Path, **sections: Any) -> Training:
    """Plan a run in `folder` and bring it to where training begins."""
    folder.mkdir(parents=True, exist_ok=True)
    plan, _ = prepared_run(folder, model, python, **structured_sections(folder, **sections))
    here = os.getcwd()
    try:
        run_stage("tokenize", plan.run_dir, events=EventWriter(None, "tokenize"), stop=StopSignal())
    finally:
        os.chdir(here)
    return Training(plan)


def served_by(training: Training, server: Kept) -> Training:
    """Let a run find a server that several runs share."""
    server_folder(training.plan.run_dir).symlink_to(server.folder, target_is_directory=True)
    return training


@contextmanager
def kept_for_training(
    folder: Path, model: Path, python: Path, *, faults: dict[str, Any] | None = None, **sections: Any
) -> Iterator[Kept]:
    """A keeper of `python`'s server, with the run file that `planned_training` makes of these sections."""
    from ebft_core.config import parse_config

    config = parse_config(run_document(folder, model, python, **structured_sections(folder, **sections)))
    with kept(folder, config=config, model=model, faults=faults) as holder:
        holder.ready(seconds=config.vllm.startup_timeout)
        yield holder

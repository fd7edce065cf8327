"""What the two stages that train share: resume, train to the end, and say how it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ebft_core.stage_runner import Preempted, StageContext
from ebft_core.trainers.checkpoints import newest_checkpoint
from ebft_core.trainers.resumable import ResumableTrainer


def train_to_end(context: StageContext, trainer: ResumableTrainer, checkpoints: Path) -> None:
    """Train until the steps are done or the budget is used, from the newest valid checkpoint if there is one.

    Raises:
        Preempted: asked to stop before that.
    """
    resume = newest_checkpoint(checkpoints)
    if resume is not None:
        context.events.message(f"resuming from {resume.name}")
        if trainer.adopt_finished(resume):
            return
    context.events.phase("train")
    trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    if not trainer.finished:
        step = trainer.state.global_step
        raise Preempted(f"stopped at step {step} of {trainer.expected_steps}: {context.stop.reason}")


def training_summary(trainer: ResumableTrainer, output: Path, rows: int) -> dict[str, Any]:
    """Steps, seconds, rows and device of a finished training; written to `training.json`, too."""
    summary = {
        "global_step": trainer.state.global_step,
        "max_steps": trainer.expected_steps,
        "seconds": round(trainer.clock.spent, 3),
        "rows": rows,
        "device": str(trainer.args.device),
    }
    (output / "training.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    return summary

"""Stage 3: energy-based fine-tuning."""

from __future__ import annotations

from typing import Any

from tasks.stage_task import run_stage, stage_task


@stage_task("train", "accelerator")
def train_policy(run_dir: str, base: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Return the reference of the trained adapter or model."""
    return run_stage("train", run_dir, [base, rows])

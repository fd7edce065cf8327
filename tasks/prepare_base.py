"""Stage 1: find, fetch or make the base model, and digest it."""

from __future__ import annotations

from typing import Any

from tasks.stage_task import run_stage, stage_task


@stage_task("prepare_base")
def prepare_base(run_dir: str) -> dict[str, Any]:
    """Return the reference of the base model."""
    return run_stage("prepare_base", run_dir, [])

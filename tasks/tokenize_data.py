"""Stage 2: read the sources and turn them into rows of tokens."""

from __future__ import annotations

from typing import Any

from tasks.stage_task import run_stage, stage_task


@stage_task("tokenize")
def tokenize_data(run_dir: str, base: dict[str, Any]) -> dict[str, Any]:
    """Return the reference of the training and held-out rows."""
    return run_stage("tokenize", run_dir, [base])

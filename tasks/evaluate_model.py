"""Stage 5: compare the base and the tuned model on the same held-out rows."""

from __future__ import annotations

from typing import Any

from tasks.stage_task import run_stage, stage_task


@stage_task("evaluate", "accelerator")
def evaluate_model(
    run_dir: str, base: dict[str, Any], rows: dict[str, Any], model: dict[str, Any]
) -> dict[str, Any]:
    """Return the reference of the comparison."""
    return run_stage("evaluate", run_dir, [base, rows, model])

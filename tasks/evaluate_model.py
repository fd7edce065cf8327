"""Stage 5: compare the base and the tuned model on the same held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.artifacts import create_table_artifact

from ebft_core.runs import read_plan
from tasks.report import evaluation_rows
from tasks.stage_task import artifact_key, run_stage, stage_task


@stage_task("evaluate", "accelerator")
def evaluate_model(
    run_dir: str, base: dict[str, Any], rows: dict[str, Any], model: dict[str, Any]
) -> dict[str, Any]:
    """Return the reference of the comparison."""
    ref = run_stage("evaluate", run_dir, [base, rows, model])
    table = evaluation_rows(read_plan(Path(run_dir)))
    create_table_artifact(table=table, key=f"{artifact_key('evaluate')}-comparison")
    return ref

"""Stage 5: compare the base and the tuned model on the same held-out rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.artifacts import create_table_artifact

from ebft_core.runs import read_plan
from tasks.report import against_rows, comparison_rows, read_evaluation
from tasks.stage_task import artifact_key, run_stage, stage_task


@stage_task("evaluate", "accelerator")
def evaluate_model(
    run_dir: str, base: dict[str, Any], rows: dict[str, Any], model: dict[str, Any]
) -> dict[str, Any]:
    """Return the reference of the comparison."""
    ref = run_stage("evaluate", run_dir, [base, rows, model])
    evaluation = read_evaluation(read_plan(Path(run_dir)))
    assert evaluation is not None  # the stage is done
    create_table_artifact(
        table=comparison_rows(evaluation.metrics), key=f"{artifact_key('evaluate')}-comparison"
    )
    for name, table in against_rows(evaluation).items():
        create_table_artifact(
            table=table, key=artifact_key(f"evaluate-against-{name}"), description=f"base: {name}"
        )
    return ref

"""The last stage of a comparison or a sweep: all models on the same held-out rows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prefect.artifacts import create_markdown_artifact, create_table_artifact

from ebft_core.comparison import ArmsComparison
from ebft_core.metrics import metric_of
from ebft_core.runs import read_plan
from tasks.comparison_report import arm_rows, columns, read_comparison
from tasks.stage_task import artifact_key, run_stage, stage_task


@stage_task("compare", "accelerator")
def measure_arms(run_dir: str, inputs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the reference of the comparison.

    Args:
        run_dir: the group's folder.
        inputs: references of base model, rows and every arm's model.
    """
    ref = run_stage("compare", run_dir, inputs)
    comparison = read_comparison(read_plan(Path(run_dir)))
    key = artifact_key("compare")
    create_table_artifact(table=_table(comparison), key=f"{key}-arms")
    create_markdown_artifact(comparison.answer, key=f"{key}-answer")
    return ref


def _table(comparison: ArmsComparison) -> list[dict[str, str]]:
    labels = [metric_of(name).label for name in columns(comparison)]
    return [
        {
            "arm": f"{row['arm']} ★" if row["best"] else row["arm"],
            **{
                label: " ".join(filter(None, (cell["value"], cell["change"], cell["verdict"])))
                for label, cell in zip(labels, row["cells"], strict=True)
            },
        }
        for row in arm_rows(comparison)
    ]

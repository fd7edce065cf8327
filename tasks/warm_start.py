"""The stage between 2 and 3, in runs that have it: supervised training before EBFT."""

from __future__ import annotations

from typing import Any

from tasks.stage_task import run_stage, stage_task


@stage_task("sft", "accelerator")
def warm_start(run_dir: str, base: dict[str, Any], rows: dict[str, Any]) -> dict[str, Any]:
    """Return the reference of the model that EBFT starts from."""
    return run_stage("sft", run_dir, [base, rows])

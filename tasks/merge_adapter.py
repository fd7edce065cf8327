"""Stage 4: fold the adapter into the base model."""

from __future__ import annotations

from typing import Any

from tasks.stage_task import run_stage, stage_task


@stage_task("merge")
def merge_adapter(run_dir: str, base: dict[str, Any], policy: dict[str, Any]) -> dict[str, Any]:
    """Return the reference of the merged model."""
    return run_stage("merge", run_dir, [base, policy])

"""Where a run's pages are: MLflow's and Prefect's, on the servers that are running or would be started."""

from __future__ import annotations

import json

from ebft_core.config import load_config
from ebft_core.runs import RunPlan
from tasks.mlflow_uri import tracking_uri
from tasks.services import HOST, MLFLOW_PORT, PREFECT_PORT, noted_services

_TRAINING = "workflowType=machine_learning"
"""MLflow shows a page among those of prompts and traces unless its address says otherwise."""


def mlflow_page(plan: RunPlan, tab: str = "") -> str | None:
    """Address of the run's page in MLflow; None as long as MLflow has not answered.

    Args:
        tab: `/model-metrics` or `/artifacts`; empty: the overview.
    """
    note_file = plan.run_dir / "tracking.json"
    note = json.loads(note_file.read_text(encoding="utf-8")) if note_file.exists() else {}
    if note.get("run_id") is None:
        return None
    uri = tracking_uri(load_config(plan.run_dir / "config.yaml"), plan.workspace)
    if not uri.startswith("http"):
        uri = (noted_services(plan.workspace) or {"mlflow": f"http://{HOST}:{MLFLOW_PORT}"})["mlflow"]
    return f"{uri.rstrip('/')}/#/experiments/{note['experiment_id']}/runs/{note['run_id']}{tab}?{_TRAINING}"


def prefect_page(plan: RunPlan, flow_run: str, configured: str | None) -> str:
    """Address of the flow run's page in Prefect; `configured` is the API's address in Prefect's settings."""
    here = noted_services(plan.workspace) or {"prefect_api": f"http://{HOST}:{PREFECT_PORT}/api"}
    api = configured or here["prefect_api"]
    return f"{api.rstrip('/').removesuffix('/api')}/runs/flow-run/{flow_run}"

"""The end of `ebft run`: the comparison, and where everything is."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console

from ebft_core.config import load_config
from ebft_core.evaluation.table import print_table
from ebft_core.manifests import read_meta, verify_folder
from ebft_core.runs import RunPlan, read_plan
from tasks.mlflow_uri import tracking_uri
from tasks.report import read_evaluation
from tasks.services import HOST


def print_summary(run_dir: Path, console: Console, *, flow_run: str) -> None:
    """Print the table base | tuned | difference, then paths and commands."""
    plan = read_plan(run_dir)
    evaluation = read_evaluation(plan)
    if evaluation is not None:
        print_table(evaluation, console)
    for name, value in _places(plan, flow_run).items():
        console.print(f"{name:<12} {value}", highlight=False, soft_wrap=True, markup=False)


def _places(plan: RunPlan, flow_run: str) -> dict[str, str]:
    places = {
        "report": str(plan.run_dir / "report.html"),
        "model": str(plan.stage("merge").output / "model"),
    }
    published = plan.stage("publish").output
    if verify_folder(published, deep=False) is not None:
        version = read_meta(published)
        places["registered"] = f"{version['name']} version {version['version']}, alias {version['alias']}"
    uri = tracking_uri(load_config(plan.run_dir / "config.yaml"), plan.workspace)
    note = json.loads((plan.run_dir / "tracking.json").read_text(encoding="utf-8"))
    page = f"#/experiments/{note.get('experiment_id')}/runs/{note.get('run_id')}"
    remote = uri.startswith("http")
    places["MLflow"] = f"{uri.rstrip('/') if remote else f'http://{HOST}:5000'}/{page}"
    places["Prefect"] = f"http://{HOST}:4200/runs/flow-run/{flow_run}"
    places["open both"] = f"ebft up --workspace {plan.workspace}"
    return places

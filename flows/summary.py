"""The end of `ebft run`: the comparison, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prefect.settings import PREFECT_API_URL
from rich.console import Console

from ebft_core.config import load_config
from ebft_core.evaluation.summary import Evaluation
from ebft_core.evaluation.table import print_table
from ebft_core.manifests import read_meta, verify_folder
from ebft_core.runs import RunPlan, read_plan
from ebft_core.storage.archive import archive_notes
from tasks.report import read_evaluation
from tasks.run_pages import mlflow_page, prefect_page
from tasks.services import noted_services


@dataclass(frozen=True)
class RunSummary:
    """A finished run: the comparison, if there is one, and where everything is (name -> path or address)."""

    evaluation: Evaluation | None
    places: Mapping[str, str]

    def to_json(self) -> dict[str, Any]:
        """For `--json-logs`."""
        evaluation = None if self.evaluation is None else self.evaluation.to_json()
        return {"evaluation": evaluation, "places": dict(self.places)}


def summarise_run(run_dir: Path, *, flow_run: str) -> RunSummary:
    """The summary of the run in `run_dir`; `flow_run` is Prefect's id of it."""
    plan = read_plan(run_dir)
    return RunSummary(read_evaluation(plan), _places(plan, flow_run))


def print_summary(summary: RunSummary, console: Console) -> None:
    """Print the table base | tuned | difference, then paths and commands."""
    if summary.evaluation is not None:
        print_table(summary.evaluation, console)
    for name, value in summary.places.items():
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
    config = load_config(plan.run_dir / "config.yaml")
    if config.archive is not None:
        places["archive"] = _archive_line(config.archive, plan)
    return {**places, **service_places(plan, flow_run)}


def service_places(plan: RunPlan, flow_run: str) -> dict[str, str]:
    """The pages of a run in MLflow and Prefect, and how to open them if no server runs."""
    configured = PREFECT_API_URL.value()
    places = {}
    page = mlflow_page(plan)
    if page is not None:
        places["MLflow"] = page
    places["Prefect"] = prefect_page(plan, flow_run, configured)
    if noted_services(plan.workspace) is None and not configured:
        places["open both"] = f"ebft up --workspace {plan.workspace}"
    return places


def _archive_line(location: str, plan: RunPlan) -> str:
    missing = [note.name for note in archive_notes(plan.run_dir) if note.error]
    if not missing:
        return location
    return f"{location} without {', '.join(missing)}; to catch up: ebft archive push {plan.run_dir}"

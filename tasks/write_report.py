"""The last task: the report, in the run's folder, and its short form in Prefect."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from ebft_core.manifests import write_text_atomic
from tasks.observe import notify
from tasks.report import build_report
from tasks.report_markdown import markdown_report
from tasks.stage_task import artifact_key


@task(
    name="report",
    task_run_name="report",
    tags=["ebft"],
    cache_policy=NO_CACHE,
    persist_result=False,
    result_serializer="json",
)
def write_report(run_dir: str, build: Callable[[Path], str] = build_report) -> str:
    """Write `report.html` and return its path; `build` makes the page from the run's folder."""
    notify("report", "started")
    path = Path(run_dir) / "report.html"
    write_text_atomic(path, build(Path(run_dir)))
    create_markdown_artifact(
        markdown_report(Path(run_dir)), key=artifact_key("report"), description=Path(run_dir).name
    )
    notify("report", "done")
    return str(path)

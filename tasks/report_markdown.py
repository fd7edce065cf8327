"""The short form of the report, in Markdown: for Prefect's page of a run and its description in MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ebft_core.manifests import read_meta, verify_folder
from ebft_core.runs import RunPlan, read_plan
from tasks.report import against_rows, comparison_rows, read_evaluation
from tasks.report_health import health_rows
from tasks.report_promotion import promotion_view
from tasks.run_pages import mlflow_page

_TABS = {"the run in MLflow": "", "its metrics": "/model-metrics", "its artifacts": "/artifacts"}


def markdown_report(run_dir: Path) -> str:
    """Comparison, the gate's word, warnings, links. What the run does not have is not in it.

    Raises:
        UserError: `run_dir` is not a run folder.
    """
    plan = read_plan(run_dir)
    parts = [f"# {run_dir.name}", *_comparison(plan), *_promotion(run_dir), *_health(run_dir), *_links(plan)]
    return "\n\n".join(parts) + "\n"


def markdown_table(rows: Sequence[Mapping[str, str]]) -> str:
    """Rows with the same columns as a table; a `|` inside a cell stays one."""
    lines = [list(rows[0]), ["---"] * len(rows[0]), *(list(row.values()) for row in rows)]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)


def _comparison(plan: RunPlan) -> Iterator[str]:
    if not _has(plan, "evaluate"):
        return
    evaluation = read_evaluation(plan)
    if evaluation is None:
        return
    yield "## Held-out evaluation"
    yield markdown_table(comparison_rows(evaluation.metrics))
    for name, rows in against_rows(evaluation).items():
        yield f"### Against {name}\n\n{markdown_table(rows)}"


def _promotion(run_dir: Path) -> Iterator[str]:
    view = promotion_view(run_dir)
    if view is not None:
        outcome = "promoted" if view["promoted"] else "refused"
        yield f"## Promotion\n\n**{view['model']} {outcome}** (by {view['by']}): {view['reason']}"


def _health(run_dir: Path) -> Iterator[str]:
    rows = health_rows(run_dir)
    if rows:
        yield f"## Health\n\n{markdown_table(rows)}"


def _links(plan: RunPlan) -> Iterator[str]:
    lines = [f"report: `{plan.run_dir / 'report.html'}`"]
    pages = {name: mlflow_page(plan, tab) for name, tab in _TABS.items()}
    lines = [f"[{name}]({page})" for name, page in pages.items() if page is not None] + lines
    if _has(plan, "merge"):
        lines.append(f"model: `{plan.stage('merge').output / 'model'}`")
    if _has(plan, "publish") and verify_folder(plan.stage("publish").output, deep=False) is not None:
        version = read_meta(plan.stage("publish").output)
        lines.append(
            f"registered: `{version['name']}` version {version['version']}, alias `{version['alias']}`"
        )
    yield "## Where everything is\n\n" + "\n".join(f"* {line}" for line in lines)


def _has(plan: RunPlan, stage: str) -> bool:
    return any(planned.name == stage for planned in plan.stages)

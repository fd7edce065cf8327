"""The report of a run: one HTML file that needs nothing else, made from the run's folder alone."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2

from ebft_core.base_model import read_base
from ebft_core.bootstrap import PairedEstimate
from ebft_core.evaluation.summary import Evaluation
from ebft_core.evaluation.table import verdict
from ebft_core.manifests import read_meta, verify_folder
from ebft_core.metrics import metric_of
from ebft_core.runs import RunPlan, read_plan
from tasks.report_answers import answer_views
from tasks.report_charts import report_charts
from tasks.report_health import health_rows
from tasks.report_promotion import promotion_view
from tasks.report_rollouts import rollout_views


def build_report(run_dir: Path) -> str:
    """The page as text. Stages that are not done are simply not in it.

    Raises:
        UserError: `run_dir` is not a run folder.
    """
    plan = read_plan(run_dir)
    evaluation = read_evaluation(plan)
    template = page_environment().get_template("report.html.j2")
    return template.render(
        plan=plan,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        evaluation=evaluation_rows(plan),
        against={} if evaluation is None else against_rows(evaluation),
        whole=evaluation is not None and evaluation.mode == "structured",
        charts=report_charts(run_dir),
        health=health_rows(run_dir),
        promotion=promotion_view(run_dir),
        rollouts=rollout_views(plan.stage("evaluate").output / "rollouts.json"),
        answers=answer_views(plan.stage("evaluate").output / "answers.json"),
        stages=_stages(plan),
        digests=_digests(plan),
        config=(run_dir / "config.yaml").read_text(encoding="utf-8"),
    )


def page_environment() -> jinja2.Environment:
    """What the pages are rendered in: text is escaped, and a name that nobody gives is an error."""
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )


def read_evaluation(plan: RunPlan) -> Evaluation | None:
    """The comparison of this run; None if it was not made."""
    path = plan.stage("evaluate").output / "evaluation.json"
    return Evaluation.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None


def evaluation_rows(plan: RunPlan) -> list[dict[str, str]]:
    """The comparison as rows of text: metric, base, tuned, difference ± s.e., interval, verdict."""
    evaluation = read_evaluation(plan)
    if evaluation is None:
        return []
    return comparison_rows(evaluation.metrics)


def against_rows(evaluation: Evaluation) -> dict[str, list[dict[str, str]]]:
    """The same with each further model in the place of the base, by its name."""
    return {name: comparison_rows(reference.metrics) for name, reference in evaluation.against.items()}


def comparison_rows(metrics: Mapping[str, PairedEstimate]) -> list[dict[str, str]]:
    """Paired estimates as rows of text; metrics without a value are left out."""
    return [
        {
            "metric": metric_of(name).label,
            "base": f"{estimate.base:.4f}",
            "tuned": f"{estimate.tuned:.4f}",
            "difference": f"{estimate.difference:+.4f} ± {estimate.standard_error:.4f}",
            "interval": f"[{estimate.interval[0]:+.4f}, {estimate.interval[1]:+.4f}]",
            "verdict": verdict(name, estimate).plain,
        }
        for name, estimate in metrics.items()
        if math.isfinite(estimate.base)
    ]


def _stages(plan: RunPlan) -> list[dict[str, Any]]:
    rows = []
    for stage in plan.stages:
        ref = verify_folder(stage.output, deep=False)
        meta = read_meta(stage.output) if ref else {}
        seconds = meta.get("wall_seconds")
        rows.append(
            {
                "name": stage.name,
                "key": stage.key[:12],
                "state": "done" if ref else "not done",
                "seconds": "" if seconds is None else f"{seconds:.1f}",
                "megabytes": f"{ref.bytes / 1e6:.1f}" if ref else "",
                "digest": ref.sha256[:12] if ref else "",
            }
        )
    return rows


def _digests(plan: RunPlan) -> dict[str, str]:
    digests = {
        "run key": plan.run_key,
        "configuration": plan.config_digest,
        "code": plan.code_digest,
        "data": plan.data_digest,
    }
    base = plan.stage("prepare_base")
    if verify_folder(base.output, deep=False):
        digests["base model"] = read_base(base.output).digest
    return digests

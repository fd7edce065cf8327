"""The report of a comparison or a sweep: one HTML file, from the group's folder and its arms' journals."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ebft_core.arm_group import STAGE, read_group
from ebft_core.arms import BASE
from ebft_core.comparison import SFT, ArmsComparison
from ebft_core.evaluation.table import verdict
from ebft_core.metrics import TASK_PREFIX, metric_of
from ebft_core.runs import RunPlan, read_plan
from tasks.charts import PALETTE_SIZE
from tasks.report import comparison_rows, page_environment
from tasks.report_charts import overlaid_charts
from tasks.report_rollouts import RolloutView, rollout_view

COLUMNS = ("cfm", "ce", "alignment", "duplicate_rate")
"""Metrics of the table of arms, beside the one that decides."""


def build_comparison_report(run_dir: Path, failed: Mapping[str, str]) -> str:
    """The page as text.

    Args:
        run_dir: the group's folder; its stage `compare` is done.
        failed: arm → why it did not finish.
    """
    plan, group = read_plan(run_dir), read_group(run_dir)
    comparison = read_comparison(plan)
    drawn = _drawn(comparison)
    folders = {name: Path(group["arms"][name]["run_dir"]) for name in drawn}
    template = page_environment().get_template("comparison.html.j2")
    return template.render(
        plan=plan,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        comparison=comparison,
        columns=[metric_of(name).label for name in columns(comparison)],
        rows=arm_rows(comparison),
        failed=failed,
        contrasts=contrast_rows(comparison),
        charts=overlaid_charts(folders),
        drawn=drawn,
        examples=_examples(plan, drawn),
        arms={name: comparison_rows(e.metrics) for name, e in comparison.arms.items()},
        group=group,
        config=(run_dir / "config.yaml").read_text(encoding="utf-8"),
    )


def comparison_file(plan: RunPlan) -> Path:
    """Where the group's stage `compare` writes its result."""
    return plan.stage(STAGE).output / "comparison.json"


def read_comparison(plan: RunPlan) -> ArmsComparison:
    """The result of the group's stage `compare`."""
    return ArmsComparison.from_json(json.loads(comparison_file(plan).read_text(encoding="utf-8")))


def best_first(comparison: ArmsComparison) -> list[str]:
    """The trained arms, the best in the metric first; those without a value last."""
    sign = -1.0 if metric_of(comparison.metric).better == "higher" else 1.0

    def place(name: str) -> float:
        value = comparison.value(name, comparison.metric)
        return sign * value if math.isfinite(value) else math.inf

    return sorted(comparison.arms, key=place)


def _drawn(comparison: ArmsComparison) -> list[str]:
    """The best arms, as many as there are colours. SFT last: in charts that it is not in, colours stay."""
    best = best_first(comparison)[:PALETTE_SIZE]
    return sorted(best, key=lambda name: comparison.stages[name] == SFT)


def columns(comparison: ArmsComparison) -> list[str]:
    """The metrics of the table of arms: the one that decides, the usual ones, those of downstream tasks."""
    measured = next(iter(comparison.arms.values())).metrics
    tasks = (name for name in measured if name.startswith(TASK_PREFIX))
    return list(dict.fromkeys((comparison.metric, *COLUMNS, *tasks)))


def arm_rows(comparison: ArmsComparison) -> list[dict[str, Any]]:
    """One row per arm, the base first: name, whether it is the best, and a cell per column.

    A cell is the value, the difference from the base with its standard error, and the verdict on it.
    """
    base = [
        {"value": f"{comparison.value(BASE, n):.4f}", "change": "", "verdict": ""}
        for n in columns(comparison)
    ]
    rows: list[dict[str, Any]] = [{"arm": BASE, "best": comparison.best == BASE, "cells": base}]
    for name, evaluation in comparison.arms.items():
        cells = []
        for metric in columns(comparison):
            estimate = evaluation.metrics[metric]
            cells.append(
                {
                    "value": f"{estimate.tuned:.4f}",
                    "change": f"{estimate.difference:+.4f} ± {estimate.standard_error:.4f}",
                    "verdict": verdict(metric, estimate).plain,
                }
            )
        rows.append({"arm": name, "best": comparison.best == name, "cells": cells})
    return rows


def contrast_rows(comparison: ArmsComparison) -> list[dict[str, str]]:
    """The best arm against each other arm, in the metric that decides and in cross-entropy."""
    rows = []
    for name, estimates in comparison.contrasts.items():
        for metric in dict.fromkeys((comparison.metric, "ce")):
            low, high = estimates[metric].interval
            rows.append(
                {
                    "arm": name,
                    "metric": metric_of(metric).label,
                    "difference": f"{estimates[metric].difference:+.4f}",
                    "interval": f"[{low:+.4f}, {high:+.4f}]",
                    "verdict": verdict(metric, estimates[metric]).plain,
                }
            )
    return rows


def _examples(plan: RunPlan, arms: list[str]) -> list[dict[str, RolloutView]]:
    """For every anchor shown: arm → its rollouts beside those of the base."""
    path = plan.stage(STAGE).output / "rollouts.json"
    stored = json.loads(path.read_text(encoding="utf-8"))["arms"]
    views = {name: [rollout_view(values) for values in stored[name]] for name in arms}
    return [dict(zip(views, anchor, strict=True)) for anchor in zip(*views.values(), strict=True)]

"""The report of a run: one HTML file that needs nothing else, made from the run's folder alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from ebft_core.base_model import read_base
from ebft_core.evaluation.metrics import METRICS
from ebft_core.evaluation.summary import Evaluation
from ebft_core.evaluation.table import verdict
from ebft_core.events import read_events
from ebft_core.manifests import read_meta, verify_folder
from ebft_core.runs import RunPlan, read_plan
from tasks.charts import Series, line_chart


@dataclass(frozen=True)
class ChartSpec:
    """A chart of the report: its metrics (label -> name) and how to read it."""

    title: str
    metrics: Mapping[str, str]
    note: str = ""


_CHARTS = (
    ChartSpec("Reward", {"reward": "ebft/reward"}),
    ChartSpec("Alignment", {"alignment": "ebft/alignment"}, "healthy: 0.3 to 0.9, rising"),
    ChartSpec("CFM (unbiased)", {"CFM": "ebft/cfm"}, "healthy: falling"),
    ChartSpec(
        "Similarity of samples", {"diversity": "ebft/diversity"}, "healthy: 0.01 to 0.1; above 1 is collapse"
    ),
    ChartSpec("Policy-gradient loss", {"policy gradient": "ebft/rl_loss"}),
    ChartSpec("Cross-entropy", {"cross-entropy": "ebft/ce_loss"}, "nats per token of the training rows"),
    ChartSpec("KL to the base", {"KL": "ebft/kl"}),
    ChartSpec("Entropy", {"entropy": "ebft/entropy"}, "healthy: 0.05 to 0.5; below 0.01 is collapse"),
    ChartSpec(
        "Gradient norm", {"gradient norm": "train/grad_norm"}, "healthy: 0.1 to 3; above 10 is unstable"
    ),
    ChartSpec(
        "Rates",
        {"duplicates": "ebft/duplicate_rate", "zero advantages": "ebft/zero_advantage_rate"},
    ),
    ChartSpec(
        "Seconds per step",
        {
            "rollout": "perf/rollout_seconds",
            "features": "perf/features_seconds",
            "update": "perf/update_seconds",
        },
    ),
)


def build_report(run_dir: Path) -> str:
    """The page as text. Stages that are not done are simply not in it.

    Raises:
        UserError: `run_dir` is not a run folder.
    """
    plan = read_plan(run_dir)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("report.html.j2").render(
        plan=plan,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        evaluation=evaluation_rows(plan),
        charts=[*_training_charts(run_dir), *_other_charts(run_dir)],
        rollouts=_rollouts(plan),
        stages=_stages(plan),
        digests=_digests(plan),
        config=(run_dir / "config.yaml").read_text(encoding="utf-8"),
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
    return [
        {
            "metric": METRICS[name].label,
            "base": f"{estimate.base:.4f}",
            "tuned": f"{estimate.tuned:.4f}",
            "difference": f"{estimate.difference:+.4f} ± {estimate.standard_error:.4f}",
            "interval": f"[{estimate.interval[0]:+.4f}, {estimate.interval[1]:+.4f}]",
            "verdict": verdict(name, estimate).plain,
        }
        for name, estimate in evaluation.metrics.items()
        if math.isfinite(estimate.base)
    ]


def metric_series(run_dir: Path, stage: str) -> dict[str, dict[float, float]]:
    """Metric name -> step -> value of a stage's journal. Of steps done twice the first counts."""
    series: dict[str, dict[float, float]] = {}
    for event in read_events(run_dir / "events" / f"{stage}.jsonl"):
        if event["kind"] == "metrics":
            for name, value in event["values"].items():
                series.setdefault(name, {}).setdefault(event["step"], float(value))
    return series


def _training_charts(run_dir: Path) -> Iterable[dict[str, Any]]:
    found = metric_series(run_dir, "train")
    for spec in _CHARTS:
        series = {label: _points(found[name]) for label, name in spec.metrics.items() if name in found}
        yield from _chart(spec.title, series, spec.note)
    heldout = sorted(name for name in found if name.startswith("eval/"))
    for name in heldout:
        yield from _chart(
            f"Held-out {name.removeprefix('eval/')}", {name: _points(found[name])}, "during training"
        )


def _other_charts(run_dir: Path) -> Iterable[dict[str, Any]]:
    """Charts of the base model made here, if one was."""
    for name, values in metric_series(run_dir, "prepare_base").items():
        if "loss" in name or name.endswith("ce"):
            yield from _chart(f"Base model: {name}", {name: _points(values)}, "training of the base model")


def _chart(title: str, series: Mapping[str, Series], note: str) -> Iterable[dict[str, Any]]:
    svg = line_chart(title, series)
    if svg:
        last = {label: f"{points[-1][1]:.4g}" for label, points in series.items() if points}
        yield {"title": title, "svg": Markup(svg), "note": note, "last": last}


def _points(values: Mapping[float, float]) -> list[tuple[float, float]]:
    return sorted(values.items())


def _rollouts(plan: RunPlan) -> list[dict[str, Any]]:
    path = plan.stage("evaluate").output / "rollouts.json"
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    examples: list[dict[str, Any]] = document["rollouts"] if isinstance(document, dict) else document
    return examples


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

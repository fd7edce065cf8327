"""The report's charts: which metrics share a panel, and how to read it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ebft_core.events import read_events
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
    ChartSpec("Generated tokens per second", {"tokens per second": "rollout/tokens_per_second"}),
    ChartSpec(
        "Seconds of generation",
        {"generating": "rollout/seconds", "waited for": "rollout/waited_seconds"},
        "generating ahead hides what is not waited for",
    ),
    ChartSpec("Completion length", {"tokens": "rollout/completion_tokens"}, "mean, without given turns"),
    ChartSpec(
        "Completions cut or left out",
        {"cut at their bound": "rollout/truncated_rate", "too far off policy": "rollout/masked_fraction"},
        "shares of the completions",
    ),
    ChartSpec(
        "Importance ratio",
        {
            "mean": "rollout/is_ratio_mean",
            "smallest": "rollout/is_ratio_min",
            "largest": "rollout/is_ratio_max",
        },
        "trainer to sampler, per token, before it is capped; healthy: mean near 1",
    ),
    ChartSpec(
        "Effective share of the samples",
        {"share": "rollout/effective_sample_size"},
        "1 where all importance ratios are equal",
    ),
    ChartSpec(
        "Policy lag", {"steps": "policy_lag"}, "optimiser steps between the sampled weights and the present"
    ),
    ChartSpec("Seconds per weight sync", {"seconds": "sync/seconds"}),
    ChartSpec(
        "Weight sync: canary",
        {"distance": "sync/canary"},
        "mean difference of log-probabilities, server to trainer",
    ),
    ChartSpec(
        "Groups without use",
        {"prompts that failed": "rollout/failed_prompts", "replaced groups": "rollout/replaced_groups"},
    ),
)

_SAME_AS = {"sft/loss": "ebft/ce_loss", "sft/grad_norm": "train/grad_norm"}
"""Metric of a warm start -> the metric of training that is drawn with it."""

_FAMILIES = (
    ("rewards/", "Own reward: {}", ""),
    ("eval/", "Held-out {}", "during training"),
)
"""Metrics whose names a run makes up: prefix, title, note. Each gets a chart of its own."""


def report_charts(run_dir: Path) -> list[dict[str, Any]]:
    """Title, SVG, note and last values of every chart that a run's journals have numbers for."""
    return [*_training_charts(run_dir), *_other_charts(run_dir)]


def overlaid_charts(run_dirs: Mapping[str, Path]) -> list[dict[str, Any]]:
    """The training charts of one metric each, with a line per run.

    Args:
        run_dirs: label -> folder of a run, at most `PALETTE_SIZE` of them.
    """
    found = {label: _trained_series(run_dir) for label, run_dir in run_dirs.items()}
    specs = [spec for spec in _CHARTS if len(spec.metrics) == 1]
    names = {name for series in found.values() for name in series if name.startswith("eval/")}
    specs += [ChartSpec(f"Held-out {name}", {name: name}, "during training") for name in sorted(names)]
    charts: list[dict[str, Any]] = []
    for spec in specs:
        (name,) = spec.metrics.values()
        lines = {label: _points(series[name]) for label, series in found.items() if name in series}
        charts += _chart(spec.title, lines, spec.note)
    return charts


def _trained_series(run_dir: Path) -> dict[str, dict[float, float]]:
    """The metrics of training; of a warm start alone, its loss stands for the cross-entropy it is."""
    trained = metric_series(run_dir, "train")
    if trained:
        return trained
    warm = metric_series(run_dir, "sft")
    return {_SAME_AS.get(name, name): values for name, values in warm.items()}


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
    for prefix, title, note in _FAMILIES:
        for name in sorted(name for name in found if name.startswith(prefix)):
            yield from _chart(title.format(name.removeprefix(prefix)), {name: _points(found[name])}, note)


def _other_charts(run_dir: Path) -> Iterable[dict[str, Any]]:
    """Charts of the warm start, and of the base model made here."""
    for stage, title, note in (
        ("sft", "Warm start", "supervised training"),
        ("prepare_base", "Base model", "training of the base model"),
    ):
        for name, values in metric_series(run_dir, stage).items():
            if "loss" in name or name.endswith("ce"):
                yield from _chart(f"{title}: {name}", {name: _points(values)}, note)


def _chart(title: str, series: Mapping[str, Series], note: str) -> Iterable[dict[str, Any]]:
    # A line that has no number to draw must not take a colour of the legend either.
    drawn = {label: points for label, points in series.items() if any(math.isfinite(y) for _, y in points)}
    svg = line_chart(title, drawn)
    if svg:
        last = {label: f"{points[-1][1]:.4g}" for label, points in drawn.items()}
        yield {"title": title, "svg": Markup(svg), "note": note, "last": last}


def _points(values: Mapping[float, float]) -> list[tuple[float, float]]:
    return sorted(values.items())

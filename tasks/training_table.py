"""Training metrics as a table for Prefect's page of the run: where they began, ended, and the mean."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from ebft_core.events import read_events

SHOWN = (
    "ebft/reward",
    "ebft/alignment",
    "ebft/cfm",
    "ebft/ce_loss",
    "ebft/entropy",
    "train/grad_norm",
    "perf/step_seconds",
    "perf/peak_memory_mb",
    "rollout/tokens_per_second",
    "rollout/waited_seconds",
    "rollout/failed_prompts",
    "policy_lag",
    "sync/seconds",
    "sync/canary",
)
"""The others are in MLflow; a metric that a run does not have is left out."""


def training_table(journal: Path) -> list[dict[str, str]]:
    """Rows of metric, steps that have it, first, last and mean; `sync/seconds` has as many steps as syncs."""
    events = [event["values"] for event in read_events(journal) if event["kind"] == "metrics"]
    series = {name: [float(values[name]) for values in events if name in values] for name in SHOWN}
    return [_row(name, values) for name, values in series.items() if values]


def _row(name: str, values: list[float]) -> dict[str, str]:
    numbers = {"first": values[0], "last": values[-1], "mean": fmean(values)}
    return {
        "metric": name,
        "steps": str(len(values)),
        **{key: f"{value:.4g}" for key, value in numbers.items()},
    }

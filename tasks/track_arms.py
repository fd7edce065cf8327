"""The result of a comparison in MLflow: numbers of every arm in the arm's own run and in the parent's."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import requests
from mlflow.exceptions import MlflowException

from ebft_core.arm_group import STAGE, ArmGroup, ArmRun
from ebft_core.arms import BASE
from ebft_core.comparison import ArmsComparison
from ebft_core.config import load_config
from tasks.comparison_report import columns
from tasks.journal_sync import evaluation_values
from tasks.mlflow_store import MlflowStore, Point
from tasks.tracking import noted_run_id

logger = logging.getLogger(__name__)

_AWAY = (MlflowException, requests.RequestException, OSError)


def track_arms(group: ArmGroup, comparison: ArmsComparison, source: Path, uri: str) -> None:
    """Write `base/…`, `tuned/…` and `delta/…` into the run of every arm, as `ebft run` does for a run.

    If MLflow is away, a warning says so; the next start of the same command sends the numbers.

    Args:
        source: `comparison.json`; its time is that of the numbers.
    """
    time_ms = int(source.stat().st_mtime * 1000)
    for name, evaluation in comparison.arms.items():
        points = [Point(key, value, 0, time_ms) for key, value in evaluation_values(evaluation).items()]
        try:
            _send(group.runs[name], points, uri, best=comparison.best == name)
        except _AWAY as error:
            logger.warning("the numbers of arm %s are not in MLflow yet: %s", name, error)


def parent_values(comparison: ArmsComparison) -> dict[str, float]:
    """Metrics of the parent's run: `arms/<arm>/<metric>` for the metrics of the table of arms."""
    return {
        f"arms/{metric_part(name)}/{metric}": value
        for name in (BASE, *comparison.arms)
        for metric in columns(comparison)
        if math.isfinite(value := comparison.value(name, metric))
    }


def metric_part(name: str) -> str:
    """An arm's name in the letters that MLflow allows in the names of metrics."""
    return re.sub(r"[^A-Za-z0-9_. -]", "_", name)


def _send(run: ArmRun, points: list[Point], uri: str, *, best: bool) -> None:
    run_id = noted_run_id(run.plan.run_dir)
    if run_id is None:
        raise ConnectionError("MLflow has not answered while the arm was trained")
    store = MlflowStore(uri, run.plan, load_config(run.plan.run_dir / "config.yaml"))
    store.log_points(run_id, points)
    store.set_tag(run_id, f"ebft.{STAGE}.best", str(best).lower())

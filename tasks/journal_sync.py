"""Copies the journals of a run to MLflow in the background: no gaps, no duplicates, never in the way.

The journals on disk are complete whatever happens to the server. A point is sent when the server does
not hold it yet; after any doubt (start, failed call) the server is asked what it holds. A stage that
resumes from a checkpoint writes some steps twice; their first values stand.
"""

from __future__ import annotations

import json
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import requests
from mlflow.exceptions import MlflowException

from ebft_core.base_model import read_base
from ebft_core.config import RunConfig
from ebft_core.evaluation.summary import Evaluation
from ebft_core.events import EventReader
from ebft_core.runs import RunPlan
from tasks.mlflow_store import MlflowStore, Point

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0
_BACKOFF_SECONDS = (1.0, 2.0, 5.0, 10.0)
_POINTS_PER_CALL = 500
_AWAY = (MlflowException, requests.RequestException, OSError)


class JournalSync(threading.Thread):
    """The background copier of one run. Start it, then `close` it."""

    def __init__(
        self, plan: RunPlan, config: RunConfig, uri: str, tags: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(name="mlflow-sync", daemon=True)
        self.run_id: str | None = None
        self.last_error: str | None = None
        self._make_store: Callable[[], MlflowStore] = lambda: MlflowStore(uri, plan, config)
        self._plan = plan
        self._tags = dict(tags or {})
        self._store: MlflowStore | None = None
        self._readers = {
            stage.name: EventReader(plan.run_dir / "events" / f"{stage.name}.jsonl") for stage in plan.stages
        }
        self._pending: deque[Point] = deque()
        self._marks: dict[str, int] | None = None
        self._extra: deque[Point] = deque()
        self._files: deque[Path] = deque()
        self._description: str | None = None
        self._base_noted = False
        self._wake = threading.Event()
        self._status: str | None = None
        self._deadline = float("inf")

    def attach(self, path: Path) -> None:
        """Store a file among the run's artifacts, as soon as MLflow is there."""
        self._files.append(path)
        self._wake.set()

    def describe(self, markdown: str) -> None:
        """Show a text on the run's page."""
        self._description = markdown
        self._wake.set()

    def add_evaluation(self, path: Path) -> None:
        """Send the results of the comparison, which stand in no journal."""
        evaluation = Evaluation.from_json(json.loads(path.read_text(encoding="utf-8")))
        self.add_values(evaluation_values(evaluation), path)

    def add_values(self, values: Mapping[str, float], source: Path) -> None:
        """Send numbers that were read from a file; their time is the file's."""
        time_ms = int(source.stat().st_mtime * 1000)
        self._extra.extend(Point(name, value, 0, time_ms) for name, value in values.items())
        self._wake.set()

    def close(self, status: str, seconds: float) -> bool:
        """Send what is left, set the run's status, and end; True if everything arrived in time."""
        self._deadline = time.monotonic() + seconds
        self._status = status
        self._wake.set()
        self.join(timeout=seconds + 1.0)
        return not self.is_alive() and self.last_error is None

    def run(self) -> None:
        """Copy until closed."""
        failures = 0
        while True:
            closing = self._status is not None
            try:
                self._sync(self._status)
                failures, self.last_error = 0, None
                if closing:
                    return
            except _AWAY as error:
                self._marks = None
                self.last_error = str(error).splitlines()[0] if str(error) else type(error).__name__
                if failures == 0:
                    logger.warning("MLflow does not answer; the journal is kept: %s", self.last_error)
                failures += 1
            if time.monotonic() >= self._deadline:
                return
            self._wake.wait(
                _BACKOFF_SECONDS[min(failures, len(_BACKOFF_SECONDS)) - 1] if failures else _POLL_SECONDS
            )
            self._wake.clear()

    def _sync(self, status: str | None) -> None:
        if self._store is None:
            self._store = self._make_store()
        if self.run_id is None:
            self.run_id = self._store.open_run(self._tags)
        self._collect()
        self._send(self._store, self.run_id)
        self._note_base(self._store, self.run_id)
        while self._files:
            self._store.log_file(self.run_id, self._files[0])
            self._files.popleft()
        if self._description is not None:
            self._store.describe(self.run_id, self._description)
        if status is not None:
            self._store.end_run(self.run_id, status)

    def _collect(self) -> None:
        for stage, reader in self._readers.items():
            for event in reader.read():
                if event["kind"] == "metrics":
                    self._pending.extend(points_of(stage, event))
        while self._extra:
            self._pending.append(self._extra.popleft())

    def _send(self, store: MlflowStore, run_id: str) -> None:
        while self._pending:
            if self._marks is None:
                self._marks = store.marks(run_id)
            marks = dict(self._marks)
            batch: list[Point] = []
            taken = min(len(self._pending), _POINTS_PER_CALL)
            for index in range(taken):
                point = self._pending[index]
                if point.step > marks.get(point.key, -1):
                    marks[point.key] = point.step
                    batch.append(point)
            if batch:
                store.log_points(run_id, batch)
            self._marks = marks
            for _ in range(taken):
                self._pending.popleft()

    def _note_base(self, store: MlflowStore, run_id: str) -> None:
        """The base model's digest is known once its stage is done."""
        if self._base_noted or not (self._plan.run_dir / "stages" / "prepare_base.json").exists():
            return
        base = read_base(self._plan.stage("prepare_base").output)
        store.set_tag(run_id, "ebft.base_digest", base.digest)
        self._base_noted = True


def evaluation_values(evaluation: Evaluation) -> dict[str, float]:
    """The numbers of a comparison as MLflow shows them; those that are not determined are left out.

    `base/…`, `tuned/…` and `delta/…`; for each further model `eval/against/<its name>/…_difference`.
    """
    values: dict[str, float] = {}
    for name, estimate in evaluation.metrics.items():
        values |= {
            f"base/{name}": estimate.base,
            f"tuned/{name}": estimate.tuned,
            f"delta/{name}": estimate.difference,
        }
    for model, reference in evaluation.against.items():
        for name, estimate in reference.metrics.items():
            values[f"eval/against/{model}/{name}_difference"] = estimate.difference
    return {name: value for name, value in values.items() if math.isfinite(value)}


def points_of(stage: str, event: Mapping[str, Any]) -> list[Point]:
    """The metric values of one event. A training says its public names; those of others get their stage."""
    prefix = "" if stage in ("train", "sft") else f"{stage}/"
    time_ms = int(event["time"] * 1000)
    values = event["values"]
    return [
        Point(f"{prefix}{key}", float(value), int(event["step"]), time_ms) for key, value in values.items()
    ]

"""Every call to MLflow for a run: open it, log to it, end it. Knows nothing about threads or journals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from mlflow import MlflowClient
from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    LifecycleStage,
    Metric,
    Param,
    Run,
)
from mlflow.exceptions import MlflowException

from ebft_core.config import RunConfig
from ebft_core.config.redaction import redact, redact_text
from ebft_core.manifests import write_json_atomic
from ebft_core.runs import RunPlan
from tasks.mlflow_uri import reach_artifacts

RUN_UID = "ebft.run_uid"
_PARAM_SECTIONS = ("model", "data", "ebft", "trainer", "lora", "evaluate")
_PARAM_LENGTH = 500
_PARAMS_PER_CALL = 100
_DESCRIPTION_LENGTH = 5000
_EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Without it MLflow's page shows the experiment as one of prompts and traces."""
_QUICK_FAILURE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


@dataclass(frozen=True)
class Point:
    """One value of a metric. Its time is the event's, so that sending it twice is the same row twice."""

    key: str
    value: float
    step: int
    time_ms: int


class MlflowStore:
    """The tracking store of one run.

    Args:
        uri: as `mlflow_uri.tracking_uri` gives it.
        plan: the run.
        config: its configuration.
    """

    def __init__(self, uri: str, plan: RunPlan, config: RunConfig) -> None:
        fail_quickly()
        self.uri = uri
        self.plan = plan
        self.config = config
        reach_artifacts(config)
        self.client = MlflowClient(tracking_uri=uri, registry_uri=uri)
        self._note = plan.run_dir / "tracking.json"

    def open_run(self, tags: Mapping[str, str]) -> str:
        """Reopen the run noted in `tracking.json`, or create it; returns its id.

        A note is written before the run is created and is found again by a tag, so a crash in between
        leaves no second run.
        """
        note = self._read_note()
        run = self._find(note["uid"], note.get("run_id"))
        if run is None:
            all_tags = {**self._tags(), **tags, RUN_UID: note["uid"]}
            run = self.client.create_run(
                self._experiment_id(), tags=all_tags, run_name=self.plan.run_dir.name
            )
        run_id = str(run.info.run_id)
        for key, value in tags.items():  # who started it this time: the flow run, the parent
            self.set_tag(run_id, key, value)
        self.client.update_run(run_id, status="RUNNING")
        self._log_inputs(run_id)
        write_json_atomic(self._note, {**note, "run_id": run_id, "experiment_id": run.info.experiment_id})
        return run_id

    def marks(self, run_id: str) -> dict[str, int]:
        """Highest logged step of every metric: what the server holds is the only truth."""
        names = self.client.get_run(run_id).data.metrics
        return {name: max(m.step for m in self.client.get_metric_history(run_id, name)) for name in names}

    def log_points(self, run_id: str, points: Sequence[Point]) -> None:
        """Send metric values in one call."""
        metrics = [Metric(p.key, p.value, p.time_ms, p.step) for p in points]
        self.client.log_batch(run_id, metrics=metrics, synchronous=True)

    def log_file(self, run_id: str, path: Path) -> None:
        """Store a file among the run's artifacts."""
        self.client.log_artifact(run_id, str(path))

    def log_folder(self, run_id: str, folder: Path, name: str) -> str:
        """Store a folder among the run's artifacts and return its uri.

        Where the artifacts lie on this machine the files are linked, not copied.
        """
        root = str(self.client.get_run(run_id).info.artifact_uri)
        place = urlparse(root)
        if place.scheme in ("", "file"):
            target = Path(unquote(place.path)) / name
            shutil.copytree(folder, target, copy_function=_link_or_copy, dirs_exist_ok=True)
        else:
            self.client.log_artifacts(run_id, str(folder), artifact_path=name)
        return f"{root}/{name}"

    def set_tag(self, run_id: str, key: str, value: str) -> None:
        """Set one tag of the run."""
        self.client.set_tag(run_id, key, value)

    def describe(self, run_id: str, markdown: str) -> None:
        """Set the text of the run's page; MLflow takes tags of limited length only."""
        self.set_tag(run_id, "mlflow.note.content", markdown[:_DESCRIPTION_LENGTH])

    def end_run(self, run_id: str, status: str) -> None:
        """Set FINISHED, FAILED or KILLED."""
        self.client.set_terminated(run_id, status=status)

    def _read_note(self) -> dict[str, Any]:
        """The note of this store; a fresh one if there is none or the run was tracked elsewhere before."""
        where = {"uri": redact_text(self.uri), "experiment": self.config.tracking.experiment}
        if self._note.exists():
            note: dict[str, Any] = json.loads(self._note.read_text(encoding="utf-8"))
            if {key: note.get(key) for key in where} == where:
                return note
        fresh = {"uid": uuid.uuid4().hex, **where}
        write_json_atomic(self._note, fresh)
        return fresh

    def _find(self, uid: str, run_id: str | None) -> Run | None:
        if run_id is None:
            found = self.client.search_runs(
                [self._experiment_id()], f"tags.`{RUN_UID}` = '{uid}'", max_results=1
            )
            return found[0] if found else None
        try:
            run = self.client.get_run(run_id)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == LifecycleStage.ACTIVE else None

    def _experiment_id(self) -> str:
        name = self.config.tracking.experiment
        experiment = self.client.get_experiment_by_name(name)
        if experiment is not None:
            return str(experiment.experiment_id)
        location = self.config.tracking.artifact_location
        if location is None and self.uri.startswith("sqlite:"):
            location = (self.plan.workspace / "mlartifacts").as_uri()
        try:
            return str(self.client.create_experiment(name, location, _EXPERIMENT_TAGS))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
            return str(self.client.get_experiment_by_name(name).experiment_id)  # someone was faster

    def _log_inputs(self, run_id: str) -> None:
        """Params, resolved configuration and data set; all of them may be sent again unchanged."""
        params = [Param(key, value) for key, value in flat_params(self.config)]
        for start in range(0, len(params), _PARAMS_PER_CALL):
            self.client.log_batch(run_id, params=params[start : start + _PARAMS_PER_CALL], synchronous=True)
        sources = [source.path for source in self.config.data.sources]
        data = Dataset(
            name=self.config.name,
            digest=self.plan.data_digest[:36],
            source_type="local",
            source=json.dumps({"sources": sources, "sha256": self.plan.data_digest}),
        )
        self.client.log_inputs(run_id, [DatasetInput(data, [InputTag("mlflow.data.context", "training")])])
        self.client.log_artifact(run_id, str(self.plan.run_dir / "config.yaml"))

    def _tags(self) -> dict[str, str]:
        tags = {
            "ebft.run_key": self.plan.run_key,
            "ebft.run_dir": str(self.plan.run_dir),
            **lineage(self.plan),
            "mlflow.source.name": "ebft",
        }
        commit = git_commit()
        if commit is not None:
            tags["mlflow.source.git.commit"] = commit
        return {**tags, **{str(k): str(v) for k, v in redact(dict(self.config.tracking.tags)).items()}}


def fail_quickly() -> None:
    """A dead server must not hold a thread for minutes; settings of the user win."""
    for name, value in _QUICK_FAILURE.items():
        os.environ.setdefault(name, value)


def lineage(plan: RunPlan) -> dict[str, str]:
    """The digests that say where a result comes from, as tags."""
    digests = {
        "ebft.config_digest": plan.config_digest,
        "ebft.code_digest": plan.code_digest,
        "ebft.data_digest": plan.data_digest,
        "ebft.base_digest": plan.base_digest,
    }
    return {key: value for key, value in digests.items() if value is not None}


def flat_params(config: RunConfig) -> list[tuple[str, str]]:
    """The sections that shape the result as dotted names and short strings; unset values are left out."""
    document = redact(config.model_dump(mode="json", exclude_none=True, include=set(_PARAM_SECTIONS)))
    return [(key, _shorten(value)) for key, value in _flatten(document, "") if value != {}]


def git_commit() -> str | None:
    """The commit of this code, or None outside a git checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _flatten(value: Any, prefix: str) -> Iterable[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= _PARAM_LENGTH else text[: _PARAM_LENGTH - 1] + "…"


def _link_or_copy(source: str, target: str) -> str:
    Path(target).unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:  # another file system
        shutil.copyfile(source, target)
    return target

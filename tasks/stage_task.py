"""What all stage tasks share: skip, supervise, retry rule, Prefect artifacts."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from uuid import UUID

from prefect import task
from prefect.artifacts import create_progress_artifact, create_table_artifact, update_progress_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import TaskRun
from prefect.logging import get_run_logger
from prefect.states import State
from prefect.tasks import Task

from ebft_core.errors import UserError
from ebft_core.manifests import StageRef, read_meta, verify_folder
from ebft_core.runs import RunPlan, read_plan
from ebft_core.stage_runner import record_stage
from tasks.observe import forward, notify
from tasks.supervise import STOPPING, StageFailed, StagePreempted, stage_command, supervise
from tasks.transient import TransientError

P = ParamSpec("P")
R = TypeVar("R")

RETRIES = 2
RETRY_DELAYS = [1.0, 10.0]
_PROGRESS_EVERY_SECONDS = 2.0


def is_transient(task_: Task[..., Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Retry what may go better next time; never what the user has to mend."""
    return not STOPPING.is_set() and isinstance(state.data, StageFailed | StagePreempted | TransientError)


def stage_task(name: str, *tags: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """`prefect.task` with the settings of a stage.

    The stage's own manifest decides about skipping, so Prefect's cache is off; results are references
    in JSON and stay in memory.
    """

    return task(
        name=name,
        task_run_name=name,
        tags=["ebft", f"stage:{name}", *tags],
        retries=RETRIES,
        retry_delay_seconds=RETRY_DELAYS,
        retry_condition_fn=is_transient,
        cache_policy=NO_CACHE,
        persist_result=False,
        result_serializer="json",
    )


def run_stage(
    name: str,
    run_dir: str,
    inputs: Sequence[Mapping[str, Any]],
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Bring stage `name` of the run to its verified output and return the output's reference as JSON.

    Args:
        environment: variables of the stage program beside this process's own.

    Raises:
        StageRefused, StagePreempted, StageFailed: as `supervise`.
        UserError: an input is not what its reference says any more.
    """
    log = get_run_logger()
    plan = read_plan(Path(run_dir))
    stage = plan.stage(name)
    check_inputs(inputs)
    ref = verify_folder(stage.output)
    if ref is None:
        notify(name, "started")
        progress = ProgressArtifact(name, log)

        def on_event(event: Mapping[str, Any]) -> None:
            progress(event)
            forward(name, event)

        command = stage_command(name, plan.run_dir)
        try:
            supervise(
                command,
                stage=name,
                run_dir=plan.run_dir,
                on_event=on_event,
                cwd=plan.working_dir,
                environment=environment,
            )
        except StageFailed as error:
            notify(name, "failed", text=str(error).splitlines()[0])
            raise
        progress.finish()
        notify(name, "done")
        ref = verify_folder(stage.output)
        if ref is None:
            raise TransientError(f"stage {name} ended well, but its output does not verify: {stage.output}")
    else:
        notify(name, "skipped")
        log.info("stage %s is done already: %s", name, stage.output)
        record_stage(plan.run_dir, stage, ref)
    publish_summary(plan, name, ref)
    return ref.to_json()


def check_inputs(inputs: Sequence[Mapping[str, Any]]) -> None:
    """Raise UserError unless every reference still fits its folder (the program hashes the contents)."""
    for data in inputs:
        ref = StageRef.from_json(data)
        if verify_folder(ref.path, deep=False) != ref:
            raise UserError(
                "the output of an earlier stage has changed",
                where=ref.uri,
                hint="start the run again: the damaged stage is then made anew",
            )


def publish_summary(plan: RunPlan, name: str, ref: StageRef) -> None:
    """The stage's reference and meta as a table in Prefect's page of the run."""
    rows = [{"what": key, "value": str(value)} for key, value in _flat(read_meta(ref.path))]
    rows += [{"what": key, "value": str(value)} for key, value in ref.to_json().items()]
    create_table_artifact(
        table=rows, key=artifact_key(name), description=f"{plan.run_dir.name}: stage {name}"
    )


def artifact_key(name: str) -> str:
    """Prefect wants lower-case letters, digits and dashes."""
    return f"ebft-{re.sub('[^a-z0-9]+', '-', name.lower())}"


class ProgressArtifact:
    """Follows a stage's events: progress to Prefect at most every two seconds, messages to its log."""

    def __init__(self, stage: str, log: logging.Logger | logging.LoggerAdapter[Any]) -> None:
        self._stage = stage
        self._log = log
        self._artifact: UUID | None = None
        self._last = 0.0

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event of the journal."""
        kind = event["kind"]
        if kind == "message":
            self._log.info("%s", event["text"])
        elif kind == "warning":
            self._log.warning("%s", event["text"])
        elif kind == "phase":
            self._log.info("%s: %s", self._stage, event["phase"])
        elif kind == "progress" and event["total"]:
            self._show(100.0 * event["done"] / event["total"])
        elif kind == "metrics" and event["total"]:
            self._show(100.0 * event["step"] / event["total"])

    def finish(self) -> None:
        """Show 100 %."""
        self._last = 0.0
        self._show(100.0)

    def _show(self, percent: float) -> None:
        if time.monotonic() - self._last < _PROGRESS_EVERY_SECONDS:
            return
        self._last = time.monotonic()
        bounded = min(100.0, max(0.0, percent))
        if self._artifact is None:
            key = f"{artifact_key(self._stage)}-progress"
            artifact = create_progress_artifact(bounded, key=key, description=f"stage {self._stage}")
            self._artifact = cast(UUID, artifact)  # a coroutine only inside an async flow
        else:
            update_progress_artifact(self._artifact, progress=bounded)


def _flat(meta: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in meta.items():
        name = f"{prefix}{key}"
        pairs += _flat(value, f"{name}.") if isinstance(value, Mapping) else [(name, value)]
    return pairs

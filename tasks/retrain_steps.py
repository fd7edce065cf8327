"""What `ebft-retrain` does around the run: look for news, fetch what the run continues, note what it made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from ebft_core.base_model import BaseModelInfo, read_base
from ebft_core.config import RunConfig
from ebft_core.data.unseen import count_unseen
from ebft_core.lease import hold_lease
from ebft_core.retrain import Continuation
from ebft_core.runs import plan_run, read_plan, write_run_folder
from tasks.observe import notify
from tasks.prepare_base import prepare_base
from tasks.registered_model import RegisteredModel
from tasks.retrain_line import Line
from tasks.stage_task import stage_task
from tasks.start_run import read_config


@stage_task("look", "registry")
def look_for_news(line: Line, fingerprint: str) -> RegisteredModel | None:
    """The version that was made from just this and judged; None if there is something new.

    Raises:
        TransientError: MLflow is away.
    """
    notify("look", "started")
    known = line.judged(fingerprint)
    text = "new data or settings" if known is None else f"version {known.version} was made from the same"
    get_run_logger().info("%s", text)
    notify("look", "message", text=text)
    notify("look", "done")
    return known


@stage_task("documents")
def look_for_documents(config: str | dict[str, Any], overrides: list[str]) -> int:
    """Documents that the run of this configuration would train on. Raises UserError."""
    notify("documents", "started")
    count = count_unseen(read_config(config, overrides))
    text = f"{count:,} documents to train on"
    get_run_logger().info("%s", text)
    notify("documents", "message", text=text)
    notify("documents", "done")
    return count


@stage_task("champion", "registry")
def find_champion(line: Line) -> RegisteredModel | None:
    """The present champion. Raises TransientError."""
    return line.registry.champion()


def continue_line(line: Line, champion: RegisteredModel | None) -> Continuation:
    """What the next run of the line needs, brought here. To be called from a flow.

    Raises:
        UserError: see `Line.continuation`. TransientError: MLflow is away.
    """
    if champion is None and line.judged_on() is None:
        return Continuation()
    return fetch_continuation(line, champion, _line_base(line.config))


@stage_task("fetch", "registry")
def fetch_continuation(line: Line, champion: RegisteredModel | None, base: BaseModelInfo) -> Continuation:
    """See `Line.continuation`."""
    notify("fetch", "started")
    found = line.continuation(champion, base)
    notify("fetch", "done")
    return found


@stage_task("record", "registry")
def record_version(
    line: Line, run_dir: str, fingerprint: str, found: Continuation, champion: RegisteredModel | None
) -> RegisteredModel:
    """See `Line.record`."""
    return line.record(read_plan(Path(run_dir)), fingerprint, found, champion)


def _line_base(config: RunConfig) -> BaseModelInfo:
    """The base model of the run file, made or fetched if it is not here."""
    plan = plan_run(config)
    with hold_lease(plan.run_dir):
        write_run_folder(plan, config)
        prepare_base(str(plan.run_dir))
    return read_base(plan.stage("prepare_base").output)

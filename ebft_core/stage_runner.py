"""Runs one stage as a program: lock, skip if done, run, commit, report by events and exit code.

A stage is a module with `run(context: StageContext) -> dict`; it knows neither locks nor manifests.
The same program serves the orchestrator and a person at a shell:
`python -m ebft_core.cli stage train --run-dir runs/runs/quickstart-0123456789ab`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import logging
import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ebft_core.config import RunConfig, load_config
from ebft_core.errors import ExitCode, UserError
from ebft_core.events import EventWriter
from ebft_core.lease import stage_lock
from ebft_core.manifests import StageRef, commit_folder, verify_folder, write_json_atomic
from ebft_core.runs import JOURNAL, RunPlan, StagePlan, code_digest, read_plan
from ebft_core.stop import StopSignal, install_stop
from ebft_core.storage.archive import Archive, open_archive
from ebft_core.storage.folders import Interrupted
from ebft_core.storage.run_copies import fetch_checkpoint, forget_checkpoint, kept_checkpoints
from ebft_core.storage.store import StorageTrouble

logger = logging.getLogger(__name__)

STAGE_MODULES: Mapping[str, str] = {
    "prepare_base": "ebft_core.stages.prepare_base",
    "tokenize": "ebft_core.stages.tokenize_data",
    "sft": "ebft_core.stages.warm_start",
    "train": "ebft_core.stages.train_policy",
    "merge": "ebft_core.stages.merge_adapter",
    "evaluate": "ebft_core.stages.evaluate_model",
    "compare": "ebft_core.stages.compare_arms",
}


class Preempted(Exception):  # noqa: N818 (an outcome, not an error)
    """The stage stopped on request and left what it needs to continue in its work folder."""


@dataclass(frozen=True)
class StageContext:
    """Everything a stage gets.

    Args:
        config: the resolved configuration of the run.
        run_dir: the run's folder (journals, logs, report).
        inputs: stage name -> verified folder, for every earlier stage.
        output: an empty staging folder; it becomes the stage's output when `run` returns.
        work: a folder that survives crashes (checkpoints, caches); removed after the commit.
        events: the stage's journal.
        stop: to be looked at in every long loop.
    """

    config: RunConfig
    run_dir: Path
    inputs: Mapping[str, Path]
    output: Path
    work: Path
    events: EventWriter
    stop: StopSignal


def main(name: str, run_dir: Path, *, modules: Mapping[str, str] = STAGE_MODULES) -> int:
    """Run stage `name` of a planned run and return the program's exit code.

    0 done (or nothing to do), 75 stopped on request, 78 an error the user can mend, 70 anything else.
    """
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    faulthandler.enable()
    stop = StopSignal()
    install_stop(stop)
    run_dir = run_dir.resolve()
    events = (
        EventWriter(run_dir / "events" / f"{name}.jsonl", name)
        if run_dir.is_dir() and name in modules
        else EventWriter(None, name)
    )
    try:
        run_stage(name, run_dir, events=events, stop=stop, modules=modules)
    except Preempted as error:
        events.message(f"stopped: {stop.reason or error}")
        return ExitCode.PREEMPTED
    except UserError as error:
        events.error({**error.to_json(), "text": error.render()})
        logger.error("%s", error.render())
        return ExitCode.BAD_INPUT
    except Exception as error:  # the end of a program: reported in full, and said by the exit code
        events.error({"what": f"{type(error).__name__}: {error}", "where": f"stage {name}"})
        logger.exception("stage %s failed", name)
        return ExitCode.INTERNAL
    return ExitCode.DONE


def run_stage(
    name: str,
    run_dir: Path,
    *,
    events: EventWriter,
    stop: StopSignal,
    modules: Mapping[str, str] = STAGE_MODULES,
) -> StageRef:
    """Run one stage unless its output already verifies; write and return its reference.

    Raises:
        UserError: unknown stage, no plan in `run_dir`, or an earlier stage is not done.
        Preempted: the stage was asked to stop.
    """
    plan = read_plan(run_dir)
    os.chdir(plan.working_dir)  # relative paths of the configuration mean the folder the run was started in
    stage = plan.stage(name)
    if name not in modules:
        raise UserError("no such stage program", where="stage", value=name, expected=", ".join(modules))
    with _stage_lock(plan, stage, events, stop):
        archive = _archive(plan, run_dir, stop)
        ref = verify_folder(stage.output) or (_restore(archive, stage, run_dir, events) if archive else None)
        if ref is None:
            with _copied_checkpoints(archive, stage, run_dir, events):
                ref = _run_locked(plan, stage, run_dir, events, stop, modules[name])
        record_stage(run_dir, stage, ref)
        if archive is not None:
            events.message(archive.push(stage))
            forget_checkpoint(archive, stage)
    return ref


def _archive(plan: RunPlan, run_dir: Path, stop: StopSignal) -> Archive | None:
    config = load_config(run_dir / "config.yaml")
    return open_archive(config, plan, stopped=lambda: stop.requested)


def _restore(archive: Archive, stage: StagePlan, run_dir: Path, events: EventWriter) -> StageRef | None:
    """Fetch the stage from the archive; None if it is not there or will not come: it is then computed."""
    try:
        ref = archive.restore(stage)
    except Interrupted:
        raise Preempted("while the stage was being fetched from the archive") from None
    except StorageTrouble as trouble:
        events.message(f"stage {stage.name} cannot be fetched from the archive: {trouble.reason}")
        return None
    if ref is not None:
        record_stage(run_dir, stage, ref)  # brings its journal, before anything is said in this one
        events.message(f"stage {stage.name} was fetched from the archive {archive.location}")
    return ref


@contextlib.contextmanager
def _copied_checkpoints(
    archive: Archive | None, stage: StagePlan, run_dir: Path, events: EventWriter
) -> Iterator[None]:
    """Go on from the archive's checkpoint where there is no work here; keep its copy up to date."""
    if archive is None:
        yield
        return
    try:
        checkpoint = fetch_checkpoint(archive, stage)
    except Interrupted:
        raise Preempted("while a checkpoint was being fetched from the archive") from None
    except StorageTrouble as trouble:
        checkpoint = None
        events.message(f"the checkpoint cannot be fetched from the archive: {trouble.reason}")
    if checkpoint is not None:
        events.message(f"{checkpoint} was fetched from the archive {archive.location}")
    minutes = load_config(run_dir / "config.yaml").storage.checkpoint_minutes
    with kept_checkpoints(archive, stage, minutes):
        yield


def record_stage(run_dir: Path, stage: StagePlan, ref: StageRef) -> None:
    """Note a finished stage in the run's folder; bring the journal along if another run made it."""
    journal = run_dir / "events" / f"{stage.name}.jsonl"
    made_elsewhere = stage.output / JOURNAL
    if made_elsewhere.exists() and (not journal.exists() or journal.stat().st_size == 0):
        journal.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made_elsewhere, journal)
    (run_dir / "stages").mkdir(exist_ok=True)
    write_json_atomic(run_dir / "stages" / f"{stage.name}.json", ref.to_json())


def _run_locked(
    plan: RunPlan, stage: StagePlan, run_dir: Path, events: EventWriter, stop: StopSignal, module: str
) -> StageRef:
    _check_code(plan, run_dir)
    inputs = _verified_inputs(plan, stage)
    if stop.requested:
        raise Preempted("before the stage began")
    config = load_config(run_dir / "config.yaml")
    context = StageContext(
        config=config,
        run_dir=run_dir,
        inputs=inputs,
        output=_empty_staging(stage),
        work=stage.work,
        events=events,
        stop=stop,
    )
    stage.work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        meta: dict[str, Any] = importlib.import_module(module).run(context)
        meta = {**meta, "wall_seconds": round(time.monotonic() - began, 3)}
        if events.path is not None:
            shutil.copyfile(events.path, context.output / JOURNAL)
        ref = commit_folder(context.output, stage.output, schema=f"ebft.{stage.name}/1", meta=meta)
    finally:  # after the commit there is nothing left here; a stage that failed leaves nothing half-written
        shutil.rmtree(context.output, ignore_errors=True)
    shutil.rmtree(stage.work, ignore_errors=True)
    return ref


def _check_code(plan: RunPlan, run_dir: Path) -> None:
    """An output made by other code than the plan's would be kept under a key that is not its own."""
    if code_digest() != plan.code_digest:
        raise UserError(
            "the code of ebft_core has changed since this run was planned",
            where=str(run_dir),
            hint="start the run again with `ebft run`: it is planned anew",
        )


def _verified_inputs(plan: RunPlan, stage: StagePlan) -> dict[str, Path]:
    inputs = {}
    for earlier in plan.before(stage.name):
        if verify_folder(earlier.output) is None:
            raise UserError(
                f"stage {stage.name} needs stage {earlier.name}, which is not done or is damaged",
                where=str(earlier.output),
                hint=f"run it first: python -m ebft_core.cli stage {earlier.name} --run-dir …",
            )
        inputs[earlier.name] = earlier.output
    return inputs


def _empty_staging(stage: StagePlan) -> Path:
    """A fresh staging folder beside the output; what a killed attempt left there is removed."""
    staging = stage.output.with_name(f".staging-{stage.output.name}")
    if staging.exists():
        shutil.rmtree(staging)
    staging.mkdir(parents=True)
    return staging


@contextlib.contextmanager
def _stage_lock(plan: RunPlan, stage: StagePlan, events: EventWriter, stop: StopSignal) -> Iterator[None]:
    """Hold the stage; wait while another run or a dying predecessor works on the same key."""
    stage.work.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(stage_lock(plan.workspace, stage.name, stage.key))
    holder = stage.work.with_suffix(".holder.json")
    waiting = False
    while True:
        try:
            lock.acquire(timeout=0.2)
            break
        except Timeout:
            if stop.requested:
                raise Preempted("while waiting for the stage's lock") from None
            if not waiting:
                waiting = True
                who = holder.read_text(encoding="utf-8") if holder.exists() else "another process"
                events.message(f"waiting: stage {stage.name} is being run by {who}")
    try:
        write_json_atomic(holder, {"pid": os.getpid(), "host": socket.gethostname()})
        yield
    finally:
        lock.release()


def read_stage_ref(run_dir: Path, name: str) -> StageRef | None:
    """The recorded reference of a finished stage; None if there is none."""
    path = run_dir / "stages" / f"{name}.json"
    return StageRef.from_json(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else None

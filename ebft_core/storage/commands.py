"""`ebft archive`: a run's archive by hand, and what an archive holds, from any machine."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import typer

from ebft_core.config import StorageConfig, load_config
from ebft_core.errors import ExitCode, UserError
from ebft_core.runs import RunPlan, read_plan
from ebft_core.storage.archive import STAGE_SETS, Archive, archive_notes, open_archive
from ebft_core.storage.folders import SETS, Folders, FolderSet
from ebft_core.storage.run_copies import RUN, RUN_SETS, push_run
from ebft_core.storage.store import StorageTrouble, Store, open_store


def push(run_dir: Path) -> ExitCode:
    """Archive what is finished and not there yet. Returns 70 if something could not be archived.

    Raises:
        UserError: not a run folder, a run without an archive, or an archive that cannot be reached.
    """
    plan, archive = _open(run_dir)
    archive.store.check(archive.where, write=True)
    for stage in archive.stages:
        typer.echo(archive.push(stage))
    typer.echo(push_run(archive))
    failed = any(note.error for note in archive_notes(plan.run_dir))
    return ExitCode.INTERNAL if failed else ExitCode.DONE


def status(run_dir: Path) -> None:
    """Print, for each stage, whether it is here and whether the archive can replace it.

    Raises:
        UserError: as `push`, or the archive does not answer.
    """
    plan, archive = _open(run_dir)
    for name, there in survey(archive).items():
        state = plan.stage(name).state
        typer.echo(f"{name:<14}{state:<9}{'in the archive' if there else 'not in the archive'}")


def list_runs(location: str) -> None:
    """Print the runs in an archive, the newest first, with what is there of each.

    Raises:
        UserError: the archive does not answer.
    """
    store = _reach(location)
    with _answering(location):
        folders = Folders(store, StorageConfig())
        sets = {entry.name: entry.written for entry in store.list(SETS)}
        names = [name for name in sets if name.startswith(SETS + RUN_SETS)]
        for name in sorted(names, key=lambda name: sets[name], reverse=True):
            run = name.removeprefix(SETS + RUN_SETS).removesuffix(".json")
            found = folders.find(RUN_SETS + run)
            if found is not None:
                keys = found.facts["stages"].items()
                there = [stage for stage, key in keys if f"{SETS}{STAGE_SETS}{stage}/{key}.json" in sets]
                when = datetime.fromtimestamp(sets[name]).isoformat(" ", "minutes")
                typer.echo(f"{run}  {when}  {', '.join(there) or 'no stage'}")


def fetch(location: str, run: str, output: Path, stages: Sequence[str]) -> None:
    """Bring a run's folder (report, configuration, journals) and outputs of its stages to `output`.

    Raises:
        UserError: no such run or stage in the archive, it does not answer, or a folder is there already.
    """
    folders = Folders(_reach(location), StorageConfig())
    with _answering(location):
        found = _found(folders, RUN_SETS + run, run, hint="`ebft archive list` shows what there is")
        keys = found.facts["stages"]
        wanted = {name: _found(folders, f"{STAGE_SETS}{name}/{keys.get(name)}", name) for name in stages}
        for name, folder in {RUN: found, **wanted}.items():
            _bring(folders, folder, output / name)
    typer.echo(f"{run}: {', '.join([RUN, *stages])} in {output}")


def _bring(folders: Folders, found: FolderSet, target: Path) -> None:
    if target.exists():
        raise UserError("the folder is there already", where="--output", value=str(target))
    staging = target.with_name(f".fetching-{target.name}")
    folders.get(found, staging)
    os.replace(staging, target)


def survey(archive: Archive) -> dict[str, bool]:
    """`Archive.survey`, after a look whether the archive can be read. Raises UserError."""
    archive.store.check(archive.where, write=False)
    with _answering(archive.where):
        return archive.survey()


def _reach(location: str) -> Store:
    store = open_store(location, StorageConfig())
    store.check(location, write=False)
    return store


def _found(folders: Folders, name: str, what: str, hint: str | None = None) -> FolderSet:
    found = folders.find(name)
    if found is None:
        raise UserError("not in the archive", where=folders.store.location, value=what, hint=hint)
    return found


@contextmanager
def _answering(where: str) -> Iterator[None]:
    try:
        yield
    except StorageTrouble as trouble:
        raise UserError("the archive does not answer", where=where, hint=trouble.reason) from trouble


def _open(run_dir: Path) -> tuple[RunPlan, Archive]:
    plan = read_plan(run_dir.resolve())
    archive = open_archive(load_config(plan.run_dir / "config.yaml"), plan)
    if archive is None:
        raise UserError(
            "the run has no archive",
            where="storage.archive",
            expected="s3://bucket/prefix or a folder",
            hint="start the run again with --set storage.archive=…: finished stages are skipped",
        )
    return plan, archive

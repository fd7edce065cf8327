"""`ebft archive push` and `ebft archive status`: a run's archive by hand."""

from __future__ import annotations

from pathlib import Path

import typer

from ebft_core.config import load_config
from ebft_core.errors import ExitCode, UserError
from ebft_core.runs import RunPlan, read_plan
from ebft_core.storage.archive import Archive, archive_notes, open_archive
from ebft_core.storage.run_copies import push_run
from ebft_core.storage.store import StorageTrouble


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


def survey(archive: Archive) -> dict[str, bool]:
    """`Archive.survey`, after a look whether the archive can be read. Raises UserError."""
    archive.store.check(archive.where, write=False)
    try:
        return archive.survey()
    except StorageTrouble as trouble:
        raise UserError("the archive does not answer", where=archive.where, hint=trouble.reason) from trouble


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

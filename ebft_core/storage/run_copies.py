"""What the archive keeps of a run beside its stages: the run's folder, and the newest checkpoint.

    sets/runs/<run>                   configuration, plan, journals, logs, report
    sets/checkpoints/<stage>/<key>    the newest checkpoint of a stage that is not finished

Another machine that starts the same run goes on with both. Trouble ends no run.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ebft_core.manifests import adopt_folder
from ebft_core.runs import StagePlan
from ebft_core.storage.archive import NOTES, Archive
from ebft_core.storage.folders import SETS, Folders, Interrupted
from ebft_core.storage.store import StorageTrouble

logger = logging.getLogger(__name__)

RUN_SETS, CHECKPOINT_SETS = "runs/", "checkpoints/"
RUN = "run"
_OF_THIS_MACHINE = ("stages", NOTES, "lease.*", ".*")
_PLANNED_HERE = frozenset({"plan.json", "config.yaml"})
_CHECKPOINTS = "checkpoints/checkpoint-*"
_EARLY_END_SECONDS, _EARLY_END_BYTES = 5.0, 64 << 20
_RUN_SECONDS = 60.0


def push_run(archive: Archive) -> str:
    """Copy the run's folder into the archive and note the outcome. Returns one line for people."""
    folders = archive.folders_at_the_end(_RUN_SECONDS)
    return f"{RUN}: {archive.noted(RUN, lambda: _put_run(archive, folders))}"


def fetch_run(archive: Archive) -> bool:
    """Bring what another machine kept of the run, unless the run has been planned here before.

    Returns:
        Whether something came. Trouble is logged: the run then begins with an empty folder.
    """
    run_dir = archive.plan.run_dir
    if (run_dir / "plan.json").exists():
        return False
    staging = run_dir / ".fetched"
    try:
        found = archive.folders.find(RUN_SETS + run_dir.name)
        if found is None:
            return False
        archive.folders.get(found, staging)
        for path in [p for p in staging.rglob("*") if p.is_file() and p.name not in _PLANNED_HERE]:
            target = run_dir / path.relative_to(staging)
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, target)
    except StorageTrouble as trouble:
        logger.warning("the run's folder cannot be fetched from the archive: %s", trouble.reason)
        return False
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return True


def fetch_checkpoint(archive: Archive, stage: StagePlan) -> str | None:
    """Bring the newest checkpoint of a stage that has no work here. The caller holds the stage.

    Returns:
        What came, in words; None if the archive has none that was made from the stages that are here.

    Raises:
        StorageTrouble: it is there, but does not come whole.
        Interrupted: asked to stop.
    """
    found = archive.folders.find(_checkpoint_set(stage)) if stage.state == "missing" else None
    if found is None or found.facts["lineage"] != archive.lineage(stage):
        return None
    staging = stage.work.with_name(f".restoring-{stage.key}")
    target = stage.work / str(found.facts["path"])
    archive.folders.get(found, staging)
    if adopt_folder(staging, target) is None:
        raise StorageTrouble(f"{target.name} in the archive is not what its manifest says", passing=False)
    return target.name


@contextmanager
def kept_checkpoints(archive: Archive, stage: StagePlan, minutes: float) -> Iterator[None]:
    """Copy the stage's newest checkpoint every `minutes` while the block runs, and when it is left early.

    An early end is not held up: where the checkpoint is large or the store does not answer at once, the
    copy stays as it was.
    """
    done = threading.Event()
    keeper = _Keeper(archive, stage)

    def copy_every() -> None:
        while not done.wait(60.0 * minutes):
            keeper.copy(archive.folders_for(done.is_set))

    thread = threading.Thread(target=copy_every, name="checkpoints", daemon=True)
    if minutes > 0:
        thread.start()
    try:
        yield
    except BaseException:
        done.set()
        keeper.copy(archive.folders_at_the_end(_EARLY_END_SECONDS), _EARLY_END_BYTES)
        raise
    finally:
        done.set()
        if minutes > 0:
            thread.join()


def forget_checkpoint(archive: Archive, stage: StagePlan) -> None:
    """Remove the copy of a stage that is finished. Trouble is logged; `ebft gc` removes it later."""
    try:
        archive.store.delete(f"{SETS}{_checkpoint_set(stage)}.json")
    except StorageTrouble as trouble:
        logger.info("the copy of a checkpoint was not removed: %s", trouble.reason)


class _Keeper:
    """Copies the checkpoints of one stage, with the journals that lead up to them, each once."""

    def __init__(self, archive: Archive, stage: StagePlan) -> None:
        self._archive = archive
        self._stage = stage
        self._copied: Path | None = None
        self._lock = threading.Lock()

    def copy(self, folders: Folders, at_most_bytes: float = math.inf) -> None:
        with self._lock:
            newest = self._newest()
            if newest is None or newest == self._copied:
                return
            try:
                if _size(newest) <= at_most_bytes:
                    self._put(newest, folders)
                    self._copied = newest
            except (StorageTrouble, Interrupted, OSError) as trouble:  # it may also have been replaced
                logger.warning("the checkpoint was not copied into the archive: %s", trouble)

    def _newest(self) -> Path | None:
        found = sorted(self._stage.work.glob(_CHECKPOINTS), key=lambda path: int(path.name.split("-")[1]))
        return found[-1] if found else None

    def _put(self, checkpoint: Path, folders: Folders) -> None:
        """Links keep the files while the trainer removes the checkpoint for a newer one."""
        staging = self._stage.work / ".copying"
        shutil.rmtree(staging, ignore_errors=True)
        try:
            shutil.copytree(checkpoint, staging, copy_function=os.link)
            facts = {
                "path": checkpoint.relative_to(self._stage.work).as_posix(),
                "lineage": self._archive.lineage(self._stage),
                "run_key": self._archive.plan.run_key,
            }
            folders.put(staging, _checkpoint_set(self._stage), facts)
            _put_run(self._archive, folders)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _put_run(archive: Archive, folders: Folders) -> str:
    """The run's folder as it is now; what means this machine only stays here."""
    plan = archive.plan
    facts = {"run_key": plan.run_key, "name": plan.name, "stages": {s.name: s.key for s in plan.stages}}
    with tempfile.TemporaryDirectory(prefix="ebft-run-") as scratch:
        copy = Path(scratch, "run")  # a journal may grow meanwhile
        shutil.copytree(plan.run_dir, copy, ignore=shutil.ignore_patterns(*_OF_THIS_MACHINE))
        folders.put(copy, RUN_SETS + plan.run_dir.name, facts)
    return f"in the archive {archive.location}"


def _checkpoint_set(stage: StagePlan) -> str:
    return f"{CHECKPOINT_SETS}{stage.name}/{stage.key}"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())

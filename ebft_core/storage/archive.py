"""The archive: finished stages in a store, found again by their keys (`run_copies.py`: the rest of a run).

A stage is fetched instead of being computed only if the stages it was made from are the ones that are
here: an output of another training is never combined with this one's. Trouble with the archive ends no run.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ebft_core.base_model import BASE_JSON
from ebft_core.config import RunConfig
from ebft_core.manifests import StageRef, adopt_folder, verify_folder, write_json_atomic
from ebft_core.runs import RunPlan, StagePlan
from ebft_core.storage.folders import Folders, FolderSet, Interrupted
from ebft_core.storage.store import StorageTrouble, open_store

logger = logging.getLogger(__name__)

NOT_ARCHIVED = frozenset({"publish"})
"""`publish` belongs to an MLflow server and is not a thing of its own."""
NOTES = "archive"
STAGE_SETS = "stages/"


@dataclass(frozen=True)
class Note:
    """What became of one attempt to archive a stage (or the report)."""

    name: str
    error: str | None


class Archive:
    """The archive of a run.

    Args:
        config: its `workspace` or its `storage` section names the place.
        plan: the run.
        stopped: whether transfers should end early.
    """

    def __init__(
        self, config: RunConfig, plan: RunPlan, *, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        assert config.archive is not None  # see `open_archive`
        location = config.archive
        if "://" not in location:
            location = str(plan.working_dir / Path(location).expanduser())
        self.store = open_store(location, config.storage)
        self.location = self.store.location
        self.where = config.archive_key
        self.plan = plan
        self._storage = config.storage
        self.folders = self.folders_for(stopped)

    def folders_for(self, stopped: Callable[[], bool]) -> Folders:
        """The same folders with another way to be stopped."""
        return Folders(self.store, self._storage, stopped=stopped)

    def folders_at_the_end(self, seconds: float) -> Folders:
        """The same folders for a process that is about to end: what takes longer is given up."""
        store = open_store(self.location, self._storage, attempts=2)
        deadline = time.monotonic() + seconds
        return Folders(store, self._storage, stopped=lambda: time.monotonic() > deadline, seconds=seconds)

    @property
    def stages(self) -> list[StagePlan]:
        """The stages of the run whose outputs go there, in their order."""
        return [stage for stage in self.plan.stages if stage.name not in NOT_ARCHIVED]

    def push(self, stage: StagePlan) -> str:
        """Copy a finished stage into the archive unless it is there; note the outcome in the run's folder.

        Returns:
            One line for people. Trouble is in it, not raised.
        """
        return f"stage {stage.name}: {self.noted(stage.name, lambda: self._push(stage))}"

    def noted(self, name: str, action: Callable[[], str]) -> str:
        """What `action` says, or the trouble it met; the outcome is noted in the run's folder."""
        try:
            said, error = action(), None
        except StorageTrouble as trouble:
            said, error = f"not in the archive: {trouble.reason}", trouble.reason
        except Interrupted:
            said, error = "not in the archive: stopped", "stopped"
        self._note(name, error)
        return said

    def restore(self, stage: StagePlan) -> StageRef | None:
        """Fetch a stage's output; None if the archive has none that fits. The caller holds the stage.

        Raises:
            StorageTrouble: it is there, but does not come whole.
            Interrupted: asked to stop; what came is kept for the next attempt.
        """
        found = self.find(stage)
        if found is None:
            return None
        staging = stage.output.with_name(f".restoring-{stage.output.name}")
        staging.mkdir(parents=True, exist_ok=True)
        self.folders.get(found, staging)
        ref = adopt_folder(staging, stage.output)
        if ref is None:
            raise StorageTrouble(
                f"stage {stage.name} in the archive is not what its manifest says", passing=False
            )
        self._note(stage.name, None)
        return ref

    def find(self, stage: StagePlan) -> FolderSet | None:
        """The stage in the archive, if it was made from the stages that are here. Raises StorageTrouble."""
        lineage = None if stage.name in NOT_ARCHIVED else self.lineage(stage)
        found = None if lineage is None else self.folders.find(_set_name(stage))
        return found if found is not None and found.facts.get("lineage") == lineage else None

    def survey(self) -> dict[str, bool]:
        """Stage -> whether the archive can replace it, given the stages here and, before it, in the archive.

        Raises:
            StorageTrouble: the archive does not answer.
        """
        lineage: dict[str, str] = {}
        there = {stage.name: False for stage in self.stages}
        for stage in self.stages:
            found = self.folders.find(_set_name(stage))
            there[stage.name] = found is not None and found.facts.get("lineage") == lineage
            identity = _identity(stage) or (found.facts["identity"] if found and there[stage.name] else None)
            if identity is None:
                break  # it will be made anew, and so will everything after it
            lineage[stage.name] = identity
        return there

    def _push(self, stage: StagePlan) -> str:
        ref = verify_folder(stage.output)
        lineage = self.lineage(stage)
        if stage.name in NOT_ARCHIVED or ref is None or lineage is None:
            return "not done, nothing to archive"
        if stage.name == "prepare_base" and not _self_contained(stage.output):
            return "the base model lies outside of the workspace and is not archived"
        facts = {
            "identity": _identity(stage),
            "manifest": ref.sha256,
            "lineage": lineage,
            "run_key": self.plan.run_key,
        }
        there = self.folders.find(_set_name(stage))
        if there is not None and {**there.facts, "run_key": None} == {**facts, "run_key": None}:
            return f"in the archive {self.location}"
        sent = self.folders.put(stage.output, _set_name(stage), facts)
        return f"in the archive {self.location}, {sent / 1e6:.1f} MB sent"

    def lineage(self, stage: StagePlan) -> dict[str, str] | None:
        """Earlier stage -> what identifies its output here; None if one is missing.

        A base model is identified by its digest, whatever folder holds it.
        """
        lineage = {}
        for earlier in self.plan.before(stage.name):
            identity = _identity(earlier)
            if identity is None:
                return None
            lineage[earlier.name] = identity
        return lineage

    def _note(self, name: str, error: str | None) -> None:
        folder = self.plan.run_dir / NOTES
        folder.mkdir(exist_ok=True)
        write_json_atomic(folder / f"{name}.json", {"name": name, "error": error})


def open_archive(
    config: RunConfig, plan: RunPlan, *, stopped: Callable[[], bool] = lambda: False
) -> Archive | None:
    """The run's archive; None if it has none."""
    return None if config.archive is None else Archive(config, plan, stopped=stopped)


def archive_notes(run_dir: Path) -> list[Note]:
    """What the last attempts to archive parts of this run came to."""
    paths = sorted((run_dir / NOTES).glob("*.json"))
    return [Note(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _set_name(stage: StagePlan) -> str:
    return f"{STAGE_SETS}{stage.name}/{stage.key}"


def _identity(stage: StagePlan) -> str | None:
    """What tells the stage's output here from any other with its key; None if it is not done."""
    ref = verify_folder(stage.output, deep=False)
    if ref is None:
        return None
    base = stage.output / BASE_JSON
    return str(json.loads(base.read_text(encoding="utf-8"))["digest"]) if base.is_file() else ref.sha256


def _self_contained(output: Path) -> bool:
    base = output / BASE_JSON
    return not base.is_file() or not Path(json.loads(base.read_text(encoding="utf-8"))["path"]).is_absolute()

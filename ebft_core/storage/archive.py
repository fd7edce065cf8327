"""The archive: finished stages in a store, found again by their keys.

A stage is fetched instead of being computed only if the stages it was made from are the ones that are
here: an output of another training is never combined with this one's. Trouble with the archive ends no run.
"""

from __future__ import annotations

import json
import logging
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

ARCHIVED = ("prepare_base", "tokenize", "train", "merge", "evaluate")
"""Stages whose outputs go there. `publish` belongs to an MLflow server and is not a thing of its own."""
REPORT = "report"
WHERE = "storage.archive"
_NOTES = "archive"
_RUN_FILES = ("report.html", "config.yaml", "plan.json")


@dataclass(frozen=True)
class Note:
    """What became of one attempt to archive a stage (or the report)."""

    name: str
    error: str | None


class Archive:
    """The archive of a run.

    Args:
        config: its `storage` section names the place.
        plan: the run.
        stopped: whether transfers should end early.
    """

    def __init__(
        self, config: RunConfig, plan: RunPlan, *, stopped: Callable[[], bool] = lambda: False
    ) -> None:
        assert config.storage.archive is not None  # see `open_archive`
        location = config.storage.archive
        if "://" not in location:
            location = str(plan.working_dir / Path(location).expanduser())
        self.store = open_store(location, config.storage)
        self.location = self.store.location
        self._plan = plan
        self._folders = Folders(self.store, config.storage, stopped=stopped)

    def push(self, stage: StagePlan) -> str:
        """Copy a finished stage into the archive unless it is there; note the outcome in the run's folder.

        Returns:
            One line for people. Trouble is in it, not raised.
        """
        try:
            said, error = self._push(stage), None
        except StorageTrouble as trouble:
            said, error = f"not in the archive: {trouble.reason}", trouble.reason
        except Interrupted:
            said, error = "not in the archive: stopped", "stopped"
        self._note(stage.name, error)
        return f"stage {stage.name}: {said}"

    def push_report(self) -> str:
        """The same for the report, with the configuration and the plan it belongs to."""
        staging = self._plan.run_dir / f".{REPORT}"
        try:
            staging.mkdir(exist_ok=True)
            for name in _RUN_FILES:
                (staging / name).write_bytes((self._plan.run_dir / name).read_bytes())
            self._folders.put(staging, f"runs/{self._plan.run_dir.name}", {"run_key": self._plan.run_key})
            said, error = f"in the archive {self.location}", None
        except StorageTrouble as trouble:
            said, error = f"not in the archive: {trouble.reason}", trouble.reason
        finally:
            for name in _RUN_FILES:
                (staging / name).unlink(missing_ok=True)
            staging.rmdir()
        self._note(REPORT, error)
        return f"{REPORT}: {said}"

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
        self._folders.get(found, staging)
        ref = adopt_folder(staging, stage.output)
        if ref is None:
            raise StorageTrouble(
                f"stage {stage.name} in the archive is not what its manifest says", passing=False
            )
        self._note(stage.name, None)
        return ref

    def find(self, stage: StagePlan) -> FolderSet | None:
        """The stage in the archive, if it was made from the stages that are here. Raises StorageTrouble."""
        lineage = self._lineage(stage) if stage.name in ARCHIVED else None
        found = None if lineage is None else self._folders.find(_set_name(stage))
        return found if found is not None and found.facts.get("lineage") == lineage else None

    def survey(self) -> dict[str, bool]:
        """Stage -> whether the archive can replace it, given the stages here and, before it, in the archive.

        Raises:
            StorageTrouble: the archive does not answer.
        """
        lineage: dict[str, str] = {}
        there = dict.fromkeys(ARCHIVED, False)
        for name in ARCHIVED:
            stage = self._plan.stage(name)
            found = self._folders.find(_set_name(stage))
            there[name] = found is not None and found.facts.get("lineage") == lineage
            identity = _identity(stage) or (found.facts["identity"] if found and there[name] else None)
            if identity is None:
                break  # it will be made anew, and so will everything after it
            lineage[name] = identity
        return there

    def _push(self, stage: StagePlan) -> str:
        ref = verify_folder(stage.output)
        lineage = self._lineage(stage)
        if stage.name not in ARCHIVED or ref is None or lineage is None:
            return "not done, nothing to archive"
        if stage.name == "prepare_base" and not _self_contained(stage.output):
            return "the base model lies outside of the workspace and is not archived"
        facts = {
            "identity": _identity(stage),
            "manifest": ref.sha256,
            "lineage": lineage,
            "run_key": self._plan.run_key,
        }
        there = self._folders.find(_set_name(stage))
        if there is not None and {**there.facts, "run_key": None} == {**facts, "run_key": None}:
            return f"in the archive {self.location}"
        sent = self._folders.put(stage.output, _set_name(stage), facts)
        return f"in the archive {self.location}, {sent / 1e6:.1f} MB sent"

    def _lineage(self, stage: StagePlan) -> dict[str, str] | None:
        """Stage -> what identifies its output here; None if one is missing. Of a base: the model's digest."""
        lineage = {}
        for earlier in self._plan.before(stage.name):
            identity = _identity(earlier)
            if identity is None:
                return None
            lineage[earlier.name] = identity
        return lineage

    def _note(self, name: str, error: str | None) -> None:
        folder = self._plan.run_dir / _NOTES
        folder.mkdir(exist_ok=True)
        write_json_atomic(folder / f"{name}.json", {"name": name, "error": error})


def open_archive(
    config: RunConfig, plan: RunPlan, *, stopped: Callable[[], bool] = lambda: False
) -> Archive | None:
    """The run's archive; None if `storage.archive` is not set."""
    return None if config.storage.archive is None else Archive(config, plan, stopped=stopped)


def archive_notes(run_dir: Path) -> list[Note]:
    """What the last attempts to archive parts of this run came to."""
    paths = sorted((run_dir / _NOTES).glob("*.json"))
    return [Note(**json.loads(path.read_text(encoding="utf-8"))) for path in paths]


def _set_name(stage: StagePlan) -> str:
    return f"stages/{stage.name}/{stage.key}"


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

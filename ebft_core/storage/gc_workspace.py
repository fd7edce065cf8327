"""Garbage of a workspace: runs that no rule keeps, stages without a run, abandoned work, leftovers.

Runs may go on meanwhile. A run in progress holds its folder, a stage in progress its key, and a run that
starts writes its plan under the workspace's lock, under which each removal looks at the plans once more.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from ebft_core.config import RetentionConfig
from ebft_core.lease import LEASE, if_free, is_held, stage_lock, workspace_lock
from ebft_core.storage.retention import DAY, Garbage, KnownRun, kept_runs, needed_stages

_HALF_MADE = ("staging", "restoring", "broken", "trash")
_LEFTOVERS = (
    "runs/.trash-*",
    "sources/*/.trash-*",
    "sources/**/.*.part",
    *(f"{top}/*/.{what}-*" for top in ("stages", "work") for what in _HALF_MADE),
)
_KEY = re.compile(r"[0-9a-f]{64}")


class WorkspaceGarbage:
    """The garbage of one workspace.

    Args:
        workspace: the folder.
        rules: the section `retention`.
        registered: run keys of the models in the registry.
    """

    def __init__(self, workspace: Path, rules: RetentionConfig, registered: Set[str]) -> None:
        self._root = workspace
        self._rules = rules
        self._registered = registered

    def find(self) -> list[Garbage]:
        """Everything that may be removed now, in the order in which it may be."""
        now = time.time()
        runs = known_runs(self._root)
        kept = kept_runs(runs, self._rules, self._registered, now)
        needed = needed_stages(kept)
        abandoned = now - DAY * self._rules.abandoned_days
        return [
            *self._garbage("run", _runs_but(self._root, kept, runs), "no rule keeps it"),
            *self._garbage("stage", self._keyed("stages", needed), "no run needs it"),
            *self._garbage("work", self._keyed("work", needed), "no run needs it"),
            *self._garbage("work", self._needed_work(needed), "abandoned", before=abandoned),
            *self._garbage("leftover", self._named(_LEFTOVERS), "of a process that ended", before=abandoned),
            *self._sources(kept, now),
        ]

    def remove(self, found: Garbage) -> bool:
        """Remove it unless somebody holds or needs it by now. Returns whether it is gone."""
        path = self._root / found.name
        trash = path.with_name(f".trash-{path.name.removeprefix('.trash-')}")
        with workspace_lock(self._root), if_free(self._lock_file(path)) as free:
            if not free or self._is_wanted(found, path):
                return False
            os.replace(path, trash)
        if trash.is_dir():
            shutil.rmtree(trash)
        else:
            trash.unlink()
        return True

    def _is_wanted(self, found: Garbage, path: Path) -> bool:
        """Whether it was written to, or a run came to need it, since it was found."""
        if not path.exists() or _written(path) != found.written:
            return True
        runs = known_runs(self._root)
        if found.kind == "stage":
            return (path.parent.name, path.name) in needed_stages(runs)
        return found.kind == "source" and any(run.busy for run in runs)

    def _garbage(
        self, kind: str, paths: Iterable[Path], why: str, *, before: float = math.inf
    ) -> Iterator[Garbage]:
        for path in sorted(paths):
            written = _written(path)
            if written < before:
                yield Garbage(kind, path.relative_to(self._root).as_posix(), _size(path), why, written)

    def _keyed(self, top: str, needed: Set[tuple[str, str]]) -> Iterator[Path]:
        """Folders `<top>/<stage>/<key>` of stages that are not needed."""
        for path in (self._root / top).glob("*/[!.]*"):
            if path.is_dir() and (path.parent.name, path.name) not in needed:
                yield path

    def _needed_work(self, needed: Set[tuple[str, str]]) -> Iterator[Path]:
        return (path for key in needed if (path := self._root.joinpath("work", *key)).is_dir())

    def _named(self, patterns: Iterable[str]) -> Iterator[Path]:
        return (path for pattern in patterns for path in self._root.glob(pattern))

    def _sources(self, kept: Iterable[KnownRun], now: float) -> Iterator[Garbage]:
        """Contents fetched from S3, which can be fetched again; a run in progress may be reading them."""
        if any(run.busy for run in kept):
            return
        files = (path for path in (self._root / "sources").glob("*/[!.]*") if path.is_file())
        old = now - DAY * self._rules.keep_days
        yield from self._garbage("source", files, "can be fetched again", before=old)

    def _lock_file(self, path: Path) -> Path | None:
        """The lock of whoever may be writing there: a run's lease, or a stage's."""
        if path.parent == self._root / "runs":
            return path / LEASE
        key = _KEY.search(path.name)
        inside = path.relative_to(self._root).parts[0]
        return stage_lock(self._root, path.parent.name, key[0]) if key and inside != "sources" else None


def known_runs(workspace: Path) -> list[KnownRun]:
    """The runs planned in a workspace."""
    runs = []
    for path in (workspace / "runs").glob("[!.]*/plan.json"):
        plan = json.loads(path.read_text(encoding="utf-8"))
        stages = {stage["name"]: stage["key"] for stage in plan["stages"]}
        busy, started = is_held(path.parent / LEASE), path.stat().st_mtime
        runs.append(KnownRun(path.parent.name, plan["name"], plan["run_key"], stages, started, busy))
    return runs


def _runs_but(workspace: Path, kept: list[KnownRun], runs: list[KnownRun]) -> list[Path]:
    return [workspace / "runs" / run.folder for run in runs if run not in kept]


def _files(path: Path) -> Iterator[Path]:
    return (p for p in path.rglob("*") if p.is_file()) if path.is_dir() else iter([path])


def _written(path: Path) -> float:
    """When the newest file was written; a folder without files counts itself. Locks do not count."""
    times = [file.stat().st_mtime for file in _files(path) if file.name != LEASE]
    return max(times, default=path.stat().st_mtime)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))

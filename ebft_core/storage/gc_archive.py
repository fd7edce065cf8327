"""Garbage of an archive: copies of runs that no rule keeps, stages without a run, contents that no set names.

Other machines may be sending meanwhile. A run names its stages in the archive when it starts; what nothing
names is left alone for `retention.orphan_days`; and whoever finds a content there that is older than a day
sends it again before naming it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Set
from concurrent.futures import ThreadPoolExecutor

from ebft_core.config import RetentionConfig, StorageConfig
from ebft_core.storage.archive import STAGE_SETS
from ebft_core.storage.folders import BLOBS, SETS, Folders, FolderSet
from ebft_core.storage.retention import DAY, Garbage, KnownRun, kept_runs, needed_stages
from ebft_core.storage.run_copies import CHECKPOINT_SETS, RUN_SETS
from ebft_core.storage.store import Entry, Store

_SUFFIX = ".json"


class ArchiveGarbage:
    """The garbage of one archive. Its methods raise StorageTrouble.

    Args:
        store: of the archive.
        storage: how it is reached.
        rules: the section `retention`.
        registered: run keys of the models in the registry.
    """

    def __init__(
        self, store: Store, storage: StorageConfig, rules: RetentionConfig, registered: Set[str]
    ) -> None:
        self._store = store
        self._storage = storage
        self._rules = rules
        self._registered = registered

    def find(self) -> list[Garbage]:
        """Everything that may be removed now, in the order in which it may be."""
        blobs = self._store.list(BLOBS)  # before the sets: what is named in between is then no orphan
        sets = self._sets()
        removable = list(self._copies(sets))
        removed = {garbage.name for garbage in removable}
        named = {
            BLOBS + str(file.sha256)
            for name, (_, found) in sets.items()
            if name not in removed
            for file in found.files
        }
        removable += self._orphans(
            "blob", (blob for blob in blobs if blob.name not in named), "nothing names it"
        )
        stale = (Garbage("upload", name, 0, "never finished") for name in self._store.stale())
        return [*removable, *stale]

    def remove(self, found: Garbage) -> bool:
        """Remove it unless it was written anew since it was found. Returns whether it is gone."""
        if found.kind == "upload":
            self._store.abort_stale()  # all of them at once
            return True
        now = self._store.stat(found.name)
        if now is not None and now.written != found.written:
            return False
        self._store.delete(found.name)
        return True

    def _sets(self) -> dict[str, tuple[Entry, FolderSet]]:
        """Name of a set's file -> the file and what it says. One that cannot be read stops everything."""
        folders = Folders(self._store, self._storage)
        entries = self._store.list(SETS)
        with ThreadPoolExecutor(self._storage.parallel) as pool:
            found = list(pool.map(lambda entry: folders.find(_set_name(entry.name)), entries))
        return {e.name: (e, f) for e, f in zip(entries, found, strict=True) if f is not None}

    def _copies(self, sets: Mapping[str, tuple[Entry, FolderSet]]) -> Iterator[Garbage]:
        runs = {n: self._run(e, f) for n, (e, f) in sets.items() if _set_name(n).startswith(RUN_SETS)}
        kept = kept_runs(runs.values(), self._rules, self._registered, time.time())
        needed = needed_stages(kept)
        yield from (
            _garbage("run", sets[name][0], "no rule keeps it")
            for name, run in runs.items()
            if run not in kept
        )
        others = (
            entry for name, (entry, _) in sets.items() if name not in runs and _stage(name) not in needed
        )
        yield from self._orphans("copy", others, "no run names it")

    def _run(self, entry: Entry, found: FolderSet) -> KnownRun:
        """A run whose folder was copied lately may be going on anywhere."""
        facts, busy = found.facts, not self._is_old(entry)
        folder = entry.name.rsplit("/", 1)[1].removesuffix(_SUFFIX)
        return KnownRun(folder, facts["name"], facts["run_key"], facts["stages"], entry.written, busy)

    def _orphans(self, kind: str, entries: Iterable[Entry], why: str) -> Iterator[Garbage]:
        return (_garbage(kind, entry, why) for entry in entries if self._is_old(entry))

    def _is_old(self, entry: Entry) -> bool:
        return time.time() - entry.written > DAY * self._rules.orphan_days


def _garbage(kind: str, entry: Entry, why: str) -> Garbage:
    return Garbage(kind, entry.name, entry.bytes, why, entry.written)


def _set_name(file: str) -> str:
    return file.removeprefix(SETS).removesuffix(_SUFFIX)


def _stage(file: str) -> tuple[str, str]:
    """Stage and key of `sets/stages/<stage>/<key>.json`, or of the same below `sets/checkpoints/`."""
    name, key = _set_name(file).removeprefix(STAGE_SETS).removeprefix(CHECKPOINT_SETS).split("/")
    return name, key

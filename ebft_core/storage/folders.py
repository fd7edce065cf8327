"""Whole folders in a store: contents under their digests, then one small file that names them all.

    blobs/<sha256>       a file's content, shared by every folder that holds it
    sets/<name>.json     a folder: paths, digests, sizes, facts; written when all of its blobs are there

A folder exists in the store from the moment its set is written, whole; an upload that was cut off leaves
blobs that the next attempt finds and skips.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from ebft_core.config import StorageConfig
from ebft_core.manifests import digest_json, sha256_file, write_json_atomic
from ebft_core.storage.store import Entry, StorageTrouble, Store, fetch, retried

BLOBS, SETS = "blobs/", "sets/"
FRESH_SECONDS = 24 * 3600.0
"""A blob that is older is sent again before a set names it: one that no set names may be removed then."""
_SCHEMA = "ebft.set/1"


class Interrupted(Exception):  # noqa: N818 (an outcome, not an error)
    """The transfer was asked to stop; what was transferred is kept."""


@dataclass(frozen=True)
class FolderSet:
    """A folder in a store: its files (names relative to it), and what its maker noted about it."""

    files: tuple[Entry, ...]
    facts: Mapping[str, Any]


class Folders:
    """Puts folders into a store and gets them out, several files at a time.

    Args:
        store: where.
        config: how many at a time, and for how long.
        stopped: looked at before every file.
        seconds: for how long, instead of `config.deadline_minutes`.
    """

    def __init__(
        self,
        store: Store,
        config: StorageConfig,
        *,
        stopped: Callable[[], bool] = lambda: False,
        seconds: float | None = None,
    ) -> None:
        self.store = store
        self._parallel = config.parallel
        self._seconds = 60.0 * config.deadline_minutes if seconds is None else seconds
        self._stopped = stopped

    def put(self, folder: Path, name: str, facts: Mapping[str, Any]) -> int:
        """Copy a folder into the store under `name`, replacing what is there. Returns the bytes sent.

        Raises:
            StorageTrouble: every attempt failed; the store holds what it held before, and some blobs more.
            Interrupted: asked to stop.
        """
        deadline = time.monotonic() + self._seconds
        self.store.abort_stale()
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        entries = [
            Entry(path.relative_to(folder).as_posix(), path.stat().st_size, sha256_file(path))
            for path in paths
        ]
        by_content = {entry.sha256: (entry, path) for entry, path in zip(entries, paths, strict=True)}
        sent = self._each(
            [partial(self._put_blob, entry, path, deadline) for entry, path in by_content.values()]
        )
        self._write_set(name, FolderSet(tuple(entries), facts), deadline)
        return sum(sent)

    def find(self, name: str) -> FolderSet | None:
        """The folder of that name; None if there is none. Raises StorageTrouble."""
        return retried(lambda: self._read_set(name), deadline=time.monotonic() + self._seconds)

    def get(self, found: FolderSet, target: Path) -> None:
        """Bring a folder's files to `target`; those that are there already with the right bytes are kept.

        Raises:
            StorageTrouble: a file did not come, or never with the right bytes. Nothing in `target` is wrong.
            Interrupted: asked to stop.
        """
        deadline = time.monotonic() + self._seconds
        wanted = {entry.name for entry in found.files}
        for path in [p for p in target.rglob("*") if p.is_file()]:
            if path.relative_to(target).as_posix() not in wanted:
                path.unlink()
        self._each([partial(self._get_blob, entry, target / entry.name, deadline) for entry in found.files])

    def _each(self, actions: Sequence[Callable[[], int]]) -> list[int]:
        """Run all actions, several at a time; the first that fails keeps the rest from beginning."""

        def run(action: Callable[[], int]) -> int:
            if self._stopped():
                raise Interrupted
            return action()

        pool = ThreadPoolExecutor(self._parallel, thread_name_prefix="storage")
        try:
            return list(pool.map(run, actions))
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

    def _put_blob(self, entry: Entry, path: Path, deadline: float) -> int:
        assert entry.sha256 is not None  # hashed above
        name, sha256 = BLOBS + entry.sha256, entry.sha256
        there = retried(lambda: self.store.stat(name), deadline=deadline)
        same = there is not None and (there.bytes, there.sha256) == (entry.bytes, sha256)
        if there is not None and same and time.time() - there.written < FRESH_SECONDS:
            return 0
        retried(lambda: self.store.put(name, path, sha256), deadline=deadline)
        return entry.bytes

    def _get_blob(self, entry: Entry, path: Path, deadline: float) -> int:
        assert entry.sha256 is not None  # checked by `_parse`
        sha256 = entry.sha256
        if path.is_file() and sha256_file(path) == sha256:
            return 0
        retried(lambda: fetch(self.store, BLOBS + sha256, path, sha256), deadline=deadline)
        return entry.bytes

    def _write_set(self, name: str, folder: FolderSet, deadline: float) -> None:
        files = [{"path": e.name, "bytes": e.bytes, "sha256": e.sha256} for e in folder.files]
        body = {"schema": _SCHEMA, "files": files, "facts": dict(folder.facts)}
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "set.json")
            write_json_atomic(path, {**body, "sha256": digest_json(body)})
            digest = sha256_file(path)
            retried(lambda: self.store.put(f"{SETS}{name}.json", path, digest), deadline=deadline)

    def _read_set(self, name: str) -> FolderSet | None:
        key = f"{SETS}{name}.json"
        entry = self.store.stat(key)
        if entry is None:
            return None
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "set.json")
            self.store.get(key, path)
            return _parse(path.read_bytes(), f"{self.store.location}/{key}")


def _parse(content: bytes, where: str) -> FolderSet:
    """The set in `content`; trouble unless it is, byte for byte, what its own digest says."""
    try:
        document = json.loads(content)
        digest = document.pop("sha256")
        if digest != digest_json(document) or document["schema"] != _SCHEMA:
            raise ValueError("another digest")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageTrouble(f"{where} is damaged") from error
    files = tuple(Entry(f["path"], int(f["bytes"]), str(f["sha256"])) for f in document["files"])
    for entry in files:
        path = PurePosixPath(entry.name)
        if path.is_absolute() or ".." in path.parts:
            raise StorageTrouble(f"{where} names a file outside of its folder", passing=False)
    return FolderSet(files, document["facts"])

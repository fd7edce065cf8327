"""What a store can do, its trouble, and the store that is a folder.

A store maps names (`blobs/ab…`, with `/` between parts) to files. A name is there with all of its content
or not at all. Whole folders are built on top of this in `folders.py`.
"""

from __future__ import annotations

import errno
import os
import random
import shutil
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from ebft_core.config import StorageConfig
from ebft_core.config.storage_section import S3
from ebft_core.errors import UserError
from ebft_core.manifests import sha256_file

T = TypeVar("T")

ATTEMPTS = 10
STALE_SECONDS = 24 * 3600.0
"""An upload that is older and not complete is taken for abandoned."""
_PASSING = frozenset({errno.EAGAIN, errno.EBUSY, errno.EIO, errno.ESTALE, errno.ETIMEDOUT})
_FIRST_DELAY, _LONGEST_DELAY = 0.25, 20.0  # seconds


class StorageTrouble(Exception):  # noqa: N818 (the name of what happened)
    """A store could not do what it was asked.

    Args:
        reason: one line for people, without secrets.
        passing: another attempt may go better.
    """

    def __init__(self, reason: str, *, passing: bool = True) -> None:
        self.reason = reason
        self.passing = passing
        super().__init__(reason)


@dataclass(frozen=True)
class Entry:
    """A file in a store: its name, size in bytes, hex sha256 where the store knows it, and when it was
    written (seconds since the epoch; 0 where nobody asked the store)."""

    name: str
    bytes: int
    sha256: str | None = None
    written: float = 0.0


class Store(Protocol):
    """A folder or a prefix in S3. Every method but `check` raises StorageTrouble; all may run in threads."""

    location: str

    def check(self, where: str, *, write: bool) -> None:
        """Raise UserError, at config key `where`, unless the store can be read (and written)."""

    def list(self, prefix: str) -> list[Entry]:
        """Every file whose name begins with `prefix`, by name, without digests."""

    def stat(self, name: str) -> Entry | None:
        """One file with its digest (None for a file that somebody else put there); None if absent."""

    def put(self, name: str, path: Path, sha256: str) -> None:
        """Copy a file into the store; it is there when this returns, and not before."""

    def get(self, name: str, path: Path) -> None:
        """Copy a file out of the store. The caller verifies it."""

    def delete(self, name: str) -> None:
        """Remove a file; one that is not there is no trouble."""

    def stale(self) -> Sequence[str]:
        """Names of what uploads that never ended have left."""

    def abort_stale(self) -> None:
        """Remove what `stale` names."""


def open_store(location: str, config: StorageConfig, *, attempts: int = ATTEMPTS) -> Store:
    """The store at `s3://bucket/prefix`, or in a folder; `attempts` bounds those of a single request."""
    if location.startswith(S3):
        from ebft_core.storage.s3 import S3Store

        return S3Store(location, config, attempts=attempts)
    return FolderStore(Path(location).expanduser())


def retried(action: Callable[[], T], *, deadline: float, attempts: int = ATTEMPTS) -> T:
    """`action()`, tried again after passing trouble, with growing random pauses.

    Args:
        deadline: `time.monotonic()` after which there is no further attempt.

    Raises:
        StorageTrouble: that of the last attempt.
    """
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except StorageTrouble as trouble:
            pause = random.uniform(0.5, 1.0) * min(_LONGEST_DELAY, _FIRST_DELAY * 2 ** (attempt - 1))
            if not trouble.passing or attempt == attempts or time.monotonic() + pause > deadline:
                raise
            time.sleep(pause)
    raise AssertionError("the loop returns or raises")


def fetch(store: Store, name: str, path: Path, sha256: str) -> None:
    """One attempt to bring a file here: whole and with the right digest, or StorageTrouble."""
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.part")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        store.get(name, part)
        if sha256_file(part) != sha256:
            raise StorageTrouble(f"{store.location}/{name} came with other bytes than its sha256 says")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


class FolderStore:
    """A folder as a store, on a disk or a mounted share."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.location = str(self.root)

    def check(self, where: str, *, write: bool) -> None:
        """See `Store`."""
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe = self.root / f".probe-{uuid.uuid4().hex[:8]}"
            if write:
                probe.touch()
                probe.unlink()
        except OSError as error:
            raise UserError(
                "the folder cannot be written",
                where=where,
                value=self.location,
                expected="a folder in which files can be made",
                hint=str(error.strerror),
            ) from error

    def list(self, prefix: str) -> list[Entry]:
        """See `Store`."""
        found = (p for p in self.root.rglob("*") if p.is_file() and not p.name.startswith("."))
        named = ((p.relative_to(self.root).as_posix(), p.stat()) for p in found)
        entries = (Entry(name, s.st_size, written=s.st_mtime) for name, s in named if name.startswith(prefix))
        return sorted(entries, key=lambda entry: entry.name)

    def stat(self, name: str) -> Entry | None:
        """See `Store`; the digest is that of the bytes that are there."""
        path = self.root / name
        try:
            return Entry(name, path.stat().st_size, sha256_file(path), path.stat().st_mtime)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise _trouble(path, error) from error

    def put(self, name: str, path: Path, sha256: str) -> None:
        """See `Store`."""
        target = self.root / name
        part = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, part)
            with open(part, "rb") as stream:
                os.fsync(stream.fileno())
            if sha256_file(part) != sha256:
                raise StorageTrouble(f"{target} was written with other bytes than were sent")
            os.replace(part, target)
        except OSError as error:
            raise _trouble(target, error) from error
        finally:
            part.unlink(missing_ok=True)

    def get(self, name: str, path: Path) -> None:
        """See `Store`."""
        try:
            shutil.copyfile(self.root / name, path)
        except FileNotFoundError as error:
            raise StorageTrouble(f"{self.root / name} is not there", passing=False) from error
        except OSError as error:
            raise _trouble(self.root / name, error) from error

    def delete(self, name: str) -> None:
        """See `Store`."""
        try:
            (self.root / name).unlink(missing_ok=True)
        except OSError as error:
            raise _trouble(self.root / name, error) from error

    def stale(self) -> Sequence[str]:
        """See `Store`."""
        oldest = time.time() - STALE_SECONDS
        parts = (p for p in self.root.rglob(".*.part") if p.stat().st_mtime < oldest)
        return sorted(p.relative_to(self.root).as_posix() for p in parts)

    def abort_stale(self) -> None:
        """See `Store`."""
        for name in self.stale():
            self.delete(name)


def _trouble(path: Path, error: OSError) -> StorageTrouble:
    return StorageTrouble(f"{path}: {error.strerror}", passing=error.errno in _PASSING)

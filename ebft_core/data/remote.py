"""Sources on S3: listed by pattern, known by their content, kept in the workspace under their digest.

An object that carries its own sha256 (metadata `sha256`) is known without being read. Any other object is
read at every look, because nothing else S3 says about it is a digest of its bytes.
"""

from __future__ import annotations

import os
import re
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TypeVar

from ebft_core.config import RunConfig, StorageConfig
from ebft_core.errors import UserError
from ebft_core.manifests import sha256_file
from ebft_core.storage.store import S3, Entry, StorageTrouble, Store, fetch, open_store, retried

T = TypeVar("T")

_GLOB = re.compile(r"[*?\[]")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class RemoteObject:
    """An object as a source: its address, size, hex sha256, and the file that holds it here once fetched."""

    uri: str
    bytes: int
    sha256: str
    path: Path


@dataclass(frozen=True)
class Remote:
    """How sources on S3 are reached, and the folder that keeps their contents."""

    storage: StorageConfig
    cache: Path

    def find(self, pattern: str, where: str) -> list[RemoteObject]:
        """The objects a pattern means, by name, with their digests; none if nothing matches.

        Raises:
            UserError: no credentials, no such bucket, no access, no answer.
        """
        store, pattern = self._open(pattern)
        store.check(where, write=False)
        start = _GLOB.search(pattern)
        with _said(where, pattern):
            listed = self._retried(lambda: store.list(pattern[: start.start()] if start else pattern))
            matches = _matcher(pattern)
            named = [e for e in listed if e.name == pattern] or [
                e for e in listed if matches.fullmatch(e.name)
            ]
            with ThreadPoolExecutor(self.storage.parallel) as pool:
                return list(pool.map(lambda entry: self._known(store, entry), named))

    def fetch(self, objects: list[RemoteObject], where: str) -> None:
        """Bring the contents here that are not here yet, verified. Raises UserError."""
        missing = [found for found in objects if not self._is_here(found)]

        def bring(found: RemoteObject) -> None:
            store, name = self._open(found.uri)
            self._retried(lambda: fetch(store, name, found.path, found.sha256))

        with (
            _said(where, objects[0].uri if objects else ""),
            ThreadPoolExecutor(self.storage.parallel) as pool,
        ):
            list(pool.map(bring, missing))

    def _known(self, store: Store, entry: Entry) -> RemoteObject:
        uri = f"{store.location}/{entry.name}"
        head = self._retried(lambda: store.stat(entry.name))
        if head is None:
            raise StorageTrouble(f"{uri} is gone", passing=False)
        if head.sha256 is not None and _DIGEST.fullmatch(head.sha256):
            return RemoteObject(uri, head.bytes, head.sha256, self._place(entry.name, head.sha256))
        digest = self._retried(lambda: self._read(store, head))
        return RemoteObject(uri, head.bytes, digest, self._place(entry.name, digest))

    def _read(self, store: Store, entry: Entry) -> str:
        """Fetch an object without a digest of its own into the cache, and return the digest."""
        self.cache.mkdir(parents=True, exist_ok=True)
        part = self.cache / f".{uuid.uuid4().hex}.part"
        try:
            store.get(entry.name, part)
            if part.stat().st_size != entry.bytes:
                raise StorageTrouble(f"{store.location}/{entry.name} came with another size")
            digest = sha256_file(part)
            place = self._place(entry.name, digest)
            place.parent.mkdir(exist_ok=True)
            os.replace(part, place)
        finally:
            part.unlink(missing_ok=True)
        return digest

    def _place(self, name: str, digest: str) -> Path:
        """By content; the ending is kept, as it tells the format."""
        return self.cache / digest[:2] / f"{digest}{PurePosixPath(name).suffix.lower()}"

    def _is_here(self, found: RemoteObject) -> bool:
        return found.path.is_file() and sha256_file(found.path) == found.sha256

    def _open(self, uri: str) -> tuple[Store, str]:
        bucket, _, name = uri.removeprefix(S3).partition("/")
        return open_store(S3 + bucket, self.storage), name

    def _retried(self, action: Callable[[], T]) -> T:
        return retried(action, deadline=time.monotonic() + 60.0 * self.storage.deadline_minutes)


def remote_of(config: RunConfig) -> Remote:
    """The run's way to sources on S3: its `storage` section, and the folder `sources` of its workspace."""
    return Remote(config.storage, Path(config.local_workspace).expanduser().absolute() / "sources")


@contextmanager
def _said(where: str, value: str) -> Iterator[None]:
    """Trouble that lasted through every attempt, as an error at `where`."""
    try:
        yield
    except StorageTrouble as trouble:
        raise UserError(
            "the source cannot be fetched", where=where, value=value, hint=trouble.reason
        ) from trouble


def _matcher(pattern: str) -> re.Pattern[str]:
    """A glob as a regular expression: `*` and `?` stay within one part of a name, `**/` crosses them."""
    tokens = {"**/": r"(?:[^/]+/)*", "**": r".*", "*": r"[^/]*", "?": r"[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[!?[^\]]+\])", pattern)
    return re.compile("".join(_part(part, tokens) for part in parts), re.DOTALL)


def _part(part: str, tokens: dict[str, str]) -> str:
    if part.startswith("[") and part.endswith("]"):
        return part.replace("[!", "[^", 1)
    return tokens.get(part, re.escape(part))

"""Folders that are either whole or absent: hash every file, write the manifest last, fsync, rename.

A folder counts as finished only while its `manifest.json` still describes every byte in it. A process
killed at any moment leaves the old state or the new one, never a mixture that verifies.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

MANIFEST = "manifest.json"


@dataclass(frozen=True)
class StageRef:
    """What one stage hands to the next: small enough for JSON, exact enough to be checked.

    Args:
        uri: where the committed folder is (`file:///…`).
        sha256: digest of the manifest: names, contents and meta of the folder.
        bytes: total size of the files, without the manifest.
        schema: what the folder holds, for example `ebft.train/1`.
    """

    uri: str
    sha256: str
    bytes: int
    schema: str

    @property
    def path(self) -> Path:
        """The folder on this machine."""
        return Path(unquote(urlparse(self.uri).path))

    def to_json(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StageRef:
        """The inverse of `to_json`. Raises KeyError if a part is missing."""
        return cls(data["uri"], data["sha256"], int(data["bytes"]), data["schema"])


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def digest_files(paths: Iterable[Path], *, root: Path | None = None) -> str:
    """Hex sha256 over the names and contents of files, whatever their order.

    Args:
        paths: the files.
        root: names are relative to this folder; without it only the last part of each path counts.
    """
    return digest_entries((p.relative_to(root).as_posix() if root else p.name, sha256_file(p)) for p in paths)


def digest_folder(folder: Path) -> str:
    """`digest_files` of every file below `folder`."""
    return digest_files((path for path in folder.rglob("*") if path.is_file()), root=folder)


def digest_entries(entries: Iterable[tuple[str, str]]) -> str:
    """Hex sha256 over (name, hex sha256 of the content) of files, whatever their order."""
    return digest_json(sorted(entries))


def digest_json(value: object) -> str:
    """Hex sha256 of a JSON value, independent of the order of keys."""
    return hashlib.sha256(_canonical(value).encode()).hexdigest()


def commit_folder(staging: Path, target: Path, *, schema: str, meta: Mapping[str, Any]) -> StageRef:
    """Turn a finished staging folder into the verified folder `target`.

    `staging` must be on the same file system. If `target` already verifies (another process was
    faster) it is kept and `staging` is removed; a `target` that does not verify is replaced.

    Raises:
        ValueError: `staging` holds a link or a special file, or a file called manifest.json.
    """
    files = []
    for path in _walk(staging):
        name = path.relative_to(staging).as_posix()
        if name == MANIFEST:
            raise ValueError(f"{path}: the name {MANIFEST} is reserved")
        _fsync(path)
        files.append({"path": name, "sha256": sha256_file(path), "bytes": path.stat().st_size})
    total = sum(path.stat().st_size for path in _walk(staging))
    body: dict[str, Any] = {"schema": schema, "bytes": total, "files": files, "meta": dict(meta)}
    write_text_atomic(staging / MANIFEST, _render(body))
    for folder in [p for p in staging.rglob("*") if p.is_dir()] + [staging]:
        _fsync(folder)
    return _replace_folder(staging, target) or _ref(target, body)


def verify_folder(target: Path, *, deep: bool = True) -> StageRef | None:
    """The folder's reference, or None unless it holds exactly what its manifest says.

    Args:
        target: a folder made by `commit_folder`.
        deep: hash every file; otherwise only names and sizes are compared.
    """
    body = _read_body(target)
    if body is None:
        return None
    present = {p.relative_to(target).as_posix(): p for p in target.rglob("*") if not p.is_dir()}
    present.pop(MANIFEST)
    if set(present) != {entry["path"] for entry in body["files"]}:
        return None
    for entry in body["files"]:
        path = present[entry["path"]]
        if path.is_symlink() or path.stat().st_size != entry["bytes"]:
            return None
        if deep and sha256_file(path) != entry["sha256"]:
            return None
    return _ref(target, body)


def adopt_folder(staging: Path, target: Path) -> StageRef | None:
    """Put a copy of a committed folder, manifest and all, in place; None if the copy does not verify.

    A `target` that verifies is kept, as in `commit_folder`.
    """
    if verify_folder(staging) is None:
        return None
    for path in [*staging.rglob("*"), staging]:
        _fsync(path)
    return _replace_folder(staging, target) or verify_folder(target, deep=False)


def read_meta(target: Path) -> dict[str, Any]:
    """The meta of a committed folder. Raises ValueError if its manifest is missing or damaged."""
    body = _read_body(target)
    if body is None:
        raise ValueError(f"{target}: no valid {MANIFEST}")
    return dict(body["meta"])


def write_text_atomic(path: Path, text: str) -> None:
    """Write a file so that readers and crashes see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    with open(temporary, "w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, path)
    _fsync(path.parent)


def write_json_atomic(path: Path, value: object) -> None:
    """`write_text_atomic` of a JSON value."""
    write_text_atomic(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def _canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _render(body: Mapping[str, Any]) -> str:
    return (
        json.dumps({**body, "sha256": digest_json(body)}, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    )


def _read_body(target: Path) -> dict[str, Any] | None:
    """The manifest without its own digest; None if a single byte of it is not as written."""
    try:
        text = (target / MANIFEST).read_text(encoding="utf-8")
        body = json.loads(text)
    except (OSError, ValueError):
        return None
    if not isinstance(body, dict) or "sha256" not in body:
        return None
    del body["sha256"]
    return body if _render(body) == text else None


def _ref(target: Path, body: Mapping[str, Any]) -> StageRef:
    return StageRef(target.resolve().as_uri(), digest_json(body), int(body["bytes"]), str(body["schema"]))


def _walk(folder: Path) -> list[Path]:
    """Regular files below `folder`, sorted; anything else but folders is refused."""
    found = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_dir() or path.is_file()):
            raise ValueError(f"{path}: only regular files can be committed")
        if path.is_file():
            found.append(path)
    return found


def _replace_folder(staging: Path, target: Path) -> StageRef | None:
    """Move `staging` to `target`; the reference of the old folder where that one is kept."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        kept = verify_folder(target)
        if kept is not None:
            shutil.rmtree(staging)
            return kept
        broken = target.with_name(f".broken-{target.name}-{uuid.uuid4().hex[:8]}")
        os.rename(target, broken)
        shutil.rmtree(broken)
    os.rename(staging, target)
    _fsync(target.parent)
    return None


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

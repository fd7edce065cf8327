"""Which files a source means: globs, formats, a fixed order, and digests of the contents.

Imports nothing heavy: the planner digests the sources before any stage runs. Digests are of contents,
never of sizes and times, so a file edited within the same second and to the same length is noticed.
"""

from __future__ import annotations

import glob
import os
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict

from ebft_core.config import SourceConfig
from ebft_core.data.remote import Remote
from ebft_core.errors import UserError
from ebft_core.manifests import digest_json, sha256_file
from ebft_core.storage.store import S3

FileFormat = Literal["text", "jsonl", "csv", "parquet", "dataset", "hub"]

STDLIB = "stdlib:"
HUB = "hub:"

_FORMAT_OF_SUFFIX: dict[str, FileFormat] = {
    ".txt": "text",
    ".py": "text",
    ".md": "text",
    ".rst": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".parquet": "parquet",
}
_NOT_STDLIB = frozenset({"site-packages", "dist-packages", "__pycache__"})
_DATASET_MARK = "dataset_info.json"
_DATASET_DICT_MARK = "dataset_dict.json"


class Fingerprint(TypedDict):
    """One input file: its name (portable for `stdlib:` files), size in bytes and hex sha256."""

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SourceFile:
    """One file (or `datasets` folder, or hub dataset) to read.

    Args:
        path: where it is; for the hub, the dataset id.
        name: how reports call it: as written by the user, `stdlib:abc.py` for the standard library.
        format: how to read it.
        split: split of a `dataset` or `hub` source.
        revision: revision of a `hub` source.
        known: size and hex sha256, where they are known without reading the file (S3).
    """

    path: Path
    name: str
    format: FileFormat
    split: str = "train"
    revision: str | None = None
    known: tuple[int, str] | None = None


def resolve_sources(
    sources: Sequence[SourceConfig],
    *,
    where: str = "data.sources",
    remote: Remote | None = None,
    fetch: bool = True,
) -> list[SourceFile]:
    """All files of the sources: sources in the order given, files of one source by name.

    Args:
        sources: as configured.
        where: config key path used in errors.
        remote: how to reach sources on S3; None refuses them.
        fetch: bring contents here that are not in the workspace yet; otherwise their paths may not exist.

    Raises:
        UserError: a source matches nothing or cannot be reached, or its format cannot be told from the
            file's name.
    """
    return [
        file
        for index, source in enumerate(sources)
        for file in _resolve_one(source, f"{where}[{index}].path", remote, fetch)
    ]


def resolve_patterns(patterns: Sequence[str], *, where: str) -> list[SourceFile]:
    """`resolve_sources` for plain glob patterns with automatic formats."""
    return resolve_sources([SourceConfig(path=pattern) for pattern in patterns], where=where)


def fingerprint_sources(sources: Sequence[SourceConfig], remote: Remote | None = None) -> list[Fingerprint]:
    """Names, sizes and content digests of everything the sources read, in reading order.

    A hub dataset is fingerprinted by the commit its revision points to (this needs the network); an object
    on S3 by the sha256 it carries, or else by its bytes.

    Raises:
        UserError: as `resolve_sources`, or the hub cannot be reached.
    """
    return [
        entry for file in resolve_sources(sources, remote=remote, fetch=False) for entry in _fingerprint(file)
    ]


def digest_sources(sources: Sequence[SourceConfig], remote: Remote | None = None) -> str:
    """One hex sha256 over `fingerprint_sources`."""
    return digest_json(fingerprint_sources(sources, remote))


def _resolve_one(source: SourceConfig, where: str, remote: Remote | None, fetch: bool) -> list[SourceFile]:
    if source.format == "hub":
        return [SourceFile(Path(source.path), HUB + source.path, "hub", source.split, source.revision)]
    if source.path.startswith(S3) and remote is not None:
        return _resolve_s3(source, where, remote, fetch)
    if "://" in source.path:
        raise UserError(
            "remote sources of this kind are not supported",
            where=where,
            value=source.path,
            expected="a local file, glob or folder; in data.sources also s3://bucket/name, or a hub dataset "
            "id with `format: hub`",
        )
    matches = expand_pattern(source.path)
    if not matches:
        raise UserError(
            "no data files",
            where=where,
            value=source.path,
            expected="a pattern that matches at least one file",
            hint=f"relative paths are looked up in {os.getcwd()}",
        )
    return [
        SourceFile(path, name, _format_of(path, source.format, where), source.split) for path, name in matches
    ]


def _resolve_s3(source: SourceConfig, where: str, remote: Remote, fetch: bool) -> list[SourceFile]:
    found = remote.find(source.path, where)
    if not found:
        raise UserError(
            "no data files",
            where=where,
            value=source.path,
            expected="a pattern that matches at least one object",
            hint="`*` does not cross a `/`; `**/` does",
        )
    files = [
        SourceFile(
            item.path, item.uri, _format_of(item.path, source.format, where), known=(item.bytes, item.sha256)
        )
        for item in found
    ]
    if fetch:
        remote.fetch(found, where)
    return files


def expand_pattern(pattern: str) -> list[tuple[Path, str]]:
    """Files (and `datasets` folders) that a pattern means, as (path, name), sorted by name.

    `stdlib:` patterns are relative to the standard library and never reach into installed packages.
    A path that exists is taken as it is, even if it holds glob characters.
    """
    if pattern.startswith(STDLIB):
        root = Path(sysconfig.get_paths()["stdlib"])
        relative = pattern.removeprefix(STDLIB)
        found = (root / match for match in glob.glob(relative, root_dir=root, recursive=True))
        own = [p for p in found if not _NOT_STDLIB.intersection(p.relative_to(root).parts)]
        return _usable((p, STDLIB + p.relative_to(root).as_posix()) for p in own)
    expanded = os.path.expanduser(pattern)
    names = [expanded] if os.path.exists(expanded) else glob.glob(expanded, recursive=True)
    return _usable((Path(name), Path(name).as_posix()) for name in names)


def _usable(pairs: Iterable[tuple[Path, str]]) -> list[tuple[Path, str]]:
    return sorted(
        ((path, name) for path, name in pairs if path.is_file() or is_dataset_folder(path)),
        key=lambda pair: pair[1],
    )


def is_dataset_folder(path: Path) -> bool:
    """True for a folder written by `Dataset.save_to_disk` or `DatasetDict.save_to_disk`."""
    return path.is_dir() and ((path / _DATASET_MARK).is_file() or (path / _DATASET_DICT_MARK).is_file())


def _format_of(path: Path, wanted: str, where: str) -> FileFormat:
    if path.is_dir() != (wanted == "dataset") and (wanted != "auto"):
        raise UserError(
            "the source is a folder" if path.is_dir() else "the source is not a folder saved by `datasets`",
            where=where,
            value=str(path),
            expected=f"something that `format: {wanted}` can read",
        )
    if wanted != "auto":
        return wanted  # type: ignore[return-value]
    if path.is_dir():
        return "dataset"
    known = _FORMAT_OF_SUFFIX.get(path.suffix.lower())
    if known is None:
        raise UserError(
            "cannot tell the format from the file's name",
            where=where,
            value=str(path),
            expected="one of " + " ".join(_FORMAT_OF_SUFFIX),
            hint="say it with `format: text`, `jsonl`, `csv` or `parquet`",
        )
    return known


def _fingerprint(file: SourceFile) -> list[Fingerprint]:
    if file.format == "hub":
        return [_fingerprint_hub(file)]
    if file.known is not None:
        return [{"path": file.name, "bytes": file.known[0], "sha256": file.known[1]}]
    if file.format == "dataset":
        inner = sorted(p for p in file.path.rglob("*") if p.is_file())
        return [_fingerprint_file(p, f"{file.name}/{p.relative_to(file.path).as_posix()}") for p in inner]
    return [_fingerprint_file(file.path, file.name)]


def _fingerprint_file(path: Path, name: str) -> Fingerprint:
    try:
        return {"path": name, "bytes": path.stat().st_size, "sha256": sha256_file(path)}
    except OSError as error:
        raise UserError("cannot read a source file", where=name, value=str(error)) from error


def _fingerprint_hub(file: SourceFile) -> Fingerprint:
    from ebft_core.hub import resolve_commit

    commit = resolve_commit(str(file.path), file.revision, repo_type="dataset", where="data.sources")
    return {
        "path": f"{file.name}@{commit}:{file.split}",
        "bytes": 0,
        "sha256": digest_json([file.name, commit]),
    }

"""The files of a registered version: read back from wherever MLflow keeps them, and digested."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import mlflow.artifacts
from botocore.exceptions import BotoCoreError, ClientError
from mlflow.exceptions import MlflowException

from ebft_core.manifests import digest_entries, sha256_file
from tasks.transient import TransientError


def download_files(source: str, folder: Path, tracking_uri: str) -> None:
    """Bring every file below `source` to `folder`. Raises TransientError if one does not come."""
    for name in _names(source, tracking_uri):
        _download(source, name, folder, tracking_uri)


def digest_files_at(source: str, tracking_uri: str) -> str:
    """`manifests.digest_folder` of the files below `source`; one of them at a time is on this disk.

    Raises:
        TransientError: one does not come.
    """
    entries = []
    for name in _names(source, tracking_uri):
        with tempfile.TemporaryDirectory(prefix="ebft-registry-") as scratch:
            entries.append((name, sha256_file(_download(source, name, Path(scratch), tracking_uri))))
    return digest_entries(entries)


def _names(source: str, tracking_uri: str) -> list[str]:
    """Paths of all files below `source`, relative to it."""
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    names: list[str] = []
    folders = [""]
    while folders:
        folder = folders.pop()
        with _reaching(source):
            uri = f"{source}/{folder}" if folder else source
            found = mlflow.artifacts.list_artifacts(artifact_uri=uri, tracking_uri=tracking_uri)
        for entry in found:
            name = f"{folder}/{Path(entry.path).name}".lstrip("/")  # MLflow's path begins with the parent
            (folders if entry.is_dir else names).append(name)
    return sorted(names)


def _download(source: str, name: str, folder: Path, tracking_uri: str) -> Path:
    target = (folder / name).parent
    target.mkdir(parents=True, exist_ok=True)
    with _reaching(source):
        uri = f"{source}/{name}"
        return Path(
            mlflow.artifacts.download_artifacts(
                artifact_uri=uri, dst_path=str(target), tracking_uri=tracking_uri
            )
        )


@contextlib.contextmanager
def _reaching(source: str) -> Iterator[None]:
    try:
        yield
    except (MlflowException, BotoCoreError, ClientError, OSError) as error:
        raise TransientError(f"{source} cannot be read: {error}") from error

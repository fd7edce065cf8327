"""Where a run is tracked. Apart from the store, so that it can be checked before MLflow is imported."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlparse

from ebft_core.config import RunConfig
from ebft_core.config.redaction import redact_text
from ebft_core.errors import UserError

_STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")


def reach_artifacts(config: RunConfig) -> None:
    """Let MLflow in this process, and in those it starts, find artifacts at the run's S3 service.

    What the environment says already wins.
    """
    storage = config.storage
    for name, value in {"MLFLOW_S3_ENDPOINT_URL": storage.endpoint_url, "AWS_REGION": storage.region}.items():
        if value is not None:
            os.environ.setdefault(name, value)


def tracking_uri(config: RunConfig, workspace: Path) -> str:
    """Where the run is tracked: the configuration, `MLFLOW_TRACKING_URI`, or a database in the workspace.

    Raises:
        UserError: a kind of store that MLflow does not have (any more).
    """
    return resolve_uri(config.tracking.mlflow_uri, workspace, where="tracking.mlflow_uri")


def resolve_uri(given: str | None, workspace: Path, *, where: str) -> str:
    """The same from what was `given` at `where`. Raises UserError."""
    uri = given or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"sqlite:///{workspace / 'mlflow.db'}"
    scheme = urlparse(uri).scheme.split("+")[0]
    if scheme not in _STORES:
        raise UserError(
            "MLflow cannot track there",
            where=where if given else "MLFLOW_TRACKING_URI",
            value=redact_text(uri),
            expected="sqlite:///FILE, http(s)://HOST or another database",
            hint="leave it out: the workspace then gets its own mlflow.db",
        )
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).expanduser().resolve()}"
    return uri

"""Where a run is tracked. Apart from the store, so that it can be checked before MLflow is imported."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlparse

from ebft_core.config import RunConfig
from ebft_core.config.redaction import redact_text
from ebft_core.errors import UserError

_STORES = ("sqlite", "postgresql", "mysql", "mssql", "http", "https", "databricks")


def tracking_uri(config: RunConfig, workspace: Path) -> str:
    """Where the run is tracked: the configuration, `MLFLOW_TRACKING_URI`, or a database in the workspace.

    Raises:
        UserError: a kind of store that MLflow does not have (any more).
    """
    uri = config.tracking.mlflow_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if not uri:
        return f"sqlite:///{workspace / 'mlflow.db'}"
    scheme = urlparse(uri).scheme.split("+")[0]
    if scheme not in _STORES:
        raise UserError(
            "MLflow cannot track there",
            where="tracking.mlflow_uri" if config.tracking.mlflow_uri else "MLFLOW_TRACKING_URI",
            value=redact_text(uri),
            expected="sqlite:///FILE, http(s)://HOST or another database",
            hint="leave it out: the workspace then gets its own mlflow.db",
        )
    if uri.startswith("sqlite:///"):
        return f"sqlite:///{Path(uri.removeprefix('sqlite:///')).expanduser().resolve()}"
    return uri

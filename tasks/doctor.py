"""The doctor's look at MLflow and Prefect: where they are, and whether they answer."""

from __future__ import annotations

import socket
from pathlib import Path
from urllib.parse import urlparse

from ebft_core.config import RunConfig
from ebft_core.config.redaction import redact_text
from ebft_core.doctor import Check, guarded
from tasks.mlflow_uri import tracking_uri
from tasks.services import answers, noted_services

_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_CONNECT_SECONDS = 3.0


def check_mlflow(config: RunConfig, workspace: Path) -> Check:
    """The tracking store of the run."""

    def look() -> Check:
        uri = tracking_uri(config, workspace)
        shown, place = redact_text(uri), urlparse(uri)
        kind = place.scheme.split("+")[0]
        if kind == "sqlite":
            return Check("MLflow", "ok", f"a file, no server needed: {shown}")
        if kind in ("http", "https"):
            reached = answers(f"{uri.rstrip('/')}/health")
        elif kind in _PORTS:
            reached = _connects(place.hostname or "", place.port or _PORTS[kind])
        else:
            return Check("MLflow", "warn", f"{shown}: not tried", None)
        if reached:
            return Check("MLflow", "ok", f"{shown} answers")
        return Check("MLflow", "fail", f"{shown} does not answer", "start it, or unset tracking.mlflow_uri")

    return guarded("MLflow", look)


def check_prefect(workspace: Path) -> Check:
    """The server a run would use, as `flows.environment.prefect_api` chooses it."""
    from prefect.settings import PREFECT_API_URL

    configured = PREFECT_API_URL.value()
    if configured:
        if answers(f"{configured.rstrip('/')}/health"):
            return Check("Prefect", "ok", f"{redact_text(configured)} answers")
        detail = f"PREFECT_API_URL: {redact_text(configured)} does not answer"
        return Check("Prefect", "fail", detail, "start it (`prefect server start`), or unset PREFECT_API_URL")
    noted = noted_services(workspace)
    if noted is not None:
        return Check("Prefect", "ok", f"{noted['prefect_api']}, started by `ebft up`")
    return Check("Prefect", "ok", "each run starts a server of its own")


def _connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=_CONNECT_SECONDS).close()
    except OSError:
        return False
    return True

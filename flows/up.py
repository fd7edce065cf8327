"""The body of `ebft up`: servers, worker and deployments of one workspace, until Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

from rich.console import Console

from ebft_core.config import StorageConfig
from ebft_core.config.storage_section import S3
from ebft_core.errors import UserError
from ebft_core.preflight import check_workspace
from ebft_core.storage.store import open_store
from flows.deploy import POOL, check_deployments, deploy
from flows.stopping import sigterm_as_interrupt
from tasks.services import (
    HOST,
    SERVICES,
    Service,
    check_port,
    mlflow_server,
    note_services,
    prefect_server,
    running,
    tail,
)


def serve(workspace: Path, prefect_port: int, mlflow_port: int, artifacts: str | None = None) -> None:
    """Run everything until Ctrl-C or SIGTERM.

    Raises:
        UserError: no `prefect.yaml` here, `artifacts` cannot be written, a port is taken,
            or one of the programs does not start or dies.
    """
    check_deployments()
    check_workspace(workspace)
    if artifacts is not None:
        check_artifacts(artifacts)
    check_port(prefect_port, "--prefect-port")
    check_port(mlflow_port, "--mlflow-port")
    sigterm_as_interrupt()
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    with contextlib.suppress(KeyboardInterrupt):
        _serve(workspace, (prefect_port, mlflow_port), artifacts, console)
    console.print("all stopped")


def check_artifacts(location: str) -> None:
    """Raise UserError unless `s3://bucket/prefix` can be written with the credentials of the environment."""
    if not location.startswith(S3):
        raise UserError(
            "no such place for artifacts", where="--artifacts", value=location, expected="s3://bucket/prefix"
        )
    open_store(location, StorageConfig()).check("--artifacts", write=True)


def _serve(workspace: Path, ports: tuple[int, int], artifacts: str | None, console: Console) -> None:
    prefect_port, mlflow_port = ports
    prefect = prefect_server(workspace, prefect_port, ui=True)
    mlflow = mlflow_server(workspace, mlflow_port, artifacts)
    api = prefect.env["PREFECT_API_URL"]
    worker = worker_service(workspace, api)
    with contextlib.ExitStack() as stack:
        with console.status("starting Prefect and MLflow"):
            stack.enter_context(running([prefect, mlflow]))
        with console.status("creating the work pool and the deployments"):
            deploy(api, workspace / "services" / "deploy.log")
        stack.enter_context(running([worker]))
        stack.callback((workspace / SERVICES).unlink, missing_ok=True)
        note_services(workspace, api, f"http://{HOST}:{mlflow_port}")
        console.print(f"Prefect   http://{HOST}:{prefect_port}")
        console.print(f"MLflow    http://{HOST}:{mlflow_port}")
        console.print(f"logs      {workspace / 'services'}")
        console.print(f"run       PREFECT_API_URL={api} prefect deployment run ebft/strided", markup=False)
        console.print("Ctrl-C stops everything")
        _watch([prefect, mlflow, worker])


def worker_service(workspace: Path, api: str) -> Service:
    """A process worker of our pool."""
    command = [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    log = workspace / "services" / "worker.log"
    return Service("Prefect worker", command, log, env={"PREFECT_API_URL": api})


def _watch(services: list[Service]) -> None:
    while True:
        for service in services:
            if not service.alive:
                raise UserError(f"{service.name} ended", where=str(service.log), hint=tail(service.log))
        time.sleep(1.0)

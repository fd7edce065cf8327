"""The servers a run needs or a user wants to look at: start, wait until they answer, stop."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ebft_core.errors import UserError
from ebft_core.manifests import write_json_atomic

PREFECT_PORT, MLFLOW_PORT = 4200, 5000
"""Where `ebft up` listens unless told otherwise."""
HOST = "127.0.0.1"
START_SECONDS = 120.0
SERVICES = "services.json"

QUIET: Mapping[str, str] = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""No telemetry, and no helper processes that nobody asked for."""


@dataclass
class Service:
    """A child process that ends with us (see `tether`), with its output in a file.

    Args:
        name: for messages and the log's name.
        command: what to run.
        log: file of its output.
        health_url: answers 200 when the service is ready; None: nothing to wait for.
        env: added to our environment.
    """

    name: str
    command: Sequence[str]
    log: Path
    health_url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; does not wait for it to be ready."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tasks.tether", *self.command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **QUIET, **self.env},
                start_new_session=True,
            )

    def wait_ready(self, seconds: float = START_SECONDS) -> None:
        """Wait until the service answers. Raises UserError with the end of its log if it does not."""
        deadline = time.monotonic() + seconds
        while self.health_url is not None and not answers(self.health_url):
            if not self.alive or time.monotonic() > deadline:
                raise UserError(
                    f"{self.name} did not start" if self.alive else f"{self.name} ended at once",
                    where=str(self.log),
                    expected=f"an answer at {self.health_url} within {seconds:.0f} seconds",
                    hint=tail(self.log),
                )
            time.sleep(0.2)

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        """End the process and everything it started."""
        if self.process is not None:
            self.process.communicate()  # closes its standard input: the tether does the rest


def prefect_server(workspace: Path, port: int, *, ui: bool) -> Service:
    """A Prefect server whose database and lasting leases are in the workspace."""
    command = [sys.executable, "-m", "prefect", "server", "start", "--host", HOST, "--port", str(port)]
    env = {
        "PREFECT_SERVER_DATABASE_CONNECTION_URL": prefect_database(workspace),
        # Leases in memory would be lost with the server, and their slots with them.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        "PREFECT_UI_ENABLED": "true" if ui else "false",
        "PREFECT_API_URL": f"http://{HOST}:{port}/api",
    }
    (workspace / "prefect").mkdir(parents=True, exist_ok=True)
    health = f"http://{HOST}:{port}/api/health"
    return Service("Prefect server", command, workspace / "services" / "prefect.log", health, env)


def mlflow_server(workspace: Path, port: int, artifacts: str | None = None) -> Service:
    """An MLflow server on the workspace's database.

    New experiments keep their artifacts at `artifacts` (`s3://bucket/prefix`), else in the workspace. Runs
    write them there themselves.
    """
    artifacts = artifacts or (workspace / "mlartifacts").as_uri()
    command = [sys.executable, "-m", "mlflow", "server", "--host", HOST, "--port", str(port)]
    command += ["--backend-store-uri", f"sqlite:///{workspace / 'mlflow.db'}", "--workers", "1"]
    command += ["--default-artifact-root", artifacts, "--no-serve-artifacts"]
    return Service(
        "MLflow server", command, workspace / "services" / "mlflow.log", f"http://{HOST}:{port}/health"
    )


def prefect_database(workspace: Path) -> str:
    """Connection string of the workspace's own Prefect database."""
    return f"sqlite+aiosqlite:///{workspace / 'prefect' / 'prefect.db'}"


@contextlib.contextmanager
def running(services: Sequence[Service]) -> Iterator[None]:
    """Start all services, then wait for each; stop all of them at the end."""
    try:
        for service in services:
            service.start()
        for service in services:
            service.wait_ready()
        yield
    finally:
        for service in reversed(services):
            service.stop()


def note_services(workspace: Path, prefect_api: str, mlflow: str) -> None:
    """Leave word of running servers for runs started in the same workspace."""
    write_json_atomic(workspace / SERVICES, {"prefect_api": prefect_api, "mlflow": mlflow})


def noted_services(workspace: Path) -> dict[str, str] | None:
    """`{"prefect_api", "mlflow"}` of what `ebft up` runs for this workspace now; None if nothing answers."""
    try:
        note = json.loads((workspace / SERVICES).read_text(encoding="utf-8"))
        services = {"prefect_api": str(note["prefect_api"]), "mlflow": str(note["mlflow"])}
    except (OSError, ValueError, KeyError):
        return None
    return services if answers(f"{services['prefect_api']}/health") else None


def answers(url: str) -> bool:
    """Whether a GET of `url` gives 200."""
    try:
        with urllib.request.urlopen(url, timeout=2.0) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    """A port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def check_port(port: int, option: str) -> None:
    """Raise UserError if somebody listens on `port`."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            raise UserError(
                "the port is taken",
                where=option,
                value=port,
                expected="a free port",
                hint=f"choose another with {option}, or stop who uses it ({error.strerror})",
            ) from error


def tail(log: Path, lines: int = 15) -> str:
    """The last lines of a log."""
    try:
        return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""

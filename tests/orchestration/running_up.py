"""A real `ebft up` for a test: servers of Prefect and MLflow, a worker, the deployments of `prefect.yaml`."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil
from prefect.client.orchestration import SyncPrefectClient

from tasks.services import SERVICES, free_port

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Up:
    """A running `ebft up`."""

    process: subprocess.Popen[str]
    workspace: Path
    api: str
    mlflow: str


def wait_until(condition: Callable[[], object], seconds: float = 240.0) -> None:
    """Wait until the condition holds; fail if it takes too long."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def start_up(
    workspace: Path, prefect_port: int, mlflow_port: int, env: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start the command; does not wait for anything."""
    command = [sys.executable, "-m", "flows.cli", "up", "--workspace", str(workspace)]
    command += ["--prefect-port", str(prefect_port), "--mlflow-port", str(mlflow_port)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@contextlib.contextmanager
def running_up(workspace: Path, env: Mapping[str, str] | None = None) -> Iterator[Up]:
    """`ebft up` while the block runs; nothing of it is left afterwards."""
    ports = free_port(), free_port()
    process = start_up(workspace, *ports, env)
    wait_until(lambda: (workspace / SERVICES).exists() or process.poll() is not None)
    assert process.poll() is None, process.communicate()[0]
    try:
        yield Up(process, workspace, f"http://127.0.0.1:{ports[0]}/api", f"http://127.0.0.1:{ports[1]}")
    finally:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=120)
    assert len(children) >= 6  # three tethers and three programs
    assert "all stopped" in output
    wait_until(lambda: not [p for p in children if p.is_running() and p.status() != "zombie"], 30)
    assert not (workspace / SERVICES).exists()


def prefect(up: Up, *arguments: str) -> str:
    """What a `prefect` command prints."""
    done = subprocess.run(
        [sys.executable, "-m", "prefect", *arguments],
        env={**os.environ, "PREFECT_API_URL": up.api, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_deployment(up: Up, deployment: str, *parameters: str) -> UUID:
    """Start a deployment with `name=value` parameters; returns the id of the flow run."""
    given = [part for parameter in parameters for part in ("-p", parameter)]
    output = prefect(up, "deployment", "run", deployment, *given)
    (line,) = [line for line in output.splitlines() if "UUID" in line]
    return UUID(line.split()[-1])


def state_of(client: SyncPrefectClient, flow_run: UUID) -> Any:
    """The present state of a flow run."""
    return client.read_flow_run(flow_run).state
